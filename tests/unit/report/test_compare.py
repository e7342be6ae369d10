"""Comparing runs: records, refusals, tables, JSON, plots, and both commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_var3.cli.main import main
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.report import compare as comparison
from mla_var3.report.compare import Run, compare, comparison_markdown, load_run, run_of_record
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures

SIZES = {"b": 32, "s": 16, "t": 4096, "h": 128, "d": 128, "p": 64, "k": 512}


def figures(name: str, time_us: float | None, **extra: Any) -> dict[str, Any]:
    times = {"time_us": time_us, "spread_us": time_us and 0.5, "predicted_us": 80.0}
    return {"name": name, **times, "flops": 1e9, "bytes": 1e6, "extra": extra}


def record(
    kernel: str = "mla_var6_plus",
    time_us: float | None = 100.0,
    *,
    mode: str = "event",
    device: str | None = "NVIDIA H200",
    language: str = "cutile-dsl",
    stages: dict[str, float] | None = None,
    extra: dict[str, Any] | None = None,
    **params: Any,
) -> dict[str, Any]:
    return {
        **{"kernel": kernel, "language": language, "prof_type": mode, "device": device},
        "params": {**SIZES, "dtype": "bfloat16", "lengths": None, "n": 512, "seed": None, **params},
        "total": figures(kernel, time_us, **(extra or {})),
        "stages": [figures(n, t) for n, t in (stages or {kernel: time_us or 0.0}).items()],
        "clocks": {"locked": False},
    }


def run(*arguments: Any, **changes: Any) -> Run:
    return run_of_record(record(*arguments, **changes))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def write(folder: str, *arguments: Any, **changes: Any) -> Path:
        path = tmp_path / folder
        path.mkdir(parents=True)
        (path / "params.json").write_text(json.dumps(record(*arguments, **changes)))
        return path

    return write


def test_a_folder_and_its_record_are_the_same_run(saved, tmp_path):
    folder = saved("runs/20260101", stages={"x": 60.0, "y": 40.0})
    found = load_run(folder)
    assert found == load_run(folder / "params.json")
    assert (found.total.time_us, found.stages["x"].time_us) == (100.0, 60.0)
    assert found.problem["t"] == 4096 and found.choices == {"n": 512}
    extra = {"TC%": 61.0, "note": "x", "idle_us": 4, "ok": True, "timing": {"runs": 9}}
    assert run(extra=extra).total.extra == {"TC%": 61.0, "idle_us": 4.0}
    last = saved("runs/20260102")
    with pytest.raises(InvalidArgumentError, match=f"there are 2 below it, the last is {last}"):
        load_run(tmp_path / "runs")
    for text in ("{", "[]", '{"kernel": "x"}'):
        (tmp_path / "params.json").write_text(text)
        with pytest.raises(InvalidArgumentError, match="expected the record of a profile"):
            load_run(tmp_path)


def test_a_static_record_and_a_result_are_runs_too():
    plain = {"kernel": "flash_mla", "prof_type": "event", "device": "NVIDIA H200", "params": SIZES}
    predicted = {"NVIDIA H200": 70.0, "NVIDIA B200": 50.0}
    static = {"device": None, "planned_for": "NVIDIA H200", "predicted_us": predicted}
    found = run_of_record(plain | static)
    assert (found.device, found.stages) == ("NVIDIA H200", {})
    assert (found.total.time_us, found.total.predicted_us) == (None, 70.0)
    total = StageFigures("flash_mla", 50.0, 1.0, 1e9, 1e6, 40.0)
    result = ProfileResult("flash_mla", NsightProfType.EVENT, total, [total], record=plain)
    found = comparison.run_of_result(result)
    assert (found.total.time_us, found.total.tflops, found.total.gbps) == (50.0, 20.0, 20.0)
    shares = next(row for row in compare([found, found]).rows if row.metric == "of roofline")
    assert shares.texts[0] == "80.0 %"


def test_changes_against_the_baseline(tmp_path):
    result = compare([run(), run("mla_var6_plus_v2", 80.0)])
    text = comparison_markdown(result)
    for words in ("### vs Baseline (mla_var6_plus)",
                  "| Metric | Previous: mla_var6_plus | Current: mla_var6_plus_v2 | Change |",
                  "| time | 100 µs | 80.0 µs | -20.0 % (faster) |"):  # fmt: skip
        assert words in text
    data = json.loads(json.dumps(comparison.comparison_data(result)))
    time, _, rate, *_ = data["metrics"]
    assert time["values"] == {"mla_var6_plus": 100.0, "mla_var6_plus_v2": 80.0}
    assert time["change_percent"] == {"mla_var6_plus_v2": -20.0}
    assert rate["metric"] == "TFLOP/s" and list(rate["change_percent"].values()) == [25.0]
    files = comparison.comparison_plot(result, tmp_path / "c")
    assert {file.name for file in files} == {"c.png", "c.svg"}
    result.rows.clear()
    assert comparison.comparison_plot(result, tmp_path / "d") == []


def test_other_problems_and_devices_are_refused_by_name():
    others = [run("b_v1", 80.0, t=8192, lengths=[1, 2]), run("c_v1", 70.0, device="NVIDIA B200")]
    with pytest.raises(UnsupportedError) as refused:
        compare([run(), *others])
    for words in ("t 4096 against 8192", "lengths None against [1, 2]", "--force",
                  "device NVIDIA H200 against NVIDIA B200"):  # fmt: skip
        assert words in str(refused.value)
    forced = compare([run(), *others], force=True)
    assert len(forced.forced) == 2 and "compared by force" in comparison_markdown(forced)
    assert compare([run(), run("x_v2", 90.0, n=1024, seed=3)]).forced == []  # choices may differ
    sliding = run("flash_mla", 20.0, sliding_window=512)
    for pair, values in (([run(), sliding], "None against 512"), ([sliding, run()], "512 against")):
        with pytest.raises(UnsupportedError, match=f"sliding_window {values}"):
            compare(pair)
    assert compare([run(), run("flash_mla", 90.0, sliding_window=0)]).forced == []


def test_remarks():
    locked = run_of_record({**record("mla_var6_plus_v2", mode="nsys"), "clocks": {"locked": True}})
    predictions = [run(mode="static"), run("flash_mla", mode="predicted")]
    pairs = ([run(), locked], predictions, [run(), run("flash_mla", None)])
    both, predicted, unmeasured = (" ".join(compare(pair).remarks) for pair in pairs)
    assert "the modes differ (mla_var6_plus: event, mla_var6_plus_v2: nsys)" in both
    assert "only mla_var6_plus_v2 ran with locked clocks" in both
    assert "modes differ" not in predicted and "predict shows call times" in unmeasured
    assert "no measured time in flash_mla" in unmeasured


def test_missing_stages_and_figures_are_dashes():
    first = run(stages={"attention": 70.0, "combine": 30.0})
    second = run("mla_var6_plus_v2", 90.0, stages={"attention": 60.0, "reduce": 30.0})
    cells = compare([first, second]).cells()
    times = {row[0]: row[2:] for row in cells if row[1] == "time"}
    assert times["attention"] == ("70.0 µs", "60.0 µs", "-14.3 % (faster)")
    assert times["combine"] == ("30.0 µs", "-", "-")
    assert times["reduce"] == ("-", "30.0 µs", "-")
    assert {row.where for row in compare([run(), run()]).rows} == {"total"}  # one stage: no more
    # Equal labels are told apart.
    for others, labels in (
        ([run(), run("v", mode="nsys")], ["mla_var6_plus #1", "mla_var6_plus #2", "v"]),
        ([run(mode="nsys")], ["mla_var6_plus event", "mla_var6_plus nsys"]),
        ([run(language="cute-dsl")], ["mla_var6_plus cutile-dsl", "mla_var6_plus cute-dsl"]),
    ):
        assert [r.label for r in compare([run(), *others]).runs] == labels


def test_the_command_compares_folders(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mla_var3.report.compare.bar_plot", lambda *_, **options: [Path("x")])
    first, second = saved("a"), saved("b", "mla_var6_plus_v2", 80.0)
    out, file = tmp_path / "out", tmp_path / "figures.json"
    arguments = [str(first), str(second), f"--out_dir={out}", f"--json={file}"]
    assert main(["compare", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "-20.0 % (faster)" in shown and str(out / "compare.md") in shown
    assert json.loads(file.read_text()) == json.loads((out / "compare.json").read_text())
    assert "![times side by side](compare.png)" in (out / "compare.md").read_text()
    assert main(["compare", *arguments, "--b=4"]) == 2
    assert "--b: only for runs given as kernel[:version]" in capsys.readouterr().err
    other = str(saved("c", s=4))
    assert main(["compare", str(first), other]) == 1
    assert "s 16 against 4" in capsys.readouterr().err
    assert main(["compare", str(first), other, "--force"]) == 0
    assert "compared by force" in capsys.readouterr().out


def test_the_command_predicts_kernels(capsys, tmp_path):
    file = tmp_path / "x.json"
    sizes = ["--b=4", "--s=16", "--t=1024"]
    arguments = ["flash_mla", "mla_var6_plus:v0", "--static", "--for_device=H100", *sizes]
    assert main(["compare", *arguments, f"--json={file}"]) == 0
    data = json.loads(file.read_text())
    assert [entry["device"] for entry in data["runs"]] == ["NVIDIA H100 80GB HBM3"] * 2
    assert data["runs"][1]["params"]["t"] == 1024
    assert "times are predictions" in capsys.readouterr().out
