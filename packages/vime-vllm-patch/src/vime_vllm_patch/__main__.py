# SPDX-License-Identifier: Apache-2.0
"""`python -m vime_vllm_patch` is the `vime-vllm-patch` command."""

import sys

from vime_vllm_patch.cli import main

sys.exit(main())
