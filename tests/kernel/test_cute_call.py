"""The latent CuTe kernel on changing tensors: what it gives the programs, on meta tensors."""

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.attention import CacheView, mla_latent_attention
from mla_var3.attention.backends.latent import LatentBackend
from mla_var3.attention.request.shape import CallShape
from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla import flash_mla
from mla_var3.kernel.cute_python.mla.hopper.constants import ROWS, SCHEDULE_SIZE, THREADS
from mla_var3.kernel.cute_python.mla.hopper.widths import LATENT_WIDTHS, LatentWidths
from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent.groups import group_shape
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LATENT_FIELDS,
    WHOLE_FIELDS,
    LatentOperands,
    LatentOptions,
    LatentSizes,
    Partials,
    groups_of,
    latent_arguments,
)
from mla_var3.kernel.cute_python.mla.latent.producer import block_parts
from mla_var3.kernel.cute_python.mla.latent.programs import latent_program
from mla_var3.kernel.cute_python.mla.latent_fp8.kernel import LatentFp8Sm90, columns_for
from mla_var3.runtime.call_state import CALL_STATE
from tests.unit.attention.attention_support import registered
from tests.unit.runtime.cute.noting_driver import OVERLAP, STREAM, noted_launches

from . import noted_launch
from .compile_once import Compiled
from .noted_calls import fp8_parts, meta_call, named, recorded_launch

SMS = 132
OPERANDS = LatentOperands._fields


named_by = partial(named, LATENT_FIELDS)


def call(b: int, s: int, h: int, **changes: Any) -> tuple[LatentOperands, LatentOptions]:
    return meta_call(b, s, h, **changes)[1:]


def test_a_call_is_one_launch_with_its_cta_groups(calls):
    flash_mla.attend(*call(3, 2, 64))
    ((name, arguments),) = calls
    assert name == "flash_mla"
    shape = group_shape(2, 3, SMS)
    sizes = groups_of(arguments, LatentOperands, Partials, LatentSizes)[2]
    assert (sizes.group_ctas, sizes.visits, sizes.group_count) == (
        shape.group_ctas, shape.visits, shape.group_count,
    )  # fmt: skip


def test_a_batch_without_queries_launches_nothing(calls):
    flash_mla.attend(*call(0, 2, 64))
    assert calls == []


def test_a_tree_is_given_as_bytes_with_its_strides(calls):
    tree = torch.empty((4, 4), dtype=torch.bool, device="meta").expand(2, 4, 4)
    flash_mla.attend(*call(2, 4, 16, tree=tree))
    given = [arg for arg in calls[0][1] if isinstance(arg, torch.Tensor)]
    assert any(arg.dtype is torch.uint8 and arg.shape == (2, 4, 4) for arg in given)
    named = named_by(calls[0][1])
    assert (named["tree_stride"], named["tree_row_stride"]) == (0, 4)


def test_one_program_serves_all_shapes(calls):
    for b, s, h in ((1, 1, 128), (7, 3, 64), (2, 9, 24)):
        flash_mla.attend(*call(b, s, h))
    assert len(latent_call._programs) == 1
    flash_mla.attend(*call(2, 1, 16))  # few rows
    table = torch.empty((2, 4), dtype=torch.int32, device="meta")
    flash_mla.attend(*call(2, 4, 16, block_table=table))
    assert len(latent_call._programs) == 3
    for _ in range(2):
        flash_mla.attend(*call(2, 4, 16, block_table=table, empty_positive=True))
    assert len(latent_call._programs) == 4


def test_an_8_bit_cache_has_a_kernel_of_its_own(calls):
    table = torch.empty((2, 4), dtype=torch.int32, device="meta")
    per_token = {**fp8_parts("fp8_per_token", "meta", 9), "block_table": table}
    for changes in (per_token, fp8_parts("fp8", "meta", 2, 256)):
        assert flash_mla.attend(*call(2, 1, 64, **changes)) is not None
    (first, arguments), (second, _) = calls
    assert first == second == "latent_fp8" and len(latent_call._programs) == 2
    named = named_by(arguments)
    assert named["scales_page_stride"].value == 64 * 644 // 4 and named["page_tokens"] == 64


def arguments_of(s: int = 2, h: int = 64, **changes: Any) -> tuple[Any, ...]:
    """Arguments of the program for a small call on meta tensors."""
    partials = latent_call.allocate_partials(torch.device("meta"), SMS)
    operands, options = call(2, s, h, **changes)
    return latent_arguments(operands, partials, options, group_shape(1, 2, SMS))


def test_the_contract_names_the_arguments_in_order():
    """Every field at its place, and no field left over."""
    operands, options = call(3, 2, 64, block_table=torch.empty((3, 4), device="meta"))
    partials = latent_call.allocate_partials(torch.device("meta"), SMS)
    arguments = latent_arguments(operands, partials, options, group_shape(2, 3, SMS))
    named = named_by(arguments)
    for group in (operands, partials):
        assert all(named[name] is value for name, value in group._asdict().items())
    assert (named["requests"], named["queries"], named["heads"]) == (3, 2, 64)
    assert (named["total_rows"], named["page_tokens"], named["q_rope_stride"]) == (384, 256, 64)
    assert (named["max_tokens"], named["block_table_stride"]) == (4 * 256, 4)
    assert (named["latent_page_stride"].value, named["latent_stride"]) == (256 * 512, 512)
    assert (named["rope_page_stride"].value, named["rope_stride"]) == (256 * 64, 64)
    dense = named_by(arguments_of())
    assert (dense["max_tokens"], dense["block_table_stride"]) == (256, 0)
    assert len(set(WHOLE_FIELDS)) == len(WHOLE_FIELDS)
    *groups, rest = groups_of([*arguments, "stream"], LatentOperands, Partials, LatentSizes)
    assert groups[:2] == [operands, partials] and rest == ["stream"]


def test_what_programs_are_compiled_for():
    """A batch-invariant one does not depend on the rows; none of two at a time has clusters."""
    operands, options = call(2, 1, 16)
    invariant = replace(options, batch_invariant=True)
    few = latent_program(operands, options)
    assert few.tiling.few == few.constants["few"] > 0
    assert not {"clusters", "overlap"} & set(few.constants)
    whole = latent_program(operands, invariant)
    assert whole.tiling.few == whole.constants["few"] == 0
    assert whole.constants["clusters"] is False
    first = latent_program(operands, replace(options, overlap="first")).constants
    assert (first["overlap"], first["clusters"]) == ("first", False)
    for fmt, per_token in (("fp8_per_token", True), ("fp8", False)):
        operands = operands._replace(**fp8_parts(fmt, "meta", 2, 256))
        made = latent_program(operands, options)
        assert made.constants["per_token"] is per_token
        assert made.tiling.few == made.constants["columns"] < ROWS
        assert latent_program(operands, invariant).constants["columns"] == ROWS


@pytest.mark.parametrize(
    ("rows", "columns", "ragged"),
    [
        (0, 16, 16), (1, 16, 16), (17, 32, 32), (33, 48, 48), (48, 48, 48), (49, 64, 64),
        (65, 48, 64), (96, 48, 64), (97, 64, 64), (128, 64, 64), (129, 48, 64), (144, 48, 64),
        (192, 64, 64), (2048, 64, 64),
    ],
)  # fmt: skip
def test_tiles_of_a_request_are_alike_over_8_bit_caches(rows, columns, ragged):
    """And no more of them than of 64 rows, also where other requests have fewer."""
    assert (columns_for(rows), columns_for(rows, True)) == (columns, ragged)
    assert -(-rows // LatentFp8Sm90(None, columns).tile_rows) == -(-rows // ROWS)


def test_a_launch_is_repeated_on_other_pointers(monkeypatch):
    """With the workspace of the stream; not on an unaligned pointer, nor in a capture."""
    workspaces = {
        stream: Partials(*(torch.empty(4) for _ in Partials._fields)) for stream in (7, 8)
    }
    state = {"stream": 7, "capturing": False, "device": 0}
    monkeypatch.setattr(latent_call, "raw_stream", lambda device: state["stream"])
    monkeypatch.setattr(latent_call, "current_device_index", lambda: state["device"])
    monkeypatch.setattr(latent_call, "is_capturing", lambda: state["capturing"])
    monkeypatch.setattr(latent_call, "partials_for", lambda *given: workspaces[state["stream"]])
    index = {"dtype": torch.int32, "device": "meta"}
    arguments = arguments_of(
        block_table=torch.empty((2, 4), **index),
        total_lengths=torch.empty(2, **index),
        cu_seqlens_q=torch.empty(3, **index),
        tree=torch.empty((2, 2, 2), dtype=torch.bool, device="meta"),
        scales=torch.empty((2, 256), dtype=torch.float32, device="meta"),
        schedule=torch.empty(SCHEDULE_SIZE, **index),
    )
    repeated, seen = recorded_launch(LATENT_FIELDS, arguments)
    launch = latent_call.LatentLaunch(repeated, torch.device("cuda", 0), SMS)
    places = (64, 128, 256, 512, 4, 8, 16, 12, 20, 32, 4096, 1024, 2048)
    pointers = named(OPERANDS, places)
    # In any order, with pointers that the kernel does not take and one that is replaced.
    names = ["w_uk", "lengths", *reversed(OPERANDS)]

    def given(**changes: int) -> list[int]:
        return [3, 5, *reversed((pointers | changes).values())]

    for stream in (7, 8):
        state["stream"] = stream
        assert launch.stream() == stream
        on_stream, kept = launch.bind(names, {})
        assert kept is workspaces[stream] and on_stream(given())
    for found, (stream, partials) in zip(seen, workspaces.items(), strict=True):
        own = {name: part.data_ptr() for name, part in partials._asdict().items()}
        assert found == {**pointers, **own, "stream": stream}
    floats = ("q_latent", "q_rope", "latent", "rope", "scales", "o_latent", "lse")
    for name, pointer in pointers.items():
        assert not on_stream(given(**{name: pointer + (8 if name in floats else 2)}))
    assert len(seen) == 2
    fixed, _ = launch.bind(OPERANDS[:-1], {"lse": 4096})
    assert fixed(list(pointers.values())[:-1]) and seen[-1]["lse"] == 4096
    with pytest.raises(InvalidArgumentError, match="flash_mla: pointers"):
        launch.bind(OPERANDS[:-1], {})
    state["capturing"] = True
    assert launch.stream() is None
    for stream in (0, 8):
        state.update(capturing=False, device=0, stream=stream)
        assert launch.stream() == stream
        state["device"] = 1
        assert launch.stream() is None


def test_threads_do_not_share_their_workspace(monkeypatch):
    """The default stream of every thread has the same number and is another stream."""
    monkeypatch.setattr(latent_call, "raw_stream", lambda device: 7)
    monkeypatch.setattr(latent_call, "is_capturing", lambda: False)
    monkeypatch.setattr(latent_call, "allocate_partials", lambda device, sms: (torch.empty(1),) * 3)
    device = torch.device("cuda", 0)
    here = latent_call.partials_for(device, SMS)
    assert latent_call.partials_for(device, SMS) is here
    there: list[Any] = []
    thread = threading.Thread(target=lambda: there.append(latent_call.partials_for(device, SMS)))
    thread.start()
    thread.join()
    assert there[0] is not here
    CALL_STATE.clear()
    assert latent_call.partials_for(device, SMS) is not here


def test_a_tree_that_is_copied_is_not_repeated(calls):
    tree = torch.empty((2, 4, 4), dtype=torch.bool, device="meta")
    for given, repeats in ((tree, True), (tree.transpose(1, 2), False)):
        assert (flash_mla.attend(*call(2, 4, 16, tree=given)) is not None) is repeats
    for _, arguments in calls:
        named = named_by(arguments)
        assert named["tree"].is_contiguous() and named["tree_row_stride"] == 4


def ptx_of(compiled: Compiled, variant: str) -> str:
    """The kernel of a variant for the GPU's assembler; with few rows the one with clusters."""
    kernels = compiled.ptx[variant].split(".visible .entry ")[1:]
    clusters = "few" in variant
    [found] = [text for text in kernels if ("mapa.shared::cluster" in text) is clusters]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "asked_for"), [("bfloat16", "p=0, empty positive"), ("few", "few, empty positive")]
)
def test_rows_without_keys_have_either_lse(compiled, without, asked_for):
    """Where +inf is asked for, whole rows and partials compare with -inf; otherwise they do not."""

    def choices(variant: str) -> list[int]:
        # A CTA releases its records at the start, and its partials between the two.
        _, attention, merge = ptx_of(compiled, variant).split("st.release.gpu")
        return [text.count("0f7F800000") for text in (attention, merge)]

    plain, positive = choices(without), choices(asked_for)
    assert all(more > less for more, less in zip(positive, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["bfloat16", "few"])
def test_partials_of_other_ctas_are_acquired_and_read_from_shared_caches(compiled, variant):
    """Non-coherent loads may return what memory held when the kernel began: old partials."""
    opening, attention, after = ptx_of(compiled, variant).split("st.release.gpu")
    assert "ld.acquire.gpu" not in opening
    # The watcher reads the records of other CTAs behind their states.
    states, _, records = attention.partition("fence.acq_rel.gpu")
    records = records[: records.index("bar.sync")]
    assert "ld.relaxed.gpu" in states and "ld.relaxed.gpu" not in records
    assert "ld.global" in records and "ld.global.nc" not in records
    assert "ld.acquire.gpu" in after and "ld.global.nc" not in after
    partials = after.index("ld.global.v4")
    assert after.rindex("ld.acquire.gpu") < after.index("atom.global") < partials


@pytest.mark.slow
def test_every_way_to_launch(compiled, repo_root, package_environment, tmp_path):
    """The real host code on a driver that only records: grid, shared memory, stream, attributes."""
    launches = noted_launches(
        noted_launch.__name__, repo_root, package_environment, tmp_path, compiled.cache
    )
    shape = group_shape(noted_launch.TILES, noted_launch.B, noted_launch.SMS)
    assert len(launches) == 6 and launches[1:3] == 2 * launches[:1]
    launch = launches[0]
    # In front of the first layer of a step, a kernel finds the schedule.
    schedule, *layers = launches[3:]
    assert (schedule["grid"], schedule["block"]) == (launch["grid"], launch["block"])
    assert schedule["shared"] < layers[0]["shared"]
    assert layers == 2 * layers[:1]
    assert all(one["attributes"][str(OVERLAP)] == 0 for one in (schedule, *layers))
    assert (launch["grid"], launch["block"]) == (
        [shape.group_ctas, shape.group_count, 1],
        [THREADS, 1, 1],
    )
    assert launch["stream"] == STREAM
    # Launches on the same workspace must not overlap.
    assert launch["attributes"][str(OVERLAP)] == 0


def test_what_it_does_not_serve_is_said():
    assert flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8)) is None
    assert "(384, 64)" in str(flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8, k=384)))
    assert "pages of 16" in str(flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8, page_size=16)))


# --- widths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", LATENT_WIDTHS, ids=str)
def test_the_parts_of_a_block_cover_its_columns_once(widths):
    """Every step of the scores' product once; the own half first, the rope part with the other."""
    for own, parts in enumerate(block_parts(widths)):
        steps = [step for part in parts for step in part.steps]
        assert sorted(steps) == list(range((widths.k + widths.p) // 16))
        assert [part.half for part in parts] == [own, 1 - own]
        assert [part.has_rope for part in parts] == [False, widths.p > 0]
        assert all(len(part.tiles) == widths.tiles // 2 + part.has_rope for part in parts)


def test_each_pair_of_widths_is_a_program_of_its_own(calls):
    for widths in LATENT_WIDTHS * 2:
        flash_mla.attend(*call(2, 4, 16, k=widths.k, p=widths.p))
    assert len(latent_call._programs) == len(LATENT_WIDTHS)


def test_rows_without_a_rope_part_bring_none(calls):
    flash_mla.attend(*call(2, 4, 16, p=0))
    named = named_by(calls[0][1])
    assert named["q_rope"] is None and named["rope"] is None
    assert named["q_rope_stride"] == named["rope_stride"] == 0


def test_a_call_without_rope_reaches_the_kernel():
    """Zero-width tensors of the public call become absent operands, and count as aligned."""
    seen: list[LatentOperands] = []

    def attend(operands: LatentOperands, options: LatentOptions) -> None:
        seen.append(operands)
        operands.o_latent.zero_()
        operands.lse.zero_()

    rows = torch.zeros(2, 64, 512, dtype=torch.bfloat16)
    cache = CacheView(rows, rows[..., 512:], torch.tensor([64, 3], dtype=torch.int32))
    q = torch.zeros(2, 1, 8, 512, dtype=torch.bfloat16)
    with registered(LatentBackend("zeros", "torch", attend, runs_on_cpu=True)):
        mla_latent_attention(q, q.new_empty(2, 1, 8, 0), cache, kernel="zeros", scale=0.1)
    (operands,) = seen
    assert operands.q_rope is None and operands.rope is None
    assert operands.widths == LatentWidths(512, 0)
