"""Annotation mode: its report on a real recording, and the whole way with a stand-in for ncu."""

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.errors import MissingToolError
from mla_var3.runtime.measure import summarise
from mla_var3.runtime.profiling import NsightProfType, common
from mla_var3.runtime.profiling.annotation import (
    annotation_available,
    annotation_profile_plan,
    write_annotation,
)
from mla_var3.runtime.profiling.lock import ClockState
from mla_var3.runtime.profiling.ncu import driver as ncu_driver
from mla_var3.runtime.profiling.ncu import session as ncu_session
from mla_var3.runtime.profiling.ncu.session import timer_note
from mla_var3.runtime.workflow import Prepared, RunOptions

pytest.importorskip("ncu_report", reason="the package that reads .ncu-rep is not installed")

from tests.unit.runtime.profiling.ncu.ncu_support import (
    RECORDING,
    STAGES,
    recorded_plan,
    recorded_session,
    stand_in,
)

STAND_IN = """
import json, lzma, pathlib
if "--version" in args:
    print("Version 2025.3.1.0 (build 1)")
    sys.exit(0)
out = pathlib.Path(args[args.index("-o") + 1])
(out.parent / "arguments.json").write_text(json.dumps(args))
data = lzma.decompress(pathlib.Path({recording!r}).read_bytes())
pathlib.Path(str(out) + ".ncu-rep").write_bytes(data)
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("annotation")
    return folder, write_annotation(recorded_session(NsightProfType.ANNOTATION, folder))


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_report_has_the_contract_and_every_figure(outcome):
    report = (outcome[0] / "report.md").read_text()
    for text in (
        "## Profile: mla_var6_plus v0",
        "| 8 | 16 | 2048 | bfloat16 |",
        "| Stage | Duration (us) | TC% | DRAM% | Occ% | Bottleneck | Key Issue |",
        "| attention_block_specialized | 291.07 | 27.3 | 23.2 | 15.3 | Latency-bound | "
        "register or shared memory pressure (occupancy=15.3%) |",
        "### Bottleneck: Latency-bound",
        "### Top 3 Opportunities (ranked by estimated impact)",
        "1. hide latency",
        "trigger: [stall long_scoreboard=42%]",
        "| mla_var6_plus | 308 µs |",
        "| tensor core utilisation | 27.3% | 11.8% | 26.4% |",
        "| L2 hit rate | 51.8% | 22.7% |",
        "| achieved occupancy | 15.3% | 8.9% |",
        "| registers per thread | 168 | 255 | - |",
        "| static shared memory per CTA | 217 KiB | 224 KiB | - |",
        "| local spilling | 0 B | 0 B | 0 B |",
        "| waves per SM | 9.70 | 1.94 | - |",
        "ncu with NVTX ranges (the package nsight is not installed)",
        "clocks not locked",
        "Bm=64 Bn=64",
    ):
        assert text in report


def test_the_csv_files(outcome):
    raw = rows_of(outcome[0] / "nsight_raw_metrics.csv")
    found = [r for r in raw if r["metric"] == "gpu__time_duration.sum"]
    assert [(r["stage"], r["run"], float(r["value"]), r["unit"]) for r in found] == [
        (STAGES[0], "0", 291072.0, "ns"),
        (STAGES[1], "0", 17056.0, "ns"),
    ]
    formatted = rows_of(outcome[0] / "nsight_formatted_metrics.csv")
    assert [row["stage"] for row in formatted] == [*STAGES, "mla_var6_plus"]
    assert float(formatted[0]["time_us [us]"]) == pytest.approx(291.072)
    assert formatted[0]["bottleneck"] == "Latency-bound"
    whole = rows_of(outcome[0] / "roofline_metrics.csv")[-1]
    assert float(whole["measured_us"]) == pytest.approx(308.128)
    assert float(whole["peak_gbps"]) == device_spec("NVIDIA H200").peak_gbps
    assert 0 < float(whole["of_roofline_pct"]) < 100


def test_a_large_difference_to_event_time_is_explained(tmp_path):
    session = recorded_session(NsightProfType.ANNOTATION, tmp_path)
    result = write_annotation(session)
    text = timer_note(result)
    assert "took 17.1 µs under the profiler at 1826 MHz, 20.0 µs by CUDA events (-14.7%)" in text
    assert "Both start with cold caches" in text
    result.stages[1].extra["event_us"] = 17.0
    assert "Both start with cold caches" not in timer_note(result)


class Machine:
    """A GPU machine as far as a session sees it: planning, timing and compiling are replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.compiled: list[str] = []
        self.check: Any = None
        path = stand_in(folder / "ncu", STAND_IN.format(recording=str(RECORDING)))
        timing = summarise([20.0], timer="cuda-event", cold_l2=True)
        clocks = ClockState(True, 1500, 3201, "today")
        monkeypatch.setattr(ncu_session, "time_gpu", lambda fn: timing)
        monkeypatch.setattr(ncu_session, "announce_clocks", lambda environment: clocks)
        monkeypatch.setattr(common, "current_device_name", lambda: "0")
        monkeypatch.setattr(common, "device_lock", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(common, "pick_device", lambda device: "cuda")
        monkeypatch.setattr(common, "prepare", self.prepare)
        monkeypatch.setattr(common, "compile_report", self.compile_report)
        monkeypatch.setattr(ncu_driver, "find_tool", lambda name: path)
        monkeypatch.setattr(ncu_driver, "nsight_problem", lambda tool, where: "it is missing")

    def compile_report(self, kernel: Any, target: str, artifacts_dir: Path) -> None:
        self.compiled.append(kernel.name)

    def prepare(self, plan: Any, options: RunOptions) -> Prepared:
        stage = plan.plan(*plan.prepare_inputs("meta"))
        return Prepared(plan, (), stage, device_spec("NVIDIA H200"), {}, self.check)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_the_whole_way(machine, tmp_path):
    result = annotation_profile_plan(recorded_plan(), out_dir=tmp_path / "out", bench_runs=1)
    assert result.get_total_time_us() == pytest.approx(308.128)
    assert result.out_dir == tmp_path / "out"
    assert machine.compiled == list(STAGES)
    arguments = json.loads((tmp_path / "out" / "arguments.json").read_text())
    assert arguments[-3:-1] == ["-m", "mla_var3.runtime.profiling.target"]
    spec = json.loads(Path(arguments[-1]).read_text())
    assert spec["runs"] == 1
    assert [entry["kernel"] for entry in spec["tilings"]] == list(STAGES)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "clocks locked by scripts/lock-gpu-clock.sh at 1500 MHz" in text
    assert "ncu with NVTX ranges (it is missing)" in text


def test_missing_tools_are_found_before_anything_is_tuned(machine, monkeypatch):
    monkeypatch.setattr(ncu_driver, "find_tool", lambda name: None)
    monkeypatch.setattr(ncu_driver, "_newest_in_opt", lambda: None)
    monkeypatch.setattr(common, "prepare", lambda *_: pytest.fail("tuned"))
    with pytest.raises(MissingToolError, match="ncu: expected Nsight Compute"):
        annotation_profile_plan(recorded_plan())
    assert (annotation_available() or "").startswith("ncu: expected Nsight Compute")
