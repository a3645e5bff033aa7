# SPDX-License-Identifier: Apache-2.0
"""Keeps the output of our commands ours: importing Megatron and its optional parts prints a page of notices."""

import logging
import warnings


def quiet_hosts() -> None:
    """Silences import-time warnings of Megatron, fla and torch, and Megatron's deprecation notices, in this process.

    For command lines and examples only; a trainer decides for itself what it wants to see.
    """
    warnings.filterwarnings("ignore", module=r"(megatron|fla|torch)\.")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
