"""Clock scripts, with stand-ins for nvidia-smi and id, and what profiling says about clocks."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.runtime.profiling import lock as clocks
from mla_var3.runtime.profiling.lock import clock_state
from tests.programs import run_program, tools_alone, write_script

UUID = "GPU-12345678-1234-1234-1234-123456789abc"
H200_CLOCKS = "\n".join(f"3201, {mhz}" for mhz in range(1980, 344, -15)) + "\n2619, 345"
RTX5090_CLOCKS = "14001, 3090\n14001, 2407\n14001, 180\n405, 180"

TOOLS = (
    *("awk", "bash", "cat", "chmod", "date", "dirname", "env", "grep", "mktemp", "mv", "rm"),
    *("sh", "sort", "tr", "uniq"),
)

# Every call is logged; a set command fails when its option is listed in $FAIL.
NVIDIA_SMI = """#!/usr/bin/env bash
echo "$*" >> "$SMI_LOG"
case "$*" in
    *--query-gpu=*)
        echo "$SMI_NAME, $SMI_UUID, $SMI_PERSISTENCE" ;;
    *--query-supported-clocks=*) echo "$SMI_CLOCKS" ;;
    *)
        for option in $SMI_FAIL; do
            if [[ " $* " == *" $option "* ]]; then echo "${SMI_TEXT:-failed}"; exit "$SMI_CODE"; fi
        done
        echo "done" ;;
esac
"""


class Scripts:
    """Runs the scripts against a stand-in card."""

    def __init__(self, folder: Path, scripts: Path) -> None:
        self.scripts = scripts
        self.log = folder / "calls.log"
        self.marker = folder / "clocks.json"
        # Nothing else is on PATH, so that no test can ever reach the nvidia-smi of the machine.
        tools = tools_alone(folder / "bin", TOOLS)
        write_script(tools / "nvidia-smi", NVIDIA_SMI)
        write_script(tools / "id", '#!/bin/sh\necho "${FAKE_UID:-0}"\n')
        self.environment = {
            "PATH": str(tools),
            "SMI_LOG": str(self.log),
            "SMI_NAME": "NVIDIA H200",
            "SMI_UUID": UUID,
            "SMI_PERSISTENCE": "Disabled",
            "SMI_CLOCKS": H200_CLOCKS,
            "SMI_FAIL": "",
            "SMI_CODE": "1",
            "HYPER_MLA_CLOCK_STATE": str(self.marker),
        }

    def run(self, script: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return run_program(
            [str(self.scripts / script), *arguments], env={**self.environment, **changes}
        )

    def settings(self) -> list[str]:
        """The calls that would change the card."""
        calls = self.log.read_text().splitlines() if self.log.exists() else []
        return [call for call in calls if "--query" not in call]


@pytest.fixture
def scripts(tmp_path: Path, repo_root: Path) -> Scripts:
    return Scripts(tmp_path, repo_root / "scripts")


@pytest.mark.parametrize(
    ("name", "clocks", "locked"),
    [
        ("NVIDIA GeForce RTX 5090", RTX5090_CLOCKS, (2407, 14001)),
        ("NVIDIA H100 80GB HBM3", "2619, 1500", (1500, 2619)),
    ],
)
def test_a_card_is_locked_by_its_profile(name, clocks, locked, scripts):
    done = scripts.run("lock-gpu-clock.sh", "--gpu", "1", SMI_NAME=name, SMI_CLOCKS=clocks)
    assert done.returncode == 0, done.stderr
    sm, memory = locked
    assert scripts.settings()[1:] == [f"-i 1 -lgc {sm},{sm}", f"-i 1 -lmc {memory},{memory}"]
    if "5090" in name:
        spec = device_spec("RTX 5090")
        assert (spec["sm_clock_MHz"], spec["mem_clock_MHz"]) == locked


@pytest.mark.parametrize(("persistence", "undone"), [("Disabled", ["-i 0 -pm 0"]), ("Enabled", [])])
def test_reset_undoes_what_the_lock_did(persistence, undone, scripts):
    scripts.run("lock-gpu-clock.sh", SMI_PERSISTENCE=persistence)
    scripts.log.unlink()
    done = scripts.run("reset-gpu-clock.sh")
    assert done.returncode == 0, done.stderr
    assert scripts.settings() == ["-i 0 -rgc", "-i 0 -rmc", *undone]
    assert not scripts.marker.exists()


@pytest.mark.parametrize(
    ("script", "changes", "message"),
    [
        ("lock", {"FAKE_UID": "1000"}, "needs root; run: sudo"),
        ("lock", {"SMI_NAME": "Tesla T4"}, "no clock profile for 'Tesla T4'; there are: h100 h200"),
        ("rtx5090-lock", {}, "this profile is for 'NVIDIA GeForce RTX 5090', got 'NVIDIA H200'"),
        ("lock", {"SMI_CLOCKS": "3201, 1200\n3201, 345"}, "supports 345 to 1200 MHz, got 1500"),
    ],
)
def test_what_cannot_be_locked_is_refused(script, changes, message, scripts):
    done = scripts.run(f"{script}-gpu-clock.sh", **changes)
    assert done.returncode == 1
    assert message in done.stderr
    assert [call for call in scripts.settings() if "-pm" not in call] == []
    assert not scripts.marker.exists()


UNSUPPORTED = {"SMI_TEXT": "Setting locked memory clocks is not supported", "SMI_CODE": "0"}


@pytest.mark.parametrize(
    ("how", "message"), [({}, "nvidia-smi -i 0 -lmc"), (UNSUPPORTED, "not supported by this card")]
)
def test_a_partial_failure_is_undone(how, message, scripts):
    done = scripts.run("lock-gpu-clock.sh", SMI_FAIL="-lmc", **how)
    assert done.returncode == 1
    assert message in done.stderr
    calls = scripts.settings()
    failed = next(i for i, call in enumerate(calls) if "-lmc" in call)
    assert calls[failed + 1 :] == ["-i 0 -rgc", "-i 0 -pm 0"]
    assert not scripts.marker.exists()


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = tmp_path / "clocks.json"
    monkeypatch.setenv("HYPER_MLA_CLOCK_STATE", str(path))

    def write(**changes: Any) -> None:
        content = {
            "device": "NVIDIA H200",
            "uuid": UUID,
            "sm_mhz": 1500,
            "memory_mhz": 3201,
            "date": "2026-11-15T00:00:00+00:00",
            "boot_id": clocks._boot_id(),
            **changes,
        }
        path.write_text(json.dumps(content))

    return write


def test_the_scripts_marker_is_believed(scripts, monkeypatch):
    scripts.run("lock-gpu-clock.sh")
    monkeypatch.setenv("HYPER_MLA_CLOCK_STATE", str(scripts.marker))
    state = clock_state(UUID.removeprefix("GPU-"))
    assert (state.locked, state.sm_mhz, state.memory_mhz) == (True, 1500, 3201)


@pytest.mark.parametrize(
    ("changes", "sm_mhz", "problem"),
    [
        ({"boot_id": "another"}, None, "from before the last restart"),
        ({"uuid": "GPU-other"}, None, "about another card"),
        ({"sm_mhz": None}, None, "not a clock marker"),
        ({}, 1980.0, "runs at 1980 MHz"),
    ],
)
def test_a_stale_marker_is_not_believed(changes, sm_mhz, problem, marker):
    marker()
    assert clock_state(UUID, 1515.0).locked
    marker(**changes)
    state = clock_state(UUID, sm_mhz)
    assert not state.locked
    assert problem in state.describe()
