# SPDX-License-Identifier: Apache-2.0
"""What the tool refuses, and the exit status that it ends with."""


class PatchError(Exception):
    """The tree, the patch or the request cannot be worked with; nothing was changed."""

    status = 2


class Unsupported(PatchError):
    """No patch for this vLLM; the message lists the versions that have one."""

    status = 3
