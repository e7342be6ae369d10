"""Composite runtime objects: stages in order, and stages at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.stage import Constraints, Stage, Tiling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

JointValidator = Callable[[list[Any]], "Constraints | bool"]


@dataclass
class KernelPipeline(Stage):
    """Stages that run one after another; later ones may read the outputs of earlier ones.

    The outputs of the last are the pipeline's; `pipeline_name` is a readable alias of `_name`.
    """

    _name: str = ""
    stages: Sequence[Stage] = ()
    pipeline_name: InitVar[str | None] = None
    output_tensors: list[Tensor] = field(default_factory=list)

    def __post_init__(self, pipeline_name: str | None) -> None:
        self._name = pipeline_name or self._name
        if not self._name:
            raise InvalidArgumentError("_name", "the pipeline's name", repr(self._name))
        if not self.stages:
            raise InvalidArgumentError("stages", "at least one stage", "none")
        self.output_tensors = self.output_tensors or self.stages[-1].output_tensors

    @property
    def name(self) -> str:
        return self._name

    @property
    def children(self) -> Sequence[Stage]:
        return self.stages

    def launch(self) -> None:
        for stage in self.stages:
            stage.launch()

    def predict_us(self, peak_tflops: float, peak_gbps: float) -> float:
        return sum(stage.predict_us(peak_tflops, peak_gbps) for stage in self.stages)


@dataclass
class ConcurrentKernels(Stage):
    """Independent stages launched on separate CUDA streams so that they can overlap.

    All members wait for what the current stream did before, and the current stream waits for all
    members, so the group behaves like one stage; the fork and join are events, hence a CUDA graph
    can capture it. On the CPU the members run one after another.

    Attributes:
        validate_joint_tiling_fn: given the tilings of all leaf kernels in order, rejects
            combinations that oversubscribe a shared resource.
        stream_priorities: CUDA stream priority per member (lower is more urgent), 0 by default.
    """

    _name: str = ""
    concurrent_kernels: Sequence[Stage] = ()
    validate_joint_tiling_fn: JointValidator | None = None
    stream_priorities: Sequence[int] = ()
    output_tensors: list[Tensor] = field(default_factory=list)
    _streams: list[torch.cuda.Stream] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self._name:
            raise InvalidArgumentError("_name", "the group's name", repr(self._name))
        if not self.concurrent_kernels:
            raise InvalidArgumentError("concurrent_kernels", "at least one stage", "none")
        if self.stream_priorities and len(self.stream_priorities) != len(self.concurrent_kernels):
            expected = f"one per member ({len(self.concurrent_kernels)})"
            raise InvalidArgumentError("stream_priorities", expected, len(self.stream_priorities))
        self.output_tensors = self.output_tensors or [
            tensor for member in self.concurrent_kernels for tensor in member.output_tensors
        ]

    @property
    def name(self) -> str:
        return self._name

    @property
    def children(self) -> Sequence[Stage]:
        return self.concurrent_kernels

    def joint_failures(self, tilings: Sequence[Tiling] | None = None) -> tuple[str, ...]:
        """Why this combination of tilings may not run together; empty when it may."""
        if self.validate_joint_tiling_fn is None:
            return ()
        chosen = list(tilings) if tilings is not None else [k.tiling for k in self.kernels()]
        outcome = self.validate_joint_tiling_fn(chosen)
        if isinstance(outcome, Constraints):
            return outcome.failures
        return () if outcome else (f"{self.name}: validate_joint_tiling_fn rejects the tilings",)

    def launch(self) -> None:
        failures = self.joint_failures()
        if failures:
            raise InvalidArgumentError("tiling", "a joint tiling that fits", "; ".join(failures))
        if self.device_type == "cuda":
            self._launch_on_streams()
        else:
            for member in self.concurrent_kernels:
                member.launch()

    def _launch_on_streams(self) -> None:
        import torch

        current = torch.cuda.current_stream()
        if not self._streams:
            priorities = self.stream_priorities or [0] * len(self.concurrent_kernels)
            self._streams = [torch.cuda.Stream(priority=p) for p in priorities]
        fork = torch.cuda.Event()
        fork.record(current)
        for member, stream in zip(self.concurrent_kernels, self._streams, strict=True):
            stream.wait_event(fork)
            with torch.cuda.stream(stream):
                member.launch()
            join = torch.cuda.Event()
            join.record(stream)
            current.wait_event(join)

    def predict_us(self, peak_tflops: float, peak_gbps: float) -> float:
        """Perfect overlap: neither the tensor cores nor the memory wait for the other member.

        A member that is itself a pipeline cannot finish before its own stages did, hence the
        maximum with the members' own times.
        """
        alone = max(m.predict_us(peak_tflops, peak_gbps) for m in self.concurrent_kernels)
        return max(self.cost().time_us(peak_tflops, peak_gbps), alone)
