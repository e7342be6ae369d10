"""Tilings and their constraints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.tiling import (
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


@pytest.mark.parametrize("change", [{"rows": None}, {"speed": 9}], ids=["missing", "unknown"])
def test_other_fields_are_refused(change: dict[str, object]) -> None:
    values = {**FakeTiling().to_dict(), **change}
    if change.get("rows", 1) is None:
        del values["rows"]
    wanted = re.escape("tiling: expected the fields ['columns', 'num_ctas', 'occupancy', 'rows']")
    with pytest.raises(InvalidArgumentError, match=f"^{wanted}, got "):
        tiling_from_dict(FakeTiling, values)
