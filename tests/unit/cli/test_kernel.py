"""The command line of a kernel: routes, exit codes, errors."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.cli import console
from mla_var3.cli.commands import kernel
from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures
from mla_var3.runtime.workflow import RunOptions
from tests.unit.cli.cli_support import FakePlan, FakeTiling, check_result, read

STATIC, EVENT, DISABLED = NsightProfType.STATIC, NsightProfType.EVENT, NsightProfType.DISABLED


@dataclass
class Machine:
    """Stands for the runtime: records what it was asked for."""

    gpu: bool = False
    passes: bool = True
    error: BaseException | None = None
    profiled: list[tuple[FakePlan, NsightProfType, RunOptions]] = field(default_factory=list)
    checked: list[tuple[FakePlan, RunOptions]] = field(default_factory=list)

    def profile_plan(self, plan: FakePlan, mode: NsightProfType, run: RunOptions) -> ProfileResult:
        self.profiled.append((plan, mode, run))
        run.progress("autotune fake", 0, 2, "")
        run.progress("autotune fake", 2, 2, "")
        if self.error is not None:
            raise self.error
        timed = None if mode is STATIC else 12.5
        stage = StageFigures("fake_stage", timed, timed and 0.5, 1e6, 2e6, 6.25)
        check = check_result(self.passes) if run.check else None
        return ProfileResult("fake", mode, stage, [stage], Path("some/where"), check)

    def prepare(self, plan: FakePlan, run: RunOptions) -> Any:
        self.checked.append((plan, run))
        return SimpleNamespace(plan=plan, check=check_result(self.passes))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(kernel, "cuda_available", lambda: machine.gpu)
    monkeypatch.setattr(kernel, "profile_plan", machine.profile_plan)
    monkeypatch.setattr(kernel, "prepare", machine.prepare)
    workflow = "mla_var3.runtime.workflow"
    monkeypatch.setattr(f"{workflow}.cuda_available", lambda: machine.gpu)
    monkeypatch.setattr(f"{workflow}.current_device_spec", lambda: device_spec("NVIDIA H200"))
    monkeypatch.delenv(console.TRACEBACK_VARIABLE, raising=False)
    return machine


@pytest.mark.parametrize(
    ("options", "gpu", "mode", "on_cpu", "check", "may_shrink"),
    [
        ("", False, STATIC, True, True, True),
        ("--check", False, STATIC, True, True, True),
        ("--device=cpu", True, STATIC, True, True, True),
        ("--device=cpu --check", True, STATIC, True, True, False),
        ("--target=sm_90", False, STATIC, True, False, True),
        ("--target=sm_90", True, STATIC, False, False, False),
        ("--target=sm_90 --check", False, STATIC, True, True, True),
        ("--prof_type=static", False, STATIC, True, False, True),
        ("--prof_type=disabled --check", False, DISABLED, True, False, True),
        ("--prof_type=disabled --device=cpu", False, DISABLED, True, False, False),
        ("--prof_type=event", True, EVENT, False, False, False),
        ("--prof_type=event", False, EVENT, True, False, False),
    ],
)
def test_routes(options, gpu, mode, on_cpu, check, may_shrink, machine):
    machine.gpu = gpu
    route = kernel.choose_route(read(FakePlan(), *options.split()), gpu)
    found = (route.mode, route.on_cpu, route.check, route.may_shrink)
    assert found == (mode, on_cpu, check, may_shrink)
    if (mode is STATIC and options) or not gpu:  # else tiling options need --no_autotune
        kernel.choose_route(read(FakePlan(), "--Bm=32", *options.split()), gpu)


def test_a_given_tiling_stays_although_it_equals_the_default(monkeypatch):
    def default_tiling(self: FakePlan, name: str) -> FakeTiling | None:
        return FakeTiling(16) if self.target.code == "sm_120" else None

    monkeypatch.setattr(FakePlan, "_default_tiling", default_tiling)
    assert read(FakePlan()).plan.for_target("sm_120").tiling == FakeTiling(16)
    assert read(FakePlan(), "--Bm=64").plan.for_target("sm_120").tiling == FakeTiling(64)


def test_without_a_gpu_it_says_what_it_does(machine, capsys):
    assert kernel.run_plan(FakePlan(), ["--b=5000"]) == 0
    out, err = capsys.readouterr()
    for words in (
        "no GPU here: static mode (compile report + prediction) and the check on the CPU",
        "is 5 GFLOP, too much for the interpreter: it runs b=2 ", "check passed",
        "check on the CPU interpreter: b=2", "some/where/report.md",
    ):  # fmt: skip
        assert words in out
    assert "autotune fake: done" in err
    (profiled,), (checked,) = machine.profiled, machine.checked
    assert profiled[0].b == 5000 and profiled[1] is STATIC and checked[0].b == 2
    assert checked[1].device == "cpu" and checked[1].check and not checked[1].autotune
    # The CPU runs the full problem only when asked.
    assert kernel.run_plan(FakePlan(), ["--b=5000", "--device=cpu", "--check"]) == 0
    assert machine.checked[1][0].b == 5000
    assert kernel.run_plan(FakePlan(), ["--b=5000", "--prof_type=disabled", "--check"]) == 0
    assert machine.profiled[2][0].b == 2
    assert kernel.run_plan(FakePlan(), ["--target=sm_100"]) == 0
    assert machine.profiled[3][2].targets == ("sm_100",) and len(machine.checked) == 2


def test_options_without_effect_are_named(machine, capsys):
    for options, gpu, words in (
        ("--retune --bench_runs=3", False, "static mode on the CPU: --bench_runs, --retune"),
        ("--target=sm_90 --refine", True, "in static mode: --refine"),
        ("--prof_type=disabled --out_dir=x --tune_seconds=1", True, "mode: --out_dir"),
        ("--prof_type=event --out_dir=x --label=y --retune", True, "mode: --label"),
        ("--prof_type=event --label=y --retune --bench_runs=3", True, ""),
    ):
        machine.gpu = gpu
        assert kernel.run_plan(FakePlan(), options.split()) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if "without effect" in line]
        assert [line.endswith(words) for line in notes] == ([True] if words else [])


def test_on_a_gpu(machine, capsys):
    machine.gpu = True
    argv = ["--b=5000", "--prof_type=event", "--check", "--no_autotune", "--Bm=32"]
    assert kernel.run_plan(FakePlan(), argv) == 0
    out = capsys.readouterr().out
    for words in ("fake_stage", "12.5 µs", "6.25 µs", "50%", "relative error", "check passed"):
        assert words in " ".join(out.split())
    plan, mode, run = machine.profiled[0]
    assert (plan.b, plan.tiling.Bm, mode, run.autotune) == (5000, 32, EVENT, False)
    machine.gpu = machine.passes = False
    assert kernel.run_plan(FakePlan(), []) == 1
    out = capsys.readouterr().out
    assert "check FAILED" in out and "FAILED: 3 NaN" in out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--b=0"], 2, "error: b: expected a positive integer, got 0\n"),
        (["--Bm=-1"], 2, "Bm: expected a positive number, got -1"),
        (["--Bm=-1", "--target=sm_90"], 2, "Bm: expected a positive number, got -1"),
        (["--language=cutile"], 2, "did you mean 'cutile-dsl'"),
        (["--language=cute-dsl"], 2, "this is the cutile-dsl kernel"),
        (["--target=sm_90", "--prof_type=event"], 2, "--target: only for --prof_type=static"),
        (["--device=cuda"], 1, "expected a usable CUDA GPU"),
        (["--Bm=32", "--prof_type=event"], 2, "--Bm: expected together with --no_autotune"),
    ],
)
def test_what_cannot_run_is_refused_at_once(argv, code, message, machine, capsys):
    machine.gpu = "--Bm=32" in argv
    assert kernel.run_plan(FakePlan(), argv) == code
    err = capsys.readouterr().err
    assert message in err and err.startswith("error: ") and err.count("\n") == 1
    assert not machine.profiled


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UnsupportedError("cannot"), 1, "error: cannot"),
        (InvalidArgumentError("tiling", "a legal tiling", "Bm=3"), 2, "error: tiling"),
        (PermissionError(13, "Permission denied", "out"), 1, "error: out: expected a path"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of"), 1, "error: CUDA out of"),
    ],
)
def test_errors_in_a_run(error, code, message, machine, monkeypatch, capsys):
    machine.error = error
    assert kernel.run_plan(FakePlan(), []) == code
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    monkeypatch.setenv(console.TRACEBACK_VARIABLE, "1")
    with pytest.raises(type(error)):
        kernel.run_plan(FakePlan(), [])


def test_the_entry_points_take_a_version_and_refuse_wrong_names(machine, capsys):
    package = "mla_var3.kernel.cutile.mla.flash_mla"
    for version in ("v0", "base"):
        assert kernel.main_for_design(package, [version, "--target=sm_90"]) == 0
    assert [plan.name for plan, _, _ in machine.profiled] == ["flash_mla", "flash_mla"]
    assert kernel.main_for_design(package, ["v77"]) == 2
    assert "v0 is the base version" in capsys.readouterr().err
    argv = ["--language=cutile-dsl", "mla_var6_plus", "v0", "--b=2", "--n=5", "--target=sm_90"]
    assert kernel.main(argv) == 0
    assert machine.profiled[-1][0].params()["n"] == 5
    for words, message in {
        "": "kernel: expected one of cutlass_mla_decode, flash_attention, ",
        "flash_mlaa": "did you mean 'flash_mla'",
        "flash_mla v9": "unknown version of flash_mla 'v9'",
        "flash_mla --language=cutile-dls": "did you mean 'cutile-dsl'",
        "--bogus": "unknown option '--bogus'",
        "flash_mla --language": "--language: expected one argument",
    }.items():
        assert kernel.main(words.split()) == 2
        assert message in capsys.readouterr().err


def test_a_kernel_file_run_itself_has_its_kernel_id(monkeypatch):
    from mla_var3.kernel.cutile.mla.flash_mla.flash_mla import flash_mla

    copied = type("CtFlashMLA", (flash_mla.CtFlashMLA,), {"__module__": "__main__"})
    started = SimpleNamespace(__spec__=SimpleNamespace(name=flash_mla.__name__))
    monkeypatch.setitem(sys.modules, "__main__", started)
    plan = kernel._importable(copied(b=3))
    assert type(plan) is flash_mla.CtFlashMLA and plan.b == 3
    started.__spec__, started.__file__ = None, flash_mla.__file__
    assert kernel._importable(copied(b=3)).name == "flash_mla"
