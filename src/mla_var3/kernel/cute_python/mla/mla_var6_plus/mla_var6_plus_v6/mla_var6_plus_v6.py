"""mla_var6_plus_v6: a prefix shared by the batch decompressed, the tokens of each request latent.

    q_nope [b, s, h, 128]   q_latent [b, s, h, 512]   q_rope [b, s, h, 64]
    k_prefix, v_prefix [h, prefix, 128], k_rope_prefix [prefix, 64]   slot j is position j, of all
    c_kv [b, t, 512]        k_rope [b, t, 64]   slot = position; nothing before `prefix` is read
    w_uv [h, 512, 128]      lengths [b] int32, the prefix counted
    own_lengths [b] int32   max(length - prefix, 0)
    -> o [b, s, h, 128] in the input dtype, lse [b, s, h] float32 (natural logarithm)

bfloat16 and float16; causal (bottom-right) or not; any b, s, t >= 1, h and any prefix in 0..t;
slots beyond a length may hold NaN. A request may be shorter than the prefix: it has the first of
its tokens and none of its own. Rows without a visible key give 0 and -inf. Target: sm_90a.

Parent: mla_var6_plus. Idea: decompress the prefix that all requests have in common, a system
prompt for example. Its keys and values are read once for the b*s queries of a head, which are rows
of one matrix, so the path with few operations per token needs few bytes as well. With prefix=0 the
latent kernel is alone, with prefix=t the decompressed one. With both, each gets all SMs and the
latent CTAs start as the others end: the prefix is a few large work tiles per SM, which no share of
the SMs divides evenly (docs/results/2026-11-16-nvidia-h200-prefix.md).

By default the prefix is half of the slots, which says nothing about a workload: `--prefix` is how
much the requests really share. Limits: those of the base version; one prefix per batch. The id in
CuTe DSL was once mla_var6_plus_v3.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.decompressed.stage import (
    DecompressedOperands,
    DecompressedShape,
)
from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK
from mla_var3.kernel.cute_python.mla.mix.plan import CuteMixPlan, LatentTokens
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.cost import Cost
from mla_var3.op.mla.inputs import project_queries
from mla_var3.op.mla.prefix.problem import SharedPrefixProblem, shared_prefix_attention_cost
from mla_var3.op.mla.prefix.reference import make_shared_prefix_inputs, reference_shared_prefix
from mla_var3.op.mla.problem import require_int
from mla_var3.runtime.composite import KernelPipeline
from mla_var3.runtime.tensors import check_tensor


@dataclass
class CuteMlaVar6PlusV6(CuteMixPlan):
    """Plan of version 6 of mla_var6_plus in CuTe DSL."""

    prefix: int | None = field(
        default=None, metadata={"help": "tokens that all requests share; default half of t"}
    )

    targets = ("sm_90",)
    in_turn = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix is not None:
            require_int("prefix", self.prefix, minimum=0, maximum=self.t, maximum_name="t")

    def _model_fields(self, peak_tflops: float, peak_gbps: float) -> dict[str, Any]:
        return {} if self.prefix is not None else {"prefix": self.t // 2 // KV_BLOCK * KV_BLOCK}

    def cpu_check_plan(self) -> Self:
        small = MlaPlan.cpu_check_plan(self.copy(prefix=None))
        share = self.prefix / self.t if self.prefix is not None else 0.5
        return small.copy(prefix=round(share * small.t))

    def shared_problem(self) -> SharedPrefixProblem:
        """The problem with its prefix."""
        if self.prefix is None:
            raise InvalidArgumentError("prefix", "a number; `resolved` chooses one", None)
        return SharedPrefixProblem(self.problem(), self.prefix)

    def latent_lengths(self) -> list[int]:
        prefix = self.decompressed_slots()
        return [max(length - prefix, 0) for length in self.problem().kv_lengths]

    def decompressed_slots(self) -> int:
        return self.shared_problem().prefix

    @property
    def decompressed_shape(self) -> DecompressedShape:
        return DecompressedShape(1, self.b * self.s, self.h, self.decompressed_slots())

    def decompressed_cost(self) -> Cost:
        both = shared_prefix_attention_cost(self.shared_problem())
        latent = self.latent_cost()
        # Each kernel reads the rope queries.
        again = self.b * self.s * self.h * self.p * self.problem().element_size
        return Cost(both.flops - latent.flops, both.bytes - latent.bytes + again)

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        made = make_shared_prefix_inputs(self.shared_problem(), device, seed=self.seed)
        raw = made.plain
        own_lengths = (raw.lengths - self.decompressed_slots()).clamp(min=0)
        return (
            raw.q_nope, project_queries(raw.q_nope, raw.w_uk), raw.q_rope, made.k_prefix,
            made.v_prefix, made.k_rope_prefix, made.c_kv, made.k_rope, raw.w_uv, raw.lengths,
            own_lengths,
        )  # fmt: skip

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        *operands, _ = inputs
        return reference_shared_prefix(*operands, **self.attend_options(compute_dtype))

    def plan(self, *inputs: Tensor) -> KernelPipeline:
        (
            q_nope, q_latent, q_rope, k_prefix, v_prefix, k_rope_prefix, c_kv, k_rope, w_uv,
            lengths, own_lengths,
        ) = inputs  # fmt: skip
        self.latent_rows(q_latent, q_rope, c_kv, k_rope, lengths)
        check_tensor("own_lengths", own_lengths, [("b", self.b)], torch.int32, q_nope.device)
        prefix = self.decompressed_slots()
        own = LatentTokens(q_latent, q_rope, c_kv[:, prefix:], k_rope[:, prefix:], own_lengths)
        shared = DecompressedOperands(
            q_nope, q_rope, k_prefix[None], v_prefix[None], k_rope_prefix[None], lengths
        )
        return self.plan_parts(own, shared, w_uv)

    def plan_parts(
        self, own: LatentTokens | None, shared: DecompressedOperands, w_uv: Tensor, page: int = 0
    ) -> KernelPipeline:
        """The stages on the operands of each kernel, for paged caches too.

        Args:
            own: the tokens behind the prefix, dense or paged; None with prefix=t, where there are
                none.
            shared: the prefix as one request, and the lengths of the whole requests.
        """
        if own is not None and self.decompressed_slots() < self.t:
            self._behind_prefix.check_latent(own, page)
        self._check_queries(shared.q_nope, w_uv)
        dtype, device = self.torch_dtype, shared.q_nope.device
        one, tokens = ("prefixes", 1), ("prefix", self.decompressed_slots())
        rows = [one, ("h", self.h), tokens, ("d", self.d)]
        check_tensor("k_prefix", shared.keys, rows, dtype, device)
        check_tensor("v_prefix", shared.values, rows, dtype, device)
        rope = [one, tokens, ("p", self.p)]
        check_tensor("k_rope_prefix", shared.k_rope, rope, dtype, device)
        check_tensor("lengths", shared.lengths, [("b", self.b)], torch.int32, device)
        return self._mixed(own, shared, w_uv, shared=True)

    @functools.cached_property
    def _behind_prefix(self) -> Self:
        """The plan of the tokens behind the prefix, for its checks."""
        return self.copy(t=self.t - self.decompressed_slots(), prefix=0, lengths=None)


if __name__ == "__main__":
    raise SystemExit(CuteMlaVar6PlusV6().benchmark_kernel_argparse())
