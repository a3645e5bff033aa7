# SPDX-License-Identifier: Apache-2.0
"""Trains a stock model for a few steps, saves, builds anew, resumes; prints one JSON line.

A script of its own, because the checkpoint writer spawns processes that import the main module again.
"""

import json
import sys
import warnings
from argparse import ArgumentParser

warnings.simplefilter("ignore")

import torch  # noqa: E402

from vime_models.host import bringup, cpu, provider, training  # noqa: E402

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 --vocab-size 50
    --make-vocab-size-divisible-by 8 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --save-interval 1000 --spec tiny_spec get_spec
"""


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--dsv4-impl", default="vime")
    return parser


def main(directory: str) -> None:
    bringup.init_world()
    words = [*FLAGS.split(), "--save", directory, "--load", directory]
    out: dict[str, object] = {}
    try:
        training.parse([*words, "--dsv4-imp", "x"], add_arguments)
    except ValueError as error:
        out["misspelt"] = str(error)
    args = training.parse(words, add_arguments)
    out["vocab"] = args.padded_vocab_size
    out["variable"] = args.variable_seq_lengths

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        bringup.set_seeds(1)
        model = provider.make_provider(args)()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            ids = torch.randint(0, 50, (2, 16))  # from the global generator: a resume must restore it
            with cpu.cuda_literals_to_cpu():
                loss = model(ids, torch.arange(16).expand(2, 16), None, labels=ids.roll(-1, 1)).mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = build()
    try:
        training.load([model])
    except FileNotFoundError as error:
        out["no_checkpoint"] = str(error)
    out["first"] = steps(model, optimizer, 2)
    model.extra = torch.nn.Parameter(torch.ones(1))
    incomplete = torch.optim.AdamW(model.parameters(), lr=1e-2)
    incomplete.state.update(optimizer.state)
    try:
        training.save(2, [model], incomplete)
    except ValueError as error:
        out["no_gradient"] = str(error)
    del model.extra
    training.save(2, [model], optimizer)
    out["rest"] = steps(model, optimizer, 2)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    model, optimizer = build()
    bringup.set_seeds(99)
    out["iteration"] = training.load([model], optimizer)
    out["resumed"] = steps(model, optimizer, 2)
    out["same_weights"] = all(torch.equal(weights[n], p) for n, p in model.named_parameters())
    args.dsv4_impl = "megatron"
    try:
        training.load([model], optimizer)
    except ValueError as error:
        out["options"] = str(error)
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1])
