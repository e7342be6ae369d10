"""`hyper-mla plan`: table, JSON, files, what it says about itself, and what it refuses."""

import json
import re

import pytest

from mla_var3.cli.main import main
from mla_var3.conf.devices import device_spec
from mla_var3.op.mla.model.mix import MixModel
from mla_var3.op.mla.model.parameters import derived_parameters, mix_parameters
from mla_var3.op.mla.model.window_plan import plan_window
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.window.formats import FP8
from mla_var3.runtime.paths import output_root

H200 = ["plan", "--for_device=H200", "--s=32"]
FILES = {"plan.json", "plan.md"}
FILES |= {f"time-against-{name}.{kind}" for name in ("n", "memory") for kind in ("png", "svg")}


@pytest.fixture(autouse=True)
def no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take most of the time; one test draws them."""
    if "files" in request.node.name:
        return
    monkeypatch.setattr("mla_var3.bench.plots.line_plot", lambda *_, **options: [])


def test_the_table_says_that_it_predicts_and_from_what(capsys):
    assert main([*H200, "--s=64", "--budget=1GiB"]) == 0
    out = capsys.readouterr().out
    for words in (
        "keep nothing decompressed: ", "steady call time per layer", "predicted for NVIDIA H200",
        "These are predictions, not measurements", "assumed", "chosen", "over budget",
        "Fitted to measured times: latent_tflops_per_sm", "2026-11-15-nvidia-h200-mix-rows.json",
        "8-bit latent cache without a window, flash_mla, burst call time: ",
        " with fp8_per_token, ", "per layer would allow",
    ):  # fmt: skip
        assert words in out, words
    assert main(["plan", "--for_device=B200", "--s=32", "--budget=2GiB"]) == 0
    out = capsys.readouterr().out
    assert "ideal, vendor peaks for NVIDIA B200" in out and "no advice: no mix was timed" in out
    assert "chosen" not in out and "8-bit latent cache" not in out


def test_the_sizes_name_the_lengths_and_what_was_not_timed_the_dtype(capsys):
    assert main([*H200, "--b=3", "--t=500", "--lengths=500,3,50", "--budget=2GiB"]) == 0
    out = capsys.readouterr().out
    assert "h=128 lengths=500,3,50, window" in out
    assert "0.00 J" not in out  # small energies keep their digits
    assert main([*H200, "--lengths=mixed", "--dtype=float16", "--budget=2GiB"]) == 0
    out = capsys.readouterr().out
    assert "lengths=1..4096" in out and "no mix was timed on NVIDIA H200 in float16" in out


def test_files_go_to_the_default_folder():
    assert main([*H200, "--budget=2GiB"]) == 0
    (folder,) = (output_root() / "plan").iterdir()
    assert {file.name for file in folder.iterdir()} == FILES
    page, record = (folder / "plan.md").read_text(), json.loads((folder / "plan.json").read_text())
    assert "predicted: true" in page and "not measurements" in page
    assert record["chosen"]["steady_call_us"] >= record["chosen"]["call_us"]
    assert f"n: {record['chosen']['n']}" in page
    assert all(f"({plot})" in page for plot in FILES if plot.endswith(".png"))
    svg = (folder / "time-against-memory.svg").read_text()
    for words in ("GiB", "bfloat16", "fp8", "chosen, n=", "predicted"):
        assert words in svg


def test_json_prints_nothing_else_and_writes_only_when_asked(capsys, tmp_path):
    argv = [*H200, "--budget=100GiB", "--layers=61", "--dtype=fp8", "--json"]
    assert main(argv) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not output_root().exists()
    model = MixModel(mix_parameters(device_spec("H200")), FP8)
    problem = MlaProblem(32, 32, 4096, 128)
    expected = plan_window(problem, model, 100 * 2**30, layers=61, multiple=128)
    assert plan["chosen"]["n"] == expected.chosen.n and plan["layers"] == 61
    assert plan["form"]["name"] == "fp8" and plan["problem"]["dtype"] == "bfloat16"
    same = [*argv[:-2], "--dtype=bfloat16", "--window_dtype=fp8", "--json"]
    for again in (same, [*argv, f"--out_dir={tmp_path / 'kept'}"]):
        assert main(again) == 0
        assert json.loads(capsys.readouterr().out) == plan
    assert (tmp_path / "kept" / "plan.json").is_file()
    # Fitted parameters from a file.
    content = derived_parameters(device_spec("H200")).to_dict()
    content["launch_us"] |= {"value": 50.0, "origin": "fitted", "source": "a test", "error": 0.02}
    path = tmp_path / "rates.json"
    path.write_text(json.dumps([content]))
    assert main([*H200, "--budget=2GiB", f"--parameters={path}"]) == 0
    out = capsys.readouterr().out
    assert "Fitted to measured times: launch_us." in out and "50 µs ± 2.0 %" in out


def test_a_shared_prefix_is_planned_by_what_it_gains(capsys, tmp_path):
    sizes = ["--b=256", "--s=1", "--t=26728", "--h=128", "--prefix=26472"]
    argv = ["plan", "--for_device=H200", *sizes, f"--out_dir={tmp_path}"]
    assert main([*argv, "--budget=2GiB"]) == 0
    out = capsys.readouterr().out
    assert "share the prefix decompressed: " in out and "predictions, not measurements" in out
    assert main([*argv, "--budget=1GiB", "--json"]) == 0  # the copies do not fit
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "plan.json").read_text())
    ways = found["ways"]
    assert found["chosen"] == "latent"
    assert ways["decompressed"]["gain"] > ways["latent"]["gain"] > ways["copied"]["gain"] == 1.0
    assert ways["decompressed"]["copy_bytes"] == 26472 * (2 * 128 * 128 + 64) * 2
    assert main([*argv, "--budget=9GiB", "--groups=2", "--json"]) == 0
    grouped = json.loads(capsys.readouterr().out)["ways"]["decompressed"]
    assert grouped["copy_bytes"] == 2 * ways["decompressed"]["copy_bytes"]
    assert main(["plan", "--for_device=H100", *sizes, "--budget=2GiB"]) == 0
    assert list(output_root().glob("plan/*/plan.json"))
    out = capsys.readouterr().out
    assert "no advice: no kernel was timed on NVIDIA H100" in out and "chosen" not in out


def test_the_examples_of_the_page_run(repo_root, capsys):
    page = (repo_root / "docs" / "planning.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "docs/planning.md", "exec"), {})
    out = capsys.readouterr().out
    for words in ("MixTime", "latent_tflops_per_sm", "latent_copied_cost"):
        assert words in out
