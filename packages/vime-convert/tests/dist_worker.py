# SPDX-License-Identifier: Apache-2.0
"""The process of `test_dist.py`: Megatron's writer spawns processes, which must find a guarded main module."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from vime_convert import cli
from vime_convert.plugin import load_plugin
from vime_convert.reader import CheckpointReader


def bitwise(a: Path, b: Path) -> bool:
    """Whether two one-dialect checkpoints agree in names, dtypes and bits."""
    ours, theirs = CheckpointReader(a), CheckpointReader(b)
    pairs = [(ours.get_raw(n), theirs.get_raw(n)) for n in ours.raw_names() if n in theirs.raw_names()]
    same = all(x.dtype == y.dtype and x.view(torch.uint8).equal(y.view(torch.uint8)) for x, y in pairs)
    return same and ours.raw_names() == theirs.raw_names()


def train_checkpoint(reference: str, source: Path, target: Path) -> None:
    """What a trainer saves after three iterations: the model and optimizer state."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from vime_convert.megatron.loader import load_checkpoint

    reader = CheckpointReader(source)
    plugin = load_plugin("", reference)
    chunks: list[Any] = plugin.build(reader.config(), dtype=torch.bfloat16, device="cpu")
    load_checkpoint(chunks, reader, plugin.rules(reader.config()))
    moment = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.x", torch.ones(2))
    directory = target / "iter_0000003"
    directory.mkdir(parents=True)
    state = {"model": chunks[0].sharded_state_dict(), "optimizer": {"x": moment}, "iteration": 3}
    dist_checkpointing.save(state, str(directory))
    (target / "latest_checkpointed_iteration.txt").write_text("3")


def main() -> None:
    """Runs the round trip of one model and prints what happened as JSON."""
    reference, model_type, base = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    model = ["--plugin", reference]
    paths = {name: base / name for name in ("hf", "dist", "back", "trained", "iter", "other", "bad")}
    status = {
        "make-tiny": cli.main(["make-tiny", str(paths["hf"]), "--model-type", model_type, *model]),
        "hf2dist": cli.main(["hf2dist", str(paths["hf"]), str(paths["dist"]), *model]),
    }

    def back(source: Path, target: Path, config: Path) -> int:
        return cli.main(["dist2hf", str(source), str(target), "--hf-config", str(config), *model])

    status["dist2hf"] = back(paths["dist"], paths["back"], paths["hf"])
    train_checkpoint(reference, paths["hf"], paths["trained"])
    status["dist2hf of training"] = back(paths["trained"], paths["iter"], paths["hf"])
    status["dist2hf again"] = back(paths["dist"], paths["back"], paths["hf"])
    config = json.loads((paths["hf"] / "config.json").read_text())
    paths["other"].mkdir()
    more = config | {"num_hidden_layers": config["num_hidden_layers"] + 1}
    more |= {key: [*config[key], config[key][-1]] for key in ("layer_types",) if config.get(key)}
    (paths["other"] / "config.json").write_text(json.dumps(more))
    status["dist2hf of another model"] = back(paths["dist"], paths["bad"], paths["other"])
    wide = {name: base / name for name in ("hf32", "dist32", "back32")}
    tiny = ["make-tiny", str(wide["hf32"]), "--model-type", model_type, "--dtype", "float32", *model]
    to_dist = ["hf2dist", str(wide["hf32"]), str(wide["dist32"]), *model]
    status["make-tiny float32"] = cli.main(tiny)
    status["hf2dist to bfloat16"] = cli.main([*to_dist, "--dtype", "bfloat16"])
    status["hf2dist float32"] = cli.main(to_dist)
    status["dist2hf float32"] = back(wide["dist32"], wide["back32"], wide["hf32"])
    (wide["dist32"] / "release" / ".metadata").write_bytes(b"no pickle")
    status["dist2hf of damaged metadata"] = back(wide["dist32"], paths["bad"], wide["hf32"])
    result = {
        "status": status,
        "bitwise": [bitwise(paths["hf"], paths["back"]), bitwise(paths["hf"], paths["iter"])],
        "bitwise float32": bitwise(wide["hf32"], wide["back32"]),
        "tracker": (paths["dist"] / "latest_checkpointed_iteration.txt").read_text(),
        "left": sorted(path.name for path in base.iterdir()),
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
