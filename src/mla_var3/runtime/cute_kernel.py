"""The CuTe DSL runtime: compile a host function once for all shapes, and launch it cheaply.

This module is the only host code that imports CuTe DSL. A kernel of this repository gives a
`host_fn`, which makes the `@cute.jit` host function for a tiling, and an `args_fn` with its
arguments (`cute/arguments.py`). A program is compiled once per host function, argument kinds and
architecture, is cached on the disk (`cute/cache.py`), and stays loaded for the life of the process.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import importlib.metadata
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_ptr
from cutlass.runtime import find_runtime_libraries, load_module, make_fake_stream

from mla_var3.errors import InvalidArgumentError, KernelCompileError, UnsupportedError
from mla_var3.runtime.compile import first_lines, quiet_compiler
from mla_var3.runtime.cute import arguments as cute_arguments
from mla_var3.runtime.cute import cache as cute_cache
from mla_var3.runtime.cute.arguments import ArgumentKind, Int64Arg, kinds_of
from mla_var3.runtime.cute.cache import CompiledProgram, ProgramKey
from mla_var3.runtime.cute.launch import (
    CuteProgram,
    arch_of_device,
    arch_of_target,
    current_device,
    require_arch,
    short_entry,
)
from mla_var3.runtime.environment import SOURCE_LINES
from mla_var3.runtime.paths import LANGUAGE_DISTRIBUTIONS, traced_source_files
from mla_var3.runtime.stage import CompiledKernel, KernelStage, require_valid

__all__ = ["CuteKernel", "CuteProgram", "Int64Arg", "program_for", "require_arch"]

log = logging.getLogger(__name__)

LANGUAGE = "cute-dsl"

_DISTRIBUTION = LANGUAGE_DISTRIBUTIONS[LANGUAGE]
_NUMBERS = {
    cute_arguments.INT32: cutlass.Int32,
    cute_arguments.INT64: cutlass.Int64,
    cute_arguments.FLOAT32: cutlass.Float32,
}

_lock = threading.RLock()
"""One compilation at a time: tracing and the redirection of the compiler's output are global."""
_compiled: dict[str, CompiledProgram] = {}
_programs: dict[tuple[str, int], CuteProgram] = {}
"""Loaded programs by key and device. They are never unloaded: a CUDA graph that captured a launch
uses the machine code after the plan is gone."""


@dataclass
class CuteKernel(KernelStage):
    """A CuTe DSL kernel with the host function that launches it.

    Give either `host_fn` and `args_fn`, from which the launch is derived, or a `launch_fn` that
    does everything itself. Only the former can be compiled without a GPU, is cached on the disk and
    launches with prepared arguments.

    Attributes:
        launch_fn: tiling -> None; launches on the current CUDA stream.
        host_fn: tiling -> the host function (or an object whose `__call__` is one), specialised for
            the tiling. Values that it carries are constants of the program.
        args_fn: tiling -> arguments of the host function in order, without the stream.
        requires_arch: architecture that the kernel is written for, for example "sm_90a"; empty for
            a kernel that runs on any.
    """

    launch_fn: Callable[[Any], None] | None = field(default=None, kw_only=True)
    host_fn: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    args_fn: Callable[[Any], Sequence[Any]] | None = field(default=None, kw_only=True)
    requires_arch: str = field(default="", kw_only=True)
    _prepared: tuple[Any, Callable[[], None]] | None = field(default=None, init=False, repr=False)

    language = LANGUAGE
    runs_on_cpu = False

    def __post_init__(self) -> None:
        if (self.host_fn is None) != (self.args_fn is None):
            missing = "args_fn" if self.args_fn is None else "host_fn"
            raise InvalidArgumentError(missing, "host_fn and args_fn together", "one of them")
        if (self.launch_fn is None) == (self.host_fn is None):
            got = "neither" if self.launch_fn is None else "both"
            raise InvalidArgumentError("launch_fn", "either launch_fn or host_fn and args_fn", got)

    @property
    def name(self) -> str:
        return str(self.kernel_fn.__name__)

    # -- launching -------------------------------------------------------------------------------

    def launch(self) -> None:
        if self.device_type != "cuda" or self.launch_fn is not None:
            super().launch()
            return
        # Arguments are prepared anew when the tiling changes.
        prepared = self._prepared
        if prepared is None or prepared[0] != self.tiling:
            require_valid(self.tiling, self.plan)
            host, args = self._host_and_args(self.tiling)
            device = self.output_tensors[0].device
            require_arch(self.name, self.requires_arch, device)
            program = program_for(self.kernel_fn, host, args, self.tiling, device)
            self._prepared = prepared = (copy.copy(self.tiling), program.bind(*args))
        prepared[1]()

    def _launch_cuda(self) -> None:
        require_arch(self.name, self.requires_arch, current_device())
        assert self.launch_fn is not None
        self.launch_fn(self.tiling)

    def require_target(self, target: str, device: str) -> None:
        if self.requires_arch and arch_of_target(target) != self.requires_arch:
            raise UnsupportedError(
                f"{self.name}: expected a GPU of {self.requires_arch}, whose instructions it is "
                f"written with, got {device} ({target})"
            )

    def _launch_cpu(self) -> None:
        kernel_id = getattr(self.plan, "kernel_id", None)
        instead = "--prof_type=static compiles and predicts it here"
        if kernel_id is not None:
            instead += f"; the cutile-dsl version of {kernel_id.design}, if there is one, runs here"
        raise UnsupportedError(
            f"{self.name}: CuTe DSL kernels need a GPU, and the tensors are on the CPU; {instead}"
        )

    # -- compiling -------------------------------------------------------------------------------

    def compile(self, target: str, tiling: Any = None) -> CompiledKernel:
        """Compile for a target; "sm_90" means "sm_90a", whose instructions these kernels use."""
        tiling = self.tiling if tiling is None else tiling
        require_valid(tiling, self.plan)
        arch = arch_of_target(target)
        if self.requires_arch and self.requires_arch != arch:
            raise KernelCompileError(
                f"{self.name} for {target}: expected {self.requires_arch}, whose instructions it "
                f"is written with, got {arch}"
            )
        host, args = self._host_and_args(tiling)
        program = compile_program(self.kernel_fn, host, kinds_of(args), tiling, arch)
        return CompiledKernel(
            target=arch,
            cubin=program.cubin,
            seconds=program.seconds,
            artifacts={f"{self.name}.ptx": program.ptx.encode()},
            dynamic_shared_bytes=program.dynamic_shared_bytes,
        )

    def why_no_mlir(self) -> str | None:
        return "the compile cache of CuTe DSL keeps its PTX and machine code"

    def source_files(self) -> list[Path]:
        return traced_source_files(self.kernel_fn, *filter(None, [self.host_fn]))

    def _host_and_args(self, tiling: Any) -> tuple[Any, tuple[Any, ...]]:
        if self.host_fn is None or self.args_fn is None:
            raise KernelCompileError(
                f"{self.name}: a kernel given as launch_fn is compiled by CuTe DSL at its first "
                "launch; expected host_fn and args_fn to compile it ahead of time"
            )
        return self.host_fn(tiling), tuple(self.args_fn(tiling))


def program_for(
    kernel_fn: Any, host: Any, args: Sequence[Any], tiling: Any, device: torch.device
) -> CuteProgram:
    """The program for these arguments, loaded on a GPU; compiled unless a cache has it.

    Of `kernel_fn`, the `@cute.kernel` function, name and source count; of `args`, the arguments of
    the host function without the stream, only the kinds.

    Raises:
        KernelCompileError: it does not compile.
        UnsupportedError: it cannot be loaded, or a CUDA graph is being captured.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    kinds = kinds_of(args)
    arch = arch_of_device(torch.device("cuda", index))
    key = _key(kernel_fn, host, kinds, tiling, arch)
    with _lock:
        program = _programs.get((key.digest, index))
        if program is None:
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    f"{key.name}: expected one launch before the capture of a CUDA graph, because "
                    "loading machine code is not allowed inside; got the first launch in a capture"
                )
            program = _programs[key.digest, index] = _load(key, host, kinds, index)
    return program


def compile_program(
    kernel_fn: Any, host: Any, kinds: Sequence[ArgumentKind], tiling: Any, arch: str
) -> CompiledProgram:
    """Compile a host function without needing a GPU, unless a cache has it."""
    with _lock:
        return _compile(_key(kernel_fn, host, kinds, tiling, arch), host, kinds)


def _key(
    kernel_fn: Any, host: Any, kinds: Sequence[ArgumentKind], tiling: Any, arch: str
) -> ProgramKey:
    return cute_cache.program_key(
        str(kernel_fn.__name__),
        host,
        kinds,
        getattr(tiling, "opt_level", None),
        arch,
        traced_source_files(kernel_fn, host),
        _toolchain(),
    )


def _toolchain() -> str:
    cuda = f"{cutlass.CUDA_VERSION.major}.{cutlass.CUDA_VERSION.minor}"
    lines = " with source lines" if _source_lines_wanted() else ""
    return f"{_DISTRIBUTION} {importlib.metadata.version(_DISTRIBUTION)} for CUDA {cuda}{lines}"


def _source_lines_wanted() -> bool:
    return os.environ.get(SOURCE_LINES, "").lower() in ("1", "true", "on", "yes")


def _compile(
    key: ProgramKey, host: Any, kinds: Sequence[ArgumentKind], *, again: bool = False
) -> CompiledProgram:
    program = None if again else _compiled.get(key.digest) or cute_cache.read_entry(key)
    if program is None:
        program = _trace_and_compile(key, host, kinds)
        cute_cache.write_entry(key, program)
    _compiled[key.digest] = program
    return program


def _trace_and_compile(
    key: ProgramKey, host: Any, kinds: Sequence[ArgumentKind]
) -> CompiledProgram:
    arch = str(key.fields["arch"])
    start = time.perf_counter()
    try:
        with quiet_compiler(), tempfile.TemporaryDirectory(prefix="hyper-mla-cute-") as folder:
            options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}"
            options += " --generate-line-info" if _source_lines_wanted() else ""
            if (level := key.fields["opt_level"]) is not None:
                options += f" --opt-level {level}"
            arguments = [_placeholder(kind) for kind in kinds]
            with _without_command_line():
                function = cute.compile(host, *arguments, make_fake_stream(), options=options)
            _offer_runtime_symbols()
            return CompiledProgram(
                name=key.name,
                arch=arch,
                object_code=function.dump_to_object(key.symbol),
                cubin=bytes(function.__cubin__),
                ptx=str(function.__ptx__),
                seconds=time.perf_counter() - start,
                dynamic_shared_bytes=_dynamic_shared_bytes(str(function.ir_module)),
            )
    except Exception as error:
        raise KernelCompileError(f"{key.name} for {arch}: {first_lines(error)}") from error


@contextlib.contextmanager
def _without_command_line() -> Iterator[None]:
    """Hide the program's arguments from CuTe DSL.

    On a machine with a GPU it looks for an option `-diagnostic` in `sys.argv` at every compilation,
    and takes `--h=128` for `--help`, which ends the process.
    """
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


_SHARED_FIELD = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : .*"
    r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
)
"""The pointer to the shared-memory field of a launch configuration, in the compiled host code."""


def _dynamic_shared_bytes(host_code: str) -> int:
    """The most shared memory that a launch in the compiled host code asks for.

    The machine code does not say: a CuTe DSL kernel gets all its shared memory at the launch, by a
    constant in the host code. 0 where none is found.
    """
    most = 0
    for function in host_code.split("llvm.func "):
        for place in _SHARED_FIELD.findall(function):
            stored = re.search(rf"llvm\.store (%\w+), {place} : i64", function)
            if stored is None:
                continue
            constant = re.search(rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", function)
            most = max(most, int(constant[1]) if constant else 0)
    return most


def _placeholder(kind: ArgumentKind) -> Any:
    if kind.tag == cute_arguments.ABSENT:
        return None
    if kind.dtype is not None:
        element = getattr(cutlass, cute_arguments.DTYPES[kind.dtype])
        return make_ptr(element, 0, cute.AddressSpace.gmem, assumed_align=kind.alignment)
    return _NUMBERS[kind.tag](0)


@functools.cache
def _offer_runtime_symbols() -> list[ctypes.CDLL]:
    """Load the DSL's runtime library: writing an object file links against it in the process."""
    libraries = find_runtime_libraries(enable_tvm_ffi=False)
    return [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in libraries]


def _link(key: ProgramKey, compiled: CompiledProgram) -> Any:
    """The host function of a compiled program, linked into this process."""
    with quiet_compiler(), tempfile.TemporaryDirectory(prefix="hyper-mla-cute-") as folder:
        path = Path(folder, "program.o")
        path.write_bytes(compiled.object_code)
        return load_module(str(path))[key.symbol]


def _load(key: ProgramKey, host: Any, kinds: Sequence[ArgumentKind], device: int) -> CuteProgram:
    """Link the host code and load the machine code onto the GPU."""
    compiled = _compile(key, host, kinds)
    try:
        function = _link(key, compiled)
    except Exception as error:
        # A valid entry may not link, for example after an update of the system's libraries. It is
        # compiled again once.
        log.warning("%s: compiled again, %s", key.path, first_lines(error))
        function = _link(key, _compile(key, host, kinds, again=True))
    try:
        with torch.cuda.device(device):
            executor = function.to(None)
    except Exception as error:
        raise UnsupportedError(
            f"{key.name}: expected machine code that loads, got {first_lines(error)}"
        ) from error
    entry = short_entry(executor.jit_module.capi_func)
    return CuteProgram(key.name, kinds, device, entry, (function, executor))
