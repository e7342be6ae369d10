"""A record that its owner can send: device, versions and figures, nothing private.

Of the environment only the facts named here stay. In texts, such as the reason of a failure, paths
and the names of user and machine are replaced.
"""

from __future__ import annotations

import getpass
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mla_var3.bench.record import MEASURED, BenchRecord
from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.paths import cache_root, output_root

FILE_NAME = "contribution.json"

_FACTS = ("date", "versions", "cuda_runtime", "arch")
_GPU_FACTS = (
    "name", "compute_capability", "sm_count", "memory_bytes", "l2_bytes", "driver", "sm_clock_mhz",
    "max_sm_clock_mhz", "memory_clock_mhz", "power_limit_w", "max_power_limit_w",
)  # fmt: skip
_PATH_OPTIONS = ("peer_libs", "out_dir", "records", "resume", "against", "config")
_PATH = re.compile(r"(?<![\w.<])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@%,~-]+){2,}[/\\]?")


def contribution(record: BenchRecord) -> BenchRecord:
    """The measured rows of a record, without anything private.

    Raises:
        InvalidArgumentError: Nothing was measured.
    """
    rows = [row for row in record.rows if row.kind == MEASURED]
    if not rows:
        raise InvalidArgumentError("contribute", "measured rows", "predictions; it needs a GPU")
    gpu = record.environment.get("gpu") or {}
    environment: dict[str, Any] = {name: record.environment.get(name) for name in _FACTS}
    environment["gpu"] = {name: gpu[name] for name in _GPU_FACTS if name in gpu}
    environment["command"] = public_command(str(record.environment.get("command") or ""))
    return BenchRecord(
        record.suite,
        environment,
        [
            replace(
                row,
                reason=public(row.reason),
                note=public(row.note),
                command=public_command(row.command),
            )
            for row in rows
        ],
        public(record.absent),
        public(record.settings),
        public(record.notes),
    )


def public(value: Any) -> Any:
    """The same value with paths and the names of user and machine replaced in every text."""
    if isinstance(value, dict):
        return {public(key): public(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(each) for each in value]
    if not isinstance(value, str):
        return value
    for path in _own_paths():
        value = value.replace(path, "<path>")
    value = _PATH.sub("<path>", value)
    for kind, name in _own_names():
        value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", f"<{kind}>", value)
    return value


def public_command(command: str) -> str:
    """A command line without the program's path and without options that name files."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    if "bench" in words:
        words = ["hyper-mla", *words[words.index("bench") :]]
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word[2:].partition("=")[0].replace("-", "_") in _PATH_OPTIONS
        if not dropping:
            kept.append(public(word))
    return shlex.join(kept)


def _own_paths() -> Iterator[str]:
    """Folders whose names may say who or where the user is, the longest first."""
    folders = {Path.home(), Path.cwd(), Path(sys.prefix), Path(__file__).parents[2]}
    folders |= {output_root(), cache_root(), Path(tempfile.gettempdir())}
    names = {str(folder) for folder in folders} - {"/", "."}
    yield from sorted(names, key=len, reverse=True)


def _own_names() -> Iterator[tuple[str, str]]:
    with suppress(KeyError, OSError):  # a user id may have no name
        yield "user", getpass.getuser()
    host = platform.node()
    for name in dict.fromkeys((host, host.partition(".")[0])):
        if name:
            yield "machine", name
