# SPDX-License-Identifier: Apache-2.0
"""Parallel layouts of the matrix: name to processes and options of the build. What is left is data parallelism."""

from typing import Any

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2-etp2": (2, {"tp": 2, "etp": 2}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2}),
    "ep2": (2, {"ep": 2}),
    "ep2-allgather": (2, {"ep": 2, "moe_token_dispatcher_type": "allgather"}),
    "pp2-3+2": (2, {"pp": 2, "num_layers_in_first_pipeline_stage": 3}),
    "pp2-layout": (2, {"pp": 2, "pipeline_model_parallel_layout": "Et|ttttL"}),
    "tp2-ep2-draft": (2, {"tp": 2, "ep": 2, "mtp_num_layers": 1}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2, "cp_balance": True, "cp_layout": "contiguous"}),
    "cp2-recompute": (2, {"cp": 2, **FULL}),
    "pp2-4+1-draft": (2, {"pp": 2, "num_layers_in_last_pipeline_stage": 1, "mtp_num_layers": 1}),
    "tp2-ep2-dp2": (4, {"tp": 2, "ep": 2}),
    "tp2-pp2-4+1": (4, {"tp": 2, "pp": 2, "num_layers_in_last_pipeline_stage": 1}),
    "cp2-pp2-3+2": (4, {"cp": 2, "pp": 2, "num_layers_in_first_pipeline_stage": 3}),
    "tp2-cp2-ep2": (4, {"tp": 2, "cp": 2, "ep": 2}),
    "pp2-ep2-1+4": (4, {"pp": 2, "ep": 2, "num_layers_in_first_pipeline_stage": 1}),
}

# What gloo cannot do, or what needs more ranks than a test machine without GPUs has cores.
NCCL_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "Et|tt|t|tL"}),
    "ep4": (4, {"ep": 4}),
    "tp2-ep2-etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "pp4-vpp2": (4, {"pp": 4, "vpp": 2, "pipeline_model_parallel_layout": "E|t|t|t|t|t||L"}),
    "tp2-ep8": (8, {"tp": 2, "ep": 8}),
    "tp2-pp2-cp2-ep2": (8, {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "num_layers_in_first_pipeline_stage": 3}),
}

RECOMPUTED_LAYOUTS = ("tp2-ep2", "pp2-3+2")
RECOMPUTATIONS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}

# Of two processes.
REFUSED: dict[str, dict[str, Any]] = {
    "odd": {"pp": 2},
    "virtual": {"pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "Et|tt|t|tL"},
}
