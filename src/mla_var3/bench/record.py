"""Benchmark records: one row per kernel and shape, with all that is needed to judge and repeat it.

A record is one JSON file. Every row carries its own device, versions, command and date, so rows of
several records can share a table. Rows are validated when a record is read and when it is written.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.conf import read_json
from mla_var3.errors import HyperMlaError, InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime.markdown import write_json
from mla_var3.runtime.paths import DEFAULT_LANGUAGE

SCHEMA = "hyper-mla-bench/1"

OURS, PEER, PROJECTION = "ours", "peer", "projection"
LATENT, DECOMPRESSED, MIX, CALL = "latent", "decompressed", "mix", "call"
MEASURED, PREDICTED = "measured", "predicted"
OK, ABSENT, FAILED, LOST = "ok", "absent", "failed", "lost"
PROJECTIONS = QUERY_PROJECTION, OUTPUT_PROJECTION = "query projection", "output projection"

EIGHT_BIT = {("mla_var6_plus_v5", "cute-dsl"), ("mla_var6_plus_v2", "cute-dsl")}
"""(kernel, language) with an 8-bit window: a larger error, so never ranked with the others."""

_SIZES = ("b", "s", "t", "h", "d", "p", "k", "dtype", "causal")


@dataclass(frozen=True)
class BenchRow:
    """One kernel at one shape.

    Attributes:
        kernel: kernel id, or the name of a peer, a projection or a public call.
        source: "ours", "peer" or "projection".
        kind: "measured" or "predicted".
        path: "latent", "decompressed", "mix", or "call" for a public call; empty when unknown.
        choices: what the run chose, such as n or splits.
        asked: the choices that the suite pinned.
        status: "ok", "absent" (cannot run here), "failed" (ran and is wrong, or raised) or "lost"
            (another contender took the device down before its turn).
        note: what to know about the row, such as the kernel a public call chose.
        time_us: median of the rounds' medians `rounds_us`, or the predicted time.
        spread_us: half the distance from the smallest 10th to the largest 90th percentile.
        runs: timed runs of all rounds.
        timer: what measured; for a prediction what it rests on.
        flops, bytes: what the algorithm needs, for TFLOP/s and GB/s.
        error: relative Frobenius error against the float32 reference.
        projections_us: time of the projections that the kernel does not do; None if unknown.
        cache_dtype: format of the 8-bit latent cache that the kernel reads; empty for 16 bits. Its
            error is that against float64 on the dequantised cache.
    """

    problem: MlaProblem
    kernel: str
    source: str
    kind: str
    path: str = ""
    language: str = ""
    choices: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[str, int] = field(default_factory=dict)
    status: str = OK
    reason: str = ""
    note: str = ""
    time_us: float | None = None
    spread_us: float | None = None
    rounds_us: tuple[float, ...] = ()
    runs: int | None = None
    timer: str = ""
    flops: float | None = None
    bytes: float | None = None
    error: float | None = None
    projections_us: float | None = None
    device: str = ""
    date: str = ""
    command: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    cache_dtype: str = ""

    @property
    def eight_bit(self) -> bool:
        """Whether the kernel reads 8-bit operands; its results have a column of their own."""
        return bool(self.cache_dtype) or (self.kernel, self.language) in EIGHT_BIT

    @property
    def series(self) -> str:
        """The kernel, its language where that is not the default, and its cache or "8-bit"."""
        language = f" ({self.language})" if self.language not in ("", DEFAULT_LANGUAGE) else ""
        if self.cache_dtype:
            return f"{self.kernel}{language} {self.cache_dtype}"
        return self.kernel + language + (" 8-bit" if self.eight_bit else "")

    @property
    def label(self) -> str:
        """The series with the row's choices."""
        return " ".join([self.series, *(f"{k}={v}" for k, v in self.choices.items())])

    @property
    def shape(self) -> str:
        """The sizes in one short text."""
        return shape_text(self.problem)

    @property
    def tflops(self) -> float | None:
        """Achieved TFLOP/s."""
        return self.flops / self.time_us / 1e6 if self.time_us and self.flops else None

    @property
    def gbps(self) -> float | None:
        """Achieved GB/s."""
        return self.bytes / self.time_us / 1e3 if self.time_us and self.bytes else None

    @property
    def call_us(self) -> float | None:
        """Call time, from `q_nope` to `o`: the kernel and the projections it does not do."""
        if self.time_us is None or self.projections_us is None:
            return None
        return self.time_us + self.projections_us

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the derived figures for readers that do not compute them."""
        sizes = asdict(self.problem)
        derived = {"tflops": self.tflops, "gbps": self.gbps, "call_us": self.call_us}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        problem = {name: sizes[name] for name in _SIZES}
        if self.problem.v != self.problem.d:
            problem["v"] = self.problem.v
        if self.problem.lengths is not None:
            problem["lengths"] = list(self.problem.lengths)
        return {**values, "problem": problem, **derived}


_WORDS: dict[str, tuple[str, ...]] = {
    "source": (OURS, PEER, PROJECTION),
    "kind": (MEASURED, PREDICTED),
    "path": (LATENT, DECOMPRESSED, MIX, CALL, ""),
    "status": (OK, ABSENT, FAILED, LOST),
}
_TEXTS = ("language", "reason", "note", "timer", "device", "date", "command", "cache_dtype")
_POSITIVE, _NOT_NEGATIVE = "a finite number above 0", "a finite number of at least 0"
_NUMBERS = {
    **dict.fromkeys(("time_us", "flops", "bytes", "runs"), _POSITIVE),
    **dict.fromkeys(("spread_us", "error", "projections_us"), _NOT_NEGATIVE),
}


def check_row(row: BenchRow) -> None:
    """Refuse a row with a value that cannot be."""

    def require(name: str, right: bool, expected: str) -> None:
        if not right:
            raise InvalidArgumentError(name, expected, repr(getattr(row, name)))

    require("kernel", isinstance(row.kernel, str) and bool(row.kernel), "a name")
    for name, allowed in _WORDS.items():
        require(name, getattr(row, name) in allowed, " or ".join(map(repr, allowed)))
    for name in _TEXTS:
        require(name, isinstance(getattr(row, name), str), "text")
    for name in ("choices", "asked"):
        value = getattr(row, name)
        integers = isinstance(value, Mapping) and all(isinstance(x, int) for x in value.values())
        require(name, integers, "an object of integers")
    for name, expected in _NUMBERS.items():
        value = getattr(row, name)
        if value is not None or (name == "time_us" and row.status == OK):
            require(name, _is_number(value, expected), expected)
    require("rounds_us", all(_is_number(x, _POSITIVE) for x in row.rounds_us), _POSITIVE)


def _is_number(value: Any, expected: str) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return value > 0 if expected == _POSITIVE else value >= 0


@dataclass
class BenchRecord:
    """The rows of one benchmark run.

    Attributes:
        suite: what was run, such as "figures"; "records" for rows read together.
        environment: what `mla_var3.runtime.environment.environment` returned at the start.
        absent: peer or kernel that could not take part -> reason.
    """

    suite: str
    environment: Mapping[str, Any]
    rows: list[BenchRow] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def predicted(self) -> bool:
        """Whether there are predictions among the rows."""
        return any(row.kind == PREDICTED for row in self.rows)

    @property
    def failed(self) -> list[BenchRow]:
        """Our rows that failed, or were never measured."""
        return [row for row in self.rows if row.source == OURS and row.status in (FAILED, LOST)]

    @property
    def devices(self) -> list[str]:
        """The devices of the rows."""
        return list(dict.fromkeys(row.device for row in self.rows if row.device))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, the rows last."""
        values = {name: value for name, value in vars(self).items() if name != "rows"}
        return {"schema": SCHEMA, **values, "rows": [row.to_dict() for row in self.rows]}


def shape_text(problem: MlaProblem) -> str:
    """Sizes of a problem in one short text; usual widths, dtype and mask are left out."""
    usual = MlaProblem(b=1, s=1, t=1, h=1)
    parts = [f"{name}={getattr(problem, name)}" for name in ("b", "s", "t", "h")]
    if problem.lengths is not None:
        parts[2] = f"t={min(problem.lengths)}..{max(problem.lengths)}"
    odd = [name for name in "dpk" if getattr(problem, name) != getattr(usual, name)]
    parts += [f"{name}={getattr(problem, name)}" for name in odd]
    parts += [f"v={problem.v}"] if problem.v != problem.d else []
    parts += [problem.dtype] if problem.dtype != usual.dtype else []
    return " ".join([*parts, *([] if problem.causal else ["full"])])


def first_line(error: BaseException) -> str:
    """The first line of an error, short enough for a table; its type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def circumstances(environment: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What every row repeats of its record's environment."""
    driver = (environment.get("gpu") or {}).get("driver")
    texts = {name: str(environment.get(name) or "") for name in ("date", "command")}
    versions = {**(environment.get("versions") or {}), "driver": driver}
    return {"device": device, **texts, "versions": versions}


def save_record(record: BenchRecord, path: Path) -> None:
    """Write a record as JSON; nothing is written where a row has a value that cannot be."""
    for index, row in enumerate(record.rows):
        with _naming_row(path, index, row.label):
            check_row(row)
    write_json(path, record.to_dict())


def load_record(path: Path) -> BenchRecord:
    """Read a record; an error names the file, the row and the field."""
    data = read_json(path, "a readable record")
    got = ""
    if not isinstance(data, Mapping) or not {"rows", "environment"} <= set(data):
        got = "an object without rows and environment"
    elif data.get("schema") != SCHEMA:
        got = f"schema {data.get('schema')!r}, this version reads {SCHEMA!r}"
    if got:
        raise InvalidArgumentError(str(path), "a benchmark record", got)
    rows = []
    for index, entry in enumerate(data["rows"]):
        name = entry.get("kernel", "") if isinstance(entry, Mapping) else ""
        with _naming_row(path, index, name):
            rows.append(_row(entry))
            check_row(rows[-1])
    rest = {name: data[name] for name in ("absent", "settings", "notes") if data.get(name)}
    return BenchRecord(str(data.get("suite", "figures")), data["environment"], rows, **rest)


@contextmanager
def _naming_row(path: Path, index: int, name: object) -> Iterator[None]:
    """Errors of the body name the file and the row."""
    where = f"{path}: row {index}" + (f" ({name})" if name else "")
    try:
        yield
    except InvalidArgumentError as error:
        argument = f"{where}, {error.argument}"
        raise InvalidArgumentError(argument, error.expected, error.got) from error
    except KeyError as error:
        raise InvalidArgumentError(where, f"the field {error}", "none") from error
    except (ValueError, TypeError, AttributeError, HyperMlaError) as error:
        raise InvalidArgumentError(where, "a row of a benchmark record", error) from error


def merge_records(records: Iterable[BenchRecord]) -> BenchRecord:
    """Several records as one; a row that occurs twice (same key) is taken from the latest."""
    found = list(records)
    if len(found) == 1:
        return found[0]
    merged = BenchRecord("records", found[0].environment)
    rows: dict[tuple[Any, ...], BenchRow] = {}
    for record in sorted(found, key=lambda record: str(record.environment.get("date"))):
        for row in record.rows:
            rows[row_key(row), row.device] = row
        merged.absent.update(record.absent)
        merged.notes += [note for note in record.notes if note not in merged.notes]
    merged.rows = list(rows.values())
    return merged


def row_key(row: BenchRow) -> tuple[Any, ...]:
    """What makes two rows the same measurement, apart from the device."""
    choices = tuple(row.choices.items())
    return row.kind, row.source, row.kernel, row.language, row.problem, choices, row.cache_dtype


CSV_COLUMNS = (
    "kernel", "language", "source", "kind", "path", "b", "s", "t", "h", "d", "p", "k", "v",
    "dtype", "cache_dtype", "causal", "lengths", "choices", "eight_bit", "status", "reason",
    "note", "time_us", "spread_us", "call_us", "runs", "timer", "tflops", "gbps", "error",
    "speedup_over_best_peer", "device", "date", "command", "versions",
)  # fmt: skip


def csv_text(record: BenchRecord, speedups: Mapping[int, float]) -> str:
    """The rows as CSV; `speedups` maps the index of a row to that over the best peer."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for index, row in enumerate(record.rows):
        values = row.to_dict()
        values |= {"lengths": None, "eight_bit": row.eight_bit, "v": row.problem.v}
        values |= values.pop("problem")
        if row.problem.lengths is not None:
            values["lengths"] = f"{min(row.problem.lengths)}..{max(row.problem.lengths)}"
        values["choices"] = " ".join(f"{k}={v}" for k, v in row.choices.items())
        values["versions"] = " ".join(f"{k}={v}" for k, v in row.versions.items() if v)
        values["speedup_over_best_peer"] = speedups.get(index)
        writer.writerow({name: values[name] for name in CSV_COLUMNS})
    return stream.getvalue()


def _row(entry: Mapping[str, Any]) -> BenchRow:
    names = {f.name for f in dataclasses.fields(BenchRow)}
    values = {name: value for name, value in entry.items() if name in names}
    values["problem"] = MlaProblem(**entry["problem"])
    values["rounds_us"] = tuple(entry.get("rounds_us") or ())
    return BenchRow(**values)
