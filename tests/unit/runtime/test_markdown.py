"""Markdown helpers: tables, JSON."""

import json
import math

from mla_var3.runtime.markdown import json_ready, table, write_json


def test_a_table_aligns_numbers_and_escapes_bars():
    text = table(("kernel", "time"), [("a|b", "1.5 µs"), ("c", None)])
    assert text == "| kernel | time |\n| --- | ---: |\n| a\\|b | 1.5 µs |\n| c | - |\n"


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
