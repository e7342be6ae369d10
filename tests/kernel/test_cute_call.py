"""The absorbed CuTe kernel on changing tensors: what it gives the programs, on meta tensors."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.kernel.cute_python.mla import latent_call
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla import flash_mla
from mla_var3.kernel.cute_python.mla.merge_partials import MergePartials, MergeTiling
from mla_var3.kernel.cute_python.mla.schedule import gang_shape
from mla_var3.runtime.cute_arguments import kinds_of
from mla_var3.runtime.cute_kernel import compile_program
from mla_var3.runtime.cute_launch import RepeatedLaunch

SMS = 132
NUMBERS_OF_THE_MERGE = (latent_call.TOTAL_ROWS, latent_call.GANG, latent_call.PARTS)


class Note:
    """Stands for a compiled program; keeps what it is called with."""

    def __init__(self, log: list[tuple[str, tuple[Any, ...]]], name: str) -> None:
        self.log, self.name = log, name

    def __call__(self, *args: Any) -> None:
        self.log.append((self.name, args))

    def repeated(self, *args: Any) -> Note:
        return Note(self.log, f"{self.name} again")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """What the program was launched with, without a GPU."""
    log: list[tuple[str, tuple[Any, ...]]] = []

    def program_for(kernel_fn: Any, host: Any, args: Any, tiling: Any, device: Any) -> Note:
        return Note(log, kernel_fn.__name__)

    monkeypatch.setattr(latent_call, "program_for", program_for)
    monkeypatch.setattr(latent_call, "require_arch", lambda *args: None)
    monkeypatch.setattr(latent_call, "sm_count_of", lambda index: SMS)
    monkeypatch.setattr(latent_call, "workspace", lambda device, slots: ("o", "lse", "merges"))
    monkeypatch.setattr(latent_call, "_programs", {})
    yield log


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


def test_one_launch_has_the_gangs_and_the_blocks_of_the_merge(
    calls: list[tuple[str, tuple[Any, ...]]],
) -> None:
    flash_mla.absorbed(**absorbed(3, 2, 64))
    ((name, arguments),) = calls
    assert name == "flash_mla"
    shape = gang_shape(2, 3, SMS)
    assert arguments[-4:-1] == (shape.gang, shape.groups, shape.parts)
    assert arguments[-1] == SMS * MergeTiling().blocks_per_sm


def test_a_batch_without_queries_launches_nothing(
    calls: list[tuple[str, tuple[Any, ...]]],
) -> None:
    flash_mla.absorbed(**absorbed(0, 2, 64))
    assert calls == []


def test_a_tree_is_given_as_bytes_with_its_strides(
    calls: list[tuple[str, tuple[Any, ...]]],
) -> None:
    tree = torch.empty((4, 4), dtype=torch.bool, device="meta").expand(2, 4, 4)
    flash_mla.absorbed(**absorbed(2, 4, 16, tree=tree))
    given = [arg for arg in calls[0][1] if isinstance(arg, torch.Tensor)]
    assert any(arg.dtype is torch.uint8 and arg.shape == (2, 4, 4) for arg in given)
    assert calls[0][1][-8:-6] == (0, 4)


def test_one_program_serves_all_shapes_and_another_each_form(
    calls: list[tuple[str, tuple[Any, ...]]],
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
    return (
        *latent_call.attention_arguments(
            *(given[name] for name in names), given["tree"], given["out"], given["lse"],
            latent_call.allocate_partials(torch.device("meta"), SMS), 0.1, s, h, True,
            gang_shape(1, 2, SMS),
        ),
        SMS,
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
    assert launch.ready() and launch(*addresses)
    state["stream"] = 8
    assert launch(*addresses)
    assert seen == [
        (*addresses, *(part.data_ptr() for part in rooms[stream]), stream) for stream in (7, 8)
    ]
    for place in (0, 1, 2, 3, 8, 9):
        wrong = list(addresses)
        wrong[place] += 8
        assert not launch(*wrong)
    for place in (4, 5, 6, 7):
        wrong = list(addresses)
        wrong[place] += 2
        assert not launch(*wrong)
    assert len(seen) == 2
    state["capturing"] = True
    assert not launch.ready()
    state.update(capturing=False, device=1)
    assert not launch.ready()


def test_threads_do_not_share_the_room_for_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may launch between the attention and the merge of a call."""
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
    calls: list[tuple[str, tuple[Any, ...]]],
) -> None:
    tree = torch.empty((2, 4, 4), dtype=torch.bool, device="meta")
    assert flash_mla_launch(tree=tree) is not None
    assert flash_mla_launch(tree=tree.transpose(1, 2)) is None


def flash_mla_launch(**changes: Any) -> Any:
    """What `launch_absorbed` returns for a small call."""
    arguments = absorbed(2, 4, 16, **changes)
    return latent_call.launch_absorbed(
        flash_mla.FlashMLASm90.flash_mla,
        flash_mla.FlashMLASm90,
        flash_mla.FlashMLATiling(),
        0,
        **arguments,
    )


def code_of(cubin: bytes) -> dict[str, bytes]:
    """The machine code in an ELF file, by the kernel's own name."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections_at + i * size) for i in range(count)]
    found = {}
    for name_at, _, _, _, offset, length in headers:
        start = headers[names][4] + name_at
        name = cubin[start : cubin.index(b"\0", start)].decode()
        match = re.match(r"\.text\.kernel_cutlass_(flash_mla|merge_partials)_", name)
        if match:
            found[match[1]] = cubin[offset : offset + length]
    return found


@pytest.mark.parametrize(("paged", "few"), [(False, 0), (True, 8)])
def test_both_kernels_are_in_one_program_unchanged(paged: bool, few: int) -> None:
    """The same machine code as compiled one by one, for plans."""
    table = torch.empty((2, 4), dtype=torch.int32, device="meta") if paged else None
    together = absorbed_arguments(1, 8 if few else 128, block_table=table)
    attention, blocks = together[:-1], together[-1]
    out, lse, *partials = attention[latent_call.OUTPUTS]
    numbers = (attention[place] for place in NUMBERS_OF_THE_MERGE)
    merge = (*partials, out, lse, *numbers, blocks)
    element = latent_call.ELEMENT_TYPES[torch.bfloat16]
    kernel, host = flash_mla.FlashMLASm90.flash_mla, flash_mla.FlashMLASm90
    tiling = flash_mla.FlashMLATiling(few=few)

    def code(kernel_fn: Any, host_fn: Any, args: Any, tiling: Any) -> dict[str, bytes]:
        program = compile_program(kernel_fn, host_fn, kinds_of(args), tiling, "sm_90a")
        return code_of(program.cubin)

    alone = code(kernel, host(element, few), attention, tiling)
    alone |= code(MergePartials.merge_partials, MergePartials(element), merge, MergeTiling())
    both = latent_call.AttentionAndMerge(host, element, few)
    assert code(kernel, both, together, tiling) == alone
    assert set(alone) == {"flash_mla", "merge_partials"} and all(alone.values())


@pytest.mark.parametrize("few", [0, 8])
def test_both_kernels_know_both_log_sums_of_nothing(few: int) -> None:
    """Where +inf is asked for, both choose by a comparison with -inf that they lack otherwise."""
    arguments = absorbed_arguments(1, 8 if few else 128)
    element, host = latent_call.ELEMENT_TYPES[torch.bfloat16], flash_mla.FlashMLASm90
    tiling = flash_mla.FlashMLATiling(few=few)

    def choices(empty_positive: bool) -> dict[str, int]:
        both = latent_call.AttentionAndMerge(host, element, few, empty_positive)
        kinds = kinds_of(arguments)
        ptx = compile_program(host.flash_mla, both, kinds, tiling, "sm_90a").ptx
        parts = re.split(r"\.entry kernel_cutlass_(flash_mla|merge_partials)_", ptx)[1:]
        found = zip(parts[::2], parts[1::2], strict=True)
        return {name: len(re.findall(r"0f7F800000", text)) for name, text in found}

    plain, positive = choices(False), choices(True)
    assert set(plain) == {"flash_mla", "merge_partials"}
    assert all(positive[name] > plain[name] for name in plain)


DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
typedef struct {
    uint32_t grid[3], block[3]; uint64_t shared; void *stream; char *attributes; uint32_t count;
} Config;
int _cudaLaunchKernelEx(Config *c, void *kernel, void **args) {
    printf("[%u, %u, %u, %lu, %lu", c->grid[0], c->grid[1], c->block[0], (long)c->shared,
           (long)c->stream);
    for (uint32_t i = 0; i < c->count; i++)  /* an attribute: its id, then 64 bytes of value */
        printf(", %d, %d", *(int *)(c->attributes + 72 * i), *(int *)(c->attributes + 72 * i + 8));
    printf("]\n");
    fflush(stdout);
    return 0;
}
int _cudaFuncSetAttribute(void *f, int a, int v) { return 0; }
int _cudaGetDevice(int *d) { *d = 0; return 0; }
int _cudaDeviceGetAttribute(int *v, int a, int d) { *v = 0; return 0; }
int _cudaKernelSetAttributeForDevice(void *k, int a, int v, int d) { return 0; }
int _cudaLibraryGetKernel(void **k, void *l, const char *n) { return 0; }
int _cudaLibraryLoadData(void **l, void *c) { return 0; }
int _cuKernelGetAttribute(int *v, int a, void *k, int d) { *v = 0; return 0; }
"""


def test_one_call_launches_both_kernels_as_they_are_launched_alone(
    repo_root: Path, package_environment: dict[str, str], tmp_path: Path
) -> None:
    """The real host code on a driver that only notes: grids, shared memory, stream, attributes."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to build a driver that notes launches")
    source, library = tmp_path / "driver.c", tmp_path / "libdriver.so"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)

    def run(step: str, **extra: str) -> list[Any]:
        done = subprocess.run(
            [sys.executable, "-m", "tests.kernel.joined_launch", step],
            cwd=repo_root, capture_output=True, text=True, timeout=300, check=False,
            env={**package_environment, "HYPER_MLA_CACHE_DIR": str(tmp_path / "cache"), **extra},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    assert run("compile") == []
    launches = run("launch", CUTE_DSL_LIBS=str(library))
    assert len(launches) == 8
    alone = launches[:2]
    assert launches[2:] == 3 * alone
    overlap = 6  # the attribute of programmatic dependent launch
    assert [launch[5:7] for launch in alone] == [[overlap, 0], [overlap, 1]]


def test_what_it_does_not_serve_is_said() -> None:
    from mla_var3.attention.shape import CallShape

    assert flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8)) is None
    assert "k=256" in str(flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8, k=256)))
    assert "pages of 16" in str(flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8, page_size=16)))
