# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer: weighted ReLU scores of every query against one shared key per row."""
