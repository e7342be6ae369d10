"""Reading a command line: words, options and their values.

`Parser` raises errors instead of exiting, accepts both spellings of an option (`--a-b`, `--a_b`)
and suggests names. `ValueType` turns the annotation of a dataclass field into a reader of text. The
sizes of a problem are the same options in every command.
"""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from mla_var3.cli.console import UsageError, note, usage_errors
from mla_var3.errors import HyperMlaError
from mla_var3.op.mla.problem import MOST_REQUESTS, require_size
from mla_var3.runtime.paths import KernelId, find_kernel
from mla_var3.runtime.plan import option_fields

# --- the parser -----------------------------------------------------------------------------------


class Renames(Protocol):
    """Other spellings of options, see `PlanOptions`."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other spelling -> option."""

    @property
    def ambiguous(self) -> Mapping[str, Sequence[str]]:
        """Name that several options share -> those options."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are exceptions, and which never guesses abbreviations.

    Attributes:
        renamed: earlier name of an option -> the option; it still works, with a notice.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **settings)
        self.renamed: dict[str, str] = {}

    def add_for_device(self, text: str, dest: str, *old: str) -> None:
        """Add `--for_device`, the device of the table that a command plans or predicts for.

        Args:
            text: its help.
            dest: name of its value.
            old: earlier names of the option, which still work.
        """
        self.add_argument("--for_device", dest=dest, metavar="NAME", help=text)
        self.renamed |= dict.fromkeys(old, "for_device")

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
    arguments = [_canonical(argument, flags, renames, parser.renamed) for argument in argv]
    values, rest = parser.parse_known_args(arguments)
    if rest:
        raise _unexpected(rest[0], flags)
    return vars(values)


def _canonical(
    argument: str, flags: Sequence[str], renames: Renames | None, renamed: Mapping[str, str]
) -> str:
    if not argument.startswith("--") or argument == "--":
        return argument
    name, equals, value = argument[2:].partition("=")
    name = name.replace("-", "_")
    if renames is not None:
        if name in renames.ambiguous and name not in flags:
            choices = " or ".join(f"--{flag}" for flag in renames.ambiguous[name])
            raise UsageError(f"--{name}: more than one tiling has it; use {choices}")
        name = renames.aliases.get(name, name)
    if name not in flags and name in renamed:
        note(f"--{name} is now --{renamed[name]}")
        name = renamed[name]
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


# --- values ---------------------------------------------------------------------------------------

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
NONE_WORDS = ("none", "auto")
MIXED = "mixed"
"""Value of a tuple option named `lengths`: evenly spread from 1 to t."""

_NAMES: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class ValueType:
    """What an option accepts.

    Attributes:
        scalar: int, float, bool or str.
        optional: whether "none" (or "auto") is a value too.
        sequence: whether it is a comma list, read into a tuple.
        words: words with a meaning of their own, passed through as they are.
    """

    scalar: type
    optional: bool = False
    sequence: bool = False
    words: tuple[str, ...] = ()

    def __call__(self, text: str) -> Any:
        """Read a value; argparse calls this."""
        word = text.strip().lower()
        if word in self.words:
            return word
        if self.optional and word in NONE_WORDS:
            return None
        if not self.sequence:
            return self._scalar(text)
        parts = [part for part in text.strip().strip("()[]").split(",") if part.strip()]
        if not parts:
            raise argparse.ArgumentTypeError(f"expected {self.expected}, got {text!r}")
        return tuple(self._scalar(part) for part in parts)

    def _scalar(self, text: str) -> Any:
        word = text.strip()
        try:
            if self.scalar is bool:
                if word.lower() not in (*_TRUE, *_FALSE):
                    raise ValueError
                return word.lower() in _TRUE
            return self.scalar(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {self.expected}, got {text!r}") from None

    @property
    def expected(self) -> str:
        """What is accepted, in words."""
        expected = _NAMES[self.scalar]
        if self.sequence:
            expected = f"a comma list, each {expected}"
        return " or ".join([expected, *self.words, *(["none"] if self.optional else [])])

    @property
    def metavar(self) -> str:
        """How the value is written in the help text."""
        name = {int: "N", float: "X", bool: "true|false", str: "TEXT"}[self.scalar]
        return f"{name},{name},..." if self.sequence else name


def field_types(owner: Any) -> dict[str, ValueType | None]:
    """The value type of every init field of a dataclass instance.

    A field whose type is no value for a command line (a nested plan, a tiling) is None.
    """
    try:
        hints = typing.get_type_hints(type(owner))
    except NameError:  # a name that only a type checker imports
        hints = {}
    found: dict[str, ValueType | None] = {}
    for field in option_fields(owner):
        if field.init:
            default = getattr(owner, field.name)
            found[field.name] = value_type(hints.get(field.name, type(default)), field.name)
    return found


def value_type(annotation: Any, name: str = "") -> ValueType | None:
    """The value type of an annotation, None where it is not one that text can give."""
    members = _union_members(annotation)
    optional = type(None) in members
    rest = [member for member in members if member is not type(None)]
    if len(rest) != 1:
        return None
    (base,) = rest
    if base in _NAMES:
        return ValueType(base, optional)
    origin, arguments = typing.get_origin(base), typing.get_args(base)
    if origin in (tuple, list, Sequence) or typing.get_origin(base) is typing.Sequence:
        scalars = {argument for argument in arguments if argument is not Ellipsis}
        if len(scalars) == 1 and (scalar := scalars.pop()) in _NAMES:
            words = (MIXED,) if name == "lengths" else ()
            return ValueType(scalar, optional, sequence=True, words=words)
    return None


def _union_members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def mixed_lengths(b: int, t: int) -> tuple[int, ...]:
    """`b` lengths spread evenly from 1 to t; a single request has t."""
    require_size("b", b, MOST_REQUESTS)
    require_size("t", t)
    if b == 1:
        return (t,)
    return tuple(round(1 + i * (t - 1) / (b - 1)) for i in range(b))


def unreadable(owner: Any, name: str) -> HyperMlaError:
    """The error for a plan field that no option can set."""
    return HyperMlaError(
        f"{type(owner).__name__}.{name}: expected a field that the command line can set (int, "
        f"float, bool, str, any of them | None, or a tuple of them), got {getattr(owner, name)!r}"
    )


# --- sizes ----------------------------------------------------------------------------------------

SIZE_TEXTS = {
    "b": "requests in the batch",
    "s": "query tokens per request",
    "t": "KV slots per request",
    "h": "query heads",
    "d": "head dimension without rope",
    "p": "rope dimension",
    "k": "latent dimension",
}
CALL_SIZES = ("b", "s", "t", "h")
"""Sizes that differ from call to call; the others belong to the model."""

SIZES = {"b": 32, "s": 16, "t": 4096, "h": 128, "d": 128, "p": 64, "k": 512}
"""Their defaults, where a command has some."""


def add_sizes(parser: Any, texts: Mapping[str, str] = SIZE_TEXTS) -> None:
    """Add the seven sizes with their defaults.

    Args:
        parser: the parser or group.
        texts: what each of them is.
    """
    for name, default in SIZES.items():
        parser.add_argument(
            f"--{name}",
            type=ValueType(int),
            default=default,
            metavar="N",
            help=f"{texts[name]} (default: {default})",
        )


def add_unset_sizes(
    parser: Any, names: Iterable[str] = SIZE_TEXTS, note: str = "", **settings: Any
) -> None:
    """Add sizes that have no default here.

    Args:
        parser: the parser or group.
        names: which.
        note: what follows each text.
        settings: further settings of each argument.
    """
    common = {"type": ValueType(int), "metavar": "N", **settings}
    for name in names:
        parser.add_argument(f"--{name}", help=SIZE_TEXTS[name] + note, **common)


def add_lengths(parser: Any, note: str = " (default: all t)", **settings: Any) -> None:
    """Add the KV lengths.

    Args:
        parser: the parser or group.
        note: what follows the text.
        settings: further settings of the argument.
    """
    parser.add_argument(
        "--lengths",
        type=ValueType(int, optional=True, sequence=True, words=(MIXED,)),
        metavar="N,N,...",
        help=f"KV length per request: comma list or mixed{note}",
        **settings,
    )


# --- which kernel ---------------------------------------------------------------------------------


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
    """Read `<kernel> [<version>] ... [--language=...]`; the kernel may be `<kernel>:<language>`.

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
        return find_kernel(words[0], version, language), rest
