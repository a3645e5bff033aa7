# SPDX-License-Identifier: Apache-2.0
"""DeepSeek sparse attention operations for training, behind one API.

Public operations live in three facades: `vime_kernels.dsa` (indexer, top-k, pooling, sparse attention),
`vime_kernels.quant` (fake quantisation, Hadamard) and `vime_kernels.mhc` (hyper-connections). This module holds the
choice of backend only. It imports neither a facade nor Triton, and it writes no environment variable.
"""

from vime_kernels._backend import BackendError, explain, set_backend, use_backend

__version__ = "0.1.0"
__all__ = ["BackendError", "__version__", "explain", "set_backend", "use_backend"]
