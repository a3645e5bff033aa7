# SPDX-License-Identifier: Apache-2.0
"""Connections to training frameworks; nothing else in this package knows one."""
