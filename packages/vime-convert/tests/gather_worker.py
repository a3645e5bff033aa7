# SPDX-License-Identifier: Apache-2.0
"""One rank of `test_gather.py`: a stand-in model cut over real Megatron groups, loaded and exported again."""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vime_convert.errors import OutputError
from vime_convert.megatron.exporter import export_tensors, save_hf
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.megatron.parallel import Parallel, current
from vime_convert.reader import CheckpointReader
from vime_convert.registry import table_for
from vime_convert.rules import RuleTable

STAGES = {1: [range(4)], 2: [range(1), range(1, 4)]}


class Layer(torch.nn.Module):
    """Carries the number that Megatron gives its layers."""

    layer_number: int


def build(table: RuleTable, parallel: Parallel) -> torch.nn.Module:
    """This rank's part of the model, with parameters of NaN."""
    layers = STAGES[parallel.pp.size][parallel.pp.rank]
    per_rank = table.num_experts // parallel.ep.size
    root = torch.nn.Module()
    for bound in table.bound():
        rule, name = bound.rule, bound.mcore
        first_stage_only = name.startswith("embedding")
        if bound.layer is None and parallel.pp.rank != (0 if first_stage_only else parallel.pp.size - 1):
            continue
        if bound.layer is not None:
            if bound.layer not in layers:
                continue
            name = name.replace(f"layers.{bound.layer}.", f"layers.{bound.layer - layers.start}.", 1)
        if bound.expert is not None:
            if bound.expert // per_rank != parallel.ep.rank:
                continue
            head, _, tail = name.partition(".experts.")
            leaf = tail.removesuffix(str(bound.expert))
            name = f"{head}.experts.local_experts.{bound.expert % per_rank}.{leaf}"
        shape = list(rule.mcore_shape)
        if rule.tp_dim is not None:
            size = (parallel.etp if rule.num_experts else parallel.tp).size
            if rule.vocab:
                shape[0] = 64
            shape[rule.tp_dim] //= size
        *path, leaf = name.split(".")
        module = root
        for step, part in enumerate(path):
            if not hasattr(module, part):
                child = Layer() if path[step - 1] == "layers" else torch.nn.Module()
                if isinstance(child, Layer):
                    child.layer_number = int(part) + layers.start + 1
                module.add_module(part, child)
            module = getattr(module, part)
        if rule.dtype.is_floating_point:
            module.register_parameter(
                leaf, torch.nn.Parameter(torch.full(shape, float("nan"), dtype=rule.dtype))
            )
        else:
            module.register_buffer(leaf, torch.full(shape, -1, dtype=rule.dtype))
    return root


def check(case: dict[str, int], source: Path, target: Path) -> str:
    """Empty if everything came back, otherwise what did not."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.get("tp", 1),
        pipeline_model_parallel_size=case.get("pp", 1),
        expert_model_parallel_size=case.get("ep", 1),
        expert_tensor_parallel_size=case.get("etp", 1),
    )
    reader = CheckpointReader(source)
    table = table_for(reader.config())
    model = build(table, current())
    load_checkpoint([model], reader, table)
    exported = dict(export_tensors([model], table))
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    gradients = dict(export_tensors([model], table, value=lambda p: p.grad))
    save_hf([model], table, target, config_from=source)
    refused = [
        failing_save(model, table, target, source),
        failing_save(model, table, target.with_name("new"), source),
    ]
    dist.barrier()
    parallel_state.destroy_model_parallel()
    for name in table.expected_hf():
        if name not in exported or not exported[name].equal(reader.get_raw(name)):
            return f"{name} differs"
    floats = {name for name, spec in table.expected_hf().items() if spec.dtype.is_floating_point}
    if gradients.keys() != floats or not all(g.eq(1).all() for g in gradients.values()):
        return "gradients differ"
    words = ("expected a path that does not exist yet", "disk full")
    if any(word not in told for word, told in zip(words, refused, strict=True)):
        return f"failures told as {refused}"
    written = CheckpointReader(target)
    same = all(written.get_raw(name).equal(reader.get_raw(name)) for name in reader.raw_names())
    return "" if same and written.raw_names() == reader.raw_names() else "written checkpoint differs"


def failing_save(model: torch.nn.Module, table: RuleTable, target: Path, source: Path) -> str:
    """What this rank learns of a save that fails on rank 0: at once, or at its second file."""
    files = iter(range(100))

    def full(*_: object, **__: object) -> None:
        if next(files) == 1:
            raise OSError("disk full")

    try:
        with mock.patch("vime_convert.writer.save_file", full):
            save_hf([model], table, target, config_from=source, shard_bytes=1000)
    except (OSError, OutputError) as error:
        return str(error)
    return ""


def main() -> None:
    """Runs the cases given as JSON and prints one line per case on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number, case in enumerate(json.loads(sys.argv[1])):
        result = check(case, Path(sys.argv[2]), Path(sys.argv[3]) / str(number))
        results: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(results, result)
        if dist.get_rank() == 0:
            print(json.dumps({"case": case, "results": results}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
