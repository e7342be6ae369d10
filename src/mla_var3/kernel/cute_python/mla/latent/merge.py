"""Merges the partials of split work tiles, at the end of the latent kernel's own launch.

    o_partial [slots, 64, k] float32, normalised within the split. Tiles of 64 rows write float16
        into the first half of a slot, and behind it a factor per row (`partial_factors`); of an
        8-bit cache partials are bfloat16, without factors
    lse_partial [slots, 64] float32, in powers of two; -inf for a row without a visible token
    merges [slots + CTAs + 1, 4] int32:
        of every slot its record (`records.Record`)
        of every CTA its state (`CtaState`, 64 bits)
        how many CTAs have read all states
    -> rows of o_latent [rows, k] and lse [rows] (natural logarithm) of the split work tiles

Every CTA owns two slots: an even one for the item in which its range begins, an odd one for the
last. It records at its start what they will hold. The partials of a work tile are in order: its
first in either slot of some CTA, the others in the even slots of the CTAs of the same rank in the
groups that follow.

A CTA that has written its partials, or has none, waits for those of the others, then all of them
share the rows to merge. Meanwhile a warp that computes nothing, the *watcher*, has seen all CTAs
start and has listed what there is to merge, so that behind the last product only states are read.
Where the lengths need no split, every CTA knows it and nothing of this happens.

Behind other kernels the code of the merge is in no instruction cache, and fetching it takes longer
than running it. So an idle warp runs it once while the others compute, without effect: a *trial*.
It must have as many registers as they, so only programs for few query rows have one.

**No CTA waits for one that has no SM.** Work on other streams may keep CTAs out, and two launches
whose waiting CTAs keep out each other's would deadlock. So a CTA publishes that it has started, and
one that misses another at its end leaves. Those that stay wait for running CTAs only, and the last
one to end misses none, so at least one stays. Which CTA merges a row, and in which order, does not
depend on which ones left: results are identical bit by bit.

**The workspace needs no initialisation.** A state is a 64-bit number that other data does not have
by chance, and the last CTA that has read all states clears them for the next launch. That launch
comes later on the same stream: a launch that overlaps this one, programmatic dependent launch
included, must not share its workspace.
"""

import operator
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int16, Int32, Int64, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_WARP_BITS,
    CONSUMER_WARPS,
    CONSUMERS,
    LATENT,
    MOST_CTAS,
    PRODUCER_WARP,
    ROWS,
    VECTOR_BITS,
)
from mla_var3.kernel.cute_python.mla.latent.ops import OutputTensors, final_lse, quotient
from mla_var3.kernel.cute_python.mla.latent.producer import Barrier
from mla_var3.kernel.cute_python.mla.latent.records import (
    MOST_SLOTS,
    SLOT_BITS,
    Record,
    Total,
    record_partials,
)
from mla_var3.kernel.cute_python.mla.latent.scheduler import Split

LOOKS = 16
"""How often a CTA that has computed all looks for others that have not started before it leaves.
CTAs without work end while the last ones are being started. Other numbers were not measured."""
WATCHER_WARP = PRODUCER_WARP + 1
"""The watcher, in the producer's warpgroup."""
TRIAL_WARP = PRODUCER_WARP + 2
"""The warp of a trial. The watcher itself would delay the merge of a short launch by it."""


class CtaState(IntEnum):
    """State of a CTA: computing, waiting for the others with its partials written, or gone."""

    STARTED = 0x5B8E_13F6_A94D_2701
    WAITING = 0x5B8E_13F6_A94D_2702
    LEFT = 0x5B8E_13F6_A94D_2703


def merge_rows(ctas: int) -> int:
    """Rows of `merges` for a number of CTAs, two slots each."""
    return 3 * ctas + 1


def outputs_of(operands: Any, partials: Any, sizes: Any) -> OutputTensors:
    """The tensors of a traced host entry's operands, `Partials` and `LatentSizes`."""
    ctas = sizes.group_ctas * sizes.group_count

    def tensor(pointer: Any, shape: Any, stride: Any = None) -> cute.Tensor:
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

    return OutputTensors(
        operands.o_latent,
        tensor(operands.lse, sizes.total_rows),
        partials.o_partial,
        tensor(partials.lse_partial, 2 * ctas * ROWS),
        tensor(partials.merges, (merge_rows(ctas), 4), (4, 1)),
    )


def merge_cost(
    rows: int, partial_size: int, element_size: int, k: int = LATENT
) -> tuple[float, float]:
    """FLOPs and bytes of merging rows of partials, by the sizes of elements before and after."""
    return 2.0 * rows * k, float(rows * (k * (partial_size + element_size) + 4))


@cute.jit
def state_pointer(merges: cute.Tensor, ctas: Int32, cta: Int32) -> cute.Pointer:
    """Pointer to the state of a CTA; that of the CTA behind the last one counts readers."""
    return cute.recast_ptr((merges.iterator + (2 * ctas + cta) * 4).align(8), dtype=Int64)


@cute.jit
def state_of(merges: cute.Tensor, ctas: Int32, cta: Int32, order: cutlass.Constexpr) -> Int64:
    """The state of a CTA now; with the order "acquire", what it wrote before can be read."""
    return cute.arch.load(state_pointer(merges, ctas, cta), Int64, sem=order, scope="gpu")


@cute.jit
def open_merge(
    merges: cute.Tensor,
    ctas: Int32,
    cta: Int32,
    scheduler: cutlass.Constexpr,
    schedule: cute.Tensor | None,
):
    """Publish that a CTA has started and what its slots will hold; one thread calls it."""
    if const_expr(schedule is None):
        record_partials(merges, cta, scheduler)
    if cta == 0:
        # Before its own state, which every CTA that counts has seen.
        cute.arch.store(state_pointer(merges, ctas, ctas), Int64(0), sem="relaxed", scope="gpu")
    started = Int64(CtaState.STARTED)
    cute.arch.store(state_pointer(merges, ctas, cta), started, sem="release", scope="gpu")


@cute.jit
def watch_starts(
    merges: cute.Tensor,
    records: cute.Tensor,
    shared: cutlass.Constexpr,
    ctas: Int32,
    cta: Int32,
):
    """See all CTAs start and list what there is to merge; the watcher calls it."""
    lane = cute.arch.lane_idx()
    finished = shared.totals.iterator + Total.FINISHED
    searching = Boolean(True)
    looks = Int32(0)
    while searching:
        over = cute.arch.load(finished, Int32, sem="relaxed", scope="cta", ss="cta")
        unknown = Boolean(False)
        for i in cutlass.range_constexpr((MOST_CTAS + 31) // 32):
            other = cutlass.min(i * 32 + lane, ctas - 1)
            if not has_started(state_of(merges, ctas, other, "relaxed")):
                unknown = Boolean(True)
        if cute.arch.vote_ballot_sync(unknown) == 0:
            searching = Boolean(False)
        else:
            looks += over
            if looks > LOOKS:
                searching = Boolean(False)
                shared.totals[Total.MISSING] = Int32(1)
    # The records were written before the states.
    cute.arch.fence_acq_rel_gpu()
    for slot in cutlass.range(lane, 2 * ctas, 32, unroll=2):
        for column in cutlass.range_constexpr(len(Record)):
            shared.records[slot, column] = records[slot, column]
    cute.arch.sync_warp()
    count_tiles(shared, ctas, cta)
    cute.arch.barrier(barrier_id=Barrier.MERGE, number_of_threads=CONSUMERS + 32)


@cute.jit
def merge_partials(
    outputs: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    group_ctas: Int32,
    ctas: Int32,
    working: Int32,
    cta: Int32,
    rows: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    trial: Int32 | None = None,
):
    """The end of a CTA whose launch may split items; all consumers call it.

    Args:
        outputs: `Outputs`.
        shared: shared memory of the merge.
        group_ctas: CTAs of a CTA group.
        ctas: CTAs of the launch.
        working: those of them that have work tiles, the first ones.
        cta: this one.
        rows: query rows of a tile.
        dtype: element type of the output.
        trial: 1 for the trial, which `TRIAL_WARP` makes in the same code, and 0 for consumers. None
            in a program without one.
    """
    if const_expr(trial is None):
        stays, readers = join_merge(outputs.merges, shared, ctas, working, cta)
        if stays:
            merge_own_rows(outputs, shared, group_ctas, ctas, rows, dtype, False)
            leave_merge(outputs.merges, shared, ctas, readers)
    else:
        # Also `stays`: nvidia-cutlass-dsl 4.6 wants to know it before the branch.
        stays, staying, readers = Boolean(True), Int32(1), Int64(0)
        if trial == 0:
            stays, readers = join_merge(outputs.merges, shared, ctas, working, cta)
            staying = stays.to(Int32)
        # The assembler must know that the warps do not diverge here.
        if cute.arch.make_warp_uniform(staying) != 0:
            chosen = shared.during(trial)
            merge_own_rows(outputs, chosen, group_ctas, ctas, rows, dtype, True)
            leave_merge(outputs.merges, chosen, ctas, readers)


@cute.jit
def join_merge(
    merges: cute.Tensor, shared: cutlass.Constexpr, ctas: Int32, working: Int32, cta: Int32
):
    """Wait for the partials of the CTAs that are running.

    Args: see `merge_partials`.

    Returns:
        Whether this CTA takes part in the merge, and in its first thread, how many had read all
        states before it.
    """
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        if cta >= working:
            await_partials(merges, ctas, cutlass.min(cta - working, working - 1))
        finished = shared.totals.iterator + Total.FINISHED
        cute.arch.store(finished, Int32(1), sem="relaxed", scope="cta", ss="cta")
    # From here on all partials are written, no warp reads the tiles, and the list is complete.
    cute.arch.barrier(barrier_id=Barrier.MERGE, number_of_threads=CONSUMERS + 32)
    stays = shared.totals[Total.MISSING] == 0
    if thread == 0:
        state = Int64(CtaState.LEFT)
        if stays:
            state = Int64(CtaState.WAITING)
        # The release covers what the other threads wrote before the barrier.
        cute.arch.store(state_pointer(merges, ctas, cta), state, sem="release", scope="gpu")
    readers = Int64(0)
    if stays:
        gather(merges, shared, ctas, cta)
        if thread == 0:
            # A CTA that counts has left its loops over states: no order of memory is needed.
            readers = cute.arch.atomic_add(
                state_pointer(merges, ctas, ctas), Int64(1), sem="relaxed", scope="gpu"
            )
    return stays, readers


@cute.jit
def leave_merge(merges: cute.Tensor, shared: cutlass.Constexpr, ctas: Int32, readers: Int64):
    """Clear the states for the next launch, as the last one that has read them.

    The readers were counted before the merge and are used only here, so that the latency is hidden.
    """
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0 and readers == shared.totals[Total.CTAS] - 1:
        for other in cutlass.range(ctas, unroll=8):
            place = state_pointer(merges, ctas, other)
            cute.arch.store(place, Int64(0), sem="relaxed", scope="gpu")


@cute.jit
def await_partials(merges: cute.Tensor, ctas: Int32, other: Int32):
    """Wait until another CTA has written its partials, if it has started; one thread calls it.

    For CTAs without work tiles, which would look at all states while the others compute
    (docs/results/2026-11-16-nvidia-h200-engine-shapes.md).
    """
    state = state_of(merges, ctas, other, "relaxed")
    looks = Int32(0)
    while not has_started(state) and looks < LOOKS:
        state = state_of(merges, ctas, other, "relaxed")
        looks += 1
    while state == CtaState.STARTED:
        state = state_of(merges, ctas, other, "relaxed")


@cute.jit
def has_started(state: Int64) -> Boolean:
    return state == CtaState.STARTED or state == CtaState.WAITING or state == CtaState.LEFT


@cute.jit
def gather(merges: cute.Tensor, shared: cutlass.Constexpr, ctas: Int32, cta: Int32):
    """Wait for all CTAs; then `shared` says which of them take part."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread >> 5)
    for other in cutlass.range(thread, ctas, CONSUMERS, unroll=1):
        state = state_of(merges, ctas, other, "acquire")
        while state != CtaState.WAITING and state != CtaState.LEFT:
            state = state_of(merges, ctas, other, "acquire")
        stays = Int32(1)
        if state == CtaState.LEFT:
            stays = Int32(0)
            shared.totals[Total.LEFT] = Int32(1)
        shared.stays[other] = stays
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
    if shared.totals[Total.LEFT] != 0:
        if warp == 0:
            count_ctas(shared, ctas, cta)
        cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)


@cute.jit
def count_tiles(shared: cutlass.Constexpr, ctas: Int32, cta: Int32):
    """List the split work tiles, in the same order in every CTA; one warp calls it.

    Tiles end in the order in which they begin: a CTA group has the first partial of one item at
    most, and the last of one before it. Until `count_ctas` says otherwise, all CTAs take part.
    """
    lane = cute.arch.lane_idx()
    slots = cute.make_tensor(
        cute.recast_ptr(shared.tiles.iterator, dtype=Int16),
        cute.make_layout((MOST_SLOTS, 2), stride=(2, 1)),
    )
    begun, ended, most = Int32(0), Int32(0), Int32(0)
    for base in cutlass.range(0, 2 * ctas, 32, unroll=1):
        slot = base + lane
        split, rows = Int32(0), Int32(0)
        if slot < 2 * ctas:
            split = shared.records[slot, Record.SPLIT]
            rows = shared.records[slot, Record.ROWS]
        begun = list_slots(slots, 0, slot, (split & Split.FIRST) != 0, begun)
        ended = list_slots(slots, 1, slot, (split & Split.LAST) != 0, ended)
        if (split & Split.FIRST) != 0:
            most = cutlass.max(most, rows)
    most = cute.arch.warp_redux_sync(most, "max")
    if lane == 0:
        shared.totals[Total.TILES] = begun
        shared.totals[Total.MOST_ROWS] = most
        shared.totals[Total.CTAS] = ctas
        shared.totals[Total.RANK] = cta


@cute.jit
def list_slots(
    slots: cute.Tensor, column: cutlass.Constexpr, slot: Int32, chosen: Boolean, found: Int32
) -> Int32:
    """Write the slots of the lanes that are chosen behind those found before; returns how many."""
    lanes = cute.arch.vote_ballot_sync(chosen)
    if chosen:
        place = found + cute.arch.popc(lanes & ((Int32(1) << cute.arch.lane_idx()) - 1))
        slots[place, column] = Int16(slot)
    return found + cute.arch.popc(lanes)


@cute.jit
def count_ctas(shared: cutlass.Constexpr, ctas: Int32, cta: Int32):
    """Count the CTAs that take part, and those of them before this one; one warp calls it."""
    lane = cute.arch.lane_idx()
    present = Int32(0)
    before = Int32(0)
    for base in cutlass.range(0, ctas, 32, unroll=1):
        other = base + lane
        stays = Int32(0)
        if other < ctas:
            stays = shared.stays[other]
        present += stays
        if other < cta:
            before += stays
    present = cute.arch.warp_redux_sync(present, "add")
    before = cute.arch.warp_redux_sync(before, "add")
    if lane == 0:
        shared.totals[Total.CTAS] = present
        shared.totals[Total.RANK] = before


@cute.jit
def merge_own_rows(
    outputs: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    group_ctas: Int32,
    ctas: Int32,
    rows: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    tried: cutlass.Constexpr,
):
    """Merge this CTA's share of the rows.

    Args:
        outputs, shared, group_ctas, ctas, rows, dtype: as for `merge_partials`.
        tried: whether there are trials, too. In one of them nothing is written and no warp waits.
    """
    chunks = outputs.widths.k // (32 * vector_columns(outputs.o_partial))
    units = shared.totals[Total.TILES] * shared.totals[Total.MOST_ROWS] * chunks
    if units > ctas * CONSUMER_WARPS:
        merge_units(outputs, shared, group_ctas, ctas, Int32(0), chunks, rows, dtype, tried)
    else:
        # Where the rows are so few that one turn is enough, a warp takes some columns of one, and
        # where these are few as well, several warps take some partials each: one alone would wait
        # for memory again and again.
        team_bits = Int32(0)
        while team_bits < CONSUMER_WARP_BITS and units * 2 <= ctas * CONSUMER_WARPS:
            team_bits += 1
            units = units * 2
        merge_units(outputs, shared, group_ctas, ctas, team_bits, 1, rows, dtype, tried)


@cute.jit
def merge_units(
    outputs: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    group_ctas: Int32,
    ctas: Int32,
    team_bits: Int32,
    chunks: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    tried: cutlass.Constexpr,
):
    """Merge this CTA's units, each some columns of a row.

    Args:
        outputs, shared, group_ctas, ctas, rows, dtype, tried: as for `merge_own_rows`.
        team_bits: log2 of the warps that share a unit, each with some of its partials; 0 for whole
            rows.
        chunks: chunks of columns of a unit.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread >> 5)
    if const_expr(tried):
        warp = warp & (CONSUMER_WARPS - 1)
    lane = cute.arch.lane_idx()
    tiles, most, present, rank = (
        shared.totals[total] for total in (Total.TILES, Total.MOST_ROWS, Total.CTAS, Total.RANK)
    )
    k = outputs.widths.k
    vector = vector_columns(outputs.o_partial)
    per_row = k // (32 * vector) // chunks
    tile_units = most * per_row
    units = tiles * tile_units
    team = Int32(1) << team_bits
    member = warp & (team - 1)
    per_turn = present << (CONSUMER_WARP_BITS - team_bits)
    factors = None
    if const_expr(outputs.o_partial.dtype is Float16):
        factors = partial_factors(outputs.o_partial, 2 * ctas, k)
    turn = rank << (CONSUMER_WARP_BITS - team_bits)  # the first unit of the CTA's warps
    while turn < units:
        unit = turn + (warp >> team_bits)
        slots = Int32(0)
        first_row = Int32(0)
        row = Int32(0)
        chunk = Int32(0)
        valid = Boolean(False)
        if unit < units:
            tile = quotient(unit, tile_units)
            place = unit - tile * tile_units
            slots = shared.tiles[tile]
            first = slots & ((1 << SLOT_BITS) - 1)
            row = quotient(place, per_row)
            chunk = place - row * per_row
            first_row = shared.records[first, Record.FIRST_ROW]
            valid = row < shared.records[first, Record.ROWS]
        top = -Float32.inf
        weight = Float32(0.0)
        acc = cute.make_rmem_tensor((vector, chunks), Float32)
        acc.fill(0.0)
        if valid:
            top, weight = add_partials(
                outputs.o_partial, k, factors, outputs.lse_partial, acc, slots, row, chunk,
                group_ctas, member, team, chunks, rows,
            )  # fmt: skip
        writing = True
        if const_expr(tried):
            writing = first_row >= 0
        if const_expr(chunks == 1):
            if team > 1:
                top, weight = add_team(shared, acc, top, weight, warp, member, team, writing)
        if valid and member == 0:
            at = first_row + row
            store_merged(
                outputs, acc, top, weight, at, chunk * chunks, lane, chunks, dtype, writing
            )
        turn += per_turn


def vector_columns(o_partial: cute.Pointer) -> int:
    """Columns of a row of partials that a lane reads at once. A chunk is what a warp reads."""
    return VECTOR_BITS // o_partial.dtype.width


def partial_factors(o_partial: cute.Pointer, slots: Int32, k: int) -> cute.Tensor:
    """[slot, row] the factor by which a row of partials in float16 is to be multiplied."""
    words = cute.recast_ptr(o_partial, dtype=Float32) + ROWS * k // 2
    return cute.make_tensor(words, cute.make_layout((slots, ROWS), stride=(ROWS * k, 1)))


def partials_at_once(o_partial: cute.Pointer, rows: int, chunks: int) -> int:
    """Partials that a warp reads before it uses the first; its CTA has few in flight otherwise.

    More take more code, which is not in the instruction cache when it runs. Of whole rows there are
    several reads each; few rows leave a warp with few partials. Other numbers were not measured.
    """
    few = rows < ROWS and o_partial.dtype.width == Float16.width
    return 4 if few or chunks > 1 else 8


def slot_rows(o_partial: cute.Pointer) -> int:
    """Rows of partials from one slot to the next: a slot has room for float32."""
    return ROWS * Float32.width // o_partial.dtype.width


@cute.jit
def add_partials(
    o_partial: cute.Pointer,
    k: cutlass.Constexpr,
    factors: cutlass.Constexpr,
    lse_partial: cute.Tensor,
    acc: cute.Tensor,
    slots: Int32,
    row: Int32,
    chunk: Int32,
    group_ctas: Int32,
    rank: Int32,
    team: Int32,
    chunks: cutlass.Constexpr,
    rows: cutlass.Constexpr,
):
    """Add every `team`-th partial of a row, weighted; returns the maximum and the sum of weights.

    Each of the first lanes has the slot, the LSE and the weight of one of the partials that are
    read together, and hands them to the others.

    Args:
        o_partial: the partials.
        k: columns of a row.
        factors: `partial_factors`, or None for partials that have none.
        lse_partial: LSE of these rows.
        acc: (columns of a vector, chunks) this lane's columns.
        slots: the tile's entry in `MergeShared.tiles`.
        row: row of the tile.
        chunk: which unit of the row's columns.
        group_ctas: CTAs of a CTA group.
        rank: the first partial to add.
        team: step from one partial to the next.
        chunks: chunks of columns of a unit.
        rows: query rows of a tile.
    """
    lane = cute.arch.lane_idx()
    first, last = slots & ((1 << SLOT_BITS) - 1), slots >> SLOT_BITS
    step = group_ctas * 2
    batch = partials_at_once(o_partial, rows, chunks)
    vector = cute.size(acc, mode=[0])
    columns = (o_partial + (chunk * chunks * 32 + lane) * vector).align(VECTOR_BITS // 8)
    top = -Float32.inf
    weight = Float32(0.0)
    # All but the first partial are in even slots.
    begin = (first & -2) + rank * step
    for base in cutlass.range(begin, last + 1, team * batch * step, unroll=1):
        # Behind the last partial the last one is read again, with a weight of 0.
        own = base + lane * team * step
        exists = lane < batch and own <= last
        own_slot = cutlass.min(own, last)
        if own <= first:
            own_slot = first
        own_place = (own_slot * slot_rows(o_partial) + row) * k
        own_lse = -Float32.inf
        own_factor = Float32(1.0)
        if exists:
            own_lse = lse_partial[own_slot * ROWS + row]
            if const_expr(factors is not None):
                own_factor = factors[own_slot, row]
        loaded = cute.make_rmem_tensor((vector, chunks, batch), o_partial.dtype)
        for j in cutlass.range_constexpr(batch):
            place = columns + cute.assume(cute.arch.shuffle_sync(own_place, j), divby=vector)
            for c in cutlass.range_constexpr(chunks):
                source = cute.make_tensor(place + c * 32 * vector, vector)
                cute.autovec_copy(source, loaded[None, c, j])
        new = cute.arch.fmax(top, reduce_first(own_lse, batch, cute.arch.fmax))
        level = finite(new)
        scale = cute.math.exp2(top - level, fastmath=True)
        own_weight = cute.math.exp2(own_lse - level, fastmath=True)
        weight = weight * scale + reduce_first(own_weight, batch, operator.add)
        own_weight = own_weight * own_factor
        acc.store(acc.load() * scale)
        for j in cutlass.range_constexpr(batch):
            factor = cute.arch.shuffle_sync(own_weight, j)
            acc.store(acc.load() + loaded[None, None, j].load().to(Float32) * factor)
        top = new
    return top, weight


def reduce_first(value: Float32, lanes: int, operation: Any) -> Float32:
    """The reduction over the first lanes of a warp, in all its lanes."""
    for bit in range(lanes.bit_length() - 1):
        value = operation(value, cute.arch.shuffle_sync_bfly(value, offset=1 << bit))
    return cute.arch.shuffle_sync(value, 0)


@cute.jit
def finite(top: Float32) -> Float32:
    """A maximum to subtract: 0 where there is none, so that no difference of infinities arises."""
    level = top
    if top == -Float32.inf:
        level = Float32(0.0)
    return level


@cute.jit
def add_team(
    shared: cutlass.Constexpr,
    acc: cute.Tensor,
    top: Float32,
    weight: Float32,
    warp: Int32,
    rank: Int32,
    team: Int32,
    writing: Boolean,
):
    """Add the sums of a team's warps; the first warp gets the result. All warps call it.

    Without `writing` it does so without effect, and alone.
    """
    lane = cute.arch.lane_idx()
    if writing:
        for e in cutlass.range_constexpr(cute.size(acc, mode=[0])):
            shared.sums[warp, e, lane] = acc[e, 0]
        if lane == 0:
            shared.weights[warp, 0] = top
            shared.weights[warp, 1] = weight
        cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
    if rank == 0:
        for other in cutlass.range(1, team, unroll=1):
            top = cute.arch.fmax(top, shared.weights[warp + other, 0])
        level = finite(top)
        weight = Float32(0.0)
        acc.fill(0.0)
        for other in cutlass.range(team, unroll=1):
            scale = cute.math.exp2(shared.weights[warp + other, 0] - level, fastmath=True)
            weight += shared.weights[warp + other, 1] * scale
            for e in cutlass.range_constexpr(cute.size(acc, mode=[0])):
                acc[e, 0] = acc[e, 0] + shared.sums[warp + other, e, lane] * scale
    if writing:
        # The next turn writes where this one is read.
        cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
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
    writing: Boolean,
):
    """Write columns of a merged row, and with the first ones its LSE; nothing without `writing`."""
    lse = outputs.lse
    inverse = Float32(0.0)
    lse_log2 = -Float32.inf
    if weight > 0.0:
        inverse = cute.arch.rcp_approx(weight)
        lse_log2 = top + cute.math.log2(weight, fastmath=True)
    vector = cute.size(acc, mode=[0])
    narrow = cute.make_rmem_tensor((vector, chunks), dtype)
    narrow.store((acc.load() * inverse).to(dtype))
    start = Int64(row) * outputs.widths.k + (chunk * (32 * vector) + lane * vector)
    for c in cutlass.range_constexpr(chunks):
        place = (outputs.o_latent + (start + c * (32 * vector))).align(vector * 2)
        if writing:
            cute.autovec_copy(narrow[None, c], cute.make_tensor(place, vector))
    if writing and chunk == 0 and lane == 0:
        lse[row] = final_lse(lse_log2, outputs.empty_positive)
