# SPDX-License-Identifier: Apache-2.0
"""One folder per operation: `reference` is the specification in plain torch, `interface` the public function."""
