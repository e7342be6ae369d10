"""The decompressed kernel for Hopper: attention over per-head keys and values.

    q_nope [b, s, h, d]     q_rope [b, s, h, p]    contiguous
    keys [b, h, slots, d], values [b, h, slots, v], k_rope [b, slots, p]
    lengths [b] int32       slot j is position max(len - kept, 0) + j
    -> o [b, s, h, v] in the input dtype, lse [b, s, h] float32 (natural logarithm)

(d, p, v) is one of `HEAD_WIDTHS`, a constant of the program; with p=0 there is no rope part.
`kept` is how many tokens of a request are decompressed: all of them, or the newest, a window. With
8 bits d = v = 128 and p = 64; keys are e4m3 and values are e4m3 [b, h, slots / 16, 128, 16]:
transposed in groups of 16 tokens, whose order is 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15; slots is a
multiple of 64; scales [b, h, slots, 2] float32 hold the key's scale and the exponent of the value's
(`op/mla/window/packed.py`).
`shared`: the tokens are a prefix of all requests, keys and values [h, slots, ...], slot j is its
position, and rows of different requests meet it in one query tile. `partials`: the tokens of a
request are split, each split writes o and lse in float32 to o_partial [splits, b, s, h, v] and
lse_partial [splits, b, s, h], and `MergeSplits` merges them in the same launch of the host.

`ring`: slot x holds the position with position % kept == x among the newest `kept` ones, as a cache
writes them, and starts [b] int32 is the oldest position that it has. KV blocks are read as they
lie, because a softmax has no order; only masks need positions, and blocks without one of the newest
tokens have no mask. Another kernel shows all tokens before `starts` to every query, or, in a ring
that is `alone`, none does. Where tokens are missing because of that the rows are NaN. slots = kept,
a multiple of 64.

Rows without a visible token give 0 and -inf; slots that hold no token may hold NaN.

How it works. A producer warp loads KV blocks into a pipeline as deep as shared memory allows, so
that 100 to 200 KB are in flight: an SM draws 98 GB/s without products, 57 to 75 with them
(docs/kernels/flash-attention.md). Two consumer warpgroups take a head each, or a query tile each,
and run at their own pace, so that one multiplies while the other computes its softmax. Queries stay
in registers, or in shared memory where the output leaves no room for them (v=256), or the scores of
KV blocks of 128 tokens. With 8 bits and few of them they are on the N side of the products, in
shared memory (`fp8_few.py`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from torch import Tensor

from mla_var3.kernel.cute_python.mla.decompressed import compute, fp8_few, producer
from mla_var3.kernel.cute_python.mla.decompressed.scheduler import Scheduler, Sizes
from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_REGISTERS,
    CONSUMER_WARPGROUPS,
    HEAD,
    KV_BLOCK,
    LN_2,
    PRODUCER_REGISTERS,
    PRODUCER_WARP,
    ROPE,
    ROWS,
    THREADS,
    TILE,
    WARPGROUP_WARPS,
)
from mla_var3.kernel.cute_python.mla.hopper.tma import TmaTensor
from mla_var3.kernel.cute_python.mla.hopper.widths import HeadWidths
from mla_var3.runtime.cute_kernel import Int64Arg

SHARED_BYTES = 220 << 10
"""Shared memory of the pipeline and the exchange: what an SM has, less barriers and alignment."""
HEADS, TILES = "heads", "tiles"
MERGE_THREADS = 256

Operand = Tensor | cute.Pointer
Size = int | Int32
Stride = Int64Arg | Int64


class DecompressedArguments(NamedTuple):
    """The launch contract: operands and sizes of a launch, in the order of the host arguments.

    On the host tensors and numbers, in the host code that CuTe DSL compiles pointers and values.

    Attributes:
        q_nope, q_rope, keys, values, k_rope, scales, lengths, starts: what the kernel reads; rope
            parts unless p is 0, scales with 8 bits, starts of a ring.
        kept: tokens of a request that are decompressed.
    """

    q_nope: Operand
    q_rope: Operand | None
    keys: Operand
    values: Operand
    k_rope: Operand | None
    scales: Operand | None
    lengths: Operand
    starts: Operand | None
    o: Operand
    lse: Operand
    o_partial: Operand | None
    lse_partial: Operand | None
    scale_log2e: float | Float32
    requests: Size
    queries: Size
    heads: Size
    slots: Size
    key_token: Size
    key_head: Stride
    key_request: Stride
    value_row: Size
    value_head: Stride
    value_request: Stride
    rope_token: Size
    rope_request: Stride
    kept: Size
    causal: Size
    splits: Size
    ctas: Size
    merge_ctas: Size


def tiles(memory, element, kind, *shape):
    """A part of shared memory as swizzled tiles."""
    atom = warpgroup.make_smem_layout_atom(kind, element)
    layout = cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))
    return memory.get_tensor(layout.outer, swizzle=layout.inner)


@dataclass(eq=False, repr=False)
class DecompressedSm90:
    """Host and device code of one variant.

    Attributes:
        dtype: element type of queries and output, and of keys and values of 16 bits.
        pairing: what the warpgroups of a CTA have in common, "heads" or "tiles".
        columns: query rows on the N side of the products, with 8 bits; 0 for the M side.
        shared, partials, ring, alone: see above.
        kv_block: tokens of a KV block, 64, or 128 with the pairing "tiles" in 16 bits and in order.
    """

    dtype: Any
    pairing: str = HEADS
    fp8: bool = False
    columns: int = 0
    shared: bool = False
    partials: bool = False
    ring: bool = False
    alone: bool = False
    widths: HeadWidths = HeadWidths()
    kv_block: int = KV_BLOCK

    def __post_init__(self):
        self.stage_heads = 1 if self.pairing == TILES else CONSUMER_WARPGROUPS
        element, scale_bytes = (1, 8) if self.fp8 else (2, 0)
        d, p, v = self.widths.d, self.widths.p, self.widths.v
        # Beside the scores of a long block queries do not fit registers.
        self.shared_queries = self.widths.shared_queries or self.kv_block > KV_BLOCK
        self.key_bytes = self.stage_heads * self.kv_block * (d * element + scale_bytes)
        self.key_bytes += self.kv_block * p * 2
        self.value_bytes = self.stage_heads * self.kv_block * v * element
        # Query rows in shared memory, 16 bits each.
        self.query_rows = CONSUMER_WARPGROUPS * ROWS if self.shared_queries else 0
        available = SHARED_BYTES - CONSUMER_WARPGROUPS * self.columns * fp8_few.EXCHANGE_BYTES
        available -= self.query_rows * (d + p) * 2
        self.stages = available // (self.key_bytes + self.value_bytes)

    @cute.jit
    def __call__(self, *arguments):
        """Launch the kernel and, if requests are split, the merge."""
        *given, stream = arguments
        args = DecompressedArguments(*given)
        dtype, d, p, v = self.dtype, self.widths.d, self.widths.p, self.widths.v
        element = Float8E4M3FN if const_expr(self.fp8) else dtype
        owners = 1 if const_expr(self.shared) else args.requests
        kinds = warpgroup.SmemLayoutAtomKind

        def aligned(stride):
            return cute.assume(stride, divby=16 if const_expr(self.fp8) else 8)

        def tensor(pointer, shape, stride):
            return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

        def copies(source, atom, tile, stages):
            """What a copy of one tile reads, and the layout of all stages."""
            one = cute.tile_to_shape(atom, tile, order=(0, 1))
            layout = cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2))
            return TmaTensor.of(source, one, tile), layout

        wide_atom = warpgroup.make_smem_layout_atom(kinds.K_SW128, element)
        head_slots = self.stages * self.stage_heads
        if const_expr(self.fp8):
            key_columns: Any = d
            column_strides: Any = 1
            # Memory holds what shared memory is to hold, so a bulk copy without a tensor map does.
            plain_atom = warpgroup.make_smem_layout_atom(kinds.K_INTER, element)
            value_tensor = tensor(
                args.values,
                (KV_BLOCK * HEAD, args.slots // KV_BLOCK, args.heads, owners),
                (1, KV_BLOCK * HEAD, aligned(args.value_head), aligned(args.value_request)),
            )
            value_layout = cute.tile_to_shape(
                plain_atom, (HEAD, KV_BLOCK, head_slots), order=(0, 1, 2)
            )
            value_copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), element)
            values = TmaTensor(value_copy, value_tensor)
            scale_tensor = tensor(
                args.scales,
                (2 * args.slots, args.heads, owners),
                (1, 2 * args.slots, Int64(args.heads) * 2 * args.slots),
            )
            scale_tile = 2 * KV_BLOCK
            scales: Any = TmaTensor.of(scale_tensor, cute.make_layout(scale_tile), (scale_tile,))
        else:
            key_columns, value_columns = (TILE, d // TILE), (TILE, v // TILE)
            column_strides = (1, TILE)
            value_strides = (aligned(args.value_row), column_strides)
            value_tensor = tensor(
                args.values,
                (args.slots, value_columns, args.heads, owners),
                (*value_strides, aligned(args.value_head), aligned(args.value_request)),
            )
            values, value_layout = copies(value_tensor, wide_atom, (self.kv_block, v), head_slots)
            scales = None
        key_strides = (aligned(args.key_token), column_strides)
        key_tensor = tensor(
            args.keys,
            (args.slots, key_columns, args.heads, owners),
            (*key_strides, aligned(args.key_head), aligned(args.key_request)),
        )
        keys, key_layout = copies(key_tensor, wide_atom, (self.kv_block, d), head_slots)
        rope = rope_layout = None
        if const_expr(p > 0):
            rope_tensor = tensor(
                args.k_rope,
                (args.slots, p, owners),
                (
                    cute.assume(args.rope_token, divby=8), 1,
                    cute.assume(args.rope_request, divby=8),
                ),
            )  # fmt: skip
            # As wide as a row.
            rope_kind = kinds.K_SW128 if p * 2 >= 128 else kinds.K_SW64
            rope_atom = warpgroup.make_smem_layout_atom(rope_kind, dtype)
            rope, rope_layout = copies(rope_tensor, rope_atom, (self.kv_block, p), self.stages)

        def mma(kind, b_major, columns, shared=False):
            source = warpgroup.OperandSource.RMEM  # queries, or probabilities
            if const_expr(shared):
                source = warpgroup.OperandSource.SMEM
            if const_expr(self.columns > 0):
                source, columns = warpgroup.OperandSource.SMEM, self.columns
            return sm90.make_trivial_tiled_mma(
                kind, kind, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (ROWS, columns), source
            )

        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        stages = self.stages
        scale_count = 2 * KV_BLOCK * head_slots if const_expr(self.fp8) else 0
        key_elements = self.kv_block * d * head_slots
        value_elements = self.kv_block * v * head_slots
        few_rows = CONSUMER_WARPGROUPS * self.columns
        warp_numbers = few_rows * WARPGROUP_WARPS
        rope_elements = self.kv_block * p * stages
        # Few rows on the N side, or all of them where they do not fit registers.
        query_rows = few_rows + self.query_rows

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[Int64, len(producer.StageBarrier) * stages]
            q_scales: cute.struct.Align[cute.struct.MemRange[Float32, few_rows], 16]
            warp_rows: cute.struct.Align[cute.struct.MemRange[Float32, warp_numbers], 16]
            q_nope: cute.struct.Align[cute.struct.MemRange[element, query_rows * d], 1024]
            q_rope: cute.struct.Align[cute.struct.MemRange[dtype, query_rows * p], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[element, few_rows * 2 * KV_BLOCK], 128]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, scale_count], 128]
            keys: cute.struct.Align[cute.struct.MemRange[element, key_elements], 1024]
            values: cute.struct.Align[cute.struct.MemRange[element, value_elements], 1024]
            rope: cute.struct.Align[cute.struct.MemRange[dtype, rope_elements], 1024]

        self.Shared = Shared
        starts = None
        if const_expr(self.ring):
            starts = cute.make_tensor(args.starts, cute.make_layout(args.requests))
        rows = args.requests * args.queries * args.heads
        o, lse, written = args.o, args.lse, rows
        if const_expr(self.partials):
            o, lse, written = args.o_partial, args.lse_partial, rows * args.splits
        self.decompressed_attention(
            mma(element, K, self.kv_block, self.query_rows > 0),
            mma(dtype, K, self.kv_block, self.query_rows > 0),
            mma(element, K if const_expr(self.fp8) else MN, v),
            producer.Sources(keys, values, rope, scales),
            (key_layout, value_layout, rope_layout),
            args.q_nope,
            args.q_rope,
            cute.make_tensor(args.lengths, cute.make_layout(args.requests)),
            starts,
            o,
            cute.make_tensor(lse, cute.make_layout(written)),
            args.scale_log2e,
            Sizes(*(getattr(args, name) for name in Sizes._fields)),
            args.ctas,
        ).launch(grid=(args.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)
        if const_expr(self.partials):
            MergeSplits(dtype, v)(
                o, lse, args.o, args.lse, rows, args.splits, args.merge_ctas, stream
            )

    @cute.kernel
    def decompressed_attention(
        self,
        qk_mma: cute.TiledMma,
        rope_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        sources: producer.Sources,
        layouts: tuple[Any, Any, Any],
        q_nope: cute.Pointer,
        q_rope: cute.Pointer | None,
        lengths: cute.Tensor,
        starts: cute.Tensor | None,
        o: cute.Pointer,
        lse: cute.Tensor,
        scale_log2e: Float32,
        sizes: Sizes,
        ctas: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        store = SmemAllocator().allocate(self.Shared)
        pipeline = producer.Pipeline(
            store.barriers.data_ptr(), self.stages, self.stage_heads, self.key_bytes,
            self.value_bytes,
        )  # fmt: skip
        if thread == 0:
            producer.init_barriers(pipeline)
        cute.arch.sync_threads()
        key_layout, value_layout, rope_layout = layouts
        s_k = store.keys.get_tensor(key_layout.outer, swizzle=key_layout.inner)
        s_v = store.values.get_tensor(value_layout.outer, swizzle=value_layout.inner)
        s_r = None
        if const_expr(rope_layout is not None):
            s_r = store.rope.get_tensor(rope_layout.outer, swizzle=rope_layout.inner)
        s_scales = None
        if const_expr(self.fp8):
            scale_layout = cute.make_layout((2 * KV_BLOCK, self.stage_heads * self.stages))
            s_scales = store.scales.get_tensor(scale_layout)
        scheduler = Scheduler(
            lengths, *sizes, pair_tiles=self.pairing == TILES, shared=self.shared, starts=starts,
            alone=self.alone, kv_block=self.kv_block,
        )  # fmt: skip
        if warp_index >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == PRODUCER_WARP:
                shared_kv = producer.SharedKv(s_k, s_v, s_r, s_scales)
                producer.produce(
                    sources, shared_kv, pipeline, scheduler, cta, ctas, self.widths,
                    one_tile_ahead=self.columns == 0,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            by_column = s_v  # columns first, then tokens
            if const_expr(not self.fp8):
                swapped = cute.select(s_v.layout, mode=[1, 0, 2])
                by_column = cute.make_tensor(s_v.iterator, swapped)
            consumer = compute.Consumer(
                compute.Mmas(qk_mma, rope_mma, pv_mma),
                producer.SharedKv(s_k, by_column, s_r, s_scales), pipeline,
                self.queries(q_nope, q_rope, store), compute.Outputs(o, lse), scale_log2e, cta,
                ctas, scheduler, self.dtype, self.fp8, self.partials, self.widths,
            )  # fmt: skip
            if const_expr(self.columns > 0):
                fp8_few.compute_few_fp8(consumer, self.exchange(store), self.columns)
            else:
                compute.compute(consumer)

    def queries(self, q_nope, q_rope, store):
        """The queries: pointers, and where a warpgroup keeps them in shared memory, if it does."""
        s_nope = s_rope = None
        if const_expr(self.query_rows > 0):
            kind, widths = warpgroup.SmemLayoutAtomKind.K_SW128, self.widths
            shape = ROWS, CONSUMER_WARPGROUPS
            s_nope = tiles(store.q_nope, self.dtype, kind, shape[0], widths.d, shape[1])
            if const_expr(widths.p > 0):
                s_rope = tiles(store.q_rope, self.dtype, kind, shape[0], widths.p, shape[1])
        return compute.Queries(q_nope, q_rope, s_nope, s_rope)

    def exchange(self, store):
        """What the warpgroups keep in shared memory with rows on the N side."""
        kinds = warpgroup.SmemLayoutAtomKind
        rows, groups = self.columns, CONSUMER_WARPGROUPS
        return fp8_few.Exchange(
            tiles(store.q_nope, Float8E4M3FN, kinds.K_SW128, rows, HEAD, groups),
            tiles(store.q_rope, self.dtype, kinds.K_SW128, rows, ROPE, groups),
            store.q_scales.get_tensor(cute.make_layout((rows, 1, groups))),
            store.warp_rows.get_tensor(cute.make_layout((rows, WARPGROUP_WARPS, groups))),
            tiles(store.weights, Float8E4M3FN, kinds.K_INTER, rows, KV_BLOCK, 2, groups),
        )


class MergeSplits:
    """Merges the partials of splits, for one element type and width of the values.

        o_partial [splits, rows, v] float32, normalised within the split; lse_partial [splits, rows]
        -> o [rows, v] in the input dtype, lse [rows] (natural logarithm)

    A warp takes a row, a lane v / 32 of its columns. Splits without a visible token have -inf and
    weigh nothing.
    """

    def __init__(self, dtype, v=HEAD):
        self.dtype = dtype
        self.v = v

    @cute.jit
    def __call__(
        self,
        o_partial: cute.Pointer,
        lse_partial: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        rows: Int32,
        splits: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.merge_splits(
            o_partial,
            cute.make_tensor(lse_partial, cute.make_layout((rows, splits))),
            o,
            cute.make_tensor(lse, cute.make_layout(rows)),
            rows,
            splits,
        ).launch(grid=(ctas, 1, 1), block=(MERGE_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def merge_splits(
        self,
        o_partial: cute.Pointer,
        lse_partial: cute.Tensor,
        o: cute.Pointer,
        lse: cute.Tensor,
        rows: Int32,
        splits: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warps = MERGE_THREADS // 32
        v, count = self.v, self.v // 32  # columns of a row and of a lane
        for row in cutlass.range(cta * warps + thread // 32, rows, ctas * warps, unroll=1):
            top = -Float32.inf
            for split in cutlass.range(splits, unroll=1):
                top = cute.arch.fmax(top, lse_partial[row, split])
            total = Float32(0.0)
            merged = cute.make_rmem_tensor(count, Float32)
            merged.fill(0.0)
            if top > -Float32.inf:
                for split in cutlass.range(splits, unroll=1):
                    weight = cute.math.exp2((lse_partial[row, split] - top) / LN_2, fastmath=True)
                    total += weight
                    at = (Int64(split) * rows + row) * v + lane * count
                    columns = cute.make_rmem_tensor(count, Float32)
                    source = cute.make_tensor((o_partial + at).align(min(16, 4 * count)), count)
                    cute.autovec_copy(source, columns)
                    merged.store(merged.load() + columns.load() * weight)
                merged.store(merged.load() * cute.arch.rcp_approx(total))
                top += cute.math.log2(total, fastmath=True) * LN_2
            narrow = cute.make_rmem_tensor(count, self.dtype)
            narrow.store(merged.load().to(self.dtype))
            place = (o + (Int64(row) * v + lane * count)).align(min(16, 2 * count))
            cute.autovec_copy(narrow, cute.make_tensor(place, count))
            if lane == 0:
                lse[row] = top
