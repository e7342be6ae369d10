"""The compile cache of CuTe DSL kernels: what a compiled program is, its key and its file.

An entry is one zip file `cute-compile/<kernel>/<key>.zip` below the cache folder, with the object
file (host code and machine code), the cubin, the PTX and the full key. A damaged entry fails the
checksums of the format; it counts as missing and is replaced. Files are written atomically, so
several processes may use one folder.

Reloading an entry neither traces nor compiles: the object is linked into the process. The object
holds host code for one kind of machine, so the host is part of the key.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import io
import json
import logging
import platform
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.cute.arguments import ArgumentKind
from mla_var3.runtime.paths import cache_root, write_atomic

log = logging.getLogger(__name__)

_BEGAN = time.time()
"""Kernels import this module, if indirectly, before they are defined themselves."""
_FORMAT = 3
_KEY, _OBJECT, _CUBIN, _PTX = "key.json", "program.o", "program.cubin", "program.ptx"


@dataclass(frozen=True)
class CompiledProgram:
    """A host function with its kernels, compiled for one architecture.

    `object_code` holds host and machine code, `cubin` the latter alone; `dynamic_shared_bytes` is
    the most shared memory per CTA that a launch asks for.
    """

    name: str
    arch: str
    object_code: bytes
    cubin: bytes
    ptx: str
    seconds: float
    dynamic_shared_bytes: int


@dataclass(frozen=True)
class ProgramKey:
    """Everything that decides what a compiled program is.

    Attributes:
        fields: what the digest is made of.
        changed: source files that changed after this process began. It may have imported what they
            held before, so what it compiles is not what the key says.
    """

    name: str
    fields: dict[str, Any]
    changed: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        text = json.dumps(self.fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def symbol(self) -> str:
        """The name of the program in its object file."""
        return f"hyper_mla_{self.digest}"

    @property
    def path(self) -> Path:
        return cache_root() / "cute-compile" / self.name / f"{self.digest}.zip"


def program_key(
    name: str,
    host: Any,
    kinds: Sequence[ArgumentKind],
    opt_level: int | None,
    arch: str,
    sources: Sequence[Path],
    toolchain: str,
) -> ProgramKey:
    """The key of a program."""
    fields = {
        "format": _FORMAT,
        "kernel": name,
        "host": host_identity(host),
        "arguments": [str(kind) for kind in kinds],
        "opt_level": opt_level,
        "arch": arch,
        "sources": [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in sources],
        "toolchain": toolchain,
        "machine": host_machine(),
    }
    # A time in the future is that of another clock.
    changed = [path.name for path in sources if _BEGAN < path.stat().st_mtime <= time.time()]
    return ProgramKey(name, fields, tuple(changed))


def host_identity(host: Any, outer: tuple[Any, ...] = ()) -> dict[str, Any]:
    """A host function by name, with every value that it carries into the trace.

    The compiler sees such a value as a constant, so two functions that differ in one are two
    programs.
    """
    carried: dict[Any, Any]
    if isinstance(host, functools.partial):
        carried = {"function": host.func, "arguments": host.args, **host.keywords}
        name = _type_name(type(host))
    elif inspect.isfunction(host) or inspect.ismethod(host):
        function = inspect.unwrap(host)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        carried = {name: cell.cell_contents for name, cell in cells}
        carried.update(enumerate(function.__defaults__ or ()))
        carried.update(function.__kwdefaults__ or {})
        if inspect.ismethod(host):
            owner = host.__self__
            carried["self"] = owner if isinstance(owner, type) else host_identity(owner, outer)
        name = f"{function.__module__}.{function.__qualname__}"
    else:
        # None, or the dict and what is in slots.
        state = host.__getstate__()
        parts = state if isinstance(state, tuple) else (state,)
        carried = {name: value for part in parts if part for name, value in part.items()}
        name = _type_name(type(host))
    if any(host is carrier for carrier in outer):
        return {"name": name}
    outer = (*outer, host)
    values = {str(k): _comparable(v, f"host_fn, value {k!r}", outer) for k, v in carried.items()}
    return {"name": name, "values": values}


def _comparable(value: Any, where: str, outer: tuple[Any, ...]) -> Any:
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, (float, torch.dtype)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{_type_name(type(value))}.{value.name}"
    if isinstance(value, type):
        return _type_name(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if inspect.isfunction(value) or isinstance(value, functools.partial):
        return host_identity(value, outer)
    if isinstance(value, (tuple, list)):
        return [_comparable(item, where, outer) for item in value]
    if isinstance(value, dict):
        return {str(k): _comparable(v, where, outer) for k, v in sorted(value.items(), key=str)}
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"type": _type_name(type(value)), **_comparable(fields, where, outer)}
    raise InvalidArgumentError(
        where,
        "numbers, strings, types, enums, functions, dataclasses or collections of them, "
        "which the compile cache can compare",
        type(value).__name__,
    )


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@functools.cache
def host_machine() -> str:
    """The kind of machine that host code is made for: it may use any feature of this CPU."""
    parts = [sys.platform, platform.machine(), platform.python_version()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts.append(hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:12])
    return " ".join(parts)


def read_entry(key: ProgramKey) -> CompiledProgram | None:
    """The program of a key from the disk; None when there is no valid one."""
    if key.changed:
        return None
    try:
        with zipfile.ZipFile(key.path) as archive:
            stored = json.loads(archive.read(_KEY))
            if stored["key"] != key.fields:
                raise ValueError("it has another key")
            return CompiledProgram(
                name=key.name,
                arch=str(key.fields["arch"]),
                object_code=archive.read(_OBJECT),
                cubin=archive.read(_CUBIN),
                ptx=archive.read(_PTX).decode(),
                seconds=float(stored["seconds"]),
                dynamic_shared_bytes=int(stored["dynamic_shared_bytes"]),
            )
    except OSError:
        return None
    except Exception as error:  # damage may show in any layer of the format
        log.warning("%s: ignored and compiled again, %s", key.path, error)
        return None


def write_entry(key: ProgramKey, program: CompiledProgram) -> None:
    """Keep a program for later processes; a folder that cannot be written to is only reported."""
    if key.changed:
        files = ", ".join(key.changed)
        message = "%s: the compiled kernel is not kept, %s changed after this process began"
        log.warning(message, key.name, files)
        return
    figures = {name: getattr(program, name) for name in ("seconds", "dynamic_shared_bytes")}
    text = json.dumps({"key": key.fields, **figures}, sort_keys=True, indent=1)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_KEY, text)
        archive.writestr(_OBJECT, program.object_code)
        archive.writestr(_CUBIN, program.cubin)
        archive.writestr(_PTX, program.ptx)
    try:
        write_atomic(key.path, buffer.getvalue())
    except OSError as error:
        log.warning("%s: the compiled kernel is not kept, %s", key.path, error)
