# SPDX-License-Identifier: Apache-2.0
"""Quantisation as it happens at rollout, simulated in training; and the Hadamard rotation before it."""
