# SPDX-License-Identifier: Apache-2.0
"""Sums of listed rows: what a token's experts return, added up."""
