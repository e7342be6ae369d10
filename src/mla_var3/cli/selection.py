"""Which kernel a command line is about: the words before the first option."""

from __future__ import annotations

from collections.abc import Sequence

from mla_var3.cli.console import UsageError, usage_errors
from mla_var3.runtime.paths import DEFAULT_LANGUAGE, KernelId, find_kernel


def leading_words(argv: Sequence[str], most: int) -> tuple[list[str], list[str]]:
    """Split a command line into the words before the first option, at most some, and the rest."""
    words = []
    for argument in argv[:most]:
        if argument.startswith("-"):
            break
        words.append(argument)
    return words, list(argv[len(words) :])


def take_option(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The last value of an option and the command line without it."""
    value, rest = None, []
    arguments = iter(argv)
    for argument in arguments:
        if argument == f"--{name}":
            value = next(arguments, None)
            if value is None:
                raise UsageError(f"--{name}: expected a value, got none")
        elif argument.startswith(f"--{name}="):
            value = argument.partition("=")[2]
        else:
            rest.append(argument)
    return value, rest


def take_kernel(argv: Sequence[str]) -> tuple[KernelId | None, list[str]]:
    """Read `<kernel> [<version>] ... [--language=...]`.

    Returns:
        The kernel, None when the command line names none, and the other arguments.

    Raises:
        UsageError: there is no such kernel, version or language.
    """
    language, rest = take_option(argv, "language")
    words, rest = leading_words(rest, 2)
    if not words:
        return None, rest
    with usage_errors():
        version = words[1] if len(words) > 1 else None
        return find_kernel(
            words[0], version, DEFAULT_LANGUAGE if language is None else language
        ), rest
