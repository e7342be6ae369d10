"""Annotation mode: hand-picked Nsight Compute metrics of every stage, beside the roofline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.files import write_atomic
from mla_var3.runtime.markdown import microseconds
from mla_var3.runtime.profiling import NsightProfType, ProfileResult
from mla_var3.runtime.profiling.common import (
    compiled_note,
    header,
    profiling_mode,
    tiling_table,
    write_artifacts,
)
from mla_var3.runtime.profiling.figures import check_markdown
from mla_var3.runtime.profiling.ncu.driver import counters_problem, find_ncu, load_ncu_report
from mla_var3.runtime.profiling.ncu.metrics import FIGURES, annotation_metrics
from mla_var3.runtime.profiling.ncu.session import Session, make_result, profile, total_stages
from mla_var3.runtime.profiling.ncu.text import (
    contract,
    issues_table,
    method_table,
    metrics_table,
    roofline_rows,
    roofline_table,
    timer_table,
    whole_note,
    write_csv,
)
from mla_var3.runtime.workflow import RunOptions

if TYPE_CHECKING:
    from mla_var3.runtime.plan import KernelPlan

DEFAULT_RUNS = 3
_MODE = NsightProfType.ANNOTATION


def annotation_available() -> str | None:
    """Why this machine cannot profile in annotation mode; None as far as can be told in advance."""
    try:
        load_ncu_report(find_ncu())
    except UnsupportedError as error:
        return str(error)
    return counters_problem()


@profiling_mode(_MODE, gpu=True)
def annotation_profile_plan(plan: KernelPlan, run: RunOptions) -> ProfileResult:
    """Tune, check when asked, and profile every stage of a plan under Nsight Compute."""
    session = profile(_MODE, plan, run, metrics=annotation_metrics(), runs=DEFAULT_RUNS)
    return write_annotation(session)


def write_annotation(session: Session) -> ProfileResult:
    """Write the artifacts of a session and return its result."""
    result, folder = make_result(session), session.folder
    write_artifacts(folder, result.record, session.prepared)
    _write_metrics(session, result)
    write_csv(folder / "roofline_metrics.csv", *roofline_rows(session, result))
    write_atomic(folder / "report.md", _report(session, result))
    return result


def _write_metrics(session: Session, result: ProfileResult) -> None:
    """The metrics as collected, launch by launch, and the figures of the report."""
    raw = []
    for measured in session.profiles:
        per_run = len(measured.launches) // measured.runs
        for index, launch in enumerate(measured.launches):
            for name, value in sorted(launch.metrics.items()):
                if value.value is not None:
                    where = (measured.name, index // per_run, launch.function)
                    raw.append((*where, name, value.value, value.unit))
    write_csv(
        session.folder / "nsight_raw_metrics.csv",
        ("stage", "run", "function", "metric", "value", "unit"),
        raw,
    )
    units = {f"{f.key}": f"{f.key} [{f.unit}]" for f in FIGURES}
    keys = [f.key for f in FIGURES] + ["dram_bytes", "dram_gbps", "shared_bytes", "local_bytes"]
    derived = {"dram_gbps": "dram_gbps [GB/s]"}
    titles = [units.get(key) or derived.get(key) or f"{key} [B]" for key in keys]
    write_csv(
        session.folder / "nsight_formatted_metrics.csv",
        ("stage", *titles, "bottleneck"),
        [
            (s.name, *(s.extra.get(key) for key in keys), s.extra.get("bottleneck"))
            for s in total_stages(result)
        ],
    )


def _report(session: Session, result: ProfileResult) -> str:
    parts = [
        header(f"{result.kernel}, annotation mode", result.record),
        contract(session),
        "## Measured against roofline\n",
        roofline_table(session, result),
        whole_note(session),
    ]
    if result.record["above_roofline"]:
        parts.append(
            f"**Faster than the specified peaks allow** ({microseconds(result.total.time_us)}): "
            "treat this measurement as wrong until explained.\n"
        )
    parts += [
        "## Nsight Compute metrics\n",
        metrics_table(result),
        "## Outside the healthy ranges\n",
        issues_table(session),
        "## Duration and event time\n",
        timer_table(result),
        "## How it was measured\n",
        method_table(session),
        compiled_note(session.prepared.stage),
        "## Tiling\n",
        tiling_table(session.prepared.stage),
    ]
    if result.check is not None:
        parts += ["## Check\n", check_markdown(result.check)]
    return "\n".join(part for part in parts if part)
