"""Whole calls in CuTe DSL without a GPU: what is launched, with which arguments."""

import re
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla import flash_mla
from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS, HEAD, ROWS
from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent import whole_call
from mla_var3.kernel.cute_python.mla.latent.groups import group_shape
from mla_var3.kernel.cute_python.mla.latent.operands import (
    WHOLE_FIELDS,
    LatentOptions,
    Partials,
    ProjectionSizes,
)
from mla_var3.kernel.cute_python.mla.latent.programs import latent_program
from mla_var3.kernel.cute_python.mla.projections import outputs as decompress_combine
from mla_var3.kernel.cute_python.mla.projections import queries as project_queries
from mla_var3.kernel.cute_python.mla.projections.outputs import columns_for
from mla_var3.runtime.cute.arguments import kinds_of
from mla_var3.runtime.cute_kernel import compile_program
from tests.unit.runtime.cute.noting_driver import OVERLAP, STREAM, noted_launches

from . import whole_launch
from .compile_once import HOST
from .noted_calls import Calls, fp8_parts, named, note_calls, recorded_launch
from .noted_calls import meta_call as call
from .noted_launch import SMS
from .test_cute_compile import held_bytes
from .whole_launch import SIZES


@pytest.mark.parametrize("queries", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_blocks_of_the_queries_product(queries, heads):
    items = project_queries.tile_count(queries, heads)
    assert items * 64 * 128 >= queries * heads * 512 > (items - heads * 4) * 64 * 128
    blocks = project_queries.cta_count(queries, heads, SMS)
    assert 1 <= blocks <= items
    assert blocks == items or blocks == 3 * SMS


@pytest.mark.parametrize(
    ("rows", "heads", "v", "columns"),
    [
        (1, 1, 128, 32), (1, 16, 128, 32), (128, 16, 128, 32), (129, 16, 128, 128),
        (64, 33, 128, 32), (64, 34, 128, 64), (1, 66, 128, 64), (1, 67, 128, 128),
        (1, 128, 128, 128), (1, 8, 256, 32), (1, 64, 256, 128), (200, 8, 256, 128),
        (1, 40, 64, 32), (200, 1, 64, 64),
    ],
)  # fmt: skip
def test_columns_of_an_output_block(rows, heads, v, columns):
    """As many blocks as there are SMs, and parts only where the weights are what is read."""
    assert columns_for(rows, heads, SMS, v) == columns
    assert columns == min(v, 128) or heads * (v // columns) <= SMS


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What programs were made for and launched with, without a GPU."""
    return note_calls(monkeypatch, SMS, whole_call.WholeCall)


def test_one_launch_has_what_all_kernels_need(calls):
    assert flash_mla.whole is whole_call
    projections, operands, options = call(3, 2, 64)
    launch = whole_call.attend(projections, operands, options)
    assert launch is not None
    assert launch.workspace == {"q_latent": 2 * 3 * 2 * 64 * 512, "o_latent": 2 * 3 * 2 * 64 * 512}
    ((name, arguments),) = calls
    assert name == "flash_mla"
    given = named(WHOLE_FIELDS, arguments)
    for group in (projections, operands):
        assert all(given[name] is value for name, value in group._asdict().items())
    sizes = ProjectionSizes(*(given[name] for name in ProjectionSizes._fields))
    assert sizes == (6, min(64 * 4, 3 * SMS), 1, 64) and given["heads"] == 64


@pytest.mark.parametrize("fmt", FP8_FORMATS)
def test_8_bit_caches_have_their_kernel_between_the_same_projections(fmt, calls):
    table = torch.empty((2, 4), dtype=torch.int32, device="meta")
    cache = {**fp8_parts(fmt, "meta", 9), "block_table": table}
    projections, operands, options = call(2, 3, 16, **cache)
    launch = whole_call.attend(projections, operands, options)
    assert launch is not None and list(launch.workspace) == ["q_latent", "o_latent"]
    ((name, arguments),) = calls
    assert name == "latent_fp8"
    given = named(WHOLE_FIELDS, arguments)
    for group in (projections, operands):
        assert all(given[name] is value for name, value in group._asdict().items())
    for s, h in ((4, 16), (1, 128), (9, 128)):  # one program for all that fills 64 rows
        whole_call.attend(*call(2, s, h, **cache))
    assert len(latent_call._programs) == 2
    for s in (1, 2, 6):  # 16 and 32 rows, and twice 48, as at first
        whole_call.attend(*call(2, s, 16, **cache))
    assert len(latent_call._programs) == 4
    whole_call.attend(*call(2, 1, 16, batch_invariant=True, **cache))
    assert len(latent_call._programs) == 4


def rows_at(stride: int) -> torch.Tensor:
    return torch.empty((2, 2, 16, stride), dtype=torch.bfloat16, device="meta")[..., :128]


def odd_rows() -> torch.Tensor:
    """Contiguous, at an address that is not aligned."""
    return torch.empty(2 * 2 * 16 * 128 + 1, dtype=torch.bfloat16)[1:].view(2, 2, 16, 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"w_uk": torch.empty((16, 96, 512), dtype=torch.bfloat16, device="meta")},
        {"w_uk": torch.empty((16, 512, 128), dtype=torch.bfloat16, device="meta").mT},
        {"w_uv": torch.empty((16, 512, 96), dtype=torch.bfloat16, device="meta")},
        {"w_uv": torch.empty((16, 128, 512), dtype=torch.bfloat16, device="meta").mT},
        {"q_nope": rows_at(192)},
        {"out": rows_at(192)},
        {"out": odd_rows()},
        {"q_nope": odd_rows()},
        {"b": 0},
        {"b": 1, "s": whole_call.OWN_PROJECTION_QUERIES + 1},
    ],
)  # fmt: skip
def test_projections_that_are_left_to_torch(changes):
    assert not whole_call.serves(call(**changes)[0])
    assert whole_call.serves(call()[0])


def test_a_tree_that_is_copied_is_not_repeated(calls):
    tree = torch.empty((2, 2, 2), dtype=torch.bool, device="meta")
    for given, repeats in ((tree, True), (tree.transpose(1, 2), False)):
        assert (whole_call.attend(*call(tree=given)) is not None) is repeats


def test_a_launch_is_bound_to_its_workspace(monkeypatch):
    """All pointers arrive where the host entry reads them; unaligned ones launch nothing."""
    partials = Partials(*(torch.empty(4) for _ in Partials._fields))
    monkeypatch.setattr(latent_call, "raw_stream", lambda device: 7)
    monkeypatch.setattr(latent_call, "partials_for", lambda *given: partials)
    arguments = whole_launch.arguments("meta", *SIZES[0])
    tensors = [
        name for name, value in named(WHOLE_FIELDS, arguments).items()
        if isinstance(value, torch.Tensor) and name not in Partials._fields
    ]  # fmt: skip
    repeated, seen = recorded_launch(WHOLE_FIELDS, arguments)
    workspace = {"q_latent": 1024, "o_latent": 2048}
    launch = latent_call.LatentLaunch(
        repeated, torch.device("cuda", 0), SMS, WHOLE_FIELDS, workspace
    )
    pointers = {name: 16 * place for place, name in enumerate(tensors, 1)} | workspace
    changing = {name: pointer for name, pointer in pointers.items() if name not in workspace}
    bound, kept = launch.bind(list(changing), workspace)
    assert kept is partials
    free, _ = launch.bind(list(pointers), {})
    assert bound(list(changing.values())) and free(list(pointers.values()))
    own = {name: tensor.data_ptr() for name, tensor in partials._asdict().items()}
    assert seen == 2 * [{**pointers, **own, "stream": 7}]
    for name, pointer in pointers.items():
        wrong = {**pointers, name: pointer + (2 if name in ("block_table", "lengths") else 8)}
        assert not free(list(wrong.values()))
        if name in changing:
            assert not bound([wrong[name] for name in changing])
    assert len(seen) == 2


QUERIES, OUTPUTS = "project_queries", "decompress_combine"


def code_of(ptx: str) -> list[tuple[str, str]]:
    """Each kernel of a program by its own name, without names, labels and lines of its module.

    As the assembler gets it: machine code of the same input may differ in the names of registers.
    """
    found = []
    for entry in ptx.split("\n.visible .entry ")[1:]:
        match = re.match(rf"kernel_cutlass_({QUERIES}|flash_mla|latent_fp8|{OUTPUTS})_", entry)
        assert match is not None
        code = entry.split("\n\t.section")[0].splitlines()
        module = re.compile(r"\s*(\.loc|\.file|//|\$L__(?!BB))")
        body = "\n".join(line for line in code if not module.match(line))
        body = re.sub(r"kernel_cutlass_\w+?(?=_param_|\W)", "kernel", body)
        found.append((match[1], re.sub(r"\$L__BB\d+", "$L__BB", body).rstrip()))
    return found


def compiled_code(kernel_fn: Any, host: Any, args: Any, tiling: Any) -> list[tuple[str, str]]:
    return code_of(compile_program(kernel_fn, host, kinds_of(args), tiling, "sm_90a").ptx)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["", "fp8"])
def test_all_kernels_are_in_one_program_unchanged(cached, fmt):
    """The same code as compiled one by one, whatever the form of the attention."""
    whole, own = (compiled_code(*program) for program in whole_launch.programs(fmt))
    projections = ("queries", "outputs", "outputs, half", "outputs, quarter")
    queries, *outputs = (code for each in projections for code in code_of(cached.ptx[each]))
    ((name, _),) = own
    assert [each for each, _ in whole].count(name) == 2  # without clusters and with them
    for text in (text for each, text in whole if each == name):
        before, *behind = text.split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in behind[-1]
        if fmt:  # the producer waits between its prefetches and the queries, which TMA brings
            queries_come = "cp.async.bulk.shared::cluster.global.mbarrier"
            by_producer, by_values = behind
            assert "cp.async.bulk.prefetch.tensor" in before
            assert queries_come not in before and "cp.async.bulk.tensor" not in before
            assert queries_come in by_producer and "ld.global.nc" not in by_values
    alone = [queries, *own, *outputs]
    assert [each for each, _ in alone] == [QUERIES, name, *3 * [OUTPUTS]]
    assert len({text for _, text in alone}) == len(alone)
    assert len(whole) == len(alone) + 1
    assert set(alone) < set(whole)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["first", "second"])
def test_where_launches_that_overlap_wait(compiled, overlap):
    """The next one may start before the first loads anything; that one waits behind its loads."""
    options = LatentOptions(1, True, 0.1, overlap=overlap)
    constants = latent_program(call(2, 1, 16)[1], options).constants
    assert (constants["overlap"], constants["clusters"]) == (overlap, False)
    [variant] = [name for name, told in HOST.items() if told.get("overlap") == overlap]
    starts, load = "griddepcontrol.launch_dependents", "cp.async.bulk.tensor"
    text = compiled.ptx[variant]
    if overlap == "first":
        assert load in text and load not in text.split(starts)[0]
        assert starts in text and "griddepcontrol.wait" not in text
        return
    before, after = text.split("griddepcontrol.wait")
    assert load in before and load not in after
    assert starts not in before


@pytest.mark.slow
def test_one_call_launches_all_kernels_in_order(compiled, repo_root, package_environment, tmp_path):
    """The real host code on a driver that only notes: grids, stream, what may start early."""
    launches = noted_launches(
        whole_launch.__name__, repo_root, package_environment, tmp_path, compiled.cache
    )
    launches, repeated, in_8_bits = launches[:-9], launches[-9:-3], launches[-3:]
    assert len(launches) == 3 * len(SIZES) and repeated == 2 * launches[:3]
    for place, (b, s, h) in enumerate((*SIZES, SIZES[0])):
        queries, attention, outputs = [*launches, *in_8_bits][3 * place : 3 * place + 3]
        blocks = project_queries.cta_count(b * s, h, SMS)
        assert queries["grid"] == [blocks, 1, 1]
        assert queries["block"] == [project_queries.THREADS, 1, 1]
        shape = group_shape(-(-s * h // ROWS), b, SMS)
        assert attention["grid"] == [shape.group_ctas, shape.group_count, 1]
        splits = decompress_combine.default_head_ctas(b * s, h, SMS)
        columns = columns_for(b * s, h, SMS)
        assert outputs["grid"] == [h, splits, HEAD // columns]
        assert outputs["block"] == [decompress_combine.THREADS, 1, 1]
        assert held_bytes(columns) <= outputs["shared"] <= held_bytes(columns) + 2048
        parts = (queries, attention, outputs)
        assert {launch["stream"] for launch in parts} == {STREAM}
        # All but the first may start early.
        assert [launch["attributes"][str(OVERLAP)] for launch in parts] == [0, 1, 1]
    assert {columns_for(b * s, h, SMS) for b, s, h in SIZES} == set(decompress_combine.COLUMNS)
