# SPDX-License-Identifier: Apache-2.0
"""The draft layer against transformers, which has none: an extra decoder layer there is fed the draft's input.

That layer's model has the draft's head in place of its own, so its logits are the draft's.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core.packed_seq_params import PackedSeqParams

from vime_convert.dsv4.names import rule_table
from vime_convert.megatron.exporter import export_tensors
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.reader import CheckpointReader
from vime_convert.tiny import make_tiny
from vime_convert.verify.compare import relative
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_convert.writer import write_checkpoint
from vime_models.dsv4.plugin import PLUGIN
from vime_models.dsv4.tiny import TINY_CASES, init_tiny

CONFIG = next(case.config for case in TINY_CASES if case.name == "flash")
TABLE = rule_table(CONFIG, draft_layers=1)
LAYERS = CONFIG["num_hidden_layers"]
LONGER = CONFIG | {"num_hidden_layers": LAYERS + 1, "num_nextn_predict_layers": 0}
F64 = PRECISIONS["float64"]
IDS = torch.randint(CONFIG["vocab_size"], (1, 151), generator=torch.Generator().manual_seed(3))
WEIGHT = 0.1  # Megatron's default for the draft's loss.
INPUTS = ("enorm.weight", "hnorm.weight", "e_proj.weight", "h_proj.weight")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("draft") / "release"
    make_tiny(CONFIG, directory, seed=0, table=TABLE, init=init_tiny)
    return directory


def theirs(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def longer(checkpoint: Path) -> Path:
    """The checkpoint with the draft's block as a sixth layer, and the draft's head."""
    reader, directory = CheckpointReader(checkpoint), checkpoint.parent / "longer"
    raw = {name: reader.get_raw(name) for name in reader.raw_names()}
    tensors = {name: tensor for name, tensor in raw.items() if not name.startswith("mtp.")}
    for name, tensor in raw.items():
        if name.startswith("mtp.") and (leaf := name.removeprefix("mtp.0.")) not in INPUTS:
            tensors[leaf if leaf.startswith(("norm", "hc_head")) else f"layers.{LAYERS}.{leaf}"] = tensor
    write_checkpoint(directory, tensors.items(), LONGER, total_bytes=1 << 20)
    return directory


def release_grads(model: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return dict(rule_table(config).module_dialect.to_release(grads))


def expected(checkpoint: Path) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of model and draft, and the gradients of the sum of both losses."""
    inputs = {
        leaf: CheckpointReader(checkpoint).get_raw(f"mtp.0.{leaf}").double().requires_grad_()
        for leaf in INPUTS
    }
    extended = longer(checkpoint)
    with running_in(F64):
        main, draft = theirs(checkpoint), theirs(extended)
        ids, labels = IDS[:, :-1], IDS[:, 1:]
        following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)

        def rms(x: torch.Tensor, leaf: str) -> torch.Tensor:
            return x * (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).rsqrt() * inputs[leaf]

        def feed(_layer: Any, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> Any:
            token = rms(draft.model.embed_tokens(following), "enorm.weight") @ inputs["e_proj.weight"].T
            streams = rms(args[0], "hnorm.weight") @ inputs["h_proj.weight"].T
            return (token[:, :, None] + streams, *args[1:]), kwargs

        draft.model.layers[LAYERS].register_forward_pre_hook(feed, with_kwargs=True)
        logits, draft_logits = main(ids, use_cache=False).logits, draft(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0], labels[0])
        loss = loss + WEIGHT * torch.nn.functional.cross_entropy(draft_logits[0, :-1], labels[0, 1:])
        loss.backward()
    grads = release_grads(main, CONFIG)
    for name, grad in release_grads(draft, LONGER).items():
        if name.startswith(("norm", "hc_head")):
            grads[f"mtp.0.{name}"] = grad
        elif name.startswith(f"layers.{LAYERS}."):
            grads[name.replace(f"layers.{LAYERS}", "mtp.0")] = grad
        else:
            grads[name] = grads[name] + grad
    grads |= {f"mtp.0.{leaf}": tensor.grad for leaf, tensor in inputs.items()}
    return logits.detach(), draft_logits.detach(), grads


def built(checkpoint: Path, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    """Our model with its draft layer, and the list that its logits [b, s, V] go to: the draft's, then the model's."""
    with running_in(F64):
        (model,) = PLUGIN.build(CONFIG, dtype=torch.float64, device="cpu", mtp_num_layers=1, **options)
    load_checkpoint([model], CheckpointReader(checkpoint), TABLE)
    seen: list[torch.Tensor] = []
    # A copy: the loss turns logits into probabilities in place.
    model.output_layer.register_forward_hook(
        lambda _module, _inputs, output: seen.append(output[0].detach().transpose(0, 1).clone())
    )
    return model.train(), seen


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return expected(checkpoint)


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}],
    ids=["plain", "recompute"],
)
def test_draft_equals_an_extra_layer_of_transformers(
    checkpoint: Path, oracle: Any, options: dict[str, Any]
) -> None:
    main_logits, draft_logits, grads = oracle
    model, seen = built(checkpoint, **options)
    with running_in(F64):
        model(IDS[:, :-1], None, None, labels=IDS[:, 1:]).mean().backward()
    ours = dict(export_tensors([model], TABLE, value=lambda p: p.grad))
    draft, main = seen
    assert relative(main, main_logits) < 1e-12
    # The last row's next token does not exist, and it has no loss.
    assert relative(draft[:, :-1], draft_logits[:, :-1]) < 1e-12
    floor = 1e-8 * torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    assert {name for name in ours if name.startswith("mtp.")} > {f"mtp.0.{leaf}" for leaf in INPUTS}
    for name, grad in ours.items():
        assert relative(grad, grads[name], floor) < 1e-11, name


def test_drafts_of_packed_sequences_are_those_of_each_alone(checkpoint: Path) -> None:
    model, seen = built(checkpoint)
    lengths = (7, 131, 1, 12)
    edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges)
    with running_in(F64), torch.no_grad():
        model(IDS, None, None, packed_seq_params=packing)
        packed = seen[0]
        for start, end in itertools.pairwise(edges.tolist()):
            seen.clear()
            model(IDS[:, start:end], None, None)
            # The last row of a sequence has no next token.
            if end - start > 1:
                assert relative(packed[:, start : end - 1], seen[0][:, :-1]) < 1e-12


def test_drafts_and_their_loss_do_not_see_padding(checkpoint: Path) -> None:
    lengths, padded = (7, 120, 1, 12), (8, 128, 3, 12)
    edges, rows = (torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in (lengths, padded))
    ids = IDS[:, : sum(padded)]
    real = torch.cat([torch.arange(n) + first for n, first in zip(lengths, rows.tolist(), strict=False)])
    grads = []
    for columns, packing in (
        (real, PackedSeqParams(qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges)),
        (
            torch.arange(sum(padded)),
            PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=edges,
                cu_seqlens_kv=edges,
                cu_seqlens_q_padded=rows,
                cu_seqlens_kv_padded=rows,
            ),
        ),
    ):
        mask = torch.isin(columns, real).double()[None]
        model, seen = built(checkpoint)
        with running_in(F64):
            losses = model(
                ids[:, columns],
                None,
                None,
                labels=(ids[:, columns] + 1) % CONFIG["vocab_size"],
                loss_mask=mask,
                packed_seq_params=packing,
            )
            (losses * mask).sum().backward()
        found = dict(export_tensors([model], TABLE, value=lambda p: p.grad))
        grads.append((seen[0][:, mask[0] > 0], found))
    (draft, alone), (padded_draft, together) = grads
    # The last row of each sequence has no next token and no loss.
    assert relative(padded_draft, draft) < 1e-12
    floor = 1e-8 * torch.stack([grad.norm() for grad in alone.values()]).norm().item()
    for name, grad in alone.items():
        assert relative(together[name], grad, floor) < 1e-11, name
