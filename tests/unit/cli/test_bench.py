"""`hyper-mla bench`: predictions, records, verdicts and exit codes, end to end."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from mla_var3.bench import run as bench_run
from mla_var3.bench import suites
from mla_var3.bench.plots import draw_plots
from mla_var3.bench.predict import predict_case
from mla_var3.bench.record import OK, OURS, PREDICTED, PROJECTION, load_record
from mla_var3.bench.suites import Case, KernelChoice
from mla_var3.cli.commands.bench import EXIT_ABSENT, bench_program
from mla_var3.cli.main import main
from mla_var3.conf.devices import device_spec
from mla_var3.op.cost import Cost
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime.paths import KernelId, discover_kernels

RESULTS = Path(__file__).parents[3] / "docs" / "results"
CUTILE = [
    KernelId(name, 0, "cutile-dsl", "mla")
    for name in ("flash_attention", "flash_mla", "mla_var6_plus")
]


@pytest.fixture(autouse=True)
def these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only kernels that are sure to be there, on a machine without a GPU."""
    monkeypatch.setattr(suites, "mla_kernels", lambda: list(CUTILE))
    monkeypatch.setattr(bench_run, "cuda_available", lambda: False)
    monkeypatch.setattr("mla_var3.runtime.workflow.cuda_available", lambda: False)
    # Plots take most of the time and have tests of their own.
    monkeypatch.setattr(bench_run, "draw_plots", lambda record, folder: [])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_sweep_without_a_gpu_makes_the_whole_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_run, "draw_plots", draw_plots)
    argv = ["bench", "sweep", "--s=16,64", "--t=1024,4096", f"--out_dir={tmp_path}"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "predictions, not measurements" in out
    images = {f"{name}.{kind}" for name in ("time_s", "roofline", "speedup", "kernels")
              for kind in ("png", "svg")}  # fmt: skip
    assert files(tmp_path) == images | {f"sweep.{kind}" for kind in ("json", "csv", "md", "html")}
    rows = load_record(tmp_path / "sweep.json").rows
    assert {(row.kind, row.device) for row in rows} == {(PREDICTED, "NVIDIA H200")}
    assert {row.source for row in rows} == {OURS, PROJECTION}
    assert len(rows) == 4 * (3 + 2) and all(row.command for row in rows)
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == len(rows) + 1
    assert "Predictions, not measurements" in (tmp_path / "sweep.html").read_text()


def test_the_prediction_is_that_of_the_cost_model(tmp_path):
    from mla_var3.op.mla.model.designs import design_estimates

    assert main(["bench", "all", "--for_device=B200", f"--out_dir={tmp_path}"]) == 0
    spec = device_spec("B200")
    model = design_estimates(MlaProblem(b=32, s=16, t=4096, h=128), spec)
    for row in load_record(tmp_path / "all.json").rows:
        if row.kernel in ("flash_mla", "flash_attention"):
            assert row.time_us == pytest.approx(model[row.kernel].kernel_us, rel=0.05)
            assert row.call_us == pytest.approx(row.time_us + model[row.kernel].around_us)
            assert row.device == spec.name and row.timer == "ideal, vendor peaks"


@pytest.mark.parametrize(("device", "s"), [("NVIDIA B200", 64), ("NVIDIA H100 80GB HBM3", 1)])
def test_ideal_rows_stay_below_the_peaks(device, s):
    spec, problem = device_spec(device), MlaProblem(b=32, s=s, t=4096, h=128)
    choices = tuple(KernelChoice(kernel) for kernel in discover_kernels())
    rows = predict_case(Case(problem, choices), spec, {"device": device})
    for row in (row for row in rows if row.time_us is not None):
        ideal_us = Cost(row.flops, row.bytes).time_us(*spec.peak_rates(problem.dtype))
        assert ideal_us <= row.time_us * (1 + 1e-9), row.label


def test_a_kernel_that_cannot_be_planned_is_a_row_with_its_reason(tmp_path, monkeypatch):
    ghost = KernelId("ghost", 0, "cutile-dsl", "mla")
    monkeypatch.setattr(suites, "mla_kernels", lambda: [*CUTILE, ghost])
    assert main(["bench", "all", "--t=512", f"--out_dir={tmp_path}"]) == 1
    rows = {row.kernel: row for row in load_record(tmp_path / "all.json").rows}
    assert rows["ghost"].time_us is None and "ghost" in rows["ghost"].reason
    assert rows["flash_mla"].time_us


def test_recorded_results_make_the_same_report_and_can_be_sent(tmp_path, capsys):
    record = RESULTS / "2026-11-15-nvidia-h200.json"
    argv = ["bench", "--records", str(record), "--contribute", f"--out_dir={tmp_path}"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    for words in (f"benchmark report from {record}", "FlashAttention-3 qv", "to be explained",
                  "contribution.json"):  # fmt: skip
        assert words in out
    assert {"records.html", "records.csv"} <= files(tmp_path)
    measured = [row for row in load_record(record).rows if row.status == OK]
    assert len(load_record(tmp_path / "contribution.json").rows) == len(measured)


def test_a_version_that_does_not_exist_is_absent_and_the_exit_code_says_so(tmp_path, capsys):
    assert main(["bench", "var6_plus", "--version=v77", f"--out_dir={tmp_path}"]) == EXIT_ABSENT
    out = capsys.readouterr().out
    assert "mla_var6_plus v77 (cutile-dsl)" in out and "does not exist; there are v0" in out
    assert load_record(tmp_path / "var6_plus.json").rows == []
    argv = ["bench", "var6_plus", f"--out_dir={tmp_path}"]
    assert main([*argv, "--version=", "--quick"]) == EXIT_ABSENT  # is not the base version
    assert main([*argv, "--backends=cutile-dsl,cute-dsl"]) == EXIT_ABSENT
    assert load_record(tmp_path / "var6_plus.json").rows


def test_an_interrupted_prediction_leaves_no_empty_folder(tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "_predict", interrupt)
    assert main(["bench", "all", f"--out_dir={tmp_path / 'new' / 'folder'}"]) == 130
    assert not list(tmp_path.iterdir())


def test_against_an_earlier_record(tmp_path, capsys):
    argv = ["bench", "all", "--t=1024"]
    assert main([*argv, f"--out_dir={tmp_path / 'a'}"]) == 0
    earlier = tmp_path / "a" / "all.json"
    capsys.readouterr()
    assert main([*argv, f"--against={earlier}", f"--out_dir={tmp_path / 'b'}"]) == 0
    assert "verdict: 0 better, 5 same, 0 worse, 0 not compared" in capsys.readouterr().out
    data = json.loads(earlier.read_text())
    for row in data["rows"]:
        row["time_us"] *= 0.5
    earlier.write_text(json.dumps(data))
    assert main([*argv, f"--against={earlier}", f"--out_dir={tmp_path / 'c'}"]) == 1
    assert "5 worse" in capsys.readouterr().out
    verdicts = json.loads((tmp_path / "c" / "regression.json").read_text())
    assert verdicts["passed"] is False


@pytest.mark.parametrize(
    ("module", "argv", "suite", "code"),
    [
        ("bench_all_mla", ["--t=512"], "all", 0),
        ("bench_mla", ["--s=1,16", "--t=512"], "sweep", 0),
        ("bench_mla_var6_plus", ["--s=16", "--t=512"], "var6_plus", 0),
        ("bench_mla_var6_plus_v3", [], "var6_plus", EXIT_ABSENT),
        ("bench_mla_var6_plus_v4", [], "var6_plus", EXIT_ABSENT),
        ("bench_figures", [], "figures", 0),
    ],
)
def test_the_modules_write_below_their_own_folder(
    module, argv, suite, code, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [module, *argv])
    monkeypatch.syspath_prepend(str(RESULTS.parents[1]))
    with pytest.raises(SystemExit) as request:
        runpy.run_module(f"tests.benchmark.{module}", run_name="__main__")
    assert request.value.code == code
    (page,) = (tmp_path / "out" / "tests" / module).glob(f"*/{suite}.html")
    assert "<h1>" in page.read_text()
    if code == EXIT_ABSENT:
        assert f"mla_var6_plus {module[-2:]} (cutile-dsl)" in capsys.readouterr().out
        assert bench_program("var6_plus", "bench", ["--version=v1"], version="v3") == 2
        assert "expected v3" in capsys.readouterr().err
