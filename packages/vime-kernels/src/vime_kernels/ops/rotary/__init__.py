# SPDX-License-Identifier: Apache-2.0
"""Partial interleaved rotary embedding, with or without the weightless norm of a query head in front."""
