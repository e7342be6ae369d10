"""Centring of the 8-bit latent kernel's output, which keeps its sums near zero.

An 8-bit wgmma aligns products to the largest exponent among them and the accumulator, and cuts them
13 bits below it: a large accumulator takes half of its last bit from every product. Where the mean
of a value is not zero, the accumulator grows with every token. With flat attention, a mean of twice
the standard deviation and 4096 tokens, 7 % of the output are lost.

So every `CENTRE_PAIRS` pairs of KV blocks an estimate of the output, `means[column] * weight[row]`,
is removed from it, and half of what the pairs until the next time are expected to add: the
accumulator then runs from -h to h and not from 0 to 2 h. The means are over query rows of a thread,
and a row's weight is its sum of probabilities until the first time, without the first pair. Neither
has to be exact: what was removed is known, and is added again before the output is used.

The means are estimated anew every time. With the first estimate alone an output is worse than
without any where values change within a segment (docs/kernels/latent-fp8.md).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.columns import own_row
from mla_var3.kernel.cute_python.mla.hopper.rows import row_sum
from mla_var3.kernel.cute_python.mla.hopper.warps import sync_warpgroup
from mla_var3.kernel.cute_python.mla.latent.producer import Barrier
from mla_var3.kernel.cute_python.mla.latent_fp8.state import CENTRE_PAIRS, FLUSH_PAIRS, HALF

UNCENTRED_PAIRS = CENTRE_PAIRS // 2 + 1
"""The longest segment that is not centred: centring for one more pair is not worth its time."""
OWN_COLUMNS = HALF // 32
"""Output columns of a thread."""
LARGEST = 1e30
"""Larger estimates are not used, nor are those that are no numbers: NaN in one query row would
reach others."""


def is_centred(pairs: Any) -> Any:
    """Whether the output of a segment of so many pairs is centred at all."""
    return pairs > UNCENTRED_PAIRS


def is_due(block: Any, pairs: Any) -> Any:
    """Whether the output is centred behind the pair of a block, in a tile of so many pairs.

    For the first time after half of `CENTRE_PAIRS`: until then it runs from 0 to h.
    """
    return (pairs_done(block) % CENTRE_PAIRS == CENTRE_PAIRS // 2) & (block + 4 < 2 * pairs)


def pairs_done(block: Any) -> Any:
    """Pairs of the segment behind the one of a block of the tile."""
    return block // 2 % FLUSH_PAIRS + 1


def opaque(value: Any) -> Any:
    """The same number, of which the compiler does not know that it is the same.

    What is rarely computed would otherwise share numbers with the rest or be computed in front of a
    loop, and both keep them in registers.
    """
    kind = type(value)
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[kind], read_only_args=[value]
    )


@cute.jit
def usable(estimate: Float32) -> Float32:
    """The estimate, or 0 in place of one that is infinite or not a number."""
    size = cute.arch.fmax(estimate, -estimate)
    return estimate if size < LARGEST else Float32(0.0)


@cute.jit
def read_means(exchange: cutlass.Constexpr, t: Int32, group: Int32) -> cute.Tensor:
    """The means of this thread's columns, (one of two, M tile)."""
    narrow = cute.make_rmem_tensor((2, OWN_COLUMNS // 2), BFloat16)
    cute.autovec_copy(own_means(exchange, t, group), narrow)
    means = cute.make_rmem_tensor((2, OWN_COLUMNS // 2), Float32)
    means.store(narrow.load().to(Float32))
    return means


@cute.jit
def write_means(exchange: cutlass.Constexpr, means: cute.Tensor, t: Int32, group: Int32):
    """Write the means of this thread's columns, and round them to what is written."""
    narrow = cute.make_rmem_tensor((2, OWN_COLUMNS // 2), BFloat16)
    narrow.store(means.load().to(BFloat16))
    cute.autovec_copy(narrow, own_means(exchange, t, group))
    means.store(narrow.load().to(Float32))


def own_means(exchange: Any, t: Any, group: Any) -> cute.Tensor:
    """Where the means of this thread's columns are in shared memory."""
    place = exchange.means[(None, t, group)].iterator.align(16)
    return cute.make_tensor(place, cute.make_layout((2, OWN_COLUMNS // 2)))


@cute.jit
def own_weights(exchange: cutlass.Constexpr, j: cutlass.Constexpr, t: Int32, group: Int32):
    """Weights of this thread's two rows of group j, which are neighbours."""
    weights = cute.make_rmem_tensor(2, Float32)
    place = exchange.removed[(None, group)].iterator + own_row(j, 0, t % 32)
    cute.autovec_copy(cute.make_tensor(place.align(8), cute.make_layout(2)), weights)
    return weights


@cute.jit
def rescale_removed(
    exchange: cutlass.Constexpr, source: cutlass.Constexpr, t: Int32, group: cutlass.Constexpr
):
    """Rescale what was removed by the factors of a block of warpgroup `source`, as the output.

    Only the thread that writes a row's weight changes it, so this needs no synchronisation.
    """
    t = opaque(t)
    row0 = (t // 32) * 16 + t % 32 // 4
    if t % 4 == 0:
        for r in cutlass.range_constexpr(2):
            row = row0 + 8 * r
            exchange.removed[row, group] = (
                exchange.removed[row, group] * exchange.scales[row, source]
            )


@cute.jit
def follow_output(
    o: cute.Tensor,
    state: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    block: Int32,
    pairs: Int32,
    t: Int32,
    group: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):
    """Centre the output behind a pair, where it is due.

    Args:
        o: output by query row; no product is being added to it.
        state, exchange: `State` and `Exchange`.
        block: a block of the last pair that was added.
        pairs: pairs of the tile.
        t, group: this thread and its warpgroup.
        columns: query rows on the N side.
    """
    if pairs_done(block) == 1:
        weigh_rows(state, exchange, False, t, group)
    if is_due(block, pairs):
        centre(o, state, exchange, block, t, group, columns)


@cute.jit
def centre(
    o: cute.Tensor,
    state: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    block: Int32,
    t: Int32,
    group: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):
    """Estimate the means anew, and remove from the output what they have changed by.

    Args:
        o: output by query row; no product is being added to it.
        state, exchange: `State` and `Exchange`.
        block: a block of the last pair that was added.
        t, group: this thread and its warpgroup.
        columns: query rows on the N side.
    """
    t = opaque(t)
    done = pairs_done(block)
    old = read_means(exchange, t, group)
    if done == CENTRE_PAIRS // 2:  # the first time in a segment: nothing is removed yet
        weigh_rows(state, exchange, True, t, group)
        old.fill(0.0)
    sync_warpgroup(Barrier.WARPGROUP_0 + group)
    new = cute.make_rmem_tensor((2, OWN_COLUMNS // 2), Float32)
    ahead = 1.0 + (CENTRE_PAIRS / 2) * cute.arch.rcp_approx(Float32(done))
    estimate_means(o, exchange, old, new, ahead, t, group, columns)
    write_means(exchange, new, t, group)
    old.store(old.load() - new.load())
    add_means(o, old, exchange, t, group, columns)


@cute.jit
def weigh_rows(
    state: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    known: cutlass.Constexpr,
    t: Int32,
    group: cutlass.Constexpr,
):
    """The rows' weights of a segment: their sums of probabilities behind its first pair.

    Called behind the first pair, not yet `known`, to note what to leave out: the first token holds
    most of the weight in many rows, which says nothing about those to come. Then at the first
    centring. The sums are those of this warpgroup, of every other KV block. Only their proportions
    matter: the unit cancels in the means.
    """
    t = opaque(t)
    row0 = (t // 32) * 16 + t % 32 // 4
    for r in cutlass.range_constexpr(2):
        total = row_sum(state.sums[r])
        if t % 4 == 0:
            row = row0 + 8 * r
            if const_expr(known):
                total = cute.arch.fmax(total - exchange.removed[row, group], Float32(0.0))
            exchange.removed[row, group] = usable(total)


@cute.jit
def estimate_means(
    o: cute.Tensor,
    exchange: cutlass.Constexpr,
    old: cute.Tensor,
    new: cute.Tensor,
    ahead: Float32,
    t: Int32,
    group: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):
    """Means over every other row of this thread: the whole output over the rows' weights.

    Args:
        o, exchange: see `centre`.
        old, new: means of this thread's columns; `new` is written.
        ahead: output expected in the middle until the next time, over that of now.
        t, group, columns: see `centre`.
    """
    weight = Float32(0.0)
    new.fill(0.0)
    for j in cutlass.range_constexpr(columns // 8):
        weight += own_weights(exchange, j, t, group)[0]
        for m in cutlass.range_constexpr(OWN_COLUMNS // 2):
            for r in cutlass.range_constexpr(2):
                new[r, m] = new[r, m] + o[(0, j), (r, m)]
    inverse = cute.arch.rcp_approx(weight)
    for m in cutlass.range_constexpr(OWN_COLUMNS // 2):
        for r in cutlass.range_constexpr(2):
            new[r, m] = usable((new[r, m] * inverse + old[r, m]) * ahead)


@cute.jit
def add_means(
    o: cute.Tensor,
    means: cute.Tensor,
    exchange: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    columns: cutlass.Constexpr,
):
    """Add means times the rows' weights to the output."""
    for j in cutlass.range_constexpr(columns // 8):
        weights = own_weights(exchange, j, t, group)
        for e in cutlass.range_constexpr(2):
            for m in cutlass.range_constexpr(OWN_COLUMNS // 2):
                for r in cutlass.range_constexpr(2):
                    place = ((e, j), (r, m))
                    o[place] = o[place] + means[r, m] * weights[e]


@cute.jit
def add_removed(
    o: cute.Tensor,
    exchange: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    columns: cutlass.Constexpr,
):
    """Add what was removed from the output, at the end of a segment."""
    sync_warpgroup(Barrier.WARPGROUP_0 + group)
    add_means(o, read_means(exchange, t, group), exchange, t, group, columns)
