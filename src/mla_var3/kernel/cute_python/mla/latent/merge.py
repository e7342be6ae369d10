"""Joins the pieces of the items that an absorbed kernel had to cut, at the end of its own launch.

    o_partial [slots, 64, 512] float32, normalised within the piece
    lse_partial [slots, 64] float32, in powers of two; -inf for a row without a visible token
    merges [slots + blocks + 1, 4] int32:
        of every slot what it holds (`Piece`), first output row, rows
        of every block where it is (`State`, 64 bits)
        how many blocks have read all states
    -> rows of o_latent [rows, 512] and lse [rows] (natural logarithm) of the items that were cut

Every block owns two slots: an even one for the first item of its part, an odd one for the last. The
pieces of an item are in order: its first in either slot of some block, the others in the even slots
of the same member in the parts that follow.

A block that has written its pieces waits for those of the others, then all of them share the rows
of cut items. Where the lengths need no cut, every block knows it and nothing of this happens.

**Nobody waits for a block that has no SM.** Blocks may be kept out by work on other streams, and
two launches whose waiting blocks keep out each other's would wait for ever. So a block says when it
has started, and one that misses another at its end leaves. Those that stay wait for running blocks
only, and the last one to end misses nobody, so somebody stays. Who shares a row, and in which
order, does not depend on who left: results are the same bit by bit.

**The memory needs no preparation.** A state is a number of 64 bits that other data does not have
by chance, and the last block that has read all states clears them for the next launch. That one
comes behind this one on its stream: a launch that overlaps this one, programmatic dependent launch
included, must not share its room for pieces.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from mla_var3.kernel.cute_python.mla.hopper.warps import CONSUMERS
from mla_var3.kernel.cute_python.mla.latent.loader import Barrier
from mla_var3.kernel.cute_python.mla.latent.ops import LATENT, LN_2, ROPE
from mla_var3.kernel.cute_python.mla.latent.schedule import ROWS, Piece

WARPS = CONSUMERS // 32
CHUNK = 128
"""Columns of a row that a warp reads at once: 16 bytes of float32 per lane."""
CHUNKS = LATENT // CHUNK
LOADS = 16
"""Reads of 16 bytes that a lane starts before it uses the first: the 8 warps of a block have few on
their way otherwise. Other numbers were not measured."""
LOOKS = 16
"""How often a block looks for others that have not started before it leaves. Blocks without work
end while the last ones are being started. Other numbers were not measured."""
MOST_SLOTS = 2048
"""Slots whose records fit into the query tile, two for each block."""


class State(IntEnum):
    """Where a block is: computing, waiting for the others with its pieces written, or gone."""

    STARTED = 0x5B8E_13F6_A94D_2701
    WAITS = 0x5B8E_13F6_A94D_2702
    LEFT = 0x5B8E_13F6_A94D_2703


def merge_rows(blocks: int) -> int:
    """Rows of `merges` for a number of blocks, two slots each."""
    return 3 * blocks + 1


def cuts_items(part_range, parts):
    """Whether a launch may cut items, from what `part_range` found for any of its blocks.

    Where it does not, the parts take turns: the step from one item to the next is their number.
    """
    return part_range[4] != parts


def merge_cost(pieces: int, element_size: int) -> tuple[float, float]:
    """FLOPs and bytes of merging a number of pieces into elements of this size."""
    rows = pieces * ROWS
    return 2.0 * rows * LATENT, float(rows * (LATENT * 4 + 4 + LATENT * element_size))


@cute.jit
def final_lse(log_sum: Float32, empty_positive: cutlass.Constexpr):
    """The log-sum-exp of a row as it is returned, from one in powers of two.

    A row without a visible token has -inf, or +inf where `empty_positive` asks for it, as FlashMLA
    returns it. Pieces have -inf in any case.
    """
    result = log_sum * LN_2
    if const_expr(empty_positive):
        if log_sum == -Float32.inf:
            result = Float32.inf
    return result


@dataclass(frozen=True)
class Room:
    """Shared memory of the merge, laid over the query tile, which nobody reads any more.

    Attributes:
        records: [slot, 3] as in `merges`.
        owners: [cut item]: the slot of its first piece.
        stays: [block]: whether it takes part.
        totals: cut items, most rows of any, blocks that take part, those of them before this one.
        weights: [warp, 2] maximum and sum of weights of a warp's pieces.
        shares: [warp, 4, lane] a warp's part of a sum.
    """

    records: Any
    owners: Any
    stays: Any
    totals: Any
    weights: Any
    shares: Any


def merge_room(tile: cute.Pointer) -> Room:
    """The merge's view of the query tile."""
    words = cute.recast_ptr(tile, dtype=Int32)
    sizes = [
        (MOST_SLOTS, 3), (MOST_SLOTS,), (MOST_SLOTS // 2,), (4,), (WARPS, 2), (WARPS, 4, 32)
    ]  # fmt: skip
    tensors: list[cute.Tensor] = []
    used = 0
    for shape in sizes:
        floats = len(tensors) >= 4
        place = cute.recast_ptr(words + used, dtype=Float32) if floats else words + used
        order = tuple(reversed(range(len(shape))))
        tensors.append(cute.make_tensor(place, cute.make_ordered_layout(shape, order=order)))
        used += cute.size(shape)
    assert used * 4 <= ROWS * (LATENT + ROPE) * 2
    return Room(*tensors)


@cute.jit
def state_place(merges: cute.Tensor, blocks: Int32, block: Int32) -> cute.Pointer:
    """Where the state of a block is; that of the block behind the last one counts readers."""
    return cute.recast_ptr((merges.iterator + (2 * blocks + block) * 4).align(8), dtype=Int64)


@cute.jit
def state_of(merges: cute.Tensor, blocks: Int32, block: Int32, order: cutlass.Constexpr) -> Int64:
    """The state of a block now; with the order "acquire", what it wrote before can be read."""
    return cute.arch.load(state_place(merges, blocks, block), Int64, sem=order, scope="gpu")


@cute.jit
def open_merge(merges: cute.Tensor, blocks: Int32, block: Int32):
    """Say that a block has started, and that its slots are empty; one thread calls it."""
    for i in cutlass.range_constexpr(2):
        merges[block * 2 + i, 0] = Int32(0)
    if block == 0:
        # Before its own state, which whoever counts has seen.
        cute.arch.store(state_place(merges, blocks, blocks), Int64(0), sem="relaxed", scope="gpu")
    started = Int64(State.STARTED)
    cute.arch.store(state_place(merges, blocks, block), started, sem="relaxed", scope="gpu")


@cute.jit
def merge_pieces(
    outputs: cutlass.Constexpr,
    missing: cute.Tensor,
    room: cutlass.Constexpr,
    gang: Int32,
    blocks: Int32,
    block: Int32,
    dtype: cutlass.Constexpr,
):
    """The end of a block whose launch cuts items; all computing threads call it.

    Args:
        outputs: o_latent, lse, o_partial, lse_partial, merges, `empty_positive` of `final_lse`.
        missing: in shared memory, 0 when the block starts.
        room: shared memory of the merge.
        gang: blocks of a gang.
        blocks: blocks of the launch.
        block: this one.
        dtype: element type of the output.
    """
    merges = outputs[4]
    thread, _, _ = cute.arch.thread_idx()
    # Asked while the results are still on their way to memory.
    for other in cutlass.range(thread, blocks, CONSUMERS, unroll=1):
        known = has_started(state_of(merges, blocks, other, "relaxed"))
        looks = Int32(0)
        while not known and looks < LOOKS:
            known = has_started(state_of(merges, blocks, other, "relaxed"))
            looks += 1
        if not known:
            missing[0] = 1
    # From here on everything is written, and nobody reads the query tile.
    cute.arch.barrier(barrier_id=Barrier.FINISH, number_of_threads=CONSUMERS)
    stays = missing[0] == 0
    if thread == 0:
        state = Int64(State.LEFT)
        if stays:
            state = Int64(State.WAITS)
        # The release covers what the other threads wrote before the barrier.
        cute.arch.store(state_place(merges, blocks, block), state, sem="release", scope="gpu")
    if stays:
        gather(merges, room, blocks, block)
        readers = Int64(0)
        if thread == 0:
            # Whoever counts has left its loops over states: no order of memory is needed.
            readers = cute.arch.atomic_add(
                state_place(merges, blocks, blocks), Int64(1), sem="relaxed", scope="gpu"
            )
        share_rows(outputs, room, gang, blocks, dtype)
        # Asked for above, needed here, so that nobody has waited for the answer.
        if thread == 0 and readers == room.totals[2] - 1:
            for other in cutlass.range(blocks, unroll=8):
                place = state_place(merges, blocks, other)
                cute.arch.store(place, Int64(0), sem="relaxed", scope="gpu")


@cute.jit
def has_started(state: Int64) -> Boolean:
    return state == State.STARTED or state == State.WAITS or state == State.LEFT


@cute.jit
def gather(merges: cute.Tensor, room: cutlass.Constexpr, blocks: Int32, block: Int32):
    """Wait for all blocks; then `room` says what there is to merge and who takes part."""
    thread, _, _ = cute.arch.thread_idx()
    for other in cutlass.range(thread, blocks, CONSUMERS, unroll=1):
        state = state_of(merges, blocks, other, "acquire")
        while state != State.WAITS and state != State.LEFT:
            state = state_of(merges, blocks, other, "acquire")
        stays = Int32(0)
        if state == State.WAITS:
            stays = Int32(1)
        room.stays[other] = stays
        for i in cutlass.range_constexpr(2):
            for column in cutlass.range_constexpr(3):
                room.records[other * 2 + i, column] = merges[other * 2 + i, column]
    cute.arch.barrier(barrier_id=Barrier.FINISH, number_of_threads=CONSUMERS)
    if thread < 32:
        count_items(room, blocks)
        count_blocks(room, blocks, block)
    cute.arch.barrier(barrier_id=Barrier.FINISH, number_of_threads=CONSUMERS)


@cute.jit
def count_items(room: cutlass.Constexpr, blocks: Int32):
    """List the cut items, in the same order in every block; one warp calls it."""
    lane = cute.arch.lane_idx()
    items = Int32(0)
    most = Int32(0)
    for base in cutlass.range(0, 2 * blocks, 32, unroll=1):
        slot = base + lane
        first = False
        if slot < 2 * blocks:
            first = (room.records[slot, 0] & Piece.FIRST) != 0
        found = cute.arch.vote_ballot_sync(first)
        if first:
            room.owners[items + cute.arch.popc(found & ((Int32(1) << lane) - 1))] = slot
            most = cutlass.max(most, room.records[slot, 2])
        items += cute.arch.popc(found)
    most = cute.arch.warp_redux_sync(most, "max")
    if lane == 0:
        room.totals[0] = items
        room.totals[1] = most


@cute.jit
def count_blocks(room: cutlass.Constexpr, blocks: Int32, block: Int32):
    """Count who takes part, and who of them comes before this block; one warp calls it."""
    lane = cute.arch.lane_idx()
    present = Int32(0)
    before = Int32(0)
    for base in cutlass.range(0, blocks, 32, unroll=1):
        other = base + lane
        stays = Int32(0)
        if other < blocks:
            stays = room.stays[other]
        present += stays
        if other < block:
            before += stays
    present = cute.arch.warp_redux_sync(present, "add")
    before = cute.arch.warp_redux_sync(before, "add")
    if lane == 0:
        room.totals[2] = present
        room.totals[3] = before


@cute.jit
def share_rows(
    outputs: cutlass.Constexpr,
    room: cutlass.Constexpr,
    gang: Int32,
    blocks: Int32,
    dtype: cutlass.Constexpr,
):
    """Merge this block's share of the rows."""
    rows = room.totals[0] * room.totals[1]
    if rows >= blocks * WARPS:
        merge_units(outputs, room, gang, blocks, Int32(1), CHUNKS, dtype)
    else:
        # With few rows a warp takes a part of one, and where these are few as well, several warps
        # take some pieces each: one alone would wait for memory once per handful of pieces.
        team = Int32(1)
        while team < WARPS and rows * CHUNKS * team * 2 <= blocks * WARPS:
            team = team * 2
        merge_units(outputs, room, gang, blocks, team, 1, dtype)


@cute.jit
def merge_units(
    outputs: cutlass.Constexpr,
    room: cutlass.Constexpr,
    gang: Int32,
    blocks: Int32,
    team: Int32,
    chunks: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Merge this block's units, each some columns of a row.

    Args:
        outputs, room, gang, blocks, dtype: as for `merge_pieces`.
        team: warps that share a unit, each with some of its pieces; 1 for whole rows.
        chunks: chunks of columns of a unit.
    """
    _, _, o_partial, lse_partial, _, _ = outputs
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    lane = cute.arch.lane_idx()
    items, most, present, rank = (room.totals[i] for i in range(4))
    per_row = CHUNKS // chunks
    units = items * most * per_row
    teams = WARPS // team
    slots = 2 * blocks
    pieces_in = cute.make_tensor(
        o_partial, cute.make_layout((slots * ROWS, LATENT), stride=(LATENT, 1))
    )
    for turn in cutlass.range((units + present * teams - 1) // (present * teams), unroll=1):
        unit = (turn * present + rank) * teams + warp // team
        first = Int32(0)
        row = Int32(0)
        live = Boolean(False)
        if unit < units:
            first = room.owners[unit // (most * per_row)]
            row = unit // per_row % most
            live = row < room.records[first, 2]
        chunk = unit % per_row
        top = -Float32.inf
        weight = Float32(0.0)
        acc = cute.make_rmem_tensor((4, chunks), Float32)
        acc.fill(0.0)
        if live:
            top, weight = add_pieces(
                pieces_in, lse_partial, room, acc, first, row, chunk, gang, slots, warp % team,
                team, chunks,
            )  # fmt: skip
        if const_expr(chunks == 1):
            if team > 1:
                top, weight = add_shares(room, acc, top, weight, warp, warp % team, team)
        if live and warp % team == 0:
            at = room.records[first, 1] + row
            store_merged(outputs, acc, top, weight, at, chunk * chunks, lane, chunks, dtype)


@cute.jit
def count_pieces(room: cutlass.Constexpr, second: Int32, step: Int32, slots: Int32) -> Int32:
    """Pieces of an item: those from the second on lie a part apart up to one marked as last."""
    lane = cute.arch.lane_idx()
    pieces = Int32(1)
    looking = Boolean(True)
    base = Int32(0)
    while looking:
        slot = second + (base + lane) * step
        is_last = False
        if slot < slots:
            is_last = (room.records[slot, 0] & Piece.LAST) != 0
        found = cute.arch.vote_ballot_sync(is_last)
        if found != 0:
            looking = Boolean(False)
            pieces = base + 1 + cute.arch.popc((found & -found) - 1) + 1
        else:
            base += 32
            looking = second + base * step < slots
    return pieces


@cute.jit
def add_pieces(
    pieces_in: cute.Tensor,
    lse_partial: cute.Tensor,
    room: cutlass.Constexpr,
    acc: cute.Tensor,
    first: Int32,
    row: Int32,
    chunk: Int32,
    gang: Int32,
    slots: Int32,
    rank: Int32,
    team: Int32,
    chunks: cutlass.Constexpr,
):
    """Add every `team`-th piece of a row, weighted; returns the maximum and the sum of weights.

    Args:
        pieces_in: o_partial as rows.
        lse_partial: log-sum-exp of these rows.
        room: shared memory of the merge.
        acc: (4, chunks) this lane's columns.
        first: slot of the item's first piece.
        row: row of the piece.
        chunk: which unit of the row's columns.
        gang: blocks of a gang.
        slots: slots of the launch.
        rank: the first piece to add.
        team: step from one piece to the next.
        chunks: chunks of columns of a unit.
    """
    lane = cute.arch.lane_idx()
    step = gang * 2
    second = first // 2 * 2 + step
    pieces = count_pieces(room, second, step, slots)
    batch = LOADS // chunks
    top = -Float32.inf
    weight = Float32(0.0)
    for base in cutlass.range(rank, pieces, team * batch, unroll=1):
        parts = cute.make_rmem_tensor((4, chunks, batch), Float32)
        own = cute.make_rmem_tensor(batch, Float32)
        own.fill(-Float32.inf)
        parts.fill(0.0)
        for j in cutlass.range_constexpr(batch):
            i = base + j * team
            if i < pieces:
                slot = second + (i - 1) * step
                if i == 0:
                    slot = first
                own[j] = lse_partial[slot * ROWS + row]
                for c in cutlass.range_constexpr(chunks):
                    column = (chunk * chunks + c) * 32 + lane
                    source = cute.local_tile(pieces_in[slot * ROWS + row, None], (4,), (column,))
                    cute.autovec_copy(source, parts[None, c, j])
        new = top
        for j in cutlass.range_constexpr(batch):
            new = cute.arch.fmax(new, own[j])
        level = finite(new)
        scale = cute.math.exp2(top - level, fastmath=True)
        weight = weight * scale
        acc.store(acc.load() * scale)
        for j in cutlass.range_constexpr(batch):
            own_weight = cute.math.exp2(own[j] - level, fastmath=True)
            weight += own_weight
            acc.store(acc.load() + parts[None, None, j].load() * own_weight)
        top = new
    return top, weight


@cute.jit
def finite(top: Float32) -> Float32:
    """A maximum to subtract: 0 where there is none, so that no difference of infinities arises."""
    level = top
    if top == -Float32.inf:
        level = Float32(0.0)
    return level


@cute.jit
def add_shares(
    room: cutlass.Constexpr,
    acc: cute.Tensor,
    top: Float32,
    weight: Float32,
    warp: Int32,
    rank: Int32,
    team: Int32,
):
    """Add what the warps of a team have; the first one gets the sum. All warps call it."""
    lane = cute.arch.lane_idx()
    for e in cutlass.range_constexpr(4):
        room.shares[warp, e, lane] = acc[e, 0]
    if lane == 0:
        room.weights[warp, 0] = top
        room.weights[warp, 1] = weight
    cute.arch.barrier(barrier_id=Barrier.FINISH, number_of_threads=CONSUMERS)
    if rank == 0:
        for other in cutlass.range(1, team, unroll=1):
            top = cute.arch.fmax(top, room.weights[warp + other, 0])
        level = finite(top)
        weight = Float32(0.0)
        acc.fill(0.0)
        for other in cutlass.range(team, unroll=1):
            scale = cute.math.exp2(room.weights[warp + other, 0] - level, fastmath=True)
            weight += room.weights[warp + other, 1] * scale
            for e in cutlass.range_constexpr(4):
                acc[e, 0] = acc[e, 0] + room.shares[warp + other, e, lane] * scale
    # The next turn writes where this one is read.
    cute.arch.barrier(barrier_id=Barrier.FINISH, number_of_threads=CONSUMERS)
    return top, weight


@cute.jit
def store_merged(
    outputs: cutlass.Constexpr,
    acc: cute.Tensor,
    top: Float32,
    weight: Float32,
    row: Int32,
    chunk: Int32,
    lane: Int32,
    chunks: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Write columns of a merged row, and with the first ones its log-sum-exp."""
    o_latent, lse, _, _, _, empty_positive = outputs
    inverse = Float32(0.0)
    log_sum = -Float32.inf
    if weight > 0.0:
        inverse = Float32(1.0) / weight
        log_sum = top + cute.math.log2(weight, fastmath=True)
    narrow = cute.make_rmem_tensor((4, chunks), dtype)
    narrow.store((acc.load() * inverse).to(dtype))
    start = Int64(row) * LATENT + (chunk * CHUNK + lane * 4)
    for c in cutlass.range_constexpr(chunks):
        place = (o_latent + (start + c * CHUNK)).align(8)
        cute.autovec_copy(narrow[None, c], cute.make_tensor(place, 4))
    if chunk == 0 and lane == 0:
        lse[row] = final_lse(log_sum, empty_positive)
