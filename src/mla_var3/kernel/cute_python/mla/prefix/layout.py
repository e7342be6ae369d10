"""lay_out_prefix: resolve groups of requests that share first tokens, on the device.

    prefix_of [levels, b], prefix_length [levels, groups]   see `attention/prefix/groups.py`
    lengths [b], cu_seqlens_q [b+1] or none                 KV lengths, first queries
    block_table [b, columns] or none                        pages of a request; none: a dense cache
    -> own_table [b, columns], own_lengths [b]              what a request attends to by itself
       per level: places [tokens], order [tokens], bounds [chunks+1], lengths [chunks],
       table [chunks, columns]                              see `PrefixPart` in `attention/prefix`

All int32. Two kernels in one launch of the host: `resolve_prefix`, one CTA, for everything that is
as long as the batch; `copy_tables`, a warp per row of a table. Wrong values (groups that do not
exist, prefixes beyond a length, decreasing bounds) lead to less sharing, never to an access outside
of a buffer.

`resolve_prefix` goes through phases, each a function of a thread's number, with a barrier behind
it. They use no GPU instruction, so tests run them on the CPU.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from torch import Tensor

THREADS = 1024
"""Of the one CTA of `resolve_prefix`."""
COPY_THREADS = 256
COPY_WARPS = COPY_THREADS // 32
REQUEST_FIELDS = ("start", "group", "fits", "count", "place", "own_page")
GROUP_FIELDS = ("queries", "tokens", "begin", "leader", "first_row", "first_chunk")
CHUNK_FIELDS = ("leaders", "pages")

Operand = Tensor | cute.Pointer
Size = int | Int32


class LayoutArguments(NamedTuple):
    """The launch contract, in the order of the host arguments.

    Attributes:
        prefix_of, prefix_length, lengths, cu_seqlens_q, block_table: what is read.
        own_table, own_lengths: what requests attend to by themselves.
        places_0, order_0, bounds_0, lengths_0, table_0: level 0; no order where the queries of a
            group are neighbours.
        places_1, order_1, bounds_1, lengths_1, table_1: level 1; none with one level.
        scratch: workspace of `scratch_size` numbers.
        queries: query tokens per request, without `cu_seqlens_q`.
        capacity: slots of a request.
        chunk: most query tokens of a chunk.
    """

    prefix_of: Operand
    prefix_length: Operand
    lengths: Operand
    cu_seqlens_q: Operand | None
    block_table: Operand | None
    own_table: Operand
    own_lengths: Operand
    places_0: Operand
    order_0: Operand | None
    bounds_0: Operand
    lengths_0: Operand
    table_0: Operand
    places_1: Operand | None
    order_1: Operand | None
    bounds_1: Operand | None
    lengths_1: Operand | None
    table_1: Operand | None
    scratch: Operand
    requests: Size
    groups: Size
    columns: Size
    chunks: Size
    tokens: Size
    queries: Size
    page: Size
    capacity: Size
    chunk: Size
    causal: Size
    table_stride: Size
    copy_ctas: Size


def scratch_size(requests: int, groups: int, chunks: int, levels: int) -> int:
    """Numbers of workspace that a launch needs."""
    per_group = len(GROUP_FIELDS) * (groups + 1)
    return len(REQUEST_FIELDS) * requests + per_group + len(CHUNK_FIELDS) * levels * chunks


def vector(pointer: Any, count: Any, first: Any = 0) -> Any:
    """Numbers at a pointer."""
    return cute.make_tensor(pointer + first, cute.make_layout(count))


def of_requests(given: LayoutArguments, name: str) -> Any:
    """An array of the workspace with a number per request."""
    return vector(given.scratch, given.requests, REQUEST_FIELDS.index(name) * given.requests)


def of_groups(given: LayoutArguments, name: str) -> Any:
    """An array of the workspace with a number per group, and one behind the last."""
    count, first = given.groups + 1, len(REQUEST_FIELDS) * given.requests
    return vector(given.scratch, count, first + GROUP_FIELDS.index(name) * count)


def of_chunks(given: LayoutArguments, name: str, level: int) -> Any:
    """An array of the workspace with a number per chunk of a level."""
    first = len(REQUEST_FIELDS) * given.requests + len(GROUP_FIELDS) * (given.groups + 1)
    place = level * len(CHUNK_FIELDS) + CHUNK_FIELDS.index(name)
    return vector(given.scratch, given.chunks, first + place * given.chunks)


def output(given: LayoutArguments, name: str, level: int) -> Any:
    """An output of a level; None where there is none."""
    pointer = getattr(given, f"{name}_{level}")
    counts = {"places": given.tokens, "order": given.tokens, "lengths": given.chunks}
    count = given.chunks + 1 if name == "bounds" else counts[name]
    return None if pointer is None else vector(pointer, count)


def level_count(given: LayoutArguments) -> int:
    """Levels of prefixes."""
    return 1 if given.places_1 is None else 2


# --- phases of resolve_prefix ---------------------------------------------------------------------


@cute.jit
def query_range(request: Int32, given: cutlass.Constexpr):
    """First query token and number of query tokens of a request, within the call's."""
    first, count = request * given.queries, given.queries
    if const_expr(given.cu_seqlens_q is not None):
        bounds = vector(given.cu_seqlens_q, given.requests + 1)
        first = cutlass.min(cutlass.max(bounds[request], 0), given.tokens)
        count = cutlass.max(cutlass.min(bounds[request + 1], given.tokens) - first, 0)
    return first, count


@cute.jit
def length_of(request: Int32, given: cutlass.Constexpr):
    """KV length of a request, within its slots."""
    length = vector(given.lengths, given.requests)[request]
    return cutlass.min(cutlass.max(length, 0), given.capacity)


@cute.jit
def begin(
    thread: Int32, threads: cutlass.Constexpr, given: cutlass.Constexpr, level: cutlass.Constexpr
):
    """Nothing is shared yet, and no query has a place."""
    start, counts = of_requests(given, "start"), of_requests(given, "count")
    for request in cutlass.range(thread, given.requests, threads, unroll=1):
        _, count = query_range(request, given)
        start[request] = Int32(0)
        counts[request] = count
    for each in cutlass.range_constexpr(level_count(given)):
        places, order = output(given, "places", each), output(given, "order", each)
        for token in cutlass.range(thread, given.tokens, threads, unroll=1):
            places[token] = Int32(-1)
            if const_expr(order is not None):
                order[token] = Int32(0)


@cute.jit
def find_groups(
    thread: Int32, threads: cutlass.Constexpr, given: cutlass.Constexpr, level: cutlass.Constexpr
):
    """The group of each request, and whether its prefix fits before what all queries see."""
    prefix_of = vector(given.prefix_of, given.requests, level * given.requests)
    prefix_length = vector(given.prefix_length, given.groups, level * given.groups)
    start, counts = of_requests(given, "start"), of_requests(given, "count")
    groups, fits = of_requests(given, "group"), of_requests(given, "fits")
    for request in cutlass.range(thread, given.requests, threads, unroll=1):
        group, tokens, fitting = prefix_of[request], Int32(0), Int32(0)
        if group < 0 or group >= given.groups:
            group = given.groups
        if group < given.groups:
            tokens = cutlass.max(prefix_length[group], 0) // given.page * given.page
        seen = length_of(request, given) - start[request]
        if given.causal != 0:
            seen = seen - counts[request]
        if tokens > 0 and tokens <= seen:
            fitting = Int32(1)
        groups[request] = group
        fits[request] = fitting


@cute.jit
def sum_up_groups(
    thread: Int32, threads: cutlass.Constexpr, given: cutlass.Constexpr, level: cutlass.Constexpr
):
    """Queries of each group, and the first request that holds its prefix."""
    prefix_length = vector(given.prefix_length, given.groups, level * given.groups)
    start, counts = of_requests(given, "start"), of_requests(given, "count")
    groups, fits = of_requests(given, "group"), of_requests(given, "fits")
    all_queries, all_tokens = of_groups(given, "queries"), of_groups(given, "tokens")
    leaders, begins = of_groups(given, "leader"), of_groups(given, "begin")
    for group in cutlass.range(thread, given.groups, threads, unroll=1):
        queries, first, tokens = Int32(0), given.requests, Int32(0)
        for request in cutlass.range(0, given.requests, 1, unroll=4):
            if groups[request] == group:
                queries = queries + counts[request]
                if fits[request] != 0:
                    first = cutlass.min(first, request)
        if first < given.requests:
            tokens = prefix_length[group] // given.page * given.page
        leader = cutlass.min(first, given.requests - 1)
        all_queries[group] = queries
        all_tokens[group] = tokens
        leaders[group] = leader
        begins[group] = start[leader]


@cute.jit
def place_groups(
    thread: Int32, threads: cutlass.Constexpr, given: cutlass.Constexpr, level: cutlass.Constexpr
):
    """First packed row and first chunk of each group; behind the last group those of all."""
    queries = of_groups(given, "queries")
    first_row, first_chunk = of_groups(given, "first_row"), of_groups(given, "first_chunk")
    for group in cutlass.range(thread, given.groups + 1, threads, unroll=1):
        rows, chunks = Int32(0), Int32(0)
        for other in cutlass.range(0, group, 1, unroll=4):
            rows = rows + queries[other]
            chunks = chunks + (queries[other] + given.chunk - 1) // given.chunk
        first_row[group] = rows
        first_chunk[group] = chunks


@cute.jit
def place_requests(
    thread: Int32, threads: cutlass.Constexpr, given: cutlass.Constexpr, level: cutlass.Constexpr
):
    """The packed row of each request's first query; `fits` becomes whether it takes part."""
    start, counts = of_requests(given, "start"), of_requests(given, "count")
    groups, fits = of_requests(given, "group"), of_requests(given, "fits")
    all_places, begins = of_requests(given, "place"), of_groups(given, "begin")
    first_row = of_groups(given, "first_row")
    for request in cutlass.range(thread, given.requests, threads, unroll=1):
        group = groups[request]
        place, _ = query_range(request, given)
        if const_expr(output(given, "order", level) is not None):
            place = first_row[group]
            for other in cutlass.range(0, request, 1, unroll=4):
                if groups[other] == group:
                    place = place + counts[other]
        all_places[request] = place
        if fits[request] != 0:
            if start[request] != begins[group]:
                fits[request] = Int32(0)


@cute.jit
def place_queries(
    thread: Int32, threads: cutlass.Constexpr, given: cutlass.Constexpr, level: cutlass.Constexpr
):
    """Places and order of the query tokens, a warp per request; then what its prefix covers."""
    places, order = output(given, "places", level), output(given, "order", level)
    groups, fits = of_requests(given, "group"), of_requests(given, "fits")
    start, all_places = of_requests(given, "start"), of_requests(given, "place")
    tokens = of_groups(given, "tokens")
    for request in cutlass.range(thread // 32, given.requests, threads // 32, unroll=1):
        first, count = query_range(request, given)
        place, member = all_places[request], fits[request]
        for query in cutlass.range(thread % 32, count, 32, unroll=1):
            if place + query < given.tokens:
                if member != 0:
                    places[first + query] = place + query
                if const_expr(order is not None):
                    order[place + query] = first + query
        if thread % 32 == 0 and member != 0:
            start[request] = start[request] + tokens[groups[request]]


@cute.jit
def place_chunks(
    thread: Int32, threads: cutlass.Constexpr, given: cutlass.Constexpr, level: cutlass.Constexpr
):
    """Bounds, lengths and pages of the chunks; the last of them may be unused."""
    bounds, lengths = output(given, "bounds", level), output(given, "lengths", level)
    chunk_leaders, pages = of_chunks(given, "leaders", level), of_chunks(given, "pages", level)
    first_row, first_chunk = of_groups(given, "first_row"), of_groups(given, "first_chunk")
    all_tokens, begins = of_groups(given, "tokens"), of_groups(given, "begin")
    leaders = of_groups(given, "leader")
    every = cutlass.min(first_row[given.groups], given.tokens)
    for chunk in cutlass.range(thread, given.chunks + 1, threads, unroll=1):
        group = Int32(0)
        for other in cutlass.range(0, given.groups, 1, unroll=4):
            if first_chunk[other + 1] <= chunk:
                group = group + 1
        row, tokens, leader, page = every, Int32(0), Int32(0), Int32(0)
        if group < given.groups:
            inside = (chunk - first_chunk[group]) * given.chunk
            row = cutlass.min(first_row[group] + inside, every)
            tokens = all_tokens[group]
            leader = leaders[group]
            page = begins[group] // given.page
        bounds[chunk] = row
        if chunk < given.chunks:
            lengths[chunk] = tokens
            chunk_leaders[chunk] = leader
            pages[chunk] = page


@cute.jit
def finish(
    thread: Int32, threads: cutlass.Constexpr, given: cutlass.Constexpr, level: cutlass.Constexpr
):
    """What is left to each request."""
    start, pages = of_requests(given, "start"), of_requests(given, "own_page")
    own_lengths = vector(given.own_lengths, given.requests)
    for request in cutlass.range(thread, given.requests, threads, unroll=1):
        own_lengths[request] = length_of(request, given) - start[request]
        pages[request] = start[request] // given.page


def phases(levels: int) -> list[tuple[Any, int]]:
    """The phases in order: functions, and the level that each is for."""
    of_level = (
        find_groups, sum_up_groups, place_groups, place_requests, place_queries, place_chunks,
    )  # fmt: skip
    found = [(phase, level) for level in range(levels) for phase in of_level]
    return [(begin, 0), *found, (finish, 0)]


# --- copy_tables ----------------------------------------------------------------------------------


@cute.jit
def copy_row(index: Int32, lane: Int32, lanes: cutlass.Constexpr, given: cutlass.Constexpr):
    """Row `index` of all tables: those of the requests, then those of each level's chunks."""
    if index < given.requests:
        page = of_requests(given, "own_page")[index]
        copy_pages(index, page, given.own_table, index, lane, lanes, given)
    for level in cutlass.range_constexpr(level_count(given)):
        chunk = index - given.requests - level * given.chunks
        if chunk >= 0 and chunk < given.chunks:
            leader = of_chunks(given, "leaders", level)[chunk]
            page = of_chunks(given, "pages", level)[chunk]
            table = getattr(given, f"table_{level}")
            copy_pages(leader, page, table, chunk, lane, lanes, given)


@cute.jit
def copy_pages(
    source: Int32,
    first: Int32,
    table: cute.Pointer,
    row: Int32,
    lane: Int32,
    lanes: cutlass.Constexpr,
    given: cutlass.Constexpr,
):
    """Pages of request `source` from column `first` on, into a row of a table."""
    target = vector(table, given.columns, row * given.columns)
    for column in cutlass.range(lane, given.columns, lanes, unroll=1):
        taken = cutlass.min(first + column, given.columns - 1)
        page = source * given.columns + taken
        if const_expr(given.block_table is not None):
            page = vector(given.block_table, given.columns, source * given.table_stride)[taken]
        target[column] = page


class LayOutPrefix:
    """Host and device code."""

    @cute.jit
    def __call__(self, *arguments):
        """Launch both kernels."""
        *values, stream = arguments
        given = LayoutArguments(*values)
        self.resolve_prefix(given).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
        self.copy_tables(given).launch(
            grid=(given.copy_ctas, 1, 1), block=(COPY_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def resolve_prefix(self, given: LayoutArguments):
        thread, _, _ = cute.arch.thread_idx()
        for phase, level in phases(level_count(given)):
            phase(thread, THREADS, given, level)
            cute.arch.sync_threads()

    @cute.kernel
    def copy_tables(self, given: LayoutArguments):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        rows = given.requests + level_count(given) * given.chunks
        first = cta * COPY_WARPS + thread // 32
        for row in cutlass.range(first, rows, ctas * COPY_WARPS, unroll=1):
            copy_row(row, thread % 32, 32, given)
