"""First stage of mla_var6_plus_v3: old tokens latent, newest tokens decompressed, at the same time.

Each role has a queue of work tiles. A latent tile attends s*h query rows of a request to its old
tokens in the latent cache (compute bound). A head tile attends the queries of one head to the
decompressed window of the n newest tokens (memory bound). The CTAs are persistent, as many as fit
the device at once. Each begins with one role, as the tiling's share says, takes tiles from the
queue of that role until it is empty, and then from the other queue.

Inputs, outputs and masks: see `mix_stages.py`.

A queue is a counter in global memory: the next tile to take. Every launch sets both to zero on its
own stream before the kernel starts. So a replayed CUDA graph, or a launch after an interrupted one,
begins with full queues.
"""

from dataclasses import dataclass, field, replace
from typing import Self

import cuda.tile as ct
from torch import Tensor

from mla_var3.kernel.cutile.mla.mix_stages import MixAttentionPlan, MixTiling
from mla_var3.kernel.cutile.mla.tile_ops import store_new_tokens, store_old_tokens
from mla_var3.kernel.cutile.mla.tilings import PERCENT, multiprocessors, percentage
from mla_var3.runtime.ct_kernel import CtKernel

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

QUEUES = 2
"""Row 0 counts latent tiles, row 1 head tiles."""
QUEUE_STRIDE = 32
"""A counter has 128 bytes to itself, so that the two do not share a cache line."""


@dataclass
class QueuedKernel(CtKernel):
    """A kernel whose CTAs take their work tiles from counters, which each launch sets to zero.

    Attributes:
        queues: int32 [QUEUES, QUEUE_STRIDE], of which column 0 is used.
    """

    queues: Tensor = field(kw_only=True)

    def launch(self) -> None:
        self.queues.zero_()
        super().launch()


@dataclass
class AttentionBlockSpecializedTilingV3(MixTiling):
    """Tiles of both roles: Bm x Bn in latent space (in parts of Kp columns), Hm x Hn per head.

    BlocksPerSm * SMs persistent CTAs; LatentShare percent of them begin with the latent role.
    """

    LatentShare: int = field(
        default=50, metadata={"help": "percent of the CTAs that begin with the latent role"}
    )
    BlocksPerSm: int = field(default=1, metadata={"help": "persistent CTAs per SM"})

    def own_rules(self) -> list[tuple[bool, str]]:
        some_blocks = f"BlocksPerSm: expected at least 1, got {self.BlocksPerSm}"
        return [percentage("LatentShare", self.LatentShare), (self.BlocksPerSm >= 1, some_blocks)]

    def variants(self) -> list[Self]:
        return [replace(self, LatentShare=share) for share in (50, 25, 75, 100)]


@ct.kernel
def attention_block_specialized_v3(
    q_nope, q_latent, q_rope, q_rope_rows, c_kv, k_rope, k_new, v_new, k_rope_new, lengths,
    o_latent, lse_latent, o_new, lse_new, queues,
    scale_log2e: float, s: int, n: int, latent_count: int, head_count: int,
    latent_first_blocks: int, latent_row_tiles: int, head_query_tiles: int,
    H: ConstInt, CAUSAL: ConstBool, BM: ConstInt, BN: ConstInt, HM: ConstInt, HN: ConstInt,
    KP: ConstInt, PARTS: ConstInt, D: ConstInt, P: ConstInt,
):  # fmt: skip
    # Of the first i CTAs, latent_first_blocks * i / blocks begin with the latent role (0).
    blocks = ct.num_blocks(0)
    before = ct.cdiv(ct.bid(0) * latent_first_blocks, blocks)
    after = ct.cdiv((ct.bid(0) + 1) * latent_first_blocks, blocks)
    role = 1 - (after - before)
    # One loop over both queues, not one per queue: between two loops the compiler (tileiras 13.4
    # for sm_90) has the storing warp arrive at an mbarrier that nobody acknowledges. In a CTA whose
    # second queue is empty it arrives twice; a warp that has not yet tested the first phase then
    # never sees it, and the launch hangs.
    queues_left = QUEUES
    while queues_left > 0:
        tile = ct.atomic_add(queues, (role, 0), 1, memory_order=ct.MemoryOrder.RELAXED)
        if tile >= latent_count * (1 - role) + head_count * role:
            role = 1 - role
            queues_left = queues_left - 1
        elif role == 0:
            # q_latent [b, s*h, K], q_rope_rows [b, s*h, P]
            # o_latent [b, s*h, K], lse_latent [b, s*h]
            store_old_tokens(
                q_latent, q_rope_rows, c_kv, k_rope, lengths, o_latent, lse_latent,
                tile, latent_row_tiles, s, n, scale_log2e, CAUSAL, H, BM, BN, KP, PARTS, P,
            )  # fmt: skip
        else:
            # q_nope [b, s, h, D], q_rope [b, s, h, P], o_new [b, s, h, D], lse_new [b, s, h]
            store_new_tokens(
                q_nope, q_rope, k_new, v_new, k_rope_new, lengths, o_new, lse_new,
                tile, head_query_tiles, c_kv.shape[1], s, n, scale_log2e, CAUSAL, H, HM, HN, D, P,
            )  # fmt: skip


@dataclass
class CtAttentionBlockSpecializedV3(MixAttentionPlan):
    """Plan of the attention stage."""

    tiling: AttentionBlockSpecializedTilingV3 = field(
        default_factory=AttentionBlockSpecializedTilingV3
    )

    def plan(self, *inputs: Tensor) -> QueuedKernel:
        tensors, outputs = self.operands(*inputs)
        queues = inputs[-1].new_zeros((QUEUES, QUEUE_STRIDE))
        sm_count = multiprocessors(inputs[0].device, self.target.code)

        def grid_fn(tiling: AttentionBlockSpecializedTilingV3) -> tuple[int]:
            return (min(sm_count * tiling.BlocksPerSm, *self.one_grid(tiling)),)

        def args_fn(tiling: AttentionBlockSpecializedTilingV3) -> tuple[object, ...]:
            latent, head, *rest = self.tile_counts(tiling)
            latent_first = round(grid_fn(tiling)[0] * tiling.LatentShare / PERCENT)
            sizes = self.scale_log2e, self.s, self.n, latent, head, latent_first, *rest
            return (*tensors, queues, *sizes, *self.constants(tiling))

        kernel_fn, own = attention_block_specialized_v3, {"queues": queues}
        return self.kernel(kernel_fn, grid_fn, args_fn, inputs, outputs, QueuedKernel, **own)
