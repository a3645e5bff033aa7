# SPDX-License-Identifier: Apache-2.0
"""The shim is a closed list. Checked in a process of its own, because it cannot be uninstalled."""

import json
import subprocess
import sys

import pytest

PROBE = """
import json, warnings
warnings.simplefilter("ignore")
import torch
out = {"cuda": torch.cuda.is_available()}
if not out["cuda"]:
    from vime_models.host import cpu
    from megatron.core.tensor_parallel import random as mrandom
    from megatron.core.transformer.moe import token_dispatcher
    modules = {"cuda": torch.cuda, "random": mrandom, "dispatcher": token_dispatcher}
    before = {key: dict(vars(module)) for key, module in modules.items()}
    with cpu.cuda_literals_to_cpu() as mode:
        out["inactive_before"] = mode is None and not cpu.installed()
    out["installed"] = [cpu.install(), cpu.install(), cpu.installed()]
    out["changed"] = {
        key: sorted(n for n, v in vars(module).items() if before[key].get(n) is not v and n in before[key])
        for key, module in modules.items()
    }
    out["still_unavailable"] = torch.cuda.is_available() is False
    out["types"] = isinstance(torch.cuda.Stream, type) and isinstance(torch.cuda.Event, type)
    optional = torch.cuda.Stream | None
    with torch.cuda.stream(torch.cuda.current_stream()):
        event = torch.cuda.current_stream().record_event()
        torch.cuda.Stream().wait_event(event)
        torch.cuda.synchronize()
    out["device"] = str(torch.zeros(1, device=torch.cuda.current_device()).device)
    x = torch.ones(2)
    with cpu.cuda_literals_to_cpu():
        moved = [
            torch.zeros(2, device="cuda"),
            torch.tensor([1.0], device=torch.device("cuda", 0)),
            torch.empty(2, pin_memory=True, device="cpu"),
            x.cuda(), x.cuda(non_blocking=True), x.to("cuda"), x.to(torch.device("cuda:0"), torch.float64),
            x.to(device="cuda"), x.pin_memory(),
        ]
    out["moved"] = sorted({str(t.device) for t in moved})
    out["kept_dtype"] = str(moved[6].dtype)
    out["identity"] = moved[3] is x
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    out["rng"] = bool((first == torch.rand(3)).all())
    state = mrandom._get_cuda_rng_state()
    first = torch.rand(3)
    mrandom._set_cuda_rng_state(state)
    out["megatron_rng"] = bool((first == torch.rand(3)).all())
    sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    out["splits"] = [type(sizes).__name__, token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None]
print(json.dumps(out))
"""


def test_shim_replaces_exactly_the_closed_list() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    out = json.loads(done.stdout.strip().splitlines()[-1])
    if out["cuda"]:
        pytest.skip("a CUDA device is present, so the shim stays out")
    assert out["inactive_before"]
    assert out["installed"] == [True, True, True]
    assert out["changed"] == {
        "cuda": [
            "Event",
            "Stream",
            "current_device",
            "current_stream",
            "default_stream",
            "get_rng_state",
            "manual_seed",
            "set_rng_state",
            "stream",
            "synchronize",
        ],
        "random": ["_get_cuda_rng_state", "_set_cuda_rng_state"],
        "dispatcher": ["maybe_move_tensor_to_cpu"],
    }
    assert out["still_unavailable"]
    assert out["types"]
    assert out["device"] == "cpu"
    assert out["moved"] == ["cpu"]
    assert out["kept_dtype"] == "torch.float64"
    assert out["identity"]
    assert out["rng"]
    assert out["megatron_rng"]
    assert out["splits"] == ["ndarray", True]


def test_cpu_overrides_keep_the_callers_dtype() -> None:
    import torch

    from vime_models.host.cpu import CPU_CONFIG, cpu_overrides

    out = cpu_overrides({"params_dtype": torch.float64, "num_layers": 3, "apply_rope_fusion": True})
    assert out == dict(CPU_CONFIG) | {
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        "num_layers": 3,
    }
    assert cpu_overrides({})["params_dtype"] is torch.float32
