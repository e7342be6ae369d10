"""The small kernels of shared prefixes without a GPU: they compile, and their device code is right.

The device code of the layout runs on the CPU, see `prefix_on_cpu.py`.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.prefix import layout as layouts
from mla_var3.attention.prefix.groups import PrefixGroups
from mla_var3.attention.prefix.layout import PrefixLayout, laid_out, prefix_layout
from mla_var3.kernel.cute_python.mla.latent.call import ELEMENT_TYPES
from mla_var3.kernel.cute_python.mla.prefix import call as prefix_call
from mla_var3.kernel.cute_python.mla.prefix import layout, rows
from mla_var3.runtime.cute.arguments import kinds_of
from mla_var3.runtime.cute_kernel import compile_program
from mla_var3.runtime.stage import Tiling

from .prefix_on_cpu import CpuKernels


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ptx_of(kernel_fn: Any, host: Any, arguments: Any) -> str:
    program = compile_program(kernel_fn, host, kinds_of(arguments), Tiling(), "sm_90a")
    assert ".local" not in program.ptx
    return program.ptx


@pytest.mark.parametrize(
    ("dtype", "parts"), [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 1)]
)
def test_the_merge_compiles_with_wide_loads(dtype, parts):
    part = (meta(6, 4, 512, dtype=dtype), meta(6, 4, dtype=torch.float32), meta(6))
    given = [*part * parts, *[None] * 3 * (2 - parts)]
    own = meta(6, 4, 512, dtype=dtype), meta(6, 4, dtype=torch.float32)
    arguments = rows.MergeArguments(*own, *given, 24, 4, 3)
    host = rows.MergePrefix(ELEMENT_TYPES[dtype])
    ptx = ptx_of(rows.MergePrefix.merge_prefix, host, arguments)
    assert ptx.count("ld.global.v4") == rows.CHUNKS * (1 + parts)
    assert ptx.count("st.global.v4") == rows.CHUNKS


def test_the_gather_compiles_with_wide_loads():
    queries = [meta(6, 4, width, dtype=torch.bfloat16) for width in (512, 64)]
    arguments = rows.GatherArguments(*queries, meta(6), meta(4), *queries, *[1] * 8)
    host = rows.GatherQueries(ELEMENT_TYPES[torch.bfloat16])
    ptx = ptx_of(rows.GatherQueries.gather_queries, host, arguments)
    assert ptx.count("ld.global.v4") == ptx.count("st.global.v4") == 2


@pytest.mark.parametrize("levels", [1, 2])
def test_the_layout_compiles_to_two_kernels(levels):
    outputs = [meta(7), meta(7), meta(4), meta(3), meta(3, 5)]
    second = outputs if levels == 2 else [None] * 5
    inputs = [meta(levels, 7), meta(levels, 3), meta(7), meta(8), meta(7, 5)]
    arguments = layout.LayoutArguments(
        *inputs, meta(7, 5), meta(7), *outputs, *second, meta(1000), *[1] * 12
    )
    ptx = ptx_of(layout.LayOutPrefix.resolve_prefix, layout.LayOutPrefix(), arguments)
    assert ptx.count(".entry") == 2
    assert ptx.count("bar.sync") == len(layout.phases(levels)) == 2 + 6 * levels


@st.composite
def cases(draw: st.DrawFn) -> tuple[PrefixGroups, CacheView, int, torch.Tensor | None, bool]:
    """Groups with wrong numbers among them, dense and paged caches, packed queries."""
    b, count = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    levels, columns = draw(st.integers(1, 2)), draw(st.integers(1, 6))

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        values = draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        return torch.tensor(values, dtype=torch.int32).view(shape)

    groups = PrefixGroups(
        ints(-2, count, levels, b),
        ints(-5, 300, levels, count),
        most=draw(st.sampled_from([None, 1, b])),
    )
    paged = draw(st.booleans())
    rows = [torch.zeros(b, columns * 64, width) for width in (8, 4)]
    table = ints(0, 99, b, columns) if paged else None
    if paged:
        rows = [torch.zeros(100, 64, width) for width in (8, 4)]
    view = CacheView(*rows, ints(-3, columns * 64 + 70, b), table)
    bounds = None
    if draw(st.booleans()):
        bounds = torch.cat([torch.zeros(1), ints(0, 5, b).cumsum(0)]).int()
    return groups, view, draw(st.integers(1, 5)), bounds, draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([1, 6, 4096]))
def test_the_layout_is_that_of_torch(case, chunk_rows):
    groups, view, s, bounds, causal = case
    total = view.requests * s if bounds is None else int(bounds[-1]) + 2
    q = torch.empty((total, 2, 8)) if bounds is not None else torch.empty(view.requests, s, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "CHUNK_ROWS", chunk_rows)
        patch.setattr(layouts, "readable", lambda tensor: False)
        options = {"cu_seqlens_q": bounds, "causal": causal}
        wanted = prefix_layout(groups, q, view, **options)
        found, _, _ = laid_out(CpuKernels(), groups, q, view, **options)
    require_same(found, wanted)


def require_same(found: PrefixLayout, wanted: PrefixLayout) -> None:
    assert torch.equal(found.lengths, wanted.lengths)
    assert torch.equal(found.table, wanted.table)
    for part, other in zip(found.parts, wanted.parts, strict=True):
        assert torch.equal(part.places, other.places)
        assert torch.equal(part.bounds, other.bounds)
        assert torch.equal(part.lengths, other.lengths)
        assert part.most == other.most
        assert part.order is not None and other.order is not None
        last = int(part.bounds[-1])  # rows of no group are in any order
        assert torch.equal(part.order[:last], other.order[:last])
        assert 0 <= int(part.order.min()) <= int(part.order.max()) < found.total
        used = part.lengths > 0
        assert torch.equal(part.table[used], other.table[used])


def test_the_stand_in_has_the_names_of_the_kernels():
    names = {name for name in vars(CpuKernels) if not name.startswith("_")}
    assert names <= set(vars(prefix_call)), "a name that only the stand-in has fails on a GPU"
