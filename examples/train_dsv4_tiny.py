# SPDX-License-Identifier: Apache-2.0
"""Train a tiny DeepSeek-V4 on this repository's own documentation, on a CPU, in a few minutes.

The whole life of a model: a Hugging Face checkpoint gives the launch flags and the weights, Megatron's own parser
reads the flags, the layers come from `--spec vime_models.dsv4 get_dsv4_spec`, training is interrupted and resumed
from a distributed checkpoint, and the result is exported as a release-dialect checkpoint that transformers loads.
Each stage is checked, and the exit status is 1 if any check fails.

    ./dev run python examples/train_dsv4_tiny.py
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from math import log
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a CPU run; GPUs must be hidden before anything looks for them

import torch
from tqdm import tqdm

from vime_convert.dsv4.names import rule_table
from vime_convert.hosts import quiet_hosts
from vime_convert.megatron.exporter import save_hf
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.reader import CheckpointReader
from vime_convert.tiny import make_tiny
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.dsv4 import add_arguments
from vime_models.dsv4.arguments import launch_flags
from vime_models.host import training
from vime_models.host.bringup import init_world
from vime_models.host.provider import make_provider

ROOT = Path(__file__).resolve().parent.parent

# A config.json with every layer kind; bytes are the tokens.
CONFIG = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 0, 4, 128],
    "num_hash_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 32,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 16,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def corpus() -> torch.Tensor:
    """The repository's documentation as one int64 tensor of bytes."""
    pages = [
        *sorted(ROOT.glob("*.md")),
        *sorted(ROOT.glob("docs/*.md")),
        *sorted(ROOT.glob("packages/*/README.md")),
    ]
    return torch.tensor(list(b"\n".join(page.read_bytes() for page in pages)), dtype=torch.int64)


def unigram_entropy(tokens: torch.Tensor) -> float:
    """Entropy in nats per byte of a model that knows only how frequent each byte is."""
    total = len(tokens)
    return -sum(n / total * log(n / total) for n in Counter(tokens.tolist()).values())


def batch(tokens: torch.Tensor, step: int, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next bytes [size, length] of one step: fresh random windows that depend on the step alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - length - 1, (size,), generator=generator)
    windows = torch.stack([tokens[start : start + length + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def fresh(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Initial value of one floating tensor: what pre-training would start from."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(("_base", "_scale", ".bias", "attn_sink", ".ape")):
        return torch.full(shape, 0.1) if name.endswith("_scale") else torch.zeros(shape)
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


class Run:
    """A model with its optimizer, as a training script would hold it."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path | None = None) -> None:
        self.model = make_provider(args)().train()
        if checkpoint is not None:
            load_checkpoint([self.model], CheckpointReader(checkpoint), rule_table(CONFIG))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
        self.clip = args.clip_grad

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One optimizer step; the mean loss in nats per byte before it."""
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        loss = self.model(inputs, positions, None, labels=targets).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()

    def train(self, tokens: torch.Tensor, first: int, last: int, args: argparse.Namespace) -> list[float]:
        """Losses of steps `first`…`last`-1, with a progress bar."""
        losses = []
        with tqdm(range(first, last), desc="train", initial=first, total=last, file=sys.stderr) as bar:
            for step in bar:
                losses.append(self.step(*batch(tokens, step, args.micro_batch_size, args.seq_length)))
                bar.set_postfix(loss=f"{losses[-1]:.3f}")
        return losses


def exported_difference(run: Run, directory: Path, tokens: torch.Tensor) -> float:
    """Largest difference between the trainer's logits and those of transformers on the exported files.

    In float64, because rounding in float32 can decide between two experts whose scores nearly tie. On windows in which
    the indexer picks every entry, because equal scores (of repeated text, or all cut at zero) have no order in
    transformers; longer sequences are the verifier's, which looks at the gaps.
    """
    from transformers import AutoModelForCausalLM

    save_hf([run.model], rule_table(CONFIG), directory, dialect="release", config=CONFIG)
    ratio = max(ratio for ratio in CONFIG["compress_ratios"] if 0 < ratio < 128)
    ids, _ = batch(tokens, 0, 4, ratio * (CONFIG["index_topk"] + 1) - 1)
    with torch.no_grad(), running_in(PRECISIONS["float64"]):
        reference = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        run.model.double().eval()
        expected = reference(ids, use_cache=False).logits
        ours = run.model(ids, torch.arange(ids.shape[1]).expand_as(ids), None)[..., : CONFIG["vocab_size"]]
    return (ours - expected).abs().max().item()


def main() -> int:
    """Runs all stages; 0 if every check holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--out", type=Path, help="keep checkpoints and the export here (default: a temporary folder)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vime-train-") as scratch:
        return train_and_check(options.steps, options.out or Path(scratch))


def train_and_check(steps: int, out: Path) -> int:
    """Trains, resumes, exports and compares, writing below `out`."""
    quiet_hosts()
    init_world()
    args = training.parse(
        [
            *launch_flags(CONFIG),
            *("--seq-length", "128", "--micro-batch-size", "8", "--lr", "4e-3", "--clip-grad", "1.0"),
            *("--save", str(out / "checkpoint"), "--save-interval", "1", "--load", str(out / "checkpoint")),
        ],
        add_arguments,
    )
    tokens = corpus()
    entropy = unigram_entropy(tokens)
    middle = steps // 2

    make_tiny(CONFIG, out / "start", seed=1, table=rule_table(CONFIG), init=fresh, dtype=torch.float32)
    run = Run(args, out / "start")
    losses = run.train(tokens, 0, middle, args)
    training.save(middle, [run.model], run.optimizer)
    losses += run.train(tokens, middle, steps, args)

    resumed = Run(args)
    first = training.load([resumed.model], resumed.optimizer)
    repeated = resumed.train(tokens, first, steps, args)

    difference = exported_difference(resumed, out / "hf", tokens)
    mean_of_last = sum(losses[-5:]) / 5
    checks = {
        f"mean loss of the last 5 steps, {mean_of_last:.3f}, is below the unigram entropy, {entropy:.3f}": (
            mean_of_last < entropy
        ),
        f"resumed at step {first}, the remaining {len(repeated)} losses repeat exactly": repeated
        == losses[middle:],
        f"exported logits equal the trainer's in transformers: {difference:.1e} <= 1e-10": difference
        <= 1e-10,
    }
    print("loss: " + " ".join(f"{loss:.3f}" for loss in losses))
    for sentence, ok in checks.items():
        print(("ok    " if ok else "FAIL  ") + sentence)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":  # checkpoints are written by spawned processes, which import this file again
    sys.exit(main())
