"""Records to be sent: the figures stay, everything private goes."""

import json
from dataclasses import replace

import pytest

from mla_var3.bench.contribute import contribution, public_command
from mla_var3.bench.record import FAILED, MEASURED, OURS, PREDICTED, BenchRecord, BenchRow
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem

COMMAND = "/home/jane/bin/python -m mla_var3.cli.main bench all --s=1,2 --peer_libs /data/libs"
ROW = BenchRow(
    MlaProblem(b=1, s=1, t=64, h=8, d=192, v=256), "flash_mla", OURS, MEASURED, time_us=12.5,
    note="see /scratch/jane/log.txt on lab-7.example.org", device="NVIDIA L40S", command=COMMAND,
    versions={"torch": "2.9.1"},
)  # fmt: skip


def record(*rows: BenchRow) -> BenchRecord:
    environment = {
        **{"date": "2026-11-16T00:00:00+00:00", "command": COMMAND, "new_fact": "jane"},
        "versions": {"torch": "2.9.1", "python": "3.12.3"},
        "platform": "Linux-6.8-lab-7",
        "git": {"commit": "0123456", "root": "/home/jane/hyper"},
        "gpu": {"name": "NVIDIA L40S", "uuid": "GPU-12ab", "driver": "580.95"},
    }
    absent = {"flashmla": "/home/jane/lib.so not found"}
    return BenchRecord("all", environment, list(rows), absent, notes=["from /home/Jane Doe/x"])


def test_figures_stay_and_private_facts_go():
    failed = replace(ROW, time_us=None, status=FAILED, reason="jane: no such kernel")
    found = contribution(record(ROW, failed, replace(ROW, kind=PREDICTED))).to_dict()
    text = json.dumps(found)
    for private in ("jane", "Jane", "lab-7", "12ab", "/home", "scratch", "libs", "0123456"):
        assert private not in text, private
    (row,) = found["rows"]
    assert (row["time_us"], row["device"], row["problem"]["v"]) == (12.5, "NVIDIA L40S", 256)
    assert row["command"] == "hyper-mla bench all --s=1,2"
    assert found["environment"]["gpu"] == {"name": "NVIDIA L40S", "driver": "580.95"}
    assert found["environment"]["versions"] == {"torch": "2.9.1", "python": "3.12.3"}


def test_the_command_repeats_the_run():
    """Options with their values, however they were written; those that name files go."""
    words = "bench sweep --s 1,2 --peer_libs /data/libs --cache-dtype=fp8 --quick --out_dir=x --b"
    assert public_command(f"python -m mla_var3 {words} 4 --shapes 1", "sweep") == (
        "hyper-mla bench sweep --s 1,2 --cache-dtype=fp8 --quick --b 4 --shapes 1"
    )
    assert public_command("python 'bench", "all") == "hyper-mla bench all"
    with pytest.raises(InvalidArgumentError, match="contribute: expected measured rows"):
        contribution(record(replace(ROW, kind=PREDICTED)))
