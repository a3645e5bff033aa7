# SPDX-License-Identifier: Apache-2.0
"""A Triton backend called `cpu` that only answers questions; kernels run in Triton's interpreter (TRITON_INTERPRET=1).

vLLM's second model runner asks for an active Triton driver, and the published Triton has none for a CPU.
"""
