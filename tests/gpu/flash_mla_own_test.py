"""Run FlashMLA's own test of dense decoding against this package.

    .venv/bin/python -m tests.gpu.flash_mla_own_test FOLDER

FOLDER is a checkout of FlashMLA. Its test is imported as it is, with `flash_mla` being
`mla_var3.integrations.flash_mla`; cases, data, reference and tolerances are the test's own. Its
last cases also take times, which it looks up by the name of FlashMLA's kernel: there the name of
the kernel that runs here is put in its place.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mla_var3.integrations import flash_mla

from .attention_record import cuda_is_missing, write_record

TEST = "test_flash_mla_dense_decoding"
KERNEL_NAMES = {"flash_fwd_splitkv_mla_kernel": "cutlass_flash_mla"}
"""Part of the name of FlashMLA's kernel -> part of the name of the one that takes its place."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Cases:
    """Takes the place of the test's function for one case; runs all of them or every n-th."""

    function: Callable[[Any], None]
    every: int
    first: int
    timing: bool
    run: int = 0
    seen: int = 0

    def __call__(self, case: Any) -> None:
        self.seen += 1
        if (self.seen - 1 - self.first) % self.every:
            return
        if not self.timing:
            case.test_performance = False
        self.function(case)
        self.run += 1


def imported_test(folder: Path) -> ModuleType:
    """The test of a checkout, served by this package."""
    tests = folder / "tests"
    if not (tests / f"{TEST}.py").is_file():
        raise SystemExit(f"FOLDER: expected a checkout with tests/{TEST}.py, got {folder}")
    sys.modules["flash_mla"] = flash_mla
    sys.path.insert(0, str(tests))
    return importlib.import_module(TEST)


def offer_triton() -> bool:
    """Whether triton is there, with which the test's helpers mark what they time.

    Without it they get a module that has the name, so that they can be imported.
    """
    if importlib.util.find_spec("triton") is not None:
        return True
    stand_in = ModuleType("triton")
    stand_in.jit = lambda function: function  # type: ignore[attr-defined]
    sys.modules["triton"] = stand_in
    return False


def rename_kernels() -> None:
    """Let the test's helper find the kernel that runs here under the name that it asks for."""
    bench: Any = importlib.import_module("kernelkit.bench")
    plain = bench.BenchKinetoRawResult.get_kernel_time

    def get_kernel_time(self: Any, part: str) -> float:
        return float(plain(self, KERNEL_NAMES.get(part, part)))

    bench.BenchKinetoRawResult.get_kernel_time = get_kernel_time


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test; 0 when every case passes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a checkout of FlashMLA")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--every", type=int, default=1, help="run every N-th case only")
    parser.add_argument(
        "--first", type=int, default=0, help="begin with this one, so that runs can share the cases"
    )
    parser.add_argument("--no_timing", action="store_true", help="check the last cases only")
    parser.add_argument("--json", type=Path, help="where the record goes")
    given = parser.parse_args(arguments)
    if cuda_is_missing():
        return 1
    timing = offer_triton() and not given.no_timing
    test: Any = imported_test(given.folder)
    rename_kernels()
    cases = test.test_flash_mla = Cases(test.test_flash_mla, given.every, given.first, timing)
    start, failure = time.perf_counter(), None
    try:
        test.main(DTYPES[given.dtype])
    except AssertionError as error:
        failure = f"case {cases.seen}: {error or 'its own comparison'}"
    took = time.perf_counter() - start
    outcome = f"failed at {failure}" if failure else "passed"
    times = "with its times" if timing else "without times"
    print(
        f"{TEST} {given.dtype}: {outcome}; {cases.run} of {cases.seen} cases, {times}, {took:.0f} s"
    )
    source = (given.folder / "tests" / f"{TEST}.py").read_bytes()
    record = {
        "test": TEST, "test_sha256": hashlib.sha256(source).hexdigest(), "dtype": given.dtype,
        "every": given.every, "first": given.first, "timing": timing, "cases_run": cases.run,
        "cases": cases.seen, "passed": failure is None, "failure": failure, "seconds": took,
    }  # fmt: skip
    write_record(given.json, "flash_mla_own_test", record)
    return 0 if failure is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
