# SPDX-License-Identifier: Apache-2.0
"""SwiGLU with clamped halves and an optional weight per row."""
