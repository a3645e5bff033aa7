# SPDX-License-Identifier: Apache-2.0
"""Chaining of argument providers, and rejection of misspelt plugin flags.

Trainers parse with `ignore_unknown_args=True`, so a misspelt `--dsv4-...` word would change nothing and say
nothing. `check_unknown_flags` turns it into an error.
"""

import difflib
from argparse import ArgumentParser
from collections.abc import Callable, Sequence

ArgsProvider = Callable[[ArgumentParser], ArgumentParser]

PLUGIN_PREFIXES = ("--dsv4-", "--kimi-k3-")


class UnknownFlagError(ValueError):
    """A word with a plugin's prefix that no plugin defines."""


def chain(*providers: ArgsProvider | None) -> ArgsProvider:
    """One `extra_args_provider` that applies the given ones in order; None entries are skipped."""

    def provider(parser: ArgumentParser) -> ArgumentParser:
        for each in providers:
            if each is not None:
                parser = each(parser)
        return parser

    return provider


def check_unknown_flags(
    argv: Sequence[str], parser: ArgumentParser, prefixes: Sequence[str] = PLUGIN_PREFIXES
) -> None:
    """Reject flags that start with a plugin's prefix and that the parser does not know.

    Args:
        argv: the words of the command line.
        parser: the parser with every provider applied.
        prefixes: the prefixes that belong to plugins.

    Raises:
        UnknownFlagError: names each unknown flag and the nearest known one.
    """
    known = list(parser._option_string_actions)  # argparse offers no public list of its options.
    problems = []
    for word in argv:
        flag = word.split("=", 1)[0]
        if flag.startswith(tuple(prefixes)) and flag not in known:
            near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
            problems.append(f"{flag} (did you mean {near[0]}?)" if near else flag)
    if problems:
        raise UnknownFlagError(
            f"vime_models: unknown flag {', '.join(problems)}; "
            "`vime-models args --hf DIR` lists what a model needs"
        )
