"""Annotation mode: hand-picked Nsight Compute metrics of every stage, beside the roofline."""

from __future__ import annotations

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.markdown import write_csv
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, common
from mla_var3.runtime.profiling.ncu import session as ncu_session
from mla_var3.runtime.profiling.ncu.driver import counters_problem, find_ncu, load_ncu_report
from mla_var3.runtime.profiling.ncu.reader import FIGURES, annotation_metrics
from mla_var3.runtime.profiling.ncu.session import Session, make_result, profile
from mla_var3.runtime.workflow import RunOptions

DEFAULT_RUNS = 3
_MODE = NsightProfType.ANNOTATION


def annotation_available() -> str | None:
    """Why this machine cannot profile in annotation mode; None as far as can be told in advance."""
    try:
        find_ncu()
        load_ncu_report()
    except UnsupportedError as error:
        return str(error)
    return counters_problem()


@common.profiling_mode(_MODE, gpu=True)
def annotation_profile_plan(plan: KernelPlan, run: RunOptions) -> ProfileResult:
    """Tune, check when asked, and profile every stage of a plan under Nsight Compute."""
    session = profile(_MODE, plan, run, metrics=annotation_metrics(), runs=DEFAULT_RUNS)
    return write_annotation(session)


def write_annotation(session: Session) -> ProfileResult:
    """Write the artifacts of a session and return its result."""
    result = make_result(session)
    common.write_artifacts(result, session.prepared, _report(session, result))
    _write_metrics(session, result)
    ncu_session.write_roofline(session, result)
    return result


def _write_metrics(session: Session, result: ProfileResult) -> None:
    """The metrics as collected, launch by launch, and the figures of the report."""
    raw = [
        (measured.name, index * measured.runs // len(measured.launches), launch.function, name,
         *value)
        for measured in session.profiles
        for index, launch in enumerate(measured.launches)
        for name, value in sorted(launch.metrics.items())
        if value.value is not None
    ]  # fmt: skip
    columns = ("stage", "run", "function", "metric", "value", "unit")
    write_csv(session.folder / "nsight_raw_metrics.csv", columns, raw)
    headers = ("stage", *(f"{figure.key} [{figure.unit}]" for figure in FIGURES), "bottleneck")
    keys = (*(figure.key for figure in FIGURES), "bottleneck")
    formatted = [(stage.name, *map(stage.extra.get, keys)) for stage in result.rows]
    write_csv(session.folder / "nsight_formatted_metrics.csv", headers, formatted)


def _report(session: Session, result: ProfileResult) -> list[str]:
    return [
        common.header(f"{result.kernel}, annotation mode", result.record),
        ncu_session.contract(session),
        "## Measured against roofline\n",
        ncu_session.roofline_table(session, result),
        ncu_session.whole_note(session),
        common.roofline_warning(result),
        "## Nsight Compute metrics\n",
        ncu_session.metrics_table(result),
        "## Outside the healthy ranges\n",
        ncu_session.issues_table(session),
        *ncu_session.method_sections(session, result),
    ]
