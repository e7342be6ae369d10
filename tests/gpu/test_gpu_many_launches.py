"""No kernel hangs: every version, ten thousand launches at small uneven shapes.

A hang is rare per launch and takes the process with it. So each kernel runs in a process of its
own, which is killed at its time limit, and the message names the kernel, the shape and the launch.
As a program, to try one kernel, also of another checkout:

    python tests/gpu/test_gpu_many_launches.py mla_var6_plus_v3 --source other/checkout/src
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHES = 10_000
SYNC_EVERY = 100
TIME_LIMIT_S = 240.0
"""Compiling takes half a minute, 10,000 launches a few seconds."""
SHAPES: tuple[dict[str, Any], ...] = (
    # Nearly as many work tiles as SMs: most CTAs of a persistent kernel find nothing left.
    {"b": 5, "s": 6, "t": 1907, "h": 16, "n": 1246, "prefix": 640,
     "lengths": (1600, 876, 1907, 1280, 721)},
    # Empty and one-token requests, more CTAs than tiles.
    {"b": 4, "s": 1, "t": 333, "h": 16, "n": 64, "prefix": 0, "lengths": (333, 0, 1, 65)},
    # More tiles than SMs, so that a CTA takes several.
    {"b": 7, "s": 70, "t": 515, "h": 16, "n": 200, "prefix": 0,
     "lengths": (515, 70, 1, 300, 0, 499, 128)},
    # One query and no empty request: what cutlass_mla_decode takes.
    {"b": 3, "s": 1, "t": 777, "h": 128, "n": 128, "prefix": 0, "lengths": (777, 1, 130)},
)  # fmt: skip


def launch_many(name: str, language: str, launches: int) -> None:
    """The child: launch every shape that the kernel accepts, then check the result."""
    import torch

    from mla_var3.runtime.check import check_stage

    accepted = 0
    for shape, plan in accepted_plans(name, language, f"sm_{capability()}"):
        inputs = plan.prepare_inputs("cuda")
        stage = plan.plan(*inputs)
        accepted += 1
        for done in range(0, launches, SYNC_EVERY):
            say(f"{shape}: launch {done} to {done + SYNC_EVERY - 1}")
            for _ in range(SYNC_EVERY):
                stage.launch()
            torch.cuda.synchronize()
        check_stage(plan, inputs, stage).require()
    if not accepted:
        raise SystemExit(f"{name} in {language} accepts none of the shapes")


def accepted_plans(name: str, language: str, target: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """The shapes that a kernel accepts, with its plans."""
    from mla_var3.errors import InvalidArgumentError, UnsupportedError
    from mla_var3.runtime.paths import find_kernel, plan_class

    cls = plan_class(find_kernel(name, language=language))
    known = {field.name for field in fields(cls)}
    for shape in SHAPES:
        own = {key: value for key, value in shape.items() if key in known}
        try:
            plan = cls(seed=0, **own).for_target(target)
            plan.plan(*plan.prepare_inputs("meta"))
        except (InvalidArgumentError, UnsupportedError) as error:
            say(f"{shape}: refused, {error}")
        else:
            yield shape, plan


def capability() -> str:
    """Compute capability of the GPU, such as "90"."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def say(text: str) -> None:
    """One line to the parent, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def supervise(
    name: str,
    language: str,
    launches: int = LAUNCHES,
    limit_s: float = TIME_LIMIT_S,
    source: Path = ROOT / "src",
) -> str | None:
    """Run one kernel in a child and kill it at the limit.

    Returns:
        What went wrong, or None.
    """
    command = [sys.executable, __file__, name, "--language", language]
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [*command, "--launches", str(launches), "--child"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        started = time.monotonic()
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            code = None
        output.seek(0)
        last = output.read().strip().splitlines()
    took = f"{time.monotonic() - started:.0f} s"
    if code is None:
        return (
            f"{name} in {language} hangs: no end after {took}, at {last[-1] if last else 'start'}"
        )
    if code:
        return f"{name} in {language} failed after {took}:\n" + "\n".join(last[-15:])
    return None


def kernels() -> Iterator[Any]:
    """All kernel versions of the package, found without importing them."""
    from mla_var3.runtime.paths import discover_kernels

    for kernel in discover_kernels():
        yield pytest.param(kernel, id=f"{kernel.full_name}-{kernel.language}")


@pytest.mark.parametrize("kernel", list(kernels()))
def test_every_kernel_accepts_a_shape(kernel: Any) -> None:
    """Needs no GPU: a kernel that refuses all shapes would never be launched."""
    from mla_var3.runtime.paths import declared_targets

    target = declared_targets(kernel)[0]
    assert list(accepted_plans(kernel.full_name, kernel.language, target))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kernel", list(kernels()))
def test_ten_thousand_launches(kernel: Any) -> None:
    from mla_var3.runtime.paths import declared_targets

    targets = declared_targets(kernel)
    if f"sm_{capability()}" not in targets:
        pytest.skip(f"written for {', '.join(targets)}, this GPU is sm_{capability()}")
    problem = supervise(kernel.full_name, kernel.language)
    assert problem is None, problem


def test_a_hang_is_killed_and_named(tmp_path: Path) -> None:
    """Needs no GPU: a package whose kernel never returns."""
    runtime = tmp_path / "mla_var3" / "runtime"
    runtime.mkdir(parents=True)
    (runtime / "paths.py").write_text("def discover_kernels():\n    return []\n")
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    problem = supervise("some_kernel", "cutile-dsl", limit_s=3.0, source=tmp_path)
    assert problem is not None
    assert problem.startswith("some_kernel in cutile-dsl hangs: no end after 3 s")


def main() -> int:
    """One kernel, supervised; with `--child` the launches themselves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel")
    parser.add_argument("--language", default="cutile-dsl")
    parser.add_argument("--launches", type=int, default=LAUNCHES)
    parser.add_argument("--limit", type=float, default=TIME_LIMIT_S, help="seconds")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="folder of mla_var3")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        launch_many(given.kernel, given.language, given.launches)
        return 0
    problem = supervise(given.kernel, given.language, given.launches, given.limit, given.source)
    say(problem or f"{given.kernel}: {given.launches} launches per shape, no hang, right results")
    return 1 if problem else 0


if __name__ == "__main__":
    raise SystemExit(main())
