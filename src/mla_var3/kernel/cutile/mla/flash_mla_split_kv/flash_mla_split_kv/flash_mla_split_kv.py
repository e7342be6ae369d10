"""flash_mla_split_kv: latent attention with each request's KV tokens split over several CTAs.

A pipeline of two kernels: `split_kv_partial` computes a partial over each of the `splits` splits of
a request, `split_kv_reduce` merges the partials by LSE. For few requests with long contexts, where
flash_mla has fewer CTAs than the GPU has SMs.

Inputs, outputs, masks, targets and limits are those of flash_mla.

The number of splits follows from the shape and the device's SM count; `--splits` pins it.
Base version. Cost on top of flash_mla: partial outputs in float32 are written and read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from mla_var3.kernel.cutile.mla.flash_mla_split_kv.flash_mla_split_kv.split_kv_partial import (
    CtSplitKVPartial,
    SplitKVPartialTiling,
)
from mla_var3.kernel.cutile.mla.flash_mla_split_kv.flash_mla_split_kv.split_kv_reduce import (
    CtSplitKVReduce,
    SplitKVReduceTiling,
)
from mla_var3.kernel.cutile.mla.latent_plan import LatentInputs, LatentPlan
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_mla_split_kv_cost, split_count
from mla_var3.op.mla.problem import require_int
from mla_var3.runtime.composite import KernelPipeline
from mla_var3.runtime.plan import Tiling

DEFAULT_SM_COUNT = 132
"""SMs assumed where only peaks are known; with a device entry its own count is used."""


@dataclass
class CtFlashMLASplitKV(LatentPlan):
    """Plan of the base version of flash_mla_split_kv."""

    splits: int | None = field(
        default=None, metadata={"help": "splits of each request's tokens; default by shape"}
    )
    tiling: SplitKVPartialTiling = field(default_factory=SplitKVPartialTiling)
    reduce_tiling: SplitKVReduceTiling = field(default_factory=SplitKVReduceTiling)

    targets = (
        "sm_90", "sm_100", "sm_120",
        "sm_80", "sm_86", "sm_87", "sm_89", "sm_103", "sm_110", "sm_121",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splits is not None:
            require_int("splits", self.splits, minimum=1, maximum=self.t, maximum_name="t")

    def _model_fields(self, peak_tflops: float, peak_gbps: float) -> dict[str, Any]:
        return {} if self.splits is not None else {"splits": self._chosen_splits()}

    def cpu_check_plan(self) -> Self:
        small = LatentPlan.cpu_check_plan(self.copy(splits=None))
        return small.copy(splits=None if self.splits is None else min(self.splits, 3, small.t))

    def _default_tiling(self, name: str) -> Tiling | None:
        if name == "tiling":
            return SplitKVPartialTiling.candidates(self)[0]
        return SplitKVReduceTiling(Kc=min(SplitKVReduceTiling.Kc, self.k))

    def _autotune_configs(self) -> Sequence[Tiling]:
        return []

    def cost(self) -> Cost:
        seen = self.problem().within(self.sliding_window)
        return flash_mla_split_kv_cost(seen, self._chosen_splits(), self.token_bytes)

    def _chosen_splits(self) -> int:
        return self.splits or split_count(
            self.problem().within(self.sliding_window),
            self.target.sm_count(DEFAULT_SM_COUNT),
            rows_per_tile=self.tiling.Bm,
            kv_tile=self.tiling.Bn,
        )

    def _stage_fields(self) -> dict[str, Any]:
        return {**self.params(), "splits": self._chosen_splits(), "target": self.target}

    def _partial_plan(self) -> CtSplitKVPartial:
        return CtSplitKVPartial(**self._stage_fields(), tiling=self.tiling)

    def _reduce_plan(self, lead: tuple[int, int]) -> CtSplitKVReduce:
        """The merge of partials [b, splits, s, ...]; packed queries are one request with all."""
        latent = ("page", "sliding_window", "cache_dtype")
        fields = {name: value for name, value in self._stage_fields().items() if name not in latent}
        if lead != (self.b, self.s):
            fields |= {"b": lead[0], "s": lead[1], "lengths": None}
        return CtSplitKVReduce(**fields, tiling=self.reduce_tiling)

    def plan(self, *inputs: Tensor | None) -> KernelPipeline:
        partial = self._partial_plan().plan(*inputs)
        requests, _, tokens, *_ = partial.output_tensors[0].shape
        reduce = self._reduce_plan((requests, tokens)).plan(*partial.output_tensors)
        if LatentInputs.of(inputs).cu_seqlens_q is not None:
            reduce.output_tensors = [output[0] for output in reduce.output_tensors]
        return KernelPipeline(_name="flash_mla_split_kv", stages=[partial, reduce])


if __name__ == "__main__":
    raise SystemExit(CtFlashMLASplitKV().benchmark_kernel_argparse())
