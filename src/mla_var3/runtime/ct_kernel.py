"""The cuTile runtime: launch a `@ct.kernel` on a GPU or on the CPU, compile it for any target.

This module and the interpreter are the only host code that knows cuTile.
"""

from __future__ import annotations

import copy
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cuda.tile as ct
import torch
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    KernelSignature,
    ScalarConstraint,
    export_kernel,
)

from mla_var3.errors import InvalidArgumentError, KernelCompileError, UnsupportedError
from mla_var3.runtime.compile import first_lines, quiet_compiler
from mla_var3.runtime.environment import find_tool, run_tool
from mla_var3.runtime.paths import kernel_source_files
from mla_var3.runtime.stage import CompiledKernel, KernelStage, require_valid

LANGUAGE = "cutile-dsl"

_DTYPES = {torch.bool: ct.bool_} | {
    getattr(torch, name): getattr(ct, name)
    for name in (
        *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}
_DISASSEMBLER = "tileirdisasm"
_TMA_ALIGNMENT = 16
_SHAPE_DIVISOR = 16

Grid = tuple[int, ...]


@dataclass
class CtKernel(KernelStage):
    """A cuTile kernel; its launch grid and its arguments, in order, follow from the tiling."""

    grid_fn: Callable[[Any], Grid] = field(kw_only=True)
    args_fn: Callable[[Any], Sequence[Any]] = field(kw_only=True)
    _prepared: tuple[Any, tuple[Any, Grid, tuple[Any, ...]]] | None = field(
        default=None, init=False, repr=False
    )

    language = LANGUAGE

    @property
    def name(self) -> str:
        return str(self.kernel_fn._pyfunc.__name__)

    def _prepare(self) -> tuple[Any, Grid, tuple[Any, ...]]:
        """Kernel with hints, grid and arguments; kept while the tiling stays the same.

        Building them costs more host time than the launch itself, and a kernel with other hints is
        another object with a compile cache of its own.
        """
        if self._prepared is None or self._prepared[0] != self.tiling:
            require_valid(self.tiling, self.plan)
            kernel = hinted_kernel(self.kernel_fn, self.tiling.hints())
            launchable = (kernel, self.grid_fn(self.tiling), tuple(self.args_fn(self.tiling)))
            self._prepared = (copy.copy(self.tiling), launchable)
        return self._prepared[1]

    def launch(self) -> None:
        if self.device_type == "cuda":
            self._launch_cuda()  # validates a tiling once
        else:
            super().launch()

    def _launch_cuda(self) -> None:
        kernel, grid, args = self._prepare()
        _launch_on_gpu(kernel, grid, args)

    def _launch_cpu(self) -> None:
        from mla_var3.runtime import interpreter

        kernel, grid, args = self._prepare()
        interpreter.launch(grid, kernel, args)

    def compile(self, target: str, tiling: Any = None) -> CompiledKernel:
        tiling = self.tiling if tiling is None else tiling
        require_valid(tiling, self.plan)
        kernel = hinted_kernel(self.kernel_fn, tiling.hints())
        args = tuple(self.args_fn(tiling))
        start = time.perf_counter()
        try:
            with quiet_compiler():
                signature = signature_of(kernel, args)
                cubin = _export(kernel, signature, target, "cubin")
                bytecode = _export(kernel, signature, target, "tileir_bytecode")
        except Exception as error:
            raise KernelCompileError(f"{self.name} for {target}: {first_lines(error)}") from error
        return CompiledKernel(
            target=target,
            cubin=cubin,
            seconds=time.perf_counter() - start,
            artifacts={f"{self.name}.tileirbc": bytecode},
        )

    def mlir_text(self, compiled: CompiledKernel) -> str | None:
        tool = find_tool(_DISASSEMBLER)
        if tool is None:
            return None
        with tempfile.NamedTemporaryFile(suffix=".tileirbc") as file:
            file.write(compiled.artifacts[f"{self.name}.tileirbc"])
            file.flush()
            return run_tool(tool, file.name)

    def why_no_mlir(self) -> str | None:
        if find_tool(_DISASSEMBLER) is None:
            return f"{_DISASSEMBLER}, which comes with CUDA 13.4, is not installed"
        return None

    def source_files(self) -> list[Path]:
        return kernel_source_files(self.kernel_fn._pyfunc)


def _launch_on_gpu(kernel: Any, grid: Grid, args: Sequence[Any], early: bool = False) -> None:
    stream = torch.cuda.current_stream()
    try:
        ct.launch(stream, grid, kernel, tuple(args), programmatic_dependent_launch=early)
    except (ct.TileError, OSError) as error:  # compiled at the first launch, in temporary files
        name = kernel._pyfunc.__name__
        raise KernelCompileError(f"{name}: {first_lines(error)}") from error
    except (OverflowError, ValueError) as error:  # a stride or a grid beyond what it takes
        if isinstance(error, ValueError) and "Grid" not in str(error):
            raise
        raise UnsupportedError(f"{kernel._pyfunc.__name__}: {first_lines(error)}") from error


class Launch(NamedTuple):
    """A launch that is no stage of a plan; `constants` are its last arguments, compiled in.

    An `early` one may begin before the kernel in front of it on the stream has ended (programmatic
    dependent launch, from compute capability 9.0 on), and waits for it in its own code.
    """

    kernel: Any
    grid: Grid
    operands: tuple[Any, ...]
    constants: tuple[Any, ...]
    early: bool = False

    @property
    def args(self) -> tuple[Any, ...]:
        return (*self.operands, *self.constants)


def specialisation(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a kernel is compiled for of a tensor: the same for others compiles nothing."""
    sizes = [size % _SHAPE_DIVISOR for size in tensor.shape]
    return (tensor.dtype, tensor.stride(), tensor.data_ptr() % _TMA_ALIGNMENT, *sizes)


def launch_kernel(launch: Launch) -> None:
    """Launch where the tensors are; CPU tensors run the kernel in the interpreter."""
    if any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in launch.operands):
        _launch_on_gpu(launch.kernel, launch.grid, launch.args, launch.early)
        return
    from mla_var3.runtime import interpreter

    interpreter.launch(launch.grid, launch.kernel, launch.args)


_hinted: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[Any, Any]] = {}


def hinted_kernel(kernel_fn: Any, hints: dict[str, int]) -> Any:
    """The kernel with compiler hints, the same object for the same hints, forever.

    A kernel object owns the code it has loaded onto the GPU. A CUDA graph that captured its launch
    keeps using that code after the plan is gone, so the object must not be collected; keeping it
    also means that another plan with the same hints does not compile again.
    """
    key = (id(kernel_fn), tuple(sorted(hints.items())))
    if key not in _hinted:
        try:
            made = (kernel_fn, kernel_fn.replace_hints(**hints))
        except (TypeError, ValueError) as error:  # cuTile checks them, and names the hint
            raise InvalidArgumentError("tiling", "compiler hints of cuTile", error) from None
        _hinted.setdefault(key, made)  # of two threads the first has it
    return _hinted[key][1]


def signature_of(kernel: Any, args: Sequence[Any]) -> KernelSignature:
    """The compile-time signature of a launch, also for meta and CPU tensors.

    For CUDA tensors this is what the just-in-time compiler itself derives. Elsewhere the same rules
    are applied to shapes and strides, because cuTile's own function needs a driver.
    """
    convention = CallingConvention.cutile_python_v2()
    if all(a.is_cuda for a in args if isinstance(a, torch.Tensor)):
        return KernelSignature.from_kernel_args(kernel, tuple(args), convention)
    annotations = kernel._annotated_function.parameter_annotations
    if len(annotations) != len(args):
        raise InvalidArgumentError("args_fn", f"{len(annotations)} kernel arguments", len(args))
    parameters = [
        arg if annotation.constant else _constraint(arg, annotation)
        for arg, annotation in zip(args, annotations, strict=True)
    ]
    signature = KernelSignature(parameters, convention)
    return signature.with_mangled_symbol(kernel._pyfunc.__name__)


def _constraint(arg: Any, annotation: Any) -> Any:
    array, scalar = annotation.array, annotation.scalar
    if isinstance(arg, torch.Tensor):
        return _array_constraint(arg, ct.int32 if array is None else array.index_dtype)
    if isinstance(arg, bool):
        return ScalarConstraint(ct.bool_)
    if isinstance(arg, int):
        return ScalarConstraint(ct.int32 if scalar is None else scalar.dtype)
    if isinstance(arg, float):
        return ScalarConstraint(ct.float32)
    raise InvalidArgumentError("args_fn", "tensors, ints, floats or constants", type(arg).__name__)


def _array_constraint(tensor: torch.Tensor, index_dtype: Any) -> ArrayConstraint:
    if tensor.dtype not in _DTYPES:
        raise InvalidArgumentError("args_fn", "tensors of dtypes that cuTile has", tensor.dtype)
    strides = tensor.stride()
    per_16_bytes = max(1, _TMA_ALIGNMENT // tensor.element_size())
    return ArrayConstraint(
        _DTYPES[tensor.dtype],
        tensor.ndim,
        index_dtype=index_dtype,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=tuple(1 if stride == 1 else None for stride in strides),
        stride_divisible_by=tuple(
            per_16_bytes if stride != 1 and stride % per_16_bytes == 0 else 1 for stride in strides
        ),
        shape_divisible_by=tuple(
            _SHAPE_DIVISOR if size % _SHAPE_DIVISOR == 0 else 1 for size in tensor.shape
        ),
        base_addr_divisible_by=_TMA_ALIGNMENT,
    )


def _export(kernel: Any, signature: KernelSignature, target: str, output_format: str) -> bytes:
    buffer = io.BytesIO()
    export_kernel(kernel, [signature], buffer, gpu_code=target, output_format=output_format)
    return buffer.getvalue()
