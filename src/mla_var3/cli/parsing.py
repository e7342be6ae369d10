"""An argument parser that raises errors, knows both spellings of an option and suggests names."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from mla_var3.cli.console import UsageError


class Renames(Protocol):
    """Other spellings of options, see `PlanOptions`."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other spelling -> option."""

    @property
    def ambiguous(self) -> Mapping[str, Sequence[str]]:
        """Name that stands for several options -> those options."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are exceptions, and which never guesses abbreviations."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Called by argparse; its own version prints the usage and exits."""
        raise UsageError(message.removeprefix("argument "))


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with the options in one column wide enough for most of them."""

    def __init__(self, prog: str, **settings: Any) -> None:
        settings.setdefault("max_help_position", 32)
        super().__init__(prog, **settings)


def known_flags(parser: argparse.ArgumentParser) -> list[str]:
    """All long options of a parser, without their dashes."""
    return [flag[2:] for flag in parser._option_string_actions if flag.startswith("--")]


def parse(parser: Parser, argv: Sequence[str], renames: Renames | None = None) -> dict[str, Any]:
    """Parse a command line into the options that were given, by name.

    `--a-b` is accepted for `--a_b`. An option that does not exist is an error that suggests the
    nearest ones.
    """
    flags = known_flags(parser)
    arguments = [_canonical(argument, flags, renames) for argument in argv]
    values, rest = parser.parse_known_args(arguments)
    if rest:
        raise _unexpected(rest[0], flags)
    return vars(values)


def _canonical(argument: str, flags: Sequence[str], renames: Renames | None) -> str:
    if not argument.startswith("--") or argument == "--":
        return argument
    name, equals, value = argument[2:].partition("=")
    name = name.replace("-", "_")
    if renames is not None:
        if name in renames.ambiguous and name not in flags:
            choices = " or ".join(f"--{flag}" for flag in renames.ambiguous[name])
            raise UsageError(f"--{name}: more than one tiling has it; use {choices}")
        name = renames.aliases.get(name, name)
    if name not in flags:
        raise unknown_option(f"--{name}", flags)
    return f"--{name}{equals}{value}"


def unknown_option(option: str, flags: Iterable[str]) -> UsageError:
    """The error for an option that does not exist."""
    option = option.partition("=")[0]
    wanted = option.lstrip("-").lower()
    by_lower = {flag.lower(): flag for flag in flags}
    nearest = difflib.get_close_matches(wanted, by_lower, n=2, cutoff=0.6)
    if wanted in by_lower:
        nearest = [wanted]
    hint = " or ".join(f"--{by_lower[name]}" for name in nearest)
    hint = f"did you mean {hint}?" if hint else "--help lists the options"
    return UsageError(f"unknown option {option!r}; {hint}")


def _unexpected(argument: str, flags: Sequence[str]) -> UsageError:
    if argument.startswith("-"):
        return unknown_option(argument, flags)
    name = argument.partition("=")[0]
    if "=" in argument and name in flags:
        return UsageError(f"unexpected argument {argument!r}; did you mean --{argument}?")
    return UsageError(f"unexpected argument {argument!r}; options start with --")
