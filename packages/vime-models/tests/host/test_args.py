# SPDX-License-Identifier: Apache-2.0
from argparse import ArgumentParser

import pytest

from vime_models.host.args import UnknownFlagError, chain, check_unknown_flags


def _dsv4(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--dsv4-impl")
    return parser


def _other(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--other")
    return parser


def test_chain_applies_in_order_and_skips_none() -> None:
    parser = chain(_dsv4, None, _other)(ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--dsv4-impl", "vime", "--other", "1"])
    assert (args.dsv4_impl, args.other) == ("vime", "1")


@pytest.mark.parametrize(
    "argv",
    [[], ["--dsv4-impl", "vime"], ["--dsv4-impl=vime"], ["--unrelated-flag", "x"], ["dsv4-impl"]],
    ids=["empty", "known", "with-equals", "not-ours", "no-flag"],
)
def test_accepts(argv: list[str]) -> None:
    check_unknown_flags(argv, _dsv4(ArgumentParser()))


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--dsv4-imp", "vime"], r"--dsv4-imp \(did you mean --dsv4-impl\?\)"),
        (["--dsv4-imlp=vime"], r"--dsv4-imlp \(did you mean --dsv4-impl\?\)"),
        (["--kimi-k3-zzz"], r"unknown flag --kimi-k3-zzz; "),
        (["--dsv4-a", "--dsv4-impl", "x", "--kimi-k3-b"], r"--dsv4-a.*, --kimi-k3-b"),
    ],
    ids=["abbreviated", "swapped-with-equals", "nothing-near", "two-at-once"],
)
def test_rejects(argv: list[str], message: str) -> None:
    with pytest.raises(UnknownFlagError, match=message):
        check_unknown_flags(argv, _dsv4(ArgumentParser()))
