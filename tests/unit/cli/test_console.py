"""How a command ends."""

import sys

from mla_var3.cli import console
from mla_var3.cli.console import guarded
from mla_var3.cli.main import main
from mla_var3.errors import DeviceTimeoutError
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures
from tests.programs import run_program


def test_a_reader_that_stops_early_is_no_error(package_environment, tmp_path):
    code = (
        "import sys; from mla_var3.cli.console import guarded, say; "
        "sys.exit(guarded(lambda: [say('x' * 200) for _ in range(5000)] and 0))"
    )
    command = ["bash", "-c", '"$0" -c "$1" | head -1', sys.executable, code]
    done = run_program(command, env=package_environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("xxx")


def test_a_terminal_without_the_characters_gets_the_result(package_environment, tmp_path):
    code = "from mla_var3.cli.main import main; raise SystemExit(main(['plan', '--budget=2GiB']))"
    environment = {**package_environment, "PYTHONIOENCODING": "ascii"}
    done = run_program([sys.executable, "-c", code], env=environment, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    assert "written: " in done.stdout and " ?s" in done.stdout


def test_no_columns_are_no_reason_to_print_nothing(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["choose", "--b=0"]) == 2
    assert "error: b: expected a positive integer, got 0" in capsys.readouterr().err


def test_an_interrupt_tells_what_was_interrupted_and_a_hung_kernel_ends(monkeypatch, capsys):
    noted, ended = KeyboardInterrupt(), list[int]()
    noted.add_note("results so far are kept")
    hung = DeviceTimeoutError("flash_mla: expected to end within 60 s")
    # The normal end of the process would wait for the kernel that hangs.
    monkeypatch.setattr(console.os, "_exit", ended.append)
    for error, code, said in (
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (noted, 130, "error: interrupted; results so far are kept\n"),
        (hung, 1, "error: flash_mla: expected to end within 60 s\n"),
    ):

        def fails(error: BaseException = error) -> int:
            raise error

        assert guarded(fails) == code
        assert capsys.readouterr().err == said
    assert ended == [1]


def test_times_at_the_vendors_peaks_are_called_ideal(capsys):
    figures = StageFigures("f", None, None, 1e9, 1e6, 5.0)
    record = {"planned_for": "NVIDIA H200", "predicted_us": {"NVIDIA H200": 5.0}}
    static = NsightProfType.STATIC
    console.print_result(ProfileResult("f", static, figures, [figures], None, record=record))
    out = capsys.readouterr().out
    assert "f, static mode, planned for NVIDIA H200" in out and " ideal " in out
    assert "not measured, at the vendor's peaks: NVIDIA H200 5.00 µs" in out
