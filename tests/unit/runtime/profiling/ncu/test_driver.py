"""Nsight Compute: finding it, its command lines, its failures; all with a stand-in program."""

import importlib.metadata
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.profiling.ncu import driver as ncu_driver
from mla_var3.runtime.profiling.ncu.driver import (
    NcuTool,
    UnknownMetricsError,
    collect,
    find_ncu,
    load_ncu_report,
    ncu_command,
    nsight_problem,
    run_ncu,
)
from mla_var3.runtime.profiling.target import TargetSpec
from tests.programs import python_stand_in

TOOL = NcuTool(Path("/opt/ncu"), "2025.3.1")
VERSION = "print('NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion {}.0 (build 1)')"
SPEC = TargetSpec("m", "P", {}, {}, "sm_90", [])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (VERSION.format("2023.3.1"), r"expected .*2024\.1 or newer, got 2023\.3\.1"),
        ("sys.exit(1)", "does not answer --version"),
    ],
)
def test_an_old_and_a_broken_ncu_are_told_apart(monkeypatch, tmp_path, body, message):
    path = python_stand_in(tmp_path / "ncu", body)
    monkeypatch.setattr(ncu_driver, "find_tool", lambda name: path)
    with pytest.raises(UnsupportedError, match=message):
        find_ncu()


def test_command_of_the_hand_picked_metrics():
    command = ncu_command(TOOL, Path("/o/report"), Path("/o/target.json"), ["a.sum", "b"])
    assert command == [
        *("/opt/ncu", "--target-processes", "all"),
        *("--nvtx", "--nvtx-include", r"regex:hyper_mla\..*/"),
        *("--clock-control", "none", "--cache-control", "all"),
        *("--metrics", "a.sum,b", "-f", "-o", "/o/report"),
        *(sys.executable, "-m", "mla_var3.runtime.profiling.target", "/o/target.json"),
    ]


def run_stand_in(folder: Path, body: str, *options: str) -> Path:
    path = python_stand_in(folder / "ncu", body)
    report = folder / "report.ncu-rep"
    command = [str(path), *options, "-o", str(folder / "report")]
    run_ncu(command, NcuTool(path, "2025.3.1"), report)
    return report


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "print('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'); sys.exit(1)",
            r"ncu 2025\.3\.1: .*ERR_NVGPUCTRPERM; run as root.*RestrictProfilingToAdminUsers=0",
        ),
        (
            "print('Traceback\\nRuntimeError: boom\\n==PROF== Disconnected'); sys.exit(3)",
            r"got exit code 3: RuntimeError: boom \(full output in .*profiler\.log\)$",
        ),
        (
            "print('==ERROR== out of memory\\n==PROF== Disconnected'); sys.exit(1)",
            "got exit code 1: ==ERROR== out of memory",
        ),
        ("sys.exit(1)", "got exit code 1: no output"),
        ("print('==WARNING== No kernels were profiled.')", "got none: .*No kernels were profiled"),
        ("print('fine')", r"expected the report report\.ncu-rep, got none: fine"),
    ],
)
def test_failures_are_explained_in_one_line(tmp_path, body, expected):
    (tmp_path / "report.ncu-rep").write_text("of an earlier run in the same folder")
    with pytest.raises(UnsupportedError, match=expected) as raised:
        run_stand_in(tmp_path, body)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("metrics", "lines"), [(None, "1"), (["a.sum"], None)])
def test_the_full_set_compiles_kernels_with_source_lines(metrics, lines, tmp_path, monkeypatch):
    monkeypatch.delenv("CUTE_DSL_LINEINFO", raising=False)
    _, *options = ncu_command(TOOL, tmp_path / "report", tmp_path / "target.json", metrics)
    with pytest.raises(UnsupportedError, match=f"got none: {lines}"):
        run_stand_in(tmp_path, "import os; print(os.environ.get('CUTE_DSL_LINEINFO'))", *options)


def test_unknown_metrics_are_named_and_the_log_keeps_what_was_tried_before(tmp_path):
    with pytest.raises(UnsupportedError, match="got none: one"):
        run_stand_in(tmp_path, "print('one')")
    with pytest.raises(UnknownMetricsError) as raised:
        run_stand_in(tmp_path, "print('==ERROR== Failed to find metric a__b.sum'); sys.exit(1)")
    assert raised.value.names == ("a__b.sum",)
    assert (tmp_path / "profiler.log").read_text().startswith("one\n==ERROR==")


def not_installed(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("version", "got"),
    [
        (lambda name: "2025.3.1", "version 2025.3.1"),  # crashes beside torch
        (lambda name: "2026.2.0", "none (import of ncu_report halted"),
        (not_installed, "none (No package metadata"),
    ],
)
def test_a_reader_that_cannot_be_used_says_what_to_install(version, got, monkeypatch):
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    expected = rf"^ncu-report: expected 2026\.2 or newer .* got {re.escape(got)}.*-mla\[profiling\]"
    with pytest.raises(MissingToolError, match=expected):
        load_ncu_report()


def test_rights_to_the_counters_are_asked_in_advance(monkeypatch, tmp_path):
    file = tmp_path / "params"
    monkeypatch.setattr(ncu_driver, "DRIVER_SETTINGS", file)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert ncu_driver.counters_problem() is None  # no driver
    for user, admin_only, refused in ((1000, 1, True), (0, 1, False), (1000, 0, False)):
        file.write_text(f"ResmanDebugLevel: 4\nRmProfilingAdminOnly: {admin_only}\n")
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        assert (ncu_driver.counters_problem() is not None) == refused


def test_nsight_python_is_usable_when_it_fits(monkeypatch, tmp_path):
    plain = Path("/plain/folder")
    monkeypatch.setitem(sys.modules, "nsight", SimpleNamespace())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.6")
    assert nsight_problem(TOOL, plain) is None
    assert "cannot handle the path" in (nsight_problem(TOOL, Path("/a folder")) or "")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.0")
    assert nsight_problem(TOOL, plain) == "nsight-python 1.0.0 needs ncu 2026.2, got 2025.3.1"
    monkeypatch.delitem(sys.modules, "nsight")
    (tmp_path / "nsight.py").write_text("import deepdiff_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cannot be imported: No module named 'deepdiff" in (nsight_problem(TOOL, plain) or "")
    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert nsight_problem(TOOL, plain) == "nsight-python is not installed"


@pytest.fixture
def run_collect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Collects where the program runs are only noted, and fail as told."""

    def run(
        problem: str | None = None,
        failures: dict[str, Exception] | None = None,
        metrics: list[str] | None = ["a", "b"],  # noqa: B006
    ) -> tuple[Any, list[list[str]]]:
        left, commands = dict(failures or {}), []

        def run_ncu(command: list[str], tool: NcuTool, report: Path) -> None:
            commands.append(command)
            kind = "ncu" if "--metrics" in command or "--set" in command else "nsight-python"
            if kind in left:
                raise left.pop(kind)
            report.write_text(kind)

        monkeypatch.setattr(ncu_driver, "run_ncu", run_ncu)
        monkeypatch.setattr(ncu_driver, "nsight_problem", lambda tool, where: problem)
        (tmp_path / "profiler.log").write_text("of an earlier run in the same folder")
        return collect(TOOL, tmp_path, SPEC, metrics), commands

    return run


BOOM: dict[str, Exception] = {"nsight-python": UnsupportedError("exit code 1: RuntimeError: boom")}


@pytest.mark.parametrize(
    ("arguments", "used", "note"),
    [
        ({}, "nsight-python", ""),
        ({"problem": "nsight is missing"}, "ncu", "nsight is missing"),
        ({"failures": BOOM}, "ncu", "nsight-python failed: exit code 1: RuntimeError: boom"),
        ({"metrics": None}, "ncu", ""),  # the full set
    ],
)
def test_which_collector_is_used_and_why(run_collect, tmp_path, caplog, arguments, used, note):
    done, commands = run_collect(**arguments)
    assert (done.collector, done.note) == (used, note)
    assert not (tmp_path / "profiler.log").exists()
    assert (tmp_path / "report.ncu-rep").read_text() == used
    assert (f"{note}; running ncu with NVTX ranges instead" in caplog.text) is bool(note)
    nsight = TargetSpec.read(tmp_path / "target.json").nsight
    program = ["-m", "mla_var3.runtime.profiling.target", f"{tmp_path}/target.json"]
    assert commands[-1][-3:] == program
    assert (nsight is None) is (used == "ncu")
    if nsight is not None:
        assert (nsight["metrics"], nsight["output_prefix"]) == (["a", "b"], f"{tmp_path}/nsight-")


def test_missing_access_is_not_tried_twice(run_collect):
    with pytest.raises(UnsupportedError, match="CTRPERM"):
        run_collect(failures={"nsight-python": UnsupportedError("ERR_NVGPUCTRPERM")})


def test_metrics_that_do_not_exist_are_left_out_and_listed(run_collect):
    done, commands = run_collect("gone", {"ncu": UnknownMetricsError(["b"])})
    assert done.dropped == ("b",)
    assert [c[c.index("--metrics") + 1] for c in commands] == ["a,b", "a"]
    with pytest.raises(UnknownMetricsError):
        run_collect("gone", {"ncu": UnknownMetricsError(["a"])}, ["a"])
