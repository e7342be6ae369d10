"""Records to be sent: the figures stay, everything private goes."""

from __future__ import annotations

import getpass
import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from mla_var3.bench.contribute import contribution, public, public_command
from mla_var3.bench.record import MEASURED, OURS, PREDICTED, BenchRecord, BenchRow
from mla_var3.cli.main import main
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem

ROW = BenchRow(
    MlaProblem(b=1, s=1, t=64, h=8, d=192, v=256),
    "flash_mla",
    OURS,
    MEASURED,
    time_us=12.5,
    device="NVIDIA L40S",
    command="/home/jane/.venv/bin/python -m mla_var3.cli.main bench all --peer_libs /data/libs",
    versions={"torch": "2.9.1"},
)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user and a machine whose names could be anywhere."""
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(platform, "node", lambda: "lab-7.example.org")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/Jane Doe"))


def record(*rows: BenchRow) -> BenchRecord:
    environment = {
        "date": "2026-11-16T00:00:00+00:00",
        "command": ROW.command,
        "versions": {"torch": "2.9.1", "python": "3.12.3"},
        "platform": "Linux-6.8-lab-7",
        "git": {"commit": "0123456", "root": "/home/jane/hyper"},
        "gpu": {
            "name": "NVIDIA L40S",
            "uuid": "GPU-12ab",
            "driver": "580.95",
            "power_limit_w": 350,
        },
        "new_fact": "jane",
    }
    return BenchRecord("all", environment, list(rows), notes=["from /home/Jane Doe/runs/x.json"])


def test_figures_stay_and_private_facts_go(named: None):
    failed = replace(
        ROW, note="see /scratch/jane/log.txt on lab-7.example.org", reason="jane: no such kernel"
    )
    found = contribution(record(failed, replace(ROW, kind=PREDICTED))).to_dict()
    text = json.dumps(found)
    for private in (
        "jane",
        "Jane",
        "Doe",
        "lab-7",
        "example",
        "12ab",
        "/home",
        "scratch",
        "libs",
        "0123456",
    ):
        assert private not in text, private
    (row,) = found["rows"]
    assert (row["time_us"], row["device"], row["problem"]["v"]) == (12.5, "NVIDIA L40S", 256)
    assert row["command"] == "hyper-mla bench all"
    assert row["note"] == "see <path> on <machine>"
    assert found["environment"]["gpu"] == {
        "name": "NVIDIA L40S", "driver": "580.95", "power_limit_w": 350,
    }  # fmt: skip
    assert found["environment"]["versions"] == {"torch": "2.9.1", "python": "3.12.3"}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (
            "hyper-mla bench sweep --s=1,2 --out-dir=x --quick",
            "hyper-mla bench sweep --s=1,2 --quick",
        ),
        ("hyper-mla bench --records a b --contribute", "hyper-mla bench --contribute"),
        (
            "python -m tests.benchmark.bench_mla /a/b",
            "python -m tests.benchmark.bench_mla '<path>'",
        ),
        ('an "open quote', ""),
    ],
)
def test_a_command_keeps_what_repeats_it(named: None, command: str, shown: str):
    assert public_command(command) == shown


def test_rates_and_fractions_are_not_paths(named: None):
    text = "1/2 of 700 W, 4.2 TB/s and FLOP/clock/SM; sm_90/sm_100"
    assert public(text) == text


def test_predictions_cannot_be_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(InvalidArgumentError, match="contribute: expected measured rows"):
        contribution(record(replace(ROW, kind=PREDICTED)))
    argv = ["bench", "all", "--contribute", "--mode=predict", f"--out_dir={tmp_path}"]
    assert main(argv) == 2
    assert "contribute: expected a GPU to measure on, or --records" in capsys.readouterr().err


def test_a_recorded_run_can_be_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = Path(__file__).parents[3] / "docs" / "results"
    source = sorted(results.glob("*suite-mix.json"))[-1]
    argv = ["bench", f"--records={source}", "--contribute", f"--out_dir={tmp_path}"]
    assert main(argv) == 0
    sent = json.loads((tmp_path / "contribution.json").read_text())
    assert len(sent["rows"]) == len(json.loads(source.read_text())["rows"])
    assert "contribution.json" in capsys.readouterr().out
