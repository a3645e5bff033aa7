# SPDX-License-Identifier: Apache-2.0
"""Gated softmax pooling of consecutive tokens, and the selection of whole pools."""
