"""The device lock: one profiling run at a time, also after a crash."""

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

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.profiling.lock import device_lock, lock_path

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
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "7"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


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
        assert json.loads(lock_path("12ab").read_text())["pid"] == os.getpid()


def test_the_file_names_the_holder_while_held():
    with device_lock("GPU-12ab"):
        content = json.loads(lock_path("12ab").read_text())
        assert content["pid"] == os.getpid()
        assert set(content) == {"pid", "command", "since"}
    assert lock_path("12ab").read_text() == ""


def test_a_second_process_is_refused_after_the_wait(environment, caplog):
    caplog.set_level(logging.INFO, "mla_var3")
    with holder(environment) as process:
        named = f"process {process.pid} .*since"
        with pytest.raises(UnsupportedError, match=named), device_lock("7", 0.3):
            pass
        assert f"waiting for up to 0.3 s for process {process.pid}" in caplog.text
        with device_lock("8", 0):  # another device is free
            pass


def test_a_killed_holder_leaves_the_device_free(environment):
    with holder(environment) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with device_lock("7", 5):
            assert json.loads(lock_path("7").read_text())["pid"] == os.getpid()


def test_a_file_that_cannot_be_opened(tmp_path):
    lock_path("7").mkdir()
    with pytest.raises(UnsupportedError, match="device lock: expected to open"), device_lock("7"):
        pass
