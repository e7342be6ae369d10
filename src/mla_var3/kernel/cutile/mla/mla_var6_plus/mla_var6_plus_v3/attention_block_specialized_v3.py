"""First stage of mla_var6_plus_v3: old tokens absorbed and newest tokens decompressed, at one time.

The work of each role is a queue of tiles. A latent tile attends s*h query rows of a request to its
old tokens in the latent cache (compute bound); a head tile attends the queries of one head to the
decompressed window of the n newest tokens (memory bound). The blocks are persistent, as many as fit
the device at once. Each begins with one of the roles, in the share that the tiling says, takes
tiles of that role from its queue until it is empty, and then tiles of the other.

    q_nope [b, s, h, d]   q_latent [b, s, h, k]   q_rope [b, s, h, p]
    c_kv [b, t, k]        k_rope [b, t, p]        latent cache; old tokens are positions < len - n
    k_new, v_new [b, h, n, d], k_rope_new [b, n, p]: the window, slot j is position max(len-n,0)+j
    lengths [b] int32
    -> o_latent [b, s, h, k], lse_latent [b, s, h] float32: over the old tokens
       o_new [b, s, h, d], lse_new [b, s, h] float32: over the window
       (input dtype; the pair of a role that has no tokens at all, n=0 or n=t, is not written)

A queue is a counter in global memory: the next tile to take. Every launch sets both to zero on its
own stream before the kernel starts, so a replayed CUDA graph and a launch after one that was
interrupted begin with full queues.

Each request splits at its own length. The causal limit cuts into the old tokens where n < s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.kernel.cutile.mla.tile_ops import (
    attend_heads,
    attend_latent,
    load_column_parts,
    log_sum_exp,
    normalise,
    store_column_parts,
    visible,
)
from mla_var3.kernel.cutile.mla.tilings import (
    divides,
    fits_shared_memory,
    head_tiles,
    latent_tiles,
    multiprocessors,
    tile_sides,
)
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.mla.attend import KvSegment, attend
from mla_var3.op.mla.cost import attention_block_specialized_cost
from mla_var3.op.mla.inputs import absorb_queries, decompress_newest
from mla_var3.op.mla.problem import require_int
from mla_var3.runtime.ct_kernel import CtKernel
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import check_tensor, require_view

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

PERCENT = 100
QUEUES = 2
"""Row 0 counts latent tiles, row 1 head tiles."""
QUEUE_STRIDE = 32
"""A counter has 128 bytes to itself, so that the two do not share a cache line."""


@dataclass
class QueuedKernel(CtKernel):
    """A kernel whose blocks take their work from counters, which each launch sets to zero.

    Attributes:
        queues: int32 [QUEUES, QUEUE_STRIDE], of which column 0 is used.
    """

    queues: Tensor = field(kw_only=True)

    def launch(self) -> None:
        self.queues.zero_()
        super().launch()


@dataclass
class AttentionBlockSpecializedTilingV3(Tiling):
    """Tiles of both roles: Bm x Bn in latent space (in parts of Kp columns), Hm x Hn per head.

    BlocksPerSm * SMs persistent blocks; LatentShare percent of them begin with the latent role.

    One kernel has one set of hints: the 64 x 512 latent accumulator needs num_worker_warps=8 on
    sm_90, and with its shared memory only one block fits on an SM.
    """

    Bm: int = 64
    Bn: int = 64
    Kp: int = 128
    Hm: int = 64
    Hn: int = 128
    LatentShare: int = field(
        default=50, metadata={"help": "percent of the blocks that begin with the latent role"}
    )
    BlocksPerSm: int = field(default=1, metadata={"help": "persistent blocks per SM"})
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = 8

    def validate(self, pd: "CtAttentionBlockSpecializedV3") -> Constraints:
        sides = {"Bm": self.Bm, "Bn": self.Bn, "Kp": self.Kp, "Hm": self.Hm, "Hn": self.Hn}
        return Constraints(
            *tile_sides(**sides, d=pd.d, p=pd.p),
            divides("Kp", self.Kp, "k", pd.k),
            fits_shared_memory(pd, *latent_tiles(pd, self.Bm, self.Bn)),
            fits_shared_memory(pd, *head_tiles(pd, self.Hm, self.Hn)),
            (
                0 <= self.LatentShare <= PERCENT,
                f"LatentShare: expected a percentage from 0 to {PERCENT}, got {self.LatentShare}",
            ),
            (
                self.BlocksPerSm >= 1,
                f"BlocksPerSm: expected at least 1, got {self.BlocksPerSm}",
            ),
        )

    @classmethod
    def candidates(cls, target: str) -> list["AttentionBlockSpecializedTilingV3"]:
        """Candidates per target, the default first (compare LatentTiling and HeadTiling)."""
        if target == "sm_120":
            sides = [(16, 64, Kp, 16, 64) for Kp in (512, 128)]
        elif target == "sm_100":
            sides = [(64, 64, 512, 64, Hn) for Hn in (128, 64)]
        else:
            sides = [(64, 64, Kp, 64, Hn) for Kp in (128, 256) for Hn in (128, 64)]
        shares = [cls(*sides[0], LatentShare=share) for share in (50, 25, 75, 100)]
        return shares + [cls(*others) for others in sides[1:]]


@ct.kernel
def attention_block_specialized_v3(
    q_nope, q_latent, q_rope, q_rope_rows, c_kv, k_rope, k_new, v_new, k_rope_new, lengths,
    o_latent, lse_latent, o_new, lse_new, queues,
    scale_log2e: float, s: int, n: int, latent_count: int, head_count: int,
    latent_first_blocks: int, latent_row_tiles: int, head_query_tiles: int,
    H: ConstInt, CAUSAL: ConstBool, BM: ConstInt, BN: ConstInt, HM: ConstInt, HN: ConstInt,
    KP: ConstInt, PARTS: ConstInt, D: ConstInt, P: ConstInt,
):  # fmt: skip
    # Of the first i blocks, latent_first_blocks * i / blocks begin with the latent role (0).
    blocks = ct.num_blocks(0)
    before = ct.cdiv(ct.bid(0) * latent_first_blocks, blocks)
    after = ct.cdiv((ct.bid(0) + 1) * latent_first_blocks, blocks)
    role = 1 - (after - before)
    # One loop over both queues. With a loop per queue the compiler (tileiras 13.4) signals the end
    # of a loop's stores on a barrier that nobody acknowledges; a CTA that finds its second queue
    # empty signals twice, a warp that has not yet looked misses the phase, and the CTA hangs.
    queues_left = QUEUES
    while queues_left > 0:
        tile = ct.atomic_add(queues, (role, 0), 1, memory_order=ct.MemoryOrder.RELAXED)
        if tile >= latent_count * (1 - role) + head_count * role:
            role = 1 - role
            queues_left = queues_left - 1
        elif role == 0:
            # q_latent [b, s*h, K], q_rope_rows [b, s*h, P]
            # o_latent [b, s*h, K], lse_latent [b, s*h]
            request = tile // latent_row_tiles
            row_tile = tile % latent_row_tiles
            q_parts = load_column_parts(q_latent, request, row_tile, BM, KP, PARTS)
            qr = ct.load(
                q_rope_rows,
                (request, row_tile, 0),
                (1, BM, P),
                padding_mode=ct.PaddingMode.ZERO,
            ).reshape((BM, P))
            length = ct.load(lengths, (request,), ())
            old = max(length - n, 0)
            first_row = row_tile * BM
            lowest = min(visible(first_row, length, s, CAUSAL, H), old)
            highest = min(visible(first_row + BM - 1, length, s, CAUSAL, H), old)
            acc_parts, m, l = attend_latent(
                q_parts, qr, c_kv, k_rope, request, 0,
                max(lowest, 0) // BN, ct.cdiv(max(highest, 0), BN),
                first_row, length, s, old, scale_log2e, CAUSAL, H, BM, BN, KP, PARTS, P,
            )  # fmt: skip
            store_column_parts(o_latent, (request, row_tile), acc_parts, l, BM, KP, PARTS)
            ct.store(lse_latent, (request, row_tile), log_sum_exp(m, l).reshape((1, BM)))
        else:
            # q_nope [b, s, h, D], q_rope [b, s, h, P], o_new [b, s, h, D], lse_new [b, s, h]
            query_tile = tile % head_query_tiles
            head = tile // head_query_tiles % H
            request = tile // (head_query_tiles * H)
            at = (request, query_tile, head, 0)
            q = ct.load(q_nope, at, (1, HM, 1, D), padding_mode=ct.PaddingMode.ZERO).reshape(
                (HM, D)
            )
            qr = ct.load(q_rope, at, (1, HM, 1, P), padding_mode=ct.PaddingMode.ZERO).reshape(
                (HM, P)
            )
            length = ct.load(lengths, (request,), ())
            old = max(length - n, 0)
            first_row = query_tile * HM
            lowest = visible(first_row, length, s, CAUSAL, 1) - old
            highest = visible(min(first_row + HM, s) - 1, length, s, CAUSAL, 1) - old
            acc, m, l = attend_heads(
                q, qr, k_new, v_new, k_rope_new, request, head,
                max(lowest, 0) // HN, ct.cdiv(max(highest, 0), HN),
                first_row, length, s, old, scale_log2e, CAUSAL, HM, HN, D, P,
            )  # fmt: skip
            ct.store(o_new, at, normalise(acc, l).astype(o_new.dtype).reshape((1, HM, 1, D)))
            ct.store(lse_new, (request, query_tile, head), log_sum_exp(m, l).reshape((1, HM, 1)))


@dataclass
class CtAttentionBlockSpecializedV3(MlaPlan):
    """Plan of the attention stage."""

    n: int = field(default=0, metadata={"help": "newest tokens kept decompressed"})
    tiling: AttentionBlockSpecializedTilingV3 = field(
        default_factory=AttentionBlockSpecializedTilingV3
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("n", self.n, minimum=0, maximum=self.t, maximum_name="t")

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        raw = self.make_inputs(device)
        window = decompress_newest(raw, self.n)
        q_latent = absorb_queries(raw.q_nope, raw.w_uk)
        return raw.q_nope, q_latent, raw.q_rope, raw.c_kv, raw.k_rope, *window, raw.lengths

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """Attention over each part by itself, as this stage leaves it for the merge."""
        q_nope, q_latent, q_rope, c_kv, k_rope, k_new, v_new, k_rope_new, lengths = inputs
        old = (lengths - self.n).clamp(min=0)[:, None]
        slots = torch.arange(self.t, device=c_kv.device)
        window = torch.arange(self.n, device=c_kv.device)
        rope_new = k_rope_new[:, None].expand(-1, self.h, -1, -1)
        parts = (
            KvSegment(
                q=torch.cat([q_latent, q_rope], dim=-1),
                keys=torch.cat([c_kv, k_rope], dim=-1)[:, None],
                values=c_kv[:, None],
                positions=torch.where(slots < old, slots, -1),
            ),
            KvSegment(
                q=torch.cat([q_nope, q_rope], dim=-1),
                keys=torch.cat([k_new, rope_new], dim=-1),
                values=v_new,
                positions=torch.where(old + window < lengths[:, None], old + window, -1),
            ),
        )
        results: list[Tensor] = []
        for part in parts:
            [out], lse = attend(
                [part],
                lengths=lengths,
                causal=self.causal,
                scale=self.problem().softmax_scale,
                compute_dtype=compute_dtype or torch.float32,
            )
            results += [out, lse]
        return tuple(results)

    def _default_tiling(self, name: str) -> AttentionBlockSpecializedTilingV3 | None:
        return self._autotune_configs()[0]

    def _autotune_configs(self) -> Sequence[AttentionBlockSpecializedTilingV3]:
        return AttentionBlockSpecializedTilingV3.candidates(self.target.code)

    def _algorithmic_flops_bytes(self, tiling: Any) -> tuple[float, float]:
        cost = attention_block_specialized_cost(self.problem(), self.n)
        return cost.flops, cost.bytes

    def plan(self, *inputs: Tensor) -> QueuedKernel:
        self._check_inputs(*inputs)
        q_nope, q_latent, q_rope, c_kv, k_rope, k_new, v_new, k_rope_new, lengths = inputs
        b, s, h, d, k, p, n = self.b, self.s, self.h, self.d, self.k, self.p, self.n
        latent_rows = require_view("q_latent", q_latent, b, s * h, k)
        rope_rows = require_view("q_rope", q_rope, b, s * h, p)
        if n == 0:
            # No head block will run, but the arguments still need a valid address.
            k_new = v_new = q_nope.new_zeros((1, 1, 1, d))
            k_rope_new = q_nope.new_zeros((1, 1, p))
        o_latent = q_nope.new_empty((b, s, h, k))
        o_new = q_nope.new_empty((b, s, h, d))
        lse_latent = q_nope.new_empty((b, s, h), dtype=torch.float32)
        lse_new = torch.empty_like(lse_latent)
        queues = lengths.new_zeros((QUEUES, QUEUE_STRIDE))
        sm_count = multiprocessors(q_nope.device, self.target.code)

        def tile_counts(tiling: AttentionBlockSpecializedTilingV3) -> tuple[int, int, int, int]:
            row_tiles, query_tiles = ct.cdiv(s * h, tiling.Bm), ct.cdiv(s, tiling.Hm)
            latent_count = b * row_tiles if n < self.t else 0
            head_count = b * h * query_tiles if n else 0
            return latent_count, head_count, row_tiles, query_tiles

        def grid_fn(tiling: AttentionBlockSpecializedTilingV3) -> tuple[int]:
            latent_count, head_count, _, _ = tile_counts(tiling)
            return (min(sm_count * tiling.BlocksPerSm, latent_count + head_count),)

        def args_fn(tiling: AttentionBlockSpecializedTilingV3) -> tuple[object, ...]:
            latent_count, head_count, row_tiles, query_tiles = tile_counts(tiling)
            latent_first = round(grid_fn(tiling)[0] * tiling.LatentShare / PERCENT)
            return (
                q_nope,
                latent_rows,
                q_rope,
                rope_rows,
                c_kv,
                k_rope,
                k_new,
                v_new,
                k_rope_new,
                lengths,
                o_latent.view(b, s * h, k),
                lse_latent.view(b, s * h),
                o_new,
                lse_new,
                queues,
                self.scale_log2e,
                s,
                n,
                latent_count,
                head_count,
                latent_first,
                row_tiles,
                query_tiles,
                h,
                self.causal,
                tiling.Bm,
                tiling.Bn,
                tiling.Hm,
                tiling.Hn,
                tiling.Kp,
                k // tiling.Kp,
                d,
                p,
            )

        return QueuedKernel(
            queues=queues,
            kernel_fn=attention_block_specialized_v3,
            grid_fn=grid_fn,
            args_fn=args_fn,
            tiling=self.tiling,
            plan=self,
            input_tensors=list(inputs),
            output_tensors=[o_latent, lse_latent, o_new, lse_new],
            autotune_configs=self._autotune_configs(),
            algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
        )

    def _check_inputs(self, *inputs: Tensor) -> None:
        dtype, device = self.torch_dtype, inputs[0].device
        b, n = ("b", self.b), ("n", self.n)
        rows = [b, ("s", self.s), ("h", self.h)]
        window = [b, ("h", self.h), n, ("d", self.d)]
        shapes = {
            "q_nope": [*rows, ("d", self.d)],
            "q_latent": [*rows, ("k", self.k)],
            "q_rope": [*rows, ("p", self.p)],
            "c_kv": [b, ("t", self.t), ("k", self.k)],
            "k_rope": [b, ("t", self.t), ("p", self.p)],
            "k_new": window,
            "v_new": window,
            "k_rope_new": [b, n, ("p", self.p)],
        }
        for (name, shape), tensor in zip(shapes.items(), inputs[:-1], strict=True):
            check_tensor(name, tensor, shape, dtype, device)
        check_tensor("lengths", inputs[-1], [b], torch.int32, device)
