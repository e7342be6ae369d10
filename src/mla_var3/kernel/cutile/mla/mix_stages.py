"""What the versions of mla_var6_plus share on the host: their attention stage and their plan.

The attention stage of a version is one kernel with two roles: latent over the old tokens and
decompressed over the window. It reads and writes

    q_nope [b, s, h, d]   q_latent [b, s, h, k]   q_rope [b, s, h, p]
    c_kv [b, t, k]        k_rope [b, t, p]        latent cache; old tokens are positions < len - n
    k_new, v_new [b, h, n, d], k_rope_new [b, n, p]: the window, slot j is position max(len-n,0)+j
    lengths [b] int32
    -> o_latent [b, s, h, k], lse_latent [b, s, h] float32: over the old tokens
       o_new [b, s, h, d], lse_new [b, s, h] float32: over the window
       (input dtype; the pair of a role that has no tokens at all, n=0 or n=t, is not written)

Each request is divided at its own length. Where n < s the causal limit reaches into the old tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.kernel.cutile.mla.decompress_combine import CtDecompressCombine
from mla_var3.kernel.cutile.mla.plan import CutilePlan
from mla_var3.kernel.cutile.mla.tilings import (
    divides,
    fits_shared_memory,
    head_tiles,
    latent_tiles,
    mma_part,
    tile_sides,
    tiling_target,
    with_parts_of,
)
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.kernel.newest_window import NewestWindowPlan
from mla_var3.op.cost import Cost
from mla_var3.op.mla.attend import KvSegment, attend
from mla_var3.op.mla.cost import attention_block_specialized_cost, decompress_combine_cost
from mla_var3.op.mla.inputs import decompress_newest, project_queries
from mla_var3.op.mla.problem import require_int
from mla_var3.op.mla.reference import decompressed_segment, latent_segment
from mla_var3.runtime.composite import KernelPipeline
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.tensors import require_view


class TileCounts(NamedTuple):
    """Work tiles of both roles; latent tiles per request, query tiles per head and request."""

    latent: int
    head: int
    latent_row_tiles: int
    head_query_tiles: int


@dataclass
class MixTiling(Tiling):
    """Tiles of both roles: Bm x Bn in latent space (in parts of Kp columns), Hm x Hn per head.

    One kernel has one set of hints: the 64 x 512 latent accumulator needs num_worker_warps=8 on
    sm_90, and with its shared memory only one CTA fits on an SM.
    """

    Bm: int = 64
    Bn: int = 64
    Kp: int = 128
    Hm: int = 64
    Hn: int = 128
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = 8

    def validate(self, pd: MlaPlan) -> Constraints:
        sides = {name: getattr(self, name) for name in ("Bm", "Bn", "Kp", "Hm", "Hn")}
        return Constraints(
            *tile_sides(**sides, d=pd.d, p=pd.p),
            divides("Kp", self.Kp, "k", pd.k),
            fits_shared_memory(pd, *latent_tiles(pd, self.Bm, self.Bn)),
            fits_shared_memory(pd, *head_tiles(pd, self.Hm, self.Hn)),
            *self.own_rules(),
        )

    def own_rules(self) -> list[tuple[bool, str]]:
        """Constraints on the fields that a version adds."""
        return []

    @classmethod
    def candidates(cls, target: str) -> list[Self]:
        """Candidates per target, the default first."""
        default, *others = (cls(*sides) for sides in mix_sides(target))
        return [*default.variants(), *others]

    def variants(self) -> list[Self]:
        """This tiling with the values to try for the fields that a version adds."""
        return [self]


def mix_sides(target: str) -> list[tuple[int, int, int, int, int]]:
    """Bm, Bn, Kp, Hm, Hn to try on a target, the default first; see LatentTiling, HeadTiling."""
    family = tiling_target(target)
    if family == "sm_120":
        return [(32, 32, mma_part(target), 16, 64), (16, 64, 512, 16, 64)]
    if family == "sm_100":
        return [(64, 64, 512, 64, Hn) for Hn in (128, 64)]
    return [(64, 64, Kp, 64, Hn) for Kp in (128, 256) for Hn in (128, 64)]


@dataclass
class MixAttentionPlan(CutilePlan):
    """Plan of an attention stage; a version adds its tiling, grid and arguments."""

    n: int = field(default=0, metadata={"help": "newest tokens kept decompressed"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("n", self.n, minimum=0, maximum=self.t, maximum_name="t")

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        raw = self.make_inputs(device)
        window = decompress_newest(raw, self.n)
        q_latent = project_queries(raw.q_nope, raw.w_uk)
        return raw.q_nope, q_latent, raw.q_rope, raw.c_kv, raw.k_rope, *window, raw.lengths

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """Attention over each part by itself, as this stage leaves it for the merge."""
        q_nope, q_latent, q_rope, c_kv, k_rope, k_new, v_new, k_rope_new, lengths = inputs
        latent = q_latent, q_rope, c_kv, k_rope, lengths
        newest = q_nope, q_rope, k_new, v_new, k_rope_new, lengths
        return (
            *self.old_reference(latent, compute_dtype),
            *self.window_reference(newest, compute_dtype),
        )

    def old_reference(
        self, inputs: Sequence[Tensor], compute_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """Latent attention over the old tokens, from what `latent_inputs` gives."""
        q_latent, q_rope, c_kv, k_rope, lengths = inputs
        slots = torch.arange(self.t, device=lengths.device)
        positions = torch.where(slots < (lengths - self.n)[:, None], slots, -1)
        old = latent_segment(q_latent, q_rope, c_kv, k_rope, positions)
        return self._attend(old, lengths, compute_dtype)

    def window_reference(
        self, inputs: Sequence[Tensor], compute_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """Attention over the window, from q_nope, q_rope, the window and the lengths."""
        q_nope, q_rope, k_new, v_new, k_rope_new, lengths = inputs
        slots = (lengths - self.n).clamp(min=0)[:, None]
        slots = slots + torch.arange(self.n, device=lengths.device)
        positions = torch.where(slots < lengths[:, None], slots, -1)
        newest = decompressed_segment(q_nope, q_rope, k_new, v_new, k_rope_new, positions)
        return self._attend(newest, lengths, compute_dtype)

    def _attend(
        self, segment: KvSegment, lengths: Tensor, compute_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        [out], lse = attend([segment], lengths=lengths, **self.attend_options(compute_dtype))
        return out, lse

    def _autotune_configs(self) -> Sequence[Any]:
        tiling: Any = self.tiling_fields()["tiling"]
        return with_parts_of(tiling.candidates(self.target.code), self.k)

    def cost(self) -> Cost:
        return attention_block_specialized_cost(self.problem(), self.n)

    def one_grid(self, tiling: Any) -> tuple[int]:
        """A CTA for each work tile of both roles."""
        counts = self.tile_counts(tiling)
        return (counts.latent + counts.head,)

    def tile_counts(self, tiling: Any) -> TileCounts:
        """Work tiles of both roles."""
        row_tiles, query_tiles = ct.cdiv(self.s * self.h, tiling.Bm), ct.cdiv(self.s, tiling.Hm)
        return TileCounts(
            self.b * row_tiles if self.n < self.t else 0,
            self.b * self.h * query_tiles if self.n else 0,
            row_tiles,
            query_tiles,
        )

    def operands(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Check the inputs and allocate the outputs.

        Returns:
            The tensors in the order of the kernel's arguments, and the outputs in their own shapes.
        """
        queries = {"q_nope": "bshd", "q_latent": "bshk", "q_rope": "bshp"}
        cache = {"c_kv": "btk", "k_rope": "btp"}
        window = {"k_new": "bhnd", "v_new": "bhnd", "k_rope_new": "bnp"}
        self.check_inputs({**queries, **cache, **window, "lengths": "b"}, inputs, n=self.n)
        q_nope, q_latent, q_rope, c_kv, k_rope, k_new, v_new, k_rope_new, lengths = inputs
        b, s, h, d, k, p = self.b, self.s, self.h, self.d, self.k, self.p
        latent_rows = require_view("q_latent", q_latent, b, s * h, k)
        rope_rows = require_view("q_rope", q_rope, b, s * h, p)
        if self.n == 0:
            # No tile of the head role exists, but the arguments still need a valid pointer.
            k_new = v_new = q_nope.new_zeros((1, 1, 1, d))
            k_rope_new = q_nope.new_zeros((1, 1, p))
        o_latent = q_nope.new_empty((b, s, h, k))
        o_new = q_nope.new_empty((b, s, h, d))
        lse_latent = q_nope.new_empty((b, s, h), dtype=torch.float32)
        lse_new = torch.empty_like(lse_latent)
        rows = q_nope, latent_rows, q_rope, rope_rows
        tokens = c_kv, k_rope, k_new, v_new, k_rope_new, lengths
        results = o_latent.view(b, s * h, k), lse_latent.view(b, s * h), o_new, lse_new
        return (*rows, *tokens, *results), [o_latent, lse_latent, o_new, lse_new]

    def constants(self, tiling: Any) -> tuple[int, ...]:
        """The compile-time arguments H to P."""
        sides = tiling.Bm, tiling.Bn, tiling.Hm, tiling.Hn, tiling.Kp, self.k // tiling.Kp
        return self.h, self.causal, *sides, self.d, self.p


@dataclass
class CutileMixPlan(NewestWindowPlan):
    """Plan of a version: attention, then the merge.

    A version adds its tilings, and the plan of its attention stage or another way to make it.
    """

    attention: ClassVar[type[MixAttentionPlan]]

    def plan(self, *inputs: Tensor) -> KernelPipeline:
        attention, outputs = self.attention_stage(*inputs)
        *_, w_uv, _ = inputs
        parts = {0: "latent", self.t: "new"}.get(self.chosen_n, "both")
        tiling = self.tiling_fields()["combine_tiling"]
        combine = self.stage_plan(CtDecompressCombine, parts=parts, tiling=tiling)
        return KernelPipeline(_name=self.name, stages=[attention, combine.plan(*outputs, w_uv)])

    def attention_stage(self, *inputs: Tensor) -> tuple[Stage, Sequence[Tensor]]:
        """What attends, and its outputs for the merge."""
        *operands, _, lengths = inputs
        tiling = self.tiling_fields()["tiling"]
        plan = self.stage_plan(self.attention, n=self.chosen_n, tiling=tiling)
        stage: Stage = plan.plan(*operands, lengths)
        return stage, stage.output_tensors

    def stage_plan(self, stage_class: type[Any], **fields: Any) -> Any:
        """The plan of a stage, for the same problem and target."""
        shared = {key: value for key, value in self.params().items() if key != "n"}
        return stage_class(**shared, target=self.target, **fields)

    def _default_tiling(self, name: str) -> Tiling | None:
        tiling: Any = type(self.tiling_fields()[name])
        if name == "combine_tiling":
            return tiling.default(self.target.code)
        return with_parts_of(tiling.candidates(self.target.code), self.k)[0]

    def _autotune_configs(self) -> Sequence[Tiling]:
        return []

    def _algorithmic_flops_bytes(self, tiling: Tiling) -> tuple[float, float]:
        problem = self.problem()
        attention = attention_block_specialized_cost(problem, self.chosen_n)
        cost = attention + decompress_combine_cost(problem)
        return cost.flops, cost.bytes
