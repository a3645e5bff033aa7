# SPDX-License-Identifier: Apache-2.0
"""`python -m vime_convert`."""

import sys

from vime_convert.cli import main

if __name__ == "__main__":
    sys.exit(main())
