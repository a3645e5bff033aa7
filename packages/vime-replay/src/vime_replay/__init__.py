# SPDX-License-Identifier: Apache-2.0
"""vime-replay."""

__version__ = "0.1.0"
