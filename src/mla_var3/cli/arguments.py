"""Reading a command line: the parser, the values of options, and which kernel is meant.

`Parser` raises errors instead of exiting, accepts both spellings of an option (`--a-b`, `--a_b`)
and suggests names. `ValueType` turns the annotation of a dataclass field into a reader of text.
"""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from mla_var3.cli.console import UsageError, usage_errors
from mla_var3.conf.models import Model, model, read_config
from mla_var3.op.mla.problem import MOST_REQUESTS, MlaProblem, require_size
from mla_var3.runtime.paths import KernelId, find_kernel

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_NONE = ("none", "auto")
MIXED = "mixed"
"""Value of a tuple option named `lengths`: evenly spread from 1 to t."""

_NAMES: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class ValueType:
    """What an option accepts: an int, float, bool or str, a comma list of them, or a word.

    Attributes:
        optional: whether "none" (or "auto") is a value too.
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
        if self.optional and word in _NONE:
            return None
        try:
            if not self.sequence:
                return self._scalar(text.strip())
            parts = [part for part in text.strip().strip("()[]").split(",") if part.strip()]
            if parts:
                return tuple(self._scalar(part.strip()) for part in parts)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {self.expected}, got {text!r}")

    def _scalar(self, word: str) -> Any:
        if self.scalar is not bool:
            return self.scalar(word)
        if word.lower() not in (*_TRUE, *_FALSE):
            raise ValueError(word)
        return word.lower() in _TRUE

    @property
    def expected(self) -> str:
        """What is accepted, in words."""
        expected = f"{'a comma list, each ' if self.sequence else ''}{_NAMES[self.scalar]}"
        return " or ".join([expected, *self.words, *(["none"] if self.optional else [])])

    @property
    def metavar(self) -> str:
        """How the value is written in the help text."""
        name = {int: "N", float: "X", bool: "true|false", str: "TEXT"}[self.scalar]
        return f"{name},{name},..." if self.sequence else name


def value_type(annotation: Any, name: str = "") -> ValueType | None:
    """The value type of an annotation, None where text cannot give one."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    optional = type(None) in members
    kinds = [member for member in members if member is not type(None)]
    sequence = len(kinds) == 1 and typing.get_origin(kinds[0]) in (tuple, list, Sequence)
    if sequence:
        kinds = list({member for member in typing.get_args(kinds[0]) if member is not Ellipsis})
    if len(kinds) != 1 or kinds[0] not in _NAMES:
        return None
    words = (MIXED,) if sequence and name == "lengths" else ()
    return ValueType(kinds[0], optional, sequence, words)


SIZE_TEXTS = {
    "b": "requests in the batch",
    "s": "query tokens per request",
    "t": "KV slots per request",
    "h": "query heads",
    "d": "head dimension without rope",
    "p": "rope dimension",
    "k": "latent dimension",
    "v": "value dimension",
}
SIZES = {"b": 32, "s": 16, "t": 4096, "h": 128, "d": 128, "p": 64, "k": 512}
"""Their defaults, where a command has some."""
CALL_SIZES = ("b", "s", "t", "h")
"""Sizes that differ from call to call; the others belong to the model."""
MODEL_SIZES = ("h", "d", "p", "k", "v")
"""Sizes that a model and its tensor parallelism decide."""
MOST_LENGTHS = 8
"""Of more KV lengths the least and the largest are shown."""


class Options(argparse._ActionsContainer):
    """The kinds of options that parsers and their groups have."""

    def add_option(self, name: str, metavar: str, text: str, **settings: Any) -> None:
        """Add an option with a value; the help names the default it is given."""
        default = settings.get("default", argparse.SUPPRESS)
        if default is not argparse.SUPPRESS:
            text += f" (default: {str(default).lower() if default is True else default})"
        self.add_argument(f"--{name}", metavar=metavar, help=text, **settings)

    def add_flag(self, name: str, text: str, **settings: Any) -> None:
        """Add an option without a value."""
        self.add_argument(f"--{name}", action="store_true", help=text, **settings)

    def add_json(self) -> None:
        """Add `--json`."""
        self.add_flag("json", "print JSON")

    def add_sizes(
        self, names: Iterable[str] = SIZES, note: str = " (default: {default})", **settings: Any
    ) -> None:
        """Add sizes of a problem, integers with their defaults unless `settings` says otherwise.

        `note` follows each help text; `{default}` in it is the size's default.
        """
        for name in names:
            common = {"type": ValueType(int), "metavar": "N", "default": SIZES[name], **settings}
            text = SIZE_TEXTS[name] + note.format(default=SIZES[name])
            self.add_argument(f"--{name}", help=text, **common)

    def add_model(self) -> None:
        """Add `--model`, `--config` and `--tp`, which give `MODEL_SIZES`; see `read_model`."""
        text = "published model that sets h, d, p, k and v; hyper-mla list names them"
        self.add_option("model", "NAME", text, default=argparse.SUPPRESS)
        text = "config.json of a Hugging Face model, instead of --model"
        self.add_option("config", "FILE", text, type=Path, default=argparse.SUPPRESS)
        text = "GPUs that share the model's heads (default: 1)"
        self.add_option("tp", "N", text, type=ValueType(int), default=argparse.SUPPRESS)

    def add_problem(self) -> None:
        """Add all sizes of a problem, and a model instead of those that it gives."""
        self.add_sizes(("b", "s", "t"))
        self.add_sizes(("h", "d", "p", "k"), default=argparse.SUPPRESS)
        text = f"{SIZE_TEXTS['v']} (default: d)"
        self.add_option("v", "N", text, type=ValueType(int), default=argparse.SUPPRESS)
        self.add_model()

    def add_lengths(self, note: str = " (default: all t)", **settings: Any) -> None:
        """Add the KV lengths; `note` follows the help text."""
        kind = ValueType(int, optional=True, sequence=True, words=(MIXED,))
        text = f"KV length per request: comma list or mixed{note}"
        self.add_argument("--lengths", type=kind, metavar="N,N,...", help=text, **settings)


class Group(Options, argparse._ArgumentGroup):
    """A group of options with a heading in the help."""


class Parser(Options, argparse.ArgumentParser):
    """An argument parser whose errors are exceptions, and which never guesses abbreviations.

    Attributes:
        aliases: other spelling of an option -> the option.
        ambiguous: name that several options share -> those options.
    """

    def __init__(self, **settings: Any) -> None:
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=32)
        super().__init__(allow_abbrev=False, **{"formatter_class": formatter, **settings})
        self.aliases: dict[str, str] = {}
        self.ambiguous: dict[str, list[str]] = {}

    def add_argument_group(self, *titles: Any, **settings: Any) -> Group:
        group = Group(self, *titles, **settings)
        self._action_groups.append(group)
        return group

    def error(self, message: str) -> NoReturn:
        """Called by argparse; its own version prints the usage and exits."""
        message = message.replace("ignored explicit argument", "expected no value, got")
        raise UsageError(message.removeprefix("argument "))

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """Parse a command line into the options that were given, by name.

        An option that does not exist is an error that suggests the nearest ones.
        """
        flags = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        values, rest = self.parse_known_args([self._canonical(word, flags) for word in argv])
        if not rest:
            return vars(values)
        if rest[0].startswith("-"):
            raise _unknown_option(rest[0], flags)
        is_option = "=" in rest[0] and rest[0].partition("=")[0] in flags
        hint = f"did you mean --{rest[0]}?" if is_option else "options start with --"
        raise UsageError(f"unexpected argument {rest[0]!r}; {hint}")

    def _canonical(self, argument: str, flags: Sequence[str]) -> str:
        if not argument.startswith("--") or argument == "--":
            return argument
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        name = self.aliases.get(name, name)
        if name in flags:
            return f"--{name}{equals}{value}"
        if name not in self.ambiguous:
            raise _unknown_option(f"--{name}", flags)
        choices = " or ".join(f"--{flag}" for flag in self.ambiguous[name])
        raise UsageError(f"--{name}: more than one tiling has it; use {choices}")


def _unknown_option(option: str, flags: Iterable[str]) -> UsageError:
    option = option.partition("=")[0]
    wanted = option.lstrip("-").lower()
    by_lower = {flag.lower(): flag for flag in flags}
    nearest = difflib.get_close_matches(wanted, by_lower, n=2, cutoff=0.6)
    nearest = [wanted] if wanted in by_lower else nearest
    meant = " or ".join(f"--{by_lower[name]}" for name in nearest)
    hint = f"did you mean {meant}?" if meant else "--help lists the options"
    return UsageError(f"unknown option {option!r}; {hint}")


def read_model(values: dict[str, Any]) -> dict[str, int]:
    """Take `--model`, `--config` and `--tp` out of parsed options; returns the sizes they give."""
    given = {name: values.pop(name) for name in ("model", "config", "tp") if name in values}
    if not given:
        return {}
    if "model" in given and "config" in given:
        raise UsageError(f"--config: expected none beside --model={given['model']}")
    if len(given) == 1 and "tp" in given:
        raise UsageError("--tp: expected --model or --config beside it, got neither")
    with usage_errors():
        found: Model = model(given["model"]) if "model" in given else read_config(given["config"])
    sizes = found.sizes(given.get("tp", 1))
    source = "--model" if "model" in given else "--config"
    for name in MODEL_SIZES:
        if name in values:
            raise UsageError(
                f"--{name}: expected none beside {source}, which gives {name}={sizes[name]}; "
                f"got {values[name]}"
            )
    return sizes


def read_problem(values: dict[str, Any]) -> None:
    """Replace the options of `add_problem` in parsed options by the sizes of a problem."""
    sizes = read_model(values)
    values |= {**SIZES, **values, **sizes}


def sizes_text(problem: Any, names: Iterable[str] = SIZES) -> str:
    """The sizes of a problem or call shape in one line; v only where it is not d."""
    shown = [*names, *(["v"] if problem.v != problem.d else [])]
    texts = [f"{name}={getattr(problem, name)}" for name in shown]
    if (lengths := getattr(problem, "lengths", None)) is not None:
        few = len(lengths) <= MOST_LENGTHS
        each = ",".join(map(str, lengths)) if few else f"{min(lengths)}..{max(lengths)}"
        texts.append(f"lengths={each}")
    return " ".join(texts)


def width_notes(problem: Any) -> list[str]:
    """What to say about predictions for widths at which no kernel was timed."""
    usual = MlaProblem(b=1, s=1, t=1, h=1)
    if all(getattr(problem, name) == getattr(usual, name) for name in "dpkv"):
        return []
    return [
        f"rates were recorded at {sizes_text(usual, ('d', 'p', 'k'))}; hyper-mla choose says which "
        "kernels take these widths"
    ]


def read_lengths(lengths: Any, b: int, t: int) -> tuple[int, ...] | None:
    """The KV lengths that an option asks for; "mixed" is `b` of them spread from 1 to t."""
    if lengths != MIXED:
        return lengths  # type: ignore[no-any-return]
    require_size("b", b, MOST_REQUESTS)
    require_size("t", t)
    return (t,) if b == 1 else tuple(round(1 + i * (t - 1) / (b - 1)) for i in range(b))


def leading_words(argv: Sequence[str], most: int) -> tuple[list[str], list[str]]:
    """Split a command line into the words before the first option, at most some, and the rest."""
    words = list(takewhile(lambda argument: not argument.startswith("-"), argv[:most]))
    return words, list(argv[len(words) :])


def take_option(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The last value of an option and the command line without it."""
    parser = Parser(add_help=False)
    parser.add_argument(f"--{name}")
    values, rest = parser.parse_known_args(argv)
    return getattr(values, name), rest


def take_kernel(argv: Sequence[str]) -> tuple[KernelId | None, list[str]]:
    """The kernel that `<kernel> [<version>] ... [--language=...]` names, and the other arguments.

    The kernel may be `<kernel>:<language>`; it is None when the command line names none.
    """
    language, rest = take_option(argv, "language")
    words, rest = leading_words(rest, 2)
    if not words:
        if language is not None:
            raise UsageError("--language: expected a kernel beside it, got none")
        return None, rest
    with usage_errors():
        return find_kernel(words[0], words[1] if len(words) > 1 else None, language), rest


def require_kernel(parser: Parser, argv: Sequence[str]) -> tuple[KernelId, list[str]]:
    """As `take_kernel`, for a command that needs a kernel; without one it shows its own help."""
    kernel, rest = take_kernel(argv)
    if kernel is not None:
        return kernel, rest
    if {"-h", "--help"} & set(rest):
        parser.parse_args(["--help"])
    raise UsageError("kernel: expected the name of a kernel, got none")
