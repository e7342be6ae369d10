"""Markdown helpers: tables, numbers, front matter, JSON."""

import json
import math

import pytest

from mla_var3.runtime.markdown import json_ready, number, table, write_json


def test_a_table_aligns_numbers_and_escapes_bars():
    text = table(("kernel", "time"), [("a|b", "1.5 µs"), ("c", None)])
    assert text == "| kernel | time |\n| --- | ---: |\n| a\\|b | 1.5 µs |\n| c | - |\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (1.0, "1.00"),
        (123.456, "123"),
        (12345.6, "12346"),
        (0.012345, "0.0123"),
        (1.5e-7, "1.50e-07"),
        (-2.5, "-2.50"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_json_holds_no_bare_nan(tmp_path):
    path = tmp_path / "new" / "figures.json"
    write_json(path, {"error": math.nan, "bound": math.inf, "path": path, "sizes": (1, 2)})
    assert json.loads(path.read_text()) == {
        "error": "nan",
        "bound": "inf",
        "path": str(path),
        "sizes": [1, 2],
    }
    assert json_ready({1: {"x"}}) == {"1": ["x"]}
