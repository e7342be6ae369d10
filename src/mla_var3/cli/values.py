"""Reading option values: from the annotation of a dataclass field to a parser of text."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mla_var3.errors import HyperMlaError
from mla_var3.op.mla.problem import MOST_REQUESTS, require_size
from mla_var3.runtime.plan import option_fields

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
