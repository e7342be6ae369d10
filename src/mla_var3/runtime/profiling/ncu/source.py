"""Source-level results: metrics per instruction and per line, PTX, and annotated sources.

The compilers of both languages record the Python file and line of every machine instruction in the
cubin, so what Nsight Compute samples per instruction can be summed up per line of the kernel.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Self

import mla_var3
from mla_var3.runtime.profiling.bottleneck import STALL_MEANING
from mla_var3.runtime.profiling.ncu.reader import Launch, plain_text

PACKAGE = "mla_var3"
HOT_SHARE = 0.05
"""A line with this share of the samples or more is marked as hot."""
_NOTED_SHARE = 0.005
_STALL_PREFIX = "smsp__pcsamp_warps_issue_stalled_"
_COLUMNS = {
    "samples": "smsp__pcsamp_sample_count",
    "executed": "inst_executed",
    "threads": "thread_inst_executed_true",
    "l2_sectors": "memory_l2_theoretical_sectors_global",
    "l2_sectors_excess": "derived__memory_l2_theoretical_sectors_global_excessive",
    "local_sectors": "memory_l2_theoretical_sectors_local",
    "shared_wavefronts": "memory_l1_wavefronts_shared",
    "shared_wavefronts_excess": "derived__memory_l1_wavefronts_shared_excessive",
}
"""Column -> per-instruction metric."""
_SPILL_OPCODES = ("LDL", "STL")
_PTX = re.compile(rb"\.version \d[\x00\t -~]+}\x00")
"""The text of a PTX module inside a cubin: lines that end in a zero byte."""


@dataclass
class Instruction:
    """One machine instruction with what was measured at it."""

    address: int
    sass: str
    file: str
    line: int
    values: dict[str, float] = field(default_factory=dict)
    stalls: Counter[str] = field(default_factory=Counter)

    @property
    def opcode(self) -> str:
        """The operation without predicate and modifiers."""
        words = [word for word in self.sass.split() if not word.startswith("@")]
        return words[0].partition(".")[0].rstrip(";") if words else ""

    @property
    def spills(self) -> bool:
        return self.opcode in _SPILL_OPCODES


@dataclass
class LineProfile:
    """The sum over the instructions of one source line."""

    samples: float = 0.0
    instructions: int = 0
    spills: int = 0
    excess_sectors: float = 0.0
    excess_wavefronts: float = 0.0
    stalls: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)


@dataclass
class KernelSource:
    """What was measured of a kernel, by instruction and by source line."""

    instructions: list[Instruction]
    files: dict[str, dict[int, LineProfile]]

    @classmethod
    def of(cls, launch: Launch) -> Self:
        instructions = instructions_of(launch.action, launch.metrics)
        # Nsight Compute's rules put marks on source lines.
        markers = launch.action.source_markers() or ()
        return cls(instructions, line_profiles(instructions, markers))

    @property
    def samples(self) -> float:
        return sum(item.values.get("samples", 0.0) for item in self.instructions)

    def hottest(self, count: int) -> list[tuple[str, int, str]]:
        """The lines with most samples, as (file, line, what was measured there)."""
        total = self.samples
        sampled = [
            (line, file, at)
            for file, lines in self.files.items()
            for at, line in lines.items()
            if file and line.samples
        ]
        hottest = heapq.nlargest(count, sampled, key=lambda entry: entry[0].samples)
        return [(file, at, describe_line(line, total)) for line, file, at in hottest]

    def sass_rows(self) -> tuple[list[str], list[list[object]]]:
        total = self.samples
        reasons = sorted({reason for item in self.instructions for reason in item.stalls})
        header = ["offset", "sass", "file", "line", "samples_pct", *_COLUMNS]
        header += [f"stall_{reason}" for reason in reasons]
        start = self.instructions[0].address if self.instructions else 0
        rows: list[list[object]] = []
        for item in self.instructions:
            share = f"{100 * item.values.get('samples', 0.0) / total:.3f}" if total else ""
            where = (f"{item.address - start:#06x}", item.sass, shown_path(item.file))
            values = (_plain(item.values.get(column)) for column in _COLUMNS)
            stalls = (item.stalls.get(reason, 0) for reason in reasons)
            rows.append([*where, item.line or "", share, *values, *stalls])
        return header, rows


def instructions_of(action: Any, metrics: Iterable[str]) -> list[Instruction]:
    """The instructions of a launch in address order; empty without source-level metrics."""
    columns = {column: _instances(action, name) for column, name in _COLUMNS.items()}
    stalls = {
        name[len(_STALL_PREFIX) :]: _instances(action, name)
        for name in metrics
        if name.startswith(_STALL_PREFIX) and not name.endswith("_not_issued")
    }
    addresses = sorted(set(columns["executed"]) | set(columns["samples"]))
    found = []
    for address in addresses:
        source = action.source_info(address)
        found.append(
            Instruction(
                address=address,
                sass=" ".join(str(action.sass_by_pc(address) or "").split()),
                file=str(source.file_name()) if source is not None else "",
                line=int(source.line()) if source is not None else 0,
                values={c: v[address] for c, v in columns.items() if address in v},
                stalls=Counter({r: int(v[address]) for r, v in stalls.items() if v.get(address)}),
            )
        )
    return found


def _instances(action: Any, name: str) -> dict[int, float]:
    """Address -> value of a metric that has one value per instruction."""
    metric = action.metric_by_name(name)
    if metric is None or not metric.num_instances() or not metric.has_correlation_ids():
        return {}
    ids = metric.correlation_ids()
    return {ids.as_uint64(i): float(metric.value(i)) for i in range(metric.num_instances())}


def _plain(value: float | None) -> object:
    if value is None:
        return ""
    return int(value) if value.is_integer() else value


def package_path(file: str) -> PurePosixPath | None:
    """A recorded path relative to the package folder, None for a file that is not ours."""
    _, ours, path = f"/{file}".rpartition(f"/{PACKAGE}/")
    return PurePosixPath(path) if ours else None


def shown_path(file: str) -> str:
    """A recorded path as it is printed: ours within the package, others by name only."""
    own = package_path(file)
    return f"{PACKAGE}/{own}" if own is not None else PurePosixPath(file).name


def line_profiles(
    instructions: Sequence[Instruction], markers: Sequence[Mapping[str, Any]] = ()
) -> dict[str, dict[int, LineProfile]]:
    """File -> line -> what was measured there."""
    found: dict[str, dict[int, LineProfile]] = {}
    for item in instructions:
        line = found.setdefault(item.file, {}).setdefault(item.line, LineProfile())
        line.samples += item.values.get("samples", 0.0)
        line.instructions += 1
        line.spills += item.spills
        line.excess_sectors += item.values.get("l2_sectors_excess", 0.0)
        line.excess_wavefronts += item.values.get("shared_wavefronts_excess", 0.0)
        line.stalls.update(item.stalls)
    for marker in markers:
        location = marker.get("source_location")
        if location is None:
            continue
        line_of = found.get(location["file_name"], {}).get(int(location["line"]))
        # The rest is advice for CUDA C++ and its compiler.
        text = plain_text(marker.get("message", "")).split(". ")[0].rstrip(".")
        # What this says is in the stall figures of the same line, with numbers.
        known = marker.get("rule_identifier") == "CPIStall"
        if line_of is not None and not known and text and text not in line_of.messages:
            line_of.messages.append(text)
    return found


def source_text(launch: Launch, file: str) -> tuple[str, str] | None:
    """Text of one of our files and where it comes from: the report, or this installation."""
    embedded = dict(launch.action.source_files() or {})
    if embedded.get(file):
        return str(embedded[file]), "as embedded in the report"
    own = package_path(file)
    if own is None or ".." in own.parts:
        return None
    path = Path(mla_var3.__file__).resolve().parent / own
    return (path.read_text(), "as installed here") if path.is_file() else None


def describe_line(line: LineProfile, total: float) -> str:
    """One comment about a line."""
    share = line.samples / total if total else 0.0
    parts = [f"{share:.1%} of samples"]
    waiting = Counter({r: n for r, n in line.stalls.items() if r != "selected"})
    for reason, count in waiting.most_common(2):
        part = count / max(1, line.stalls.total())
        if part >= 0.15:
            parts.append(f"{part:.0%} {reason} ({STALL_MEANING.get(reason, reason)})")
    if line.spills:
        parts.append(f"SPILLS: {line.spills} local memory instructions")
    if line.excess_sectors:
        parts.append(f"UNCOALESCED: {line.excess_sectors:.0f} excess L2 sectors")
    if line.excess_wavefronts:
        parts.append(f"BANK CONFLICTS: {line.excess_wavefronts:.0f} excess shared wavefronts")
    return "; ".join([*parts, *line.messages])


def annotate_source(
    text: str, lines: Mapping[int, LineProfile], total: float, title: Sequence[str]
) -> str:
    """The source with a comment before each line at which something was measured."""
    out = [f"# {line}" for line in title] + ["#"]
    for number, source in enumerate(text.splitlines(), start=1):
        line = lines.get(number, LineProfile())
        share = line.samples / total if total else 0.0
        bad = line.spills or line.excess_sectors or line.excess_wavefronts
        if share >= _NOTED_SHARE or bad:
            indent = source[: len(source) - len(source.lstrip())]
            mark = "HOT" if share >= HOT_SHARE else "---"
            out.append(f"{indent}# [{mark}] line {number}: {describe_line(line, total)}")
        out.append(source)
    return "\n".join(out) + "\n"


def source_ptx(report: Path, launch: Launch, instructions: Sequence[Instruction]) -> str:
    """The PTX of a kernel: the text in its cubin, or else the parts correlated with its code."""
    text = _embedded_ptx(report.read_bytes(), launch.function)
    if text is not None:
        return text
    lines = (str(launch.action.ptx_by_pc(i.address) or "").strip() for i in instructions)
    told = "// PTX instructions correlated with the machine code, in its order; not a module."
    return "\n".join([told, *(line for line, _ in itertools.groupby(lines) if line)]) + "\n"


def _embedded_ptx(data: bytes, function: str) -> str | None:
    """The PTX of a function's module: a report contains cubins, and these the text of their PTX."""
    entry = f".entry {function}(".encode()
    for match in _PTX.finditer(data):
        if entry in match[0]:
            return match[0].replace(b"\0", b"\n").decode().strip() + "\n"
    return None
