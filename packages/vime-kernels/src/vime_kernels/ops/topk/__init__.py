# SPDX-License-Identifier: Apache-2.0
"""Selection of the k best columns of every row inside its range."""
