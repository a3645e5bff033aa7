# SPDX-License-Identifier: Apache-2.0
"""`python -m vime_replay.integrations.vime --check`: what the connection needs of the installed vime."""

import argparse
import sys

from vime_replay.integrations.vime.probe import check, report


def main(argv: list[str] | None = None) -> int:
    """Prints the findings; 1 if something is missing or different."""
    parser = argparse.ArgumentParser(prog="python -m vime_replay.integrations.vime", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", required=True, help="list needed names and their state"
    )
    parser.parse_args(argv)
    findings = check()
    sys.stdout.write(report(findings) + "\n")
    return int(any(each.state != "found" for each in findings))


if __name__ == "__main__":
    sys.exit(main())
