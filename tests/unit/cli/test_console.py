"""How a command ends."""

import subprocess
import sys

from mla_var3.cli import console
from mla_var3.cli.console import guarded
from mla_var3.errors import DeviceTimeoutError


def test_a_reader_that_stops_early_is_no_error(package_environment, tmp_path):
    code = (
        "import sys; from mla_var3.cli.console import guarded, say; "
        "sys.exit(guarded(lambda: [say('x' * 200) for _ in range(5000)] and 0))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=package_environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == ""


def interrupted(note: str = "") -> int:
    interrupt = KeyboardInterrupt()
    if note:
        interrupt.add_note(note)
    raise interrupt


def test_an_interrupt_tells_only_what_was_interrupted(capsys):
    assert guarded(interrupted) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    assert guarded(lambda: interrupted("results so far are kept")) == 130
    assert capsys.readouterr().err == "error: interrupted; results so far are kept\n"


def test_a_hung_kernel_ends_the_process(capsys, monkeypatch):
    """The normal end of the process would wait for the kernel."""
    ended: list[int] = []
    monkeypatch.setattr(console.os, "_exit", ended.append)

    def hangs() -> int:
        raise DeviceTimeoutError("flash_mla: expected to end within 60 s")

    assert guarded(hangs) == 1
    assert ended == [1]
    assert "error: flash_mla: expected to end" in capsys.readouterr().err
