"""Tilings and their constraints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.tiling import (
    HINT_FIELDS,
    Constraints,
    Tiling,
    constraint_failures,
    require_valid,
    tiling_from_dict,
)
from tests.unit.runtime.runtime_support import FakeTiling


@dataclass
class Picky(Tiling):
    """Says no without saying why."""

    rows: int = 3

    def validate(self, pd: object) -> bool:
        return self.rows != 3


def test_constraints_keep_the_messages_of_what_does_not_hold() -> None:
    outcome = Constraints((True, "a"), (False, "b"), (False, "c"))
    assert not outcome
    assert outcome.failures == ("b", "c")
    assert repr(outcome) == "Constraints(failures=['b', 'c'])"


def test_an_illegal_tiling_is_named_with_every_reason() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        require_valid(FakeTiling(rows=-1, occupancy=2), SimpleNamespace(limit=-2))
    assert str(caught.value) == (
        "tiling: expected a legal tiling, got rows=-1 occupancy=2: "
        "rows: expected a positive number, got -1; rows: expected at most -2, got -1"
    )


def test_a_plain_false_becomes_a_message() -> None:
    assert constraint_failures(Picky(), None) == ("Picky.validate rejects rows=3",)
    assert constraint_failures(Picky(rows=4), None) == ()


def test_hints_are_the_fields_that_are_set() -> None:
    assert FakeTiling().hints() == {}
    assert FakeTiling(occupancy=2).hints() == {"occupancy": 2}
    assert FakeTiling(occupancy=0, num_ctas=4).hints() == {"num_ctas": 4, "occupancy": 0}
    assert set(HINT_FIELDS) >= {"num_ctas", "occupancy", "num_worker_warps"}


def test_a_tiling_survives_a_dictionary() -> None:
    tiling = FakeTiling(rows=32, occupancy=2)
    assert tiling_from_dict(FakeTiling, tiling.to_dict()) == tiling


@pytest.mark.parametrize("change", [{"rows": None}, {"speed": 9}], ids=["missing", "unknown"])
def test_other_fields_are_refused(change: dict[str, object]) -> None:
    values = {**FakeTiling().to_dict(), **change}
    if change.get("rows", 1) is None:
        del values["rows"]
    wanted = re.escape("tiling: expected the fields ['columns', 'num_ctas', 'occupancy', 'rows']")
    with pytest.raises(InvalidArgumentError, match=f"^{wanted}, got "):
        tiling_from_dict(FakeTiling, values)
