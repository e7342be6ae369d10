"""Benchmark records: one row per kernel and shape, with all that is needed to judge and repeat it.

A record is one JSON file. Every row carries its own device, versions, command and date, so that
rows of several records can stand in one table.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.errors import HyperMlaError, InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime.markdown import write_json
from mla_var3.runtime.paths import DEFAULT_LANGUAGE, split_full_name

SCHEMA = "hyper-mla-bench/1"

OURS, PEER, PROJECTION = "ours", "peer", "projection"
ABSORBED, DECOMPRESSED, MIX = "absorbed", "decompressed", "mix"
MEASURED, PREDICTED = "measured", "predicted"
OK, ABSENT, FAILED, LOST = "ok", "absent", "failed", "lost"

_SIZES = ("b", "s", "t", "h", "d", "p", "k", "dtype", "causal")
_FIRST_FORM_DESIGNS = ("flash_attention", "flash_mla", "flash_mla_split_kv", "mla_var6_plus")
_FIRST_FORM_TIMER = "cuda-graph"


@dataclass(frozen=True)
class BenchRow:
    """One kernel at one shape.

    Attributes:
        problem: sizes, dtype and mask.
        kernel: kernel id, or the name of a peer or of a projection.
        source: "ours", "peer" or "projection".
        kind: "measured" or "predicted".
        path: "absorbed", "decompressed" or "mix"; empty where it is not known.
        language: language key of one of our kernels.
        choices: what the run chose, such as n or splits.
        asked: the choices that the suite pinned.
        status: "ok", "absent" (cannot run here), "failed" (ran and is wrong, or broke) or "lost"
            (another one took the device down before its turn).
        reason: why it is not "ok".
        time_us: median of the rounds' medians, or the roofline time of a prediction.
        spread_us: half the distance from the smallest 10th to the largest 90th percentile.
        rounds_us: the median of each round, in the order of the rounds.
        runs: timed runs of all rounds.
        timer: what measured; "roofline" for a prediction.
        flops, bytes: what the algorithm needs, for TFLOP/s and GB/s.
        error: relative Frobenius error against the float32 reference.
        projections_us: time of the projections that the kernel leaves to others; None if unknown.
        device, date, command, versions: the circumstances of the row.
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

    @property
    def label(self) -> str:
        """The kernel with its language, where that is not the default, and its choices."""
        language = f" ({self.language})" if self.language not in ("", DEFAULT_LANGUAGE) else ""
        return " ".join([self.kernel + language, *(f"{k}={v}" for k, v in self.choices.items())])

    @property
    def series(self) -> str:
        """The label without choices: what stays the same from shape to shape."""
        return dataclasses.replace(self, choices={}).label

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
    def end_to_end_us(self) -> float | None:
        """From `q_nope` to `o`: the kernel and the projections it leaves to others."""
        if self.time_us is None or self.projections_us is None:
            return None
        return self.time_us + self.projections_us

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the derived figures for readers that do not compute them."""
        sizes = asdict(self.problem)
        derived = {"tflops": self.tflops, "gbps": self.gbps, "end_to_end_us": self.end_to_end_us}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        problem = {name: sizes[name] for name in _SIZES}
        if self.problem.lengths is not None:
            problem["lengths"] = list(self.problem.lengths)
        return {**values, "problem": problem, **derived}


@dataclass
class BenchRecord:
    """The rows of one benchmark run.

    Attributes:
        suite: what was run, such as "figures"; "records" for rows read together.
        environment: what `mla_var3.runtime.environment.environment` said at the start.
        rows: the rows.
        absent: peer or kernel that could not take part -> reason.
        settings: rounds, seconds per timing, whether tilings were tuned.
        notes: what a reader has to know besides.
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
    def devices(self) -> list[str]:
        """The devices of the rows."""
        return list(dict.fromkeys(row.device for row in self.rows if row.device))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "environment": dict(self.environment),
            "settings": self.settings,
            "absent": self.absent,
            "notes": self.notes,
            "rows": [row.to_dict() for row in self.rows],
        }


def shape_text(problem: MlaProblem) -> str:
    """Sizes of a problem in one short text; usual widths, dtype and mask are left out."""
    usual = MlaProblem(b=1, s=1, t=1, h=1)
    parts = [f"{name}={getattr(problem, name)}" for name in ("b", "s", "t", "h")]
    if problem.lengths is not None:
        parts[2] = f"t={min(problem.lengths)}..{max(problem.lengths)}"
    parts += [
        f"{name}={getattr(problem, name)}"
        for name in ("d", "p", "k")
        if getattr(problem, name) != getattr(usual, name)
    ]
    parts += [problem.dtype] if problem.dtype != usual.dtype else []
    return " ".join([*parts, *([] if problem.causal else ["full"])])


def circumstances(environment: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """What every row repeats of its record's environment."""
    gpu = environment.get("gpu") or {}
    versions = dict(environment.get("versions") or {})
    versions["driver"] = gpu.get("driver")
    return {
        "device": device or gpu.get("name") or "",
        "date": str(environment.get("date") or ""),
        "command": str(environment.get("command") or ""),
        "versions": versions,
    }


def save_record(record: BenchRecord, path: Path) -> None:
    """Write a record as JSON."""
    write_json(path, record.to_dict())


def load_record(path: Path) -> BenchRecord:
    """Read a record, also one of the first form (rows with a shape as text).

    Raises:
        InvalidArgumentError: the file is no benchmark record.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, Mapping) or "rows" not in data or "environment" not in data:
            raise ValueError("an object without rows and environment")
        if "schema" not in data:
            return _first_form(data)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, this version reads {SCHEMA!r}")
        return BenchRecord(
            suite=str(data["suite"]),
            environment=data["environment"],
            rows=[_row(entry) for entry in data["rows"]],
            absent=dict(data.get("absent") or {}),
            settings=dict(data.get("settings") or {}),
            notes=list(data.get("notes") or []),
        )
    except OSError as error:
        raise InvalidArgumentError(str(path), "a readable record", error.strerror) from error
    except (ValueError, KeyError, TypeError, HyperMlaError) as error:
        raise InvalidArgumentError(str(path), "a benchmark record", error) from error


def merge_records(records: Iterable[BenchRecord]) -> BenchRecord:
    """Several records as one; a row that occurs twice (same key) is taken from the latest."""
    found = list(records)
    if len(found) == 1:
        return found[0]
    merged = BenchRecord("records", found[0].environment if found else {})
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
    return row.kind, row.source, row.kernel, row.language, row.problem, tuple(row.choices.items())


CSV_COLUMNS = (
    "kernel", "language", "source", "kind", "path", "b", "s", "t", "h", "d", "p", "k", "dtype",
    "causal", "lengths", "choices", "status", "reason", "time_us", "spread_us", "end_to_end_us",
    "runs", "timer", "tflops", "gbps", "error", "speedup_over_best_peer", "device", "date",
    "command", "versions",
)  # fmt: skip


def csv_text(record: BenchRecord, speedups: Mapping[int, float]) -> str:
    """The rows as CSV.

    Args:
        record: the rows.
        speedups: index of a row -> its speed-up over the best peer at the shape.
    """
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for index, row in enumerate(record.rows):
        values = row.to_dict()
        values |= {"lengths": None, **values.pop("problem")}
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
    for name in ("time_us", "spread_us", "flops", "bytes", "error", "projections_us"):
        values[name] = _number(entry.get(name))
    return BenchRow(**values)


def _first_form(data: Mapping[str, Any]) -> BenchRecord:
    environment = data["environment"]
    around = circumstances(environment)
    rows = []
    for entry in data["rows"]:
        design, _ = split_full_name(str(entry["kernel"]))
        ours = design in _FIRST_FORM_DESIGNS
        time_us, note = _number(entry["time_us"]), str(entry.get("note") or "")
        tflops, gbps = _number(entry.get("tflops")), _number(entry.get("gbps"))
        found = re.findall(r"(\w)=(\d+)", str(entry["shape"]))
        sizes: dict[str, Any] = {"h": 128, **{key: int(value) for key, value in found}}
        full = "full" in str(entry["shape"]).split()
        rows.append(
            BenchRow(
                problem=MlaProblem(**sizes, causal=not full),
                kernel=str(entry["kernel"]),
                source=OURS if ours else PEER,
                kind=MEASURED,
                path=_first_form_path(str(entry["kernel"])),
                language=DEFAULT_LANGUAGE if ours else "",
                choices={key: int(value) for key, value in re.findall(r"\b(\w+)=(\d+)", note)},
                status=OK if time_us is not None else FAILED,
                reason=note if time_us is None else "",
                time_us=time_us,
                spread_us=_number(entry.get("spread_us")),
                timer=_FIRST_FORM_TIMER,
                flops=tflops * time_us * 1e6 if tflops and time_us else None,
                bytes=gbps * time_us * 1e3 if gbps and time_us else None,
                error=_number(entry.get("error")),
                **around,
            )
        )
    return BenchRecord(
        suite="figures",
        environment=environment,
        rows=rows,
        absent=dict(data.get("absent_peers") or {}),
        notes=["Kernel times only: this record holds no times of the projections."],
    )


def _first_form_path(kernel: str) -> str:
    if kernel.startswith("mla_var6_plus"):
        return MIX
    absorbed = kernel.startswith(("flash_mla", "FlashMLA")) or kernel.endswith(" qv")
    return ABSORBED if absorbed else DECOMPRESSED


def _number(value: Any) -> float | None:
    """A finite number, None for everything else (JSON has no NaN; it comes as text)."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
