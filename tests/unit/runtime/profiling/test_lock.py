"""The device lock, the clock scripts with stand-ins for nvidia-smi and id, and their marker."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.errors import UnsupportedError
from mla_var3.runtime.profiling import lock as clocks
from mla_var3.runtime.profiling.lock import clock_state, device_lock, lock_path
from tests.programs import run_program, tools_alone, write_script

HOLDER = """
import sys, time
from mla_var3.runtime.profiling.lock import device_lock
with device_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def environment(package_environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**package_environment, "TMPDIR": str(tmp_path)}


@contextmanager
def holder(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, "7"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_lock_file_of_another_user_is_opened_without_making_it(monkeypatch):
    """As Linux does in a sticky folder where fs.protected_regular is set."""
    with device_lock("GPU-12ab"):
        pass
    opened = os.open

    def protected(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", protected)
    with device_lock("GPU-12ab"):
        content = json.loads(lock_path("12ab").read_text())
        assert content["pid"] == os.getpid() and set(content) == {"pid", "command", "since"}
    assert lock_path("12ab").read_text() == ""


def test_a_second_process_is_refused_after_the_wait_and_a_killed_one_leaves_it_free(
    environment, caplog
):
    caplog.set_level(logging.INFO, "mla_var3")
    with holder(environment) as process:
        named = f"process {process.pid} .*since"
        with pytest.raises(UnsupportedError, match=named), device_lock("7", 0.3):
            pass
        assert f"waiting for up to 0.3 s for process {process.pid}" in caplog.text
        with device_lock("8", 0):  # another device is free
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with device_lock("7", 5):
            assert json.loads(lock_path("7").read_text())["pid"] == os.getpid()


def test_a_file_that_cannot_be_opened(tmp_path):
    lock_path("7").mkdir()
    with pytest.raises(UnsupportedError, match="device lock: expected to open"), device_lock("7"):
        pass


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
    failed, *undone = scripts.settings()[-3:]
    assert "-lmc" in failed and undone == ["-i 0 -rgc", "-i 0 -pm 0"]
    assert not scripts.marker.exists()


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
def test_a_stale_marker_is_not_believed(changes, sm_mhz, problem, tmp_path, monkeypatch):
    path = tmp_path / "clocks.json"
    monkeypatch.setenv("HYPER_MLA_CLOCK_STATE", str(path))
    content = {"uuid": UUID, "sm_mhz": 1500, "memory_mhz": 3201, "date": "2026-11-15"}
    content["boot_id"] = clocks._boot_id()
    path.write_text(json.dumps(content))
    assert clock_state(UUID, 1515.0).locked
    path.write_text(json.dumps(content | changes))
    state = clock_state(UUID, sm_mhz)
    assert not state.locked
    assert problem in state.describe()
