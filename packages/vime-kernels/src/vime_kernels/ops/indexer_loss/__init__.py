# SPDX-License-Identifier: Apache-2.0
"""The loss that teaches the indexer to rank keys as the main attention weighs them."""
