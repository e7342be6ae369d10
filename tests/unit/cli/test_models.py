"""`--model`, `--config` and `--tp` of the commands."""

import json
from typing import Any

import pytest

from mla_var3.bench.record import ABSENT, load_record
from mla_var3.cli.arguments import Parser, read_problem
from mla_var3.cli.console import UsageError
from mla_var3.cli.main import main
from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.paths import find_kernel, plan_class
from tests.unit.cli.cli_support import read


def test_a_model_gives_the_sizes_that_belong_to_it():
    def sizes(*argv: str) -> dict[str, Any]:
        parser = Parser(prog="prog")
        parser.add_problem()
        values = parser.parse(argv)
        read_problem(values)
        return values

    given = sizes("--model=kimi-k2", "--tp=8", "--b=4")
    assert [given[name] for name in "bsthdpkv"] == [4, 16, 4096, 8, 128, 64, 512, 128]
    assert sizes("--h=20", "--v=256")["v"] == 256 and sizes()["h"] == 128


@pytest.mark.parametrize("command", ["choose", "predict --for_device=H200", "plan --budget=1GiB"])
def test_commands_compute_with_the_widths_of_a_model(command, capsys):
    options = ["--model=glm-4.7-flash", "--tp=4", "--json", "--s=2", "--t=1024"]
    assert main([*command.split(), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    entry = found[0] if isinstance(found, list) else found
    problem = entry.get("shape") or entry["problem"]
    assert [problem[name] for name in "hdpkv"] == [5, 192, 64, 512, 256]


@pytest.mark.parametrize(("model", "noted"), [("kimi-k2", False), ("mistral-small-4", True)])
def test_predictions_for_widths_that_were_not_timed_say_so(model, noted, capsys):
    assert main(["predict", f"--model={model}", "--for_device=H200"]) == 0
    assert ("rates were recorded at d=128 p=64 k=512" in capsys.readouterr().out) == noted


def test_bench_predicts_a_model_and_says_what_does_not_serve_it(tmp_path):
    argv = ["bench", "all", "--model=glm-4.7-flash", "--tp=4", "--s=2", "--t=1024", "--b=4"]
    argv += ["--mode=predict", "--for_device=H200", f"--out_dir={tmp_path}"]
    assert main([*argv, "--kernels=flash_mla,flash_attention"]) == 0
    rows = {(r.kernel, r.language): r for r in load_record(tmp_path / "all.json").rows}
    latent = rows["flash_mla", "cutile-dsl"]
    assert (latent.problem.h, latent.problem.d, latent.problem.v) == (5, 192, 256)
    assert latent.shape == "b=4 s=2 t=1024 h=5 d=192 v=256"
    assert latent.time_us is not None
    refused = rows["flash_attention", "cutile-dsl"]
    assert refused.status == ABSENT
    assert "v=256" in refused.reason


def test_run_takes_a_model_for_a_kernel():
    def planned(kernel: str, *argv: str) -> Any:
        return read(plan_class(find_kernel(kernel))(), *argv).plan

    plan = planned("flash_mla", "--model=glm-4.7-flash", "--tp=4")
    assert (plan.h, plan.d, plan.p, plan.k) == (5, 192, 64, 512)
    with pytest.raises(UsageError, match="--model: flash_attention needs v=d=192, the model has v"):
        planned("flash_attention", "--model=glm-4.7-flash")
    assert planned("flash_mla", "--model=glm-5.3-flash").p == 0
    with pytest.raises(InvalidArgumentError, match="p: expected a positive integer, got 0"):
        planned("mla_var6_plus", "--d=256", "--p=0")
