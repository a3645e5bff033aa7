# SPDX-License-Identifier: Apache-2.0
"""Attention of every query over its own list of key rows."""
