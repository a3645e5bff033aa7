# SPDX-License-Identifier: Apache-2.0
"""Which names of vime the connection needs, and whether the installed vime has them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Need:
    """A name of the host.

    Attributes:
        module: where it is.
        name: attribute path.
        parameters: names that a function must take.
        used_for: what stops working without it.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    used_for: str


TRAINER = "vime.backends.megatron_utils"
NEEDS = (
    Need("vime.utils.types", "Sample.Status", (), "aborted samples keep their rows"),
    Need("vime.utils.types", "Sample.append_response_tokens", ("tokens", "meta_info"), "tokens before rows"),
    Need("vime.data.tensor", "DiskTensorRef.write", ("kind", "validated"), "spill_indexer_topk"),
    Need("vime.data.tensor", "DiskTensorRef.link", (), "retention of spilled rows"),
    Need(
        "vime.rollout.vllm_rollout", "generate", ("args", "sample", "sampling_params"), "request and response"
    ),
    Need(
        "vime.ray.rollout",
        "RolloutManager._convert_samples_to_train_data",
        ("samples",),
        "the rollout's column",
    ),
    Need("vime.ray.rollout", "RolloutManager._split_train_data_by_dp", ("data",), "the column of a rank"),
    Need("vime.utils.arguments", "get_vime_extra_args_provider", (), "add_arguments"),
    Need(f"{TRAINER}.data", "DataIterator.get_next", ("keys",), "fill_indexer_replay"),
    Need(f"{TRAINER}.data", "DataIterator.reset", (), "fill_indexer_replay"),
    Need(f"{TRAINER}.data", "get_batch", ("data_iterator", "keys"), "tickets on packing objects"),
    Need(f"{TRAINER}.actor", "MegatronTrainRayActor.train_actor", ("rollout_data",), "stages of a step"),
    Need(
        f"{TRAINER}.actor",
        "MegatronTrainRayActor.fill_routing_replay",
        ("num_microbatches",),
        "where to fill",
    ),
    Need(f"{TRAINER}.model", "forward_only", ("data_iterator", "num_microbatches"), "log-probabilities"),
    Need(f"{TRAINER}.model", "train_one_step", ("data_iterator", "num_microbatches"), "forward_step"),
    Need(
        "vime.utils.routing_replay",
        "RoutingReplay.begin_lazy_pass",
        ("release_stage",),
        "names of IndexerReplay",
    ),
    Need("vime.utils.routing_replay", "RoutingReplay.clear_all_forward", (), "names of IndexerReplay"),
)


@dataclass(frozen=True)
class Finding:
    """Whether a need is met: "found", "missing", or "differs" with what is different."""

    need: Need
    state: str
    detail: str


def check() -> list[Finding]:
    """One finding for each need. Files are read and not imported: the host imports Ray and an engine."""
    return [_finding(need) for need in NEEDS]


def report(findings: list[Finding]) -> str:
    """A table for people."""
    lines = [
        f"{each.state:8} {each.need.module}.{each.need.name}  ({each.need.used_for})"
        + (f": {each.detail}" if each.detail else "")
        for each in findings
    ]
    return "\n".join(lines)


def _finding(need: Need) -> Finding:
    path = _file_of(need.module)
    if path is None:
        return Finding(need, "missing", "no such module")
    found: Any = ast.parse(path.read_text())
    for part in need.name.split("."):
        found = next((node for node in _definitions(found) if node.name == part), None)
        if found is None:
            return Finding(need, "missing", f"no {part} in {path.name}")
    if isinstance(found, ast.ClassDef):
        return Finding(need, "found", "")
    parameters = [each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
    absent = [name for name in need.parameters if name not in parameters]
    if absent and not found.args.kwarg:
        return Finding(
            need, "differs", f"expected parameters {', '.join(absent)}, got {', '.join(parameters)}"
        )
    return Finding(need, "found", "")


def _definitions(node: Any) -> Iterator[Any]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (each for each in ast.iter_child_nodes(node) if isinstance(each, kinds))


def _file_of(module: str) -> Path | None:
    """The file of a module, found without importing anything but namespace packages."""
    root, *rest = module.split(".")
    found = find_spec(root)
    for base in (found.submodule_search_locations or ()) if found else ():
        path = Path(base, *rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
