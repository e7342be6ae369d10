"""Random calls against float64, in worker processes that are killed when they hang.

    python -m tests.fuzz --seconds=300 --seed=7 [--device=cuda] [--processes=4]
    python -m tests.fuzz --repro='{...}'

Case i of a seed is the same in every run. A failure is shrunk and printed as a line that repeats
it. Ends with 1 when there was one.
"""

import argparse
import collections
import contextlib
import json
import logging
import os
import queue
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from . import cases
from .cases import Case

ROOT = Path(__file__).resolve().parents[2]
FINE = ("ok", "refused")
START_S = 180.0
"""Until a worker has imported torch and what it needs, also on a busy machine."""
SHRINK_S = 60.0
HANG_TRIES = 4
"""Simpler variants of a case that hangs, each of which takes the whole time limit."""
MOST_FAILURES = 5


def say(text: str) -> None:
    """A line for whoever runs the fuzzer."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Worker:
    """A process that runs cases; a new one takes its place when it hangs or dies."""

    def __init__(self, device: str, plant: str | None) -> None:
        self._command = [sys.executable, "-m", "tests.fuzz", "--worker", f"--device={device}"]
        if plant:
            self._command.append(f"--plant={plant}")
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()

    def run(self, case: Case, limit_s: float) -> tuple[str, str]:
        """Status and detail of a case; "hang" and "crash" beside those of `cases.run`."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self.stop()
            return "hang", f"no end after {limit_s:.0f} s"
        except OSError:
            answer = None
        if answer is None:
            code = self._process.wait()
            self.stop()
            return "crash", f"the worker ended with {code}"
        status, detail = json.loads(answer)
        if status == "error" and self._device != "cpu":
            self.stop()  # an error on the device may have ended its context
        return status, detail

    def stop(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            self._process = None

    def _start(self) -> None:
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                # With AMX oneDNN adds 0 * NaN of the neighbouring number where widths are odd.
                "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            },
        )
        self._answers = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(
            target=_forward, args=(self._process.stdout, self._answers), daemon=True
        ).start()
        if self._answers.get(timeout=START_S) != "ready\n":
            raise RuntimeError("the worker did not start; see its output above")


def _forward(stream: IO[str], answers: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            answers.put(line)
    answers.put(None)


def work(device: str, plant: str | None) -> None:
    """The loop of a worker: a case per line in, a result per line out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    warnings.simplefilter("ignore")
    if plant:
        from .plants import plant as install

        install(plant)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(cases.run(json.loads(line), device)) + "\n")
        answers.flush()
        if device != "cpu":
            import torch

            torch.cuda.empty_cache()


def shrink(case: Case, status: str, worker: Worker, limit_s: float, seconds: float) -> Case:
    """The smallest case found that still fails in the same way."""
    deadline = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for variant in cases.smaller(case):
            if time.monotonic() > deadline:
                return case
            if worker.run(variant, limit_s)[0] == status:
                case, found = variant, True
                break
    return case


@dataclass
class Session:
    """One run of the fuzzer, shared by the threads that drive the workers."""

    options: argparse.Namespace
    kernels: list[str]
    started: float = field(default_factory=time.monotonic)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def drive(self, index: int) -> None:
        """Run every processes-th case until the time is over."""
        options = self.options
        worker = Worker(options.device, options.plant)
        try:
            for number in range(options.first + index, sys.maxsize, options.processes):
                if self._is_over():
                    return
                case = cases.draw(f"{options.seed}/{number}", options.device, self.kernels)
                status, detail = worker.run(case, options.limit)
                with self.lock:
                    self.counts[status] += 1
                if status not in FINE:
                    self._report(number, case, status, detail, worker)
        finally:
            worker.stop()

    def _is_over(self) -> bool:
        spent = time.monotonic() - self.started
        return spent > self.options.seconds or self.failures >= MOST_FAILURES

    def _report(self, number: int, case: Case, status: str, detail: str, worker: Worker) -> None:
        with self.lock:
            self.failures += 1
        seconds = HANG_TRIES * self.options.limit if status == "hang" else SHRINK_S
        small = shrink(case, status, worker, self.options.limit, seconds)
        again, repeated = worker.run(small, self.options.limit)
        text = json.dumps(small, separators=(",", ":"))
        device = "" if self.options.device == "cpu" else f" --device={self.options.device}"
        with self.lock:
            say(f"{status.upper()}: case {number} of seed {self.options.seed}: {detail}")
            if again == status and repeated != detail:
                say(f"  shrunk: {repeated}")
            say(f"  python -m tests.fuzz{device} --repro='{text}'")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to draw cases")
    parser.add_argument("--seed", type=int, help="of all cases; a fresh one when left out")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--processes", type=int, default=1, help="workers at the same time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until a case hangs")
    parser.add_argument("--repro", help="run one case that a failure printed")
    parser.add_argument("--plant", choices=["wrong", "hang"], help="a defect that must be found")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    if options.worker:
        work(options.device, options.plant)
        return 0
    if options.repro:
        worker = Worker(options.device, options.plant)
        status, detail = worker.run(json.loads(options.repro), options.limit)
        worker.stop()
        say(f"{status}: {detail}" if detail else status)
        return 0 if status in FINE else 1
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    say(f"seed {options.seed}, {options.device}, {options.processes} processes")
    session = Session(options, cases.kernel_names())
    threads = [
        threading.Thread(target=session.drive, args=(index,)) for index in range(options.processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(session.counts.values())
    shares = ", ".join(f"{count} {name}" for name, count in session.counts.most_common())
    say(f"{total} cases in {time.monotonic() - session.started:.0f} s: {shares or 'none'}")
    return 1 if session.failures or not total else 0


if __name__ == "__main__":
    raise SystemExit(main())
