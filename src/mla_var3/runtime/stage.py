"""What a plan builds: runtime objects that can be launched, tuned, compiled and predicted; tilings.

`Stage` is the interface of all of them. `KernelStage` is a leaf, one GPU kernel; the language
wrappers (`CtKernel`, `CuteKernel`) derive from it. `KernelPipeline` and `ConcurrentKernels` in
`composite.py` nest stages in any way.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.op.cost import Cost

if TYPE_CHECKING:
    from torch import Tensor


HINT_FIELDS = ("num_ctas", "occupancy", "num_worker_warps", "opt_level")
"""Tiling fields that are compiler hints rather than tile sizes."""


class Constraints:
    """The outcome of `Tiling.validate`: true when every constraint holds, and says which do not.

    A tiling lists its rules once, as (holds, message) pairs; the autotuner uses the truth value,
    error messages use the texts.
    """

    def __init__(self, *rules: tuple[bool, str]) -> None:
        self.failures = tuple(message for holds, message in rules if not holds)

    def __bool__(self) -> bool:
        return not self.failures

    def __repr__(self) -> str:
        return f"Constraints(failures={list(self.failures)!r})"


@dataclass
class Tiling:
    """Base of all tilings. Every field is a command line option of the kernel."""

    def validate(self, pd: Any) -> Constraints | bool:
        """Whether this tiling is legal for the plan `pd`; the one place for its constraints."""
        return True

    def hints(self) -> dict[str, int]:
        """The compiler hints among the fields, those that are set."""
        found = {name: getattr(self, name, None) for name in HINT_FIELDS}
        return {name: value for name, value in found.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def label(self) -> str:
        """Short text for tables and progress bars: the fields that are set."""
        return " ".join(f"{k}={v}" for k, v in self.to_dict().items() if v is not None)


T = TypeVar("T", bound=Tiling)


def tiling_from_dict(cls: type[T], values: dict[str, Any]) -> T:
    """Rebuild a tiling from `to_dict`; refuses unknown or missing fields."""
    names = {f.name for f in dataclasses.fields(cls)}
    if set(values) != names:
        raise InvalidArgumentError("tiling", f"the fields {sorted(names)}", sorted(values))
    return cls(**values)


def constraint_failures(tiling: Tiling, pd: Any) -> tuple[str, ...]:
    """The constraints of `tiling` that do not hold for the plan `pd`."""
    outcome = tiling.validate(pd)
    if isinstance(outcome, Constraints):
        return outcome.failures
    return () if outcome else (f"{type(tiling).__name__}.validate rejects {tiling.label()}",)


def require_valid(tiling: Tiling, pd: Any) -> None:
    """Raise an error naming the tiling and every constraint that does not hold."""
    failures = constraint_failures(tiling, pd)
    if failures:
        got = f"{tiling.label()}: " + "; ".join(failures)
        raise InvalidArgumentError("tiling", "a legal tiling", got)


def is_power_of_two(value: int) -> bool:
    """Tile sides of cuTile are powers of two."""
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel compiled ahead of time for one target.

    `artifacts` are other files worth keeping, by file name; `dynamic_shared_bytes` is the shared
    memory per CTA that the launch asks for beside what the machine code itself declares.
    """

    target: str
    cubin: bytes
    seconds: float
    artifacts: dict[str, bytes] = field(default_factory=dict)
    dynamic_shared_bytes: int = 0


class Stage(ABC):
    """A runtime object: a kernel, or stages arranged in order or at the same time."""

    output_tensors: list[Tensor]

    @property
    @abstractmethod
    def name(self) -> str:
        """Id of the stage, used in reports, NVTX ranges and file names."""

    @abstractmethod
    def launch(self) -> None:
        """Run once: on the current CUDA stream, or, for CPU tensors, in the interpreter."""

    @property
    def children(self) -> Sequence[Stage]:
        """The stages directly below, in launch order; none below a kernel."""
        return ()

    def kernels(self) -> Iterator[KernelStage]:
        """The leaf kernels in launch order."""
        for child in self.children:
            yield from child.kernels()

    @abstractmethod
    def predict_us(self, peak_tflops: float, peak_gbps: float) -> float:
        """Roofline time in microseconds."""

    def cost(self) -> Cost:
        """Total FLOPs and bytes of all kernels."""
        return sum((kernel.cost() for kernel in self.kernels()), Cost(0.0, 0.0))

    def tilings(self) -> dict[str, Tiling]:
        """The active tiling of every kernel, by the names of `by_unique_name`."""
        return {name: kernel.tiling for name, kernel in by_unique_name(self.kernels()).items()}

    @property
    def device_type(self) -> str:
        """Where the tensors live: "cuda", "cpu" or, for an empty plan, "meta"."""
        return next(iter(self.kernels())).device_type


S = TypeVar("S", bound=Stage)


def by_unique_name(stages: Iterable[S]) -> dict[str, S]:
    """Stages by name; one that runs twice gets a number, since each run counts for itself."""
    found: dict[str, S] = {}
    for stage in stages:
        name, number = stage.name, 2
        while name in found:
            name, number = f"{stage.name}.{number}", number + 1
        found[name] = stage
    return found


def call_cost(
    function: Callable[..., tuple[float, float]], inputs: Sequence[Tensor], tiling: Any
) -> tuple[float, float]:
    """FLOPs and bytes by a function of the tiling, or of the inputs and the tiling."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.name == "tiling" and p.kind is p.KEYWORD_ONLY for p in parameters):
        return function(*inputs, tiling=tiling)
    return function(tiling)


@dataclass
class KernelStage(Stage):
    """One GPU kernel with its arguments; the part that does not depend on the language.

    Attributes:
        kernel_fn: the decorated kernel function; its name is the stage's name.
        tiling: the active tiling.
        autotune_configs: candidate tilings.
        algorithmic_flops_bytes_fn: tiling -> (FLOPs, bytes) for the roofline; a function with a
            keyword-only argument `tiling` gets the input tensors as well.
        plan: the plan that built it; tilings are validated against it. `KernelPlan.plan` sets it
            where the constructor got none.
    """

    kernel_fn: Any
    tiling: Any
    input_tensors: list[Tensor]
    output_tensors: list[Tensor]
    algorithmic_flops_bytes_fn: Callable[..., tuple[float, float]]
    autotune_configs: Sequence[Any] = ()
    plan: Any = field(default=None, kw_only=True)

    language = ""
    runs_on_cpu: ClassVar[bool] = True
    """Whether the language has an interpreter for CPU tensors."""

    def cost(self) -> Cost:
        flops, nbytes = call_cost(self.algorithmic_flops_bytes_fn, self.input_tensors, self.tiling)
        return Cost(float(flops), float(nbytes))

    def predict_us(self, peak_tflops: float, peak_gbps: float) -> float:
        return self.cost().time_us(peak_tflops, peak_gbps)

    def kernels(self) -> Iterator[KernelStage]:
        yield self

    @property
    def device_type(self) -> str:
        return self.output_tensors[0].device.type

    def launch(self) -> None:
        require_valid(self.tiling, self.plan)
        if self.device_type == "meta":
            raise UnsupportedError(
                f"{self.name}: planned without tensors (device 'meta'); use "
                "plan(*prepare_inputs(device)) to run it"
            )
        if self.device_type == "cuda":
            self._launch_cuda()
        else:
            self._launch_cpu()

    def require_target(self, target: str, device: str) -> None:
        """Refuse a GPU that this kernel cannot run on; none by default."""

    def mlir_text(self, compiled: CompiledKernel) -> str | None:
        """The compiler's input as MLIR text, None where the toolchain gives none."""
        return None

    def why_no_mlir(self) -> str | None:
        """Why the compiled artifacts hold no MLIR text; None when they do."""
        return "its language gives none"

    @abstractmethod
    def _launch_cuda(self) -> None:
        """Launch on the current CUDA stream."""

    @abstractmethod
    def _launch_cpu(self) -> None:
        """Run on CPU tensors, or raise UnsupportedError."""

    @abstractmethod
    def compile(self, target: str, tiling: Any = None) -> CompiledKernel:
        """Compile for a target without needing a GPU; raises KernelCompileError."""

    @abstractmethod
    def source_files(self) -> list[Path]:
        """The source files whose content decides what the kernel does, for cache keys."""
