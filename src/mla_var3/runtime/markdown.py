"""Markdown building blocks: tables, front matter and numbers with their units."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_var3.runtime.paths import write_atomic

MISSING = "-"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table; columns in which every value is a number or missing align right."""
    cells = [[_cell(value) for value in row] for row in rows]
    for row in cells:
        if len(row) != len(headers):
            raise ValueError(f"row {row}: expected {len(headers)} cells, got {len(row)}")
    columns = [[row[i] for row in cells] for i in range(len(headers))]
    rules = ["---:" if column and all(map(_is_numeric, column)) else "---" for column in columns]
    lines = [[_cell(header) for header in headers], rules, *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(value: object) -> str:
    text = MISSING if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _is_numeric(text: str) -> bool:
    return text == MISSING or text[:1].isdigit() or (text[:1] in "+-" and text[1:2].isdigit())


def front_matter(values: Mapping[str, Any]) -> str:
    """A YAML block for the top of a report; agents and documentation tools read it.

    Values are written as JSON, which is YAML, so that no string needs special care.
    """
    ready = json_ready(values)
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in ready.items()]
    return "\n".join(["---", *lines, "---", ""])


def number(value: float | None, digits: int = 3) -> str:
    """A number with the given significant digits, without an exponent where it can be read."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4 or exponent > 8:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - exponent)
    return f"{value:.{decimals}f}"


def quantity(value: float | None, unit: str) -> str:
    """A number with its unit."""
    return MISSING if value is None else f"{number(value)} {unit}"


def microseconds(value: float | None) -> str:
    """A time given in microseconds, in the unit that reads best."""
    if value is None:
        return MISSING
    if not math.isfinite(value) or value < 1e4:
        return quantity(value, "µs")
    return quantity(value / 1e3, "ms") if value < 1e7 else quantity(value / 1e6, "s")


def byte_count(value: float | None) -> str:
    """A number of bytes in binary units."""
    if value is not None and abs(value) < 1024:
        return f"{value:.0f} B"
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flop_count(value: float | None) -> str:
    """A number of floating-point operations."""
    return _scaled(value, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def _scaled(value: float | None, base: int, units: Sequence[str]) -> str:
    """A number in the largest unit that leaves at least 1, each `base` times the one before."""
    if value is None:
        return MISSING
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return quantity(value, units[power])


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file; None becomes an empty cell."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_atomic(path, buffer.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; values that JSON has no form for become strings."""
    write_atomic(path, json.dumps(json_ready(value), indent=2, allow_nan=False) + "\n")


def json_ready(value: Any) -> Any:
    """A value in terms of JSON; NaN and the infinities become the strings "nan" and "inf"."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_ready(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
