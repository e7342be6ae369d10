"""A benchmark on a device that fails: every suite, what is kept, who runs again, and where."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mla_var3.bench import measure as bench_measure
from mla_var3.bench import run as bench_run
from mla_var3.bench.measure import ENDED
from mla_var3.bench.record import FAILED, LOST, OK, PREDICTED, BenchRow, load_record, save_record
from mla_var3.bench.run import BenchOptions, BenchResult, build_cases, run_bench
from mla_var3.bench.session import resumable_rows, split_case
from mla_var3.bench.suites import SUITES
from mla_var3.cli.main import main
from mla_var3.errors import InvalidArgumentError
from tests.programs import run_program
from tests.unit.bench.bench_support import FakeGpu, FakeTimer, fake_contender, record, row


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A fake GPU behind the whole benchmark; plots have tests of their own."""
    monkeypatch.setattr(bench_run, "draw_plots", lambda record, folder: [])
    return FakeGpu(monkeypatch)


def names(rows: list[BenchRow], status: str) -> set[str]:
    return {row.kernel for row in rows if row.status == status}


@pytest.mark.parametrize("suite", list(SUITES))
def test_in_every_suite_one_broken_kernel_costs_its_own_rows_only(suite, gpu, tmp_path):
    gpu.broken = {"flash_mla": RuntimeError("out of memory"), "fa3_qv": RuntimeError("no")}
    options = BenchOptions(suite=suite, quick=True, rounds=1, out_dir=tmp_path)
    rows = run_bench(options).record.rows
    cases, _ = build_cases(options)
    assert {row.problem for row in rows} == {case.problem for case in cases}
    assert names(rows, FAILED) <= {"flash_mla", "fa3_qv"}
    expected = {c.kernel.full_name for case in cases for c in case.kernels} - {"flash_mla"}
    expected |= {name for case in cases for name in case.peers} - {"fa3_qv"}
    assert names(rows, OK) == expected


def test_a_quick_run_has_fewer_shapes_rounds_and_seconds(gpu, tmp_path):
    for suite, times in (("sweep", 3), ("var6_plus", 1)):
        options = [BenchOptions(suite=suite, quick=quick) for quick in (True, False)]
        few, many = (sum(len(case.kernels) for case in build_cases(each)[0]) for each in options)
        assert few * times < many
    argv = ["bench", "all", "--t=64", "--backends=cutile-dsl", "--quick", f"--out_dir={tmp_path}"]
    assert main(argv) == 0
    expected = {"rounds": 1, "seconds per timing": 0.15, "tilings": "default", "grid": "quick"}
    assert load_record(tmp_path / "all.json").settings == expected
    assert main([*argv, "--rounds=2", "--max_seconds=0.3"]) == 0
    settings = load_record(tmp_path / "all.json").settings
    assert (settings["rounds"], settings["seconds per timing"]) == (2, 0.3)


def test_a_lost_device_starts_again_and_nothing_but_the_culprit_is_missing(
    gpu, tmp_path, monkeypatch
):
    gpu.deadly = {"flash_attention"}
    argv = ["bench", "sweep", "--s=1,2", "--t=64", "--backends=cutile-dsl,sdpa", "--rounds=2"]
    argv.append(f"--out_dir={tmp_path}")
    starts: list[list[str]] = []

    class Replaced(BaseException):
        """The process is gone."""

    def execv(program: str, arguments: list[str]) -> None:
        assert program == sys.executable and arguments[:3] == ["python", "-m", "mla_var3.cli"]
        starts.append(arguments[3:])
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "mla_var3.cli", *argv])
    for number in range(2):  # the culprit breaks once at each of the two shapes
        with pytest.raises(Replaced):
            main([argv, *starts][number])
        gpu.dead, gpu.log[:] = False, []
    assert main(starts[1]) == 1
    rows = load_record(tmp_path / "sweep.json").rows
    assert names(rows, FAILED) == {"flash_attention"} and not names(rows, LOST)
    first, second = ({row.kernel for row in rows if row.problem.s == s} for s in (1, 2))
    assert first == second
    assert "build flash_attention" not in gpu.log


def test_without_a_new_process_the_run_ends_there_and_says_so(gpu, tmp_path):
    gpu.deadly = {"flash_attention"}
    options = BenchOptions(suite="sweep", sizes={"s": (1, 2), "t": (64,)}, out_dir=tmp_path)
    result = run_bench(options)
    rows = result.record.rows
    assert {row.problem.s for row in rows} == {1} and result.record.failed
    reasons = {row.reason for row in rows if row.status == LOST}
    assert reasons == {"the CUDA context was lost with flash_attention"}
    assert any("The device was lost" in note for note in result.record.notes)
    assert "The device was lost" in result.files["html"].read_text()
    gpu.deadly, gpu.dead = {"sdpa"}, False  # the last one may break the device
    small: dict[str, Any] = {"rounds": 1, "backends": ("cutile-dsl", "sdpa"), "out_dir": tmp_path}
    starts: list[Path] = []
    rows = run_bench(BenchOptions(suite="all", on_lost=starts.append, **small)).record.rows
    assert not starts and not names(rows, LOST) and names(rows, FAILED) == {"sdpa"}


def test_resuming_measures_only_what_is_missing(gpu, tmp_path):
    def run(*lengths: int, **more: Any) -> BenchResult:
        gpu.log.clear()
        sizes = {"s": lengths, "t": (64,)}
        small: dict[str, Any] = {"suite": "sweep", "backends": ("cutile-dsl",), "rounds": 1}
        return run_bench(BenchOptions(sizes=sizes, **small, **more))

    done = run(1, out_dir=tmp_path).files["json"]
    result = run(1, 2, resume=done)
    assert result.folder == tmp_path
    assert {row.problem.s for row in result.record.rows} == {1, 2}
    assert sum(line.startswith("run") for line in gpu.log) == len(result.record.rows) // 2
    other = run(4, resume=done)
    assert {row.problem.s for row in other.record.rows} == {1, 2, 4}  # nothing of the file is lost


def test_a_record_goes_on_with_its_own_settings_only(gpu, tmp_path):
    """A record names its settings once: rows measured with others once went by them."""
    small: dict[str, Any] = {"suite": "all", "backends": ("cutile-dsl",)}
    gpu.deadly = {"flash_attention"}
    done = run_bench(BenchOptions(**small, rounds=2, out_dir=tmp_path)).files["json"]
    before = done.read_text()
    gpu.dead, gpu.deadly = False, set()
    for changes, message in (
        ({"rounds": 3}, "resume: expected a record with rounds 3, got rounds 2"),
        ({"rounds": 2, "max_seconds": 0.1}, "with seconds per timing 0.1, got .* 0.4"),
        ({"rounds": 2, "tune": True}, "with tilings tuned, got tilings default"),
        ({"rounds": 2, "quick": True}, "with grid quick, got grid not given"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            run_bench(BenchOptions(**small, **changes, resume=done))
    assert done.read_text() == before
    result = run_bench(BenchOptions(**small, rounds=2, resume=done))
    assert result.record.settings["rounds"] == 2 and not names(result.record.rows, LOST)


def test_an_interrupted_continuation_forgets_nobody(gpu, tmp_path):
    """Contenders that were lost with the device once counted as done after a second interrupt."""
    small: dict[str, Any] = {"suite": "all", "backends": ("cutile-dsl",), "rounds": 1}
    gpu.deadly = {"flash_attention"}
    done = run_bench(BenchOptions(**small, out_dir=tmp_path)).files["json"]
    lost = names(load_record(done).rows, LOST)
    gpu.dead, gpu.deadly, gpu.broken = False, set(), {min(lost): KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run_bench(BenchOptions(**small, resume=done))
    assert names(load_record(done).rows, LOST) == lost
    gpu.broken = {}
    rows = run_bench(BenchOptions(**small, resume=done)).record.rows
    assert names(rows, OK) == lost and names(rows, FAILED) == {"flash_attention"}


def test_a_time_limit_blames_nobody(gpu, tmp_path, monkeypatch, capsys):
    def terminated(run: Callable[[], None]) -> Any:
        if len([line for line in gpu.log if line.startswith("check")]) > 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return FakeTimer()(run)

    monkeypatch.setattr(bench_measure, "gpu_timer", lambda seconds: terminated)
    before = signal.getsignal(signal.SIGTERM)
    argv = ["bench", "sweep", "--s=1,2,4", "--t=64", "--backends=cutile-dsl", "--quick"]
    assert main([*argv, f"--out_dir={tmp_path}"]) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    assert "--resume continues it" in capsys.readouterr().err
    rows = load_record(tmp_path / "sweep.json").rows
    assert {(row.problem.s, row.status) for row in rows} == {(1, OK)}


def test_only_a_record_of_the_same_suite_and_device_is_resumed(tmp_path):
    path = tmp_path / "figures.json"
    for kind, suite, device, message in (
        ("measured", "sweep", "NVIDIA H200", "a record of the suite sweep"),
        ("measured", "figures", "NVIDIA B200", "a record of NVIDIA B200"),
        # Their shapes would count as measured.
        (PREDICTED, "figures", "NVIDIA H200", "a record of measurements, got predictions"),
    ):
        save_record(record(row(kind=kind)), path)
        with pytest.raises(InvalidArgumentError, match=f"resume: expected {message}"):
            resumable_rows(path, suite, device, {})


def test_pinned_choices_tell_rows_of_one_kernel_apart():
    entrants = [fake_contender("k", [], asked=pinned) for pinned in ({}, {"n": 4}, {"n": 8})]
    rows = [row("k", choices={"n": 4}), row("k", choices={"n": 8}, asked={"n": 8})]
    rows.append(row("other", None, status=LOST))
    kept, waiting = split_case(entrants, rows)
    assert kept == rows[:2]
    assert [each.asked for each in waiting] == [{"n": 4}]
    assert split_case(entrants, []) == ([], entrants)
    assert split_case(entrants, rows[:2]) == (rows[:2], [])


PROGRAM = """
import os, signal, sys, time
from mla_var3.bench import run
from mla_var3.cli.main import main
from pytest import MonkeyPatch
from tests.unit.bench.bench_support import FakeGpu

class Hanging(FakeGpu):
    def _built(self, name):
        if name == "flash_attention":
            time.sleep(600)
        if name == "flash_mla":
            os.kill(os.getpid(), signal.SIGSEGV)

Hanging(MonkeyPatch())
run.draw_plots = lambda record, folder: []
sys.exit(main(sys.argv[1:]))
"""


def test_a_hanging_process_is_replaced_and_a_crash_can_be_resumed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parents[3]
    argv = [sys.executable, str(program), "bench", "all", "--t=64", "--backends=cutile-dsl"]
    argv += ["--quick", "--patience=1", f"--out_dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    run = partial(run_program, cwd=root, env=environment)
    path = tmp_path / "all.json"
    first = run(argv)
    assert first.returncode == -signal.SIGSEGV, first.stderr
    assert first.stderr.count("a new process continues from") == 1
    rows = {row.kernel: row for row in load_record(path).rows}
    assert rows["flash_attention"].reason == "did not finish within 1 s"
    assert (rows["flash_mla"].status, rows["flash_mla"].reason) == (FAILED, ENDED)
    lost = rows["mla_var6_plus"]
    assert (lost.status, lost.reason) == (LOST, "the run ended with flash_mla")
    second = run([*argv, "--resume", path])
    assert second.returncode == 1, second.stderr
    rows = {row.kernel: row for row in load_record(path).rows}
    bad = {name for name, row in rows.items() if row.status != OK}
    assert bad == {"flash_attention", "flash_mla"}
    assert len(rows) > len(bad)
    assert (tmp_path / "all.html").is_file()
