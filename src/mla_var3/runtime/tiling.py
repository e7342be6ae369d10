"""Tilings: the launch and tile parameters of a kernel, and the constraints on them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from mla_var3.errors import InvalidArgumentError

HINT_FIELDS = ("num_ctas", "occupancy", "num_worker_warps", "opt_level")
"""Tiling fields that are compiler hints rather than tile sizes."""


class Constraints:
    """The outcome of `Tiling.validate`: true when every constraint holds, and says which do not.

    A tiling lists its rules once, as (holds, message) pairs; the autotuner uses the truth value,
    error messages use the texts.
    """

    def __init__(self, *rules: tuple[bool, str]) -> None:
        self.failures = tuple(message for holds, message in rules if not holds)

    def __bool__(self) -> bool:
        return not self.failures

    def __repr__(self) -> str:
        return f"Constraints(failures={list(self.failures)!r})"


@dataclass
class Tiling:
    """Base of all tilings. Every field is a command line option of the kernel."""

    def validate(self, pd: Any) -> Constraints | bool:
        """Whether this tiling is legal for the plan `pd`; the one place for its constraints."""
        return True

    def hints(self) -> dict[str, int]:
        """The compiler hints among the fields, those that are set."""
        return {
            name: getattr(self, name)
            for name in HINT_FIELDS
            if getattr(self, name, None) is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """The fields as a JSON-ready mapping."""
        return dataclasses.asdict(self)

    def label(self) -> str:
        """Short text for tables and progress bars: the fields that are set."""
        return " ".join(f"{k}={v}" for k, v in self.to_dict().items() if v is not None)


T = TypeVar("T", bound=Tiling)


def tiling_from_dict(cls: type[T], values: dict[str, Any]) -> T:
    """Rebuild a tiling from `to_dict`; refuses unknown or missing fields."""
    names = {f.name for f in dataclasses.fields(cls)}
    if set(values) != names:
        raise InvalidArgumentError("tiling", f"the fields {sorted(names)}", sorted(values))
    return cls(**values)


def constraint_failures(tiling: Tiling, pd: Any) -> tuple[str, ...]:
    """The constraints of `tiling` that do not hold for the plan `pd`."""
    outcome = tiling.validate(pd)
    if isinstance(outcome, Constraints):
        return outcome.failures
    return () if outcome else (f"{type(tiling).__name__}.validate rejects {tiling.label()}",)


def require_valid(tiling: Tiling, pd: Any) -> None:
    """Raise an error naming the tiling and every constraint that does not hold."""
    failures = constraint_failures(tiling, pd)
    if failures:
        got = f"{tiling.label()}: " + "; ".join(failures)
        raise InvalidArgumentError("tiling", "a legal tiling", got)


def is_power_of_two(value: int) -> bool:
    """Tile sides of cuTile are powers of two."""
    return value > 0 and value & (value - 1) == 0
