# SPDX-License-Identifier: Apache-2.0
"""Which megatron-core this package was tested with, and what it needs of another one.

Development trees of Megatron report the version of some release, so a version decides only whether to look
closely; what counts is whether the names that we adapt can be imported.
"""

import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

TESTED_FROM, TESTED_BELOW = (0, 19, 2), (0, 20)

# Everything that the host modules replace or subclass; the rest of Megatron is used through plain imports.
_ADAPTED = (
    ("megatron.core.models.gpt", "GPTModel"),
    ("megatron.core.packed_seq_params", "PackedSeqParams"),
    ("megatron.core.tensor_parallel.layers", "_grad_accum_fusion_available"),
    ("megatron.core.tensor_parallel.random", "_get_cuda_rng_state"),
    ("megatron.core.tensor_parallel.random", "_set_cuda_rng_state"),
    ("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu"),
    ("megatron.core.transformer.multi_token_prediction", "_roll_tensor_packed_seq"),
    ("megatron.core.transformer.spec_utils", "get_submodules"),
    ("megatron.core.transformer.transformer_block", "TransformerBlockSubmodules"),
)


@cache
def check_megatron() -> str:
    """The installed megatron-core version, after making sure that it can host our models.

    Warns once when the version is outside the tested range and everything that we adapt is there.

    Raises:
        ModuleNotFoundError: megatron-core is absent; the message names the extra.
        RuntimeError: a name that we adapt is missing.
    """
    try:
        import_module("megatron.core")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "vime_models: megatron-core is not installed; run `pip install vime-models[dsv4]`",
            name=error.name,
        ) from error
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        installed = "0"  # a source tree on the path
    if TESTED_FROM <= _release(installed) < TESTED_BELOW:
        return installed
    tested = f"{'.'.join(map(str, TESTED_FROM))} and later, below {'.'.join(map(str, TESTED_BELOW))}"
    missing = [f"{module}.{name}" for module, name in _ADAPTED if not _importable(module, name)]
    if missing:
        raise RuntimeError(
            f"vime_models: megatron-core {installed} lacks {', '.join(missing)}; install version {tested}"
        )
    warnings.warn(
        f"vime_models: megatron-core {installed} is outside the tested range ({tested}); "
        "the names that we adapt exist, their behaviour is untested",
        RuntimeWarning,
        stacklevel=2,
    )
    return installed


def _release(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _importable(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False
