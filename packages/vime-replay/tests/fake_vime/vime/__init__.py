# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vime: the names, signatures and order of calls that the connection relies on, and nothing behind them.

Lines that vime would gain are marked "replay:".
"""
