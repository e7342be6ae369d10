"""The absorbed CuTe kernel on changing tensors: what it gives the programs, on meta tensors."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla import flash_mla
from mla_var3.kernel.cute_python.mla.hopper.constants import THREADS
from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent.scheduler import group_shape
from mla_var3.runtime.cute.arguments import kinds_of
from mla_var3.runtime.cute.launch import RepeatedLaunch
from mla_var3.runtime.cute_kernel import compile_program
from tests.unit.runtime.cute.noting_driver import OVERLAP, STREAM, noted_launches

from . import noted_launch
from .noted_calls import Calls, note_calls

SMS = 132


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the program was launched with, without a GPU."""
    return note_calls(monkeypatch, SMS)


def absorbed(b: int, s: int, h: int, **changes: Any) -> dict[str, Any]:
    """Arguments of `absorbed` on meta tensors."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    arguments = {
        "q_latent": empty(b, s, h, 512),
        "q_rope": empty(b, s, h, 64),
        "latent": empty(b, 256, 512),
        "rope": empty(b, 256, 64),
        "block_table": None,
        "lengths": empty(b, dtype=torch.int32),
        "query_begins": None,
        "tree": None,
        "max_queries": s,
        "causal": True,
        "scale": 0.1,
        "out": empty(b, s, h, 512),
        "lse": empty(b, s, h, dtype=torch.float32),
    }
    return {**arguments, **changes}


def test_a_call_is_one_launch_with_its_gangs(
    calls: Calls,
) -> None:
    flash_mla.absorbed(**absorbed(3, 2, 64))
    ((name, arguments),) = calls
    assert name == "flash_mla"
    shape = group_shape(2, 3, SMS)
    assert arguments[-3:] == (shape.group_ctas, shape.visits, shape.group_count)


def test_a_batch_without_queries_launches_nothing(
    calls: Calls,
) -> None:
    flash_mla.absorbed(**absorbed(0, 2, 64))
    assert calls == []


def test_a_tree_is_given_as_bytes_with_its_strides(
    calls: Calls,
) -> None:
    tree = torch.empty((4, 4), dtype=torch.bool, device="meta").expand(2, 4, 4)
    flash_mla.absorbed(**absorbed(2, 4, 16, tree=tree))
    given = [arg for arg in calls[0][1] if isinstance(arg, torch.Tensor)]
    assert any(arg.dtype is torch.uint8 and arg.shape == (2, 4, 4) for arg in given)
    assert calls[0][1][-7:-5] == (0, 4)


def test_one_program_serves_all_shapes_and_another_each_form(
    calls: Calls,
) -> None:
    for b, s, h in ((1, 1, 128), (7, 3, 64), (2, 9, 24)):
        flash_mla.absorbed(**absorbed(b, s, h))
    assert len(latent_call._programs) == 1
    flash_mla.absorbed(**absorbed(2, 1, 16))  # few rows
    table = torch.empty((2, 4), dtype=torch.int32, device="meta")
    flash_mla.absorbed(**absorbed(2, 4, 16, block_table=table))
    assert len(latent_call._programs) == 3
    for _ in range(2):
        flash_mla.absorbed(**absorbed(2, 4, 16, block_table=table, empty_positive=True))
    assert len(latent_call._programs) == 4


def absorbed_arguments(s: int = 2, h: int = 64, **changes: Any) -> tuple[Any, ...]:
    """Arguments of the program for a small call on meta tensors."""
    given = absorbed(2, s, h, **changes)
    names = ("q_latent", "q_rope", "latent", "rope", "block_table", "lengths", "query_begins")
    return latent_call.attention_arguments(
        *(given[name] for name in names), given["tree"], given["out"], given["lse"],
        latent_call.allocate_partials(torch.device("meta"), SMS), 0.1, s, h, True,
        group_shape(1, 2, SMS),
    )  # fmt: skip


def test_a_launch_is_repeated_on_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the room of the stream; not where an address is not aligned, nor in a capture."""
    rooms = {stream: tuple(torch.empty(4) for _ in range(3)) for stream in (7, 8)}
    state = {"stream": 7, "capturing": False, "device": 0}
    monkeypatch.setattr(latent_call, "raw_stream", lambda device: state["stream"])
    monkeypatch.setattr(latent_call, "current_device_index", lambda: state["device"])
    monkeypatch.setattr(latent_call, "is_capturing", lambda: state["capturing"])
    monkeypatch.setattr(latent_call, "workspace", lambda device, sms: rooms[state["stream"]])
    index = {"dtype": torch.int32, "device": "meta"}
    arguments = absorbed_arguments(
        block_table=torch.empty((2, 4), **index),  # type: ignore[call-overload]
        query_begins=torch.empty(3, **index),  # type: ignore[call-overload]
        tree=torch.empty((2, 2, 2), dtype=torch.bool, device="meta"),
    )
    seen: list[tuple[int, ...]] = []

    def entry(packed: Any) -> None:
        """Reads what the compiled host function would: 13 addresses first, the stream behind."""
        cells = [*range(13), len(packed) - 2]
        seen.append(tuple(ctypes.c_uint64.from_address(packed[cell]).value for cell in cells))

    repeated = RepeatedLaunch("flash_mla", entry, kinds_of(arguments), 0, arguments)
    launch = latent_call.AbsorbedLaunch(repeated, torch.device("cuda", 0), SMS)
    addresses = (64, 128, 256, 512, 4, 8, 12, 20, 1024, 2048)
    for stream in (7, 8):
        state["stream"] = stream
        assert launch.stream() == stream
        on_stream, kept = launch.bound()
        assert kept is rooms[stream] and on_stream(addresses)
    assert seen == [
        (*addresses, *(part.data_ptr() for part in rooms[stream]), stream) for stream in (7, 8)
    ]
    for place in (0, 1, 2, 3, 8, 9):
        wrong = list(addresses)
        wrong[place] += 8
        assert not on_stream(wrong)
    for place in (4, 5, 6, 7):
        wrong = list(addresses)
        wrong[place] += 2
        assert not on_stream(wrong)
    assert len(seen) == 2
    state["capturing"] = True
    assert launch.stream() is None
    for stream in (0, 8):
        state.update(capturing=False, device=0, stream=stream)
        assert launch.stream() == stream
        state["device"] = 1
        assert launch.stream() is None


def test_threads_do_not_share_the_room_for_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default stream of every thread has the same number and is another stream."""
    monkeypatch.setattr(latent_call, "raw_stream", lambda device: 7)
    monkeypatch.setattr(latent_call, "is_capturing", lambda: False)
    monkeypatch.setattr(latent_call, "allocate_partials", lambda device, sms: (torch.empty(1),) * 3)
    device = torch.device("cuda", 0)
    here = latent_call.workspace(device, SMS)
    assert latent_call.workspace(device, SMS) is here
    there: list[Any] = []
    thread = threading.Thread(target=lambda: there.append(latent_call.workspace(device, SMS)))
    thread.start()
    thread.join()
    assert there[0] is not here


def test_a_tree_that_is_copied_is_not_repeated(
    calls: Calls,
) -> None:
    tree = torch.empty((2, 4, 4), dtype=torch.bool, device="meta")
    assert flash_mla_launch(tree=tree) is not None
    assert flash_mla_launch(tree=tree.transpose(1, 2)) is None


def flash_mla_launch(**changes: Any) -> Any:
    """What `absorbed` returns for a small call."""
    return flash_mla.absorbed(**absorbed(2, 4, 16, **changes))


def ptx_of(few: int, empty_positive: bool = False) -> str:
    """The kernel for a small call, for the GPU's assembler."""
    arguments = absorbed_arguments(1, 8 if few else 128)
    element, host = latent_call.ELEMENT_TYPES[torch.bfloat16], flash_mla.FlashMLASm90
    made = host(element, few, empty_positive=empty_positive)
    tiling = flash_mla.FlashMLATiling(few=few)
    return compile_program(host.flash_mla, made, kinds_of(arguments), tiling, "sm_90a").ptx


@pytest.mark.parametrize("few", [0, 8])
def test_pieces_and_whole_items_know_both_log_sums_of_nothing(few: int) -> None:
    """Where +inf is asked for, both choose by a comparison with -inf that they lack otherwise."""

    def choices(empty_positive: bool) -> list[int]:
        # A block says that its pieces are written between the two.
        attention, merge = ptx_of(few, empty_positive).split("st.release.gpu")
        return [text.count("0f7F800000") for text in (attention, merge)]

    plain, positive = choices(False), choices(True)
    assert all(more > less for more, less in zip(positive, plain, strict=True))


@pytest.mark.parametrize("few", [0, 8])
def test_pieces_of_other_blocks_are_read_after_their_word_and_from_shared_caches(few: int) -> None:
    """Loads that may keep what memory held when the kernel began would give old pieces."""
    before, after = ptx_of(few).split("st.release.gpu")
    assert "ld.acquire.gpu" in after and "ld.acquire.gpu" not in before
    assert "ld.global.nc" not in after
    pieces = after.index("ld.global.v4")
    assert after.rindex("ld.acquire.gpu") < after.index("atom.global") < pieces


def test_every_way_to_launch_is_one_launch(
    repo_root: Path, package_environment: dict[str, str], tmp_path: Path
) -> None:
    """The real host code on a driver that only notes: grid, shared memory, stream, attributes."""
    launches = noted_launches(noted_launch.__name__, repo_root, package_environment, tmp_path)
    shape = group_shape(noted_launch.TILES, noted_launch.B, noted_launch.SMS)
    assert len(launches) == 3 and launches[1:] == 2 * launches[:1]
    launch = launches[0]
    assert (launch["grid"], launch["block"]) == (
        [shape.group_ctas, shape.group_count, 1],
        [THREADS, 1, 1],
    )
    assert launch["stream"] == STREAM
    # A launch on the same room must not overlap.
    assert launch["attributes"][str(OVERLAP)] == 0


def test_what_it_does_not_serve_is_said() -> None:
    from mla_var3.attention.request.shape import CallShape

    assert flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8)) is None
    assert "k=256" in str(flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8, k=256)))
    assert "pages of 16" in str(flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8, page_size=16)))
