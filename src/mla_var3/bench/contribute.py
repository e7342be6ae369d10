"""A record that its owner can send: device, versions and figures, nothing private.

What could name a user, a machine or a folder is left out: free texts, rows without a time, all of
the environment but the facts named here, and options that name files.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from mla_var3.bench.record import MEASURED, OK, BenchRecord
from mla_var3.errors import InvalidArgumentError

FILE_NAME = "contribution.json"

_FACTS = ("date", "versions", "cuda_runtime", "arch")
_GPU_FACTS = (
    "name", "compute_capability", "sm_count", "memory_bytes", "l2_bytes", "driver", "sm_clock_mhz",
    "max_sm_clock_mhz", "memory_clock_mhz", "power_limit_w", "max_power_limit_w",
)  # fmt: skip
_FLAGS = ("quick", "tune")
_OPTIONS = (
    "b", "s", "t", "h", "n", "version", "kernels", "backends", "shapes", "dtype", "cache_dtype",
    "causal", "model", "tp", "rounds", "max_seconds", *_FLAGS,
)  # fmt: skip
"""Options of `hyper-mla bench` that name no file; those of `_FLAGS` have no value."""


def contribution(record: BenchRecord) -> BenchRecord:
    """The measured rows of a record, without anything private."""
    rows = [row for row in record.rows if row.kind == MEASURED and row.status == OK]
    if not rows:
        raise InvalidArgumentError("contribute", "measured rows", "none; it needs a GPU")
    known, suite = record.environment, record.suite
    gpu = known.get("gpu") or {}
    environment: dict[str, Any] = {name: known.get(name) for name in _FACTS}
    environment["gpu"] = {name: gpu[name] for name in _GPU_FACTS if name in gpu}
    environment["command"] = public_command(known.get("command"), suite)
    rows = [replace(row, note="", command=public_command(row.command, suite)) for row in rows]
    return BenchRecord(suite, environment, rows, settings=record.settings)


def public_command(command: str | None, suite: str) -> str:
    """The command that repeats a suite, with those options that name no file."""
    try:
        words = shlex.split(command or "")
    except ValueError:
        words = []
    kept: list[str] = []
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        name, has_value, _ = word.removeprefix("--").replace("-", "_").partition("=")
        if not word.startswith("--") or name not in _OPTIONS:
            continue
        kept.append(word)
        if not has_value and name not in _FLAGS and not following.startswith("--"):
            kept.append(following)
    return shlex.join(["hyper-mla", "bench", suite, *kept])
