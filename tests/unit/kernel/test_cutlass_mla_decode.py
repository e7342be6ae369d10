"""cutlass_mla_decode: the example of a checkout is found, imported, described and refused.

A tiny checkout with code of our own stands in for CUTLASS. Against a real one the kernel is
compiled when HYPER_MLA_CUTLASS_DIR names it.
"""

import inspect
import math
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.cli.commands import kernel as kernel_command
from mla_var3.errors import (
    InvalidArgumentError,
    KernelCompileError,
    MissingToolError,
    UnsupportedError,
)
from mla_var3.kernel.cute_python.mla.cutlass_mla_decode.cutlass_mla_decode import checkout
from mla_var3.kernel.cute_python.mla.cutlass_mla_decode.cutlass_mla_decode.cutlass_mla_decode import (  # noqa: E501
    TILE,
    CutlassMlaDecodeKernel,
    CutlassMlaDecodeTiling,
    MlaDecodeSm100,
)
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.runtime.compile import compile_report
from mla_var3.runtime.cute import cache as cute_cache
from mla_var3.runtime.cute.arguments import Int64Arg

REAL = os.environ.get(checkout.VARIABLE)
NEW, OLD = checkout.PLACES.values()
RATES = (2000.0, 7000.0)

HELPERS = "SPLITS = 3\n"
EXAMPLE = """\
import cutlass
import cutlass.cute as cute

from {package}.mla_helpers import SPLITS

seen = []


class {name}:
    def __init__({__init__}):
        self.page_size, self.clusters = page_size, max_active_clusters

    @cute.jit
    def __call__({__call__}):
        tensors = dict(q_latent=q_latent, q_rope=q_rope, c_latent=c_latent, c_rope=c_rope)
        tensors.update(page_table=page_table, o=o, lse=lse, cache_seqs=cache_seqs)
        found = dict()
        for name, tensor in tensors.items():
            found[name] = (str(tensor.element_type), str(tensor.layout))
        found["workspace"] = workspace is not None
        seen.append(found)
        self.count(lse, split_kv).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def count(self, lse: cute.Tensor, split_kv: cutlass.Int32):
        lse[0, 0, 0] = cutlass.Float32(split_kv + SPLITS)

    @staticmethod
    def can_implement({can_implement}):
        return K < 5000

    @staticmethod
    def get_split_kv({get_split_kv}):
        return min(SPLITS, max_active_blocks)

    @staticmethod
    def get_workspace_size({get_workspace_size}):
        return 0 if split_kv == 1 else B * H * S * split_kv * (D + 1) * acc_dtype.width // 8
"""


def make_checkout(folder: Path, place: Path = NEW, helpers: str = HELPERS, **changed: str) -> Path:
    """A checkout whose example has the interface that the plan relies on, or a changed one."""
    wanted = {name: ", ".join(names.split()) for name, names in checkout.PARAMETERS.items()}
    wanted |= {"package": ".".join(place.parent.parts), "name": checkout.CLASS}
    path, pins = folder / checkout.EXAMPLES / place, folder / "python" / "CuTeDSL"
    for each in (path.parent, pins):
        each.mkdir(parents=True)
    path.write_text(EXAMPLE.format(**wanted | changed))
    (path.parent / "mla_helpers.py").write_text(helpers)
    (pins / "requirements.txt").write_text("# what it needs\nnvidia-cutlass-dsl==4.9.7\n")
    return folder


@pytest.fixture(autouse=True)
def no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkout unless a test names one."""
    monkeypatch.delenv(checkout.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "cutlass")


def empty(**fields: Any) -> Any:
    return CutlassMlaDecodeKernel(**fields).plan_empty(*RATES)


def arguments(stage: Any, tiling: CutlassMlaDecodeTiling) -> dict[str, Any]:
    """The arguments of the host function by name, without the stream."""
    _, *names, stream = inspect.signature(MlaDecodeSm100.__call__).parameters
    assert stream == "stream"
    values = [each.value if isinstance(each, Int64Arg) else each for each in stage.args_fn(tiling)]
    return dict(zip(names, values, strict=True))


def test_what_is_missing_is_named(tmp_path):
    """A checkout with the ways to name one, an example with the paths where it should lie."""
    (tmp_path / "bare" / checkout.EXAMPLES / "cute").mkdir(parents=True)
    for name, parts in {
        "nothing": ("--cutlass_dir", checkout.VARIABLE, str(tmp_path / "nothing"), "CuTeDSL"),
        "bare": (str(checkout.EXAMPLES / NEW), str(checkout.EXAMPLES / OLD)),
    }.items():
        with pytest.raises(MissingToolError) as caught:
            checkout.load_example(tmp_path / name)
        assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("place", [NEW, OLD], ids=["4.5", "4.4"])
def test_the_example_is_imported_with_its_helpers(tmp_path, place):
    folder = make_checkout(tmp_path / "cutlass", place)
    # As in CUTLASS 4.4: a module and a folder of one name, and the helpers are in the folder.
    (folder / checkout.EXAMPLES / place.parent).with_suffix(".py").write_text("raise OSError\n")
    example = checkout.load_example(folder)
    assert example.cls.__name__ == checkout.CLASS
    assert [path.name for path in example.files] == ["mla_decode_fp16.py", "mla_helpers.py"]
    assert example.release == "4.9.7"
    assert example.cls.get_split_kv(1, 1, 1, (128, 128), 99) == 3
    assert checkout.load_example(folder) is example
    assert checkout.loaded_example(example.fingerprint) is example


def test_importing_leaves_the_interpreter_and_the_checkout_as_they_were(fake, monkeypatch):
    own = ModuleType("cute")
    monkeypatch.setitem(sys.modules, "cute", own)
    files = sorted(fake.rglob("*"))
    example = fake / checkout.EXAMPLES / NEW
    example.write_text("import sys\nsys.path.insert(0, 'stray')\n" + example.read_text())
    before = list(sys.path), list(sys.meta_path), sys.dont_write_bytecode
    names = set(sys.modules)
    checkout.load_example(fake)
    assert (list(sys.path), list(sys.meta_path), sys.dont_write_bytecode) == before
    assert sys.modules["cute"] is own
    assert all(name.startswith("hyper_mla_cutlass_") for name in set(sys.modules) - names)
    assert sorted(fake.rglob("*")) == files


def test_a_failing_import_restores_too_and_names_the_release(fake):
    helpers = fake / checkout.EXAMPLES / NEW.parent / "mla_helpers.py"
    helpers.write_text("from cutlass.cute import gone_since\n")
    before = list(sys.path), list(sys.meta_path), set(sys.modules)
    with pytest.raises(UnsupportedError, match=r"gone_since.*nvidia-cutlass-dsl 4\.9\.7") as caught:
        checkout.load_example(fake)
    assert str(fake / checkout.EXAMPLES / NEW) in str(caught.value)
    assert (list(sys.path), list(sys.meta_path), set(sys.modules)) == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "Renamed"}, f"no class {checkout.CLASS}"),
        (
            {"get_split_kv": "B, S, max_active_blocks"},
            r"get_split_kv\(B S max_active_blocks\) instead of",
        ),
    ],
)
def test_a_changed_example_is_refused(tmp_path, changed, said):
    folder = make_checkout(tmp_path / "cutlass", **changed)
    with pytest.raises(UnsupportedError, match=said) as caught:
        checkout.load_example(folder)
    assert "written against nvidia-cutlass-dsl 4.9.7" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"dtype": "bfloat16"}, "dtype: expected float16"),
        ({"k": 256}, "k: expected 512"),
        ({"p": 32}, "p: expected 64"),
        ({"h": 129}, "h: expected 1 to 128"),
        ({"s": 5, "causal": False}, "s: expected 1 to 4"),
        ({"s": 2}, "causal: expected False"),
        ({"b": 2, "lengths": (7, 0)}, "lengths: expected at least 1"),
        *(({"page": page}, "page: expected a divisor of 128") for page in (0, 1, 48, 256)),
    ],
)
def test_what_the_example_does_not_take_is_refused(fields, argument):
    with pytest.raises((UnsupportedError, InvalidArgumentError), match=argument):
        CutlassMlaDecodeKernel(**fields)


def test_planning_and_costs_need_no_checkout():
    plan = CutlassMlaDecodeKernel(b=3, t=300)
    stage = plan.plan_empty(*RATES)
    assert stage.name == "cutlass_mla_decode"
    assert stage.cost() == flash_mla_cost(plan.problem())
    assert all(tiling.validate(plan) for tiling in stage.autotune_configs)
    assert {tiling.splits for tiling in stage.autotune_configs} == {0, 1, 2}
    assert all("third_party" not in str(path) for path in stage.source_files())
    with pytest.raises(MissingToolError, match="cutlass_dir"):
        stage.compile("sm_100")


@pytest.mark.parametrize("lengths", [None, (300, 1, 129)])
@pytest.mark.parametrize("page", [128, 32])
def test_the_reference_reads_the_pages(lengths, page):
    plan = CutlassMlaDecodeKernel(b=3, s=2, t=300, h=2, causal=False, page=page, lengths=lengths)
    inputs = plan.copy(seed=3).prepare_inputs("cpu")
    q_latent, q_rope, latent, rope, given, table = (each.double() for each in inputs)
    o_latent, lse = plan.reference_fn(*inputs)
    for request, length in enumerate(plan.problem().kv_lengths):
        assert int(given[request]) == length
        pages = table[request].long()
        keys = torch.cat([latent, rope], -1)[pages].flatten(0, 1)
        assert keys.shape[0] == 384
        assert not keys[length:].any(), "slots beyond a length are finite, here zero"
        query = torch.cat([q_latent, q_rope], -1)[request]
        scores = query @ keys[:length].T * (plan.d + plan.p) ** -0.5
        wanted = torch.softmax(scores, -1) @ keys[:length, : plan.k]
        torch.testing.assert_close(o_latent[request].double(), wanted, rtol=1e-3, atol=1e-3)
        base_two = torch.logsumexp(scores, -1) / math.log(2.0)
        torch.testing.assert_close(lse[request].double(), base_two, rtol=1e-4, atol=1e-4)


def test_a_table_must_cover_whole_tiles():
    plan = CutlassMlaDecodeKernel(b=1, t=130, h=2, page=32)
    *others, table = plan.prepare_inputs("cpu")
    assert table.shape == (1, 8)
    with pytest.raises(InvalidArgumentError, match="table: .*at least 8 pages"):
        plan.plan(*others, table[:, :5].contiguous())


@pytest.mark.parametrize(
    ("fields", "splits", "legal"),
    [
        ({"t": 1000}, 8, True),
        ({"t": 1000}, 9, False),
        ({"t": 1000, "h": 64}, 2, False),
        ({"t": 100_000}, 257, False),
        ({"t": 100_000, "b": 4096}, 32, False),
    ],
)
def test_legal_splits(fields, splits, legal):
    plan = CutlassMlaDecodeKernel(**{"b": 1, **fields})
    assert bool(CutlassMlaDecodeTiling(splits=splits).validate(plan)) is legal


def test_the_splits_are_those_of_the_example_and_decide_the_workspace(fake):
    plan = CutlassMlaDecodeKernel(b=2, t=1000, cutlass_dir=str(fake))
    assert plan.split_count(CutlassMlaDecodeTiling()) == 3
    assert plan.split_count(CutlassMlaDecodeTiling(splits=2)) == 2
    assert plan.copy(h=64).split_count(CutlassMlaDecodeTiling()) == 1
    stage: Any = plan.plan_empty(*RATES)
    split = arguments(stage, CutlassMlaDecodeTiling())
    assert split["partials"].numel() == 2 * 128 * 3 * 513
    assert (split["splits"], split["partial_bytes"]) == (3, 4 * 2 * 128 * 3 * 513)
    whole = arguments(stage, CutlassMlaDecodeTiling(splits=1))
    assert (whole["partials"], whole["partial_bytes"]) == (None, 0)


def test_the_strides_lead_to_the_elements(fake):
    plan = CutlassMlaDecodeKernel(
        b=2, s=3, t=300, h=5, causal=False, page=64, cutlass_dir=str(fake), seed=1
    )
    inputs = plan.prepare_inputs("cpu")
    stage = plan.plan(*inputs)
    given = arguments(stage, stage.tiling)
    assert (given["requests"], given["queries"], given["heads"]) == (2, 3, 5)
    for name, tensor in zip(("q_latent", "q_rope"), inputs, strict=False):
        row, request = given[f"{name}_stride"], given[f"{name}_request_stride"]
        shape = (5, tensor.shape[-1], 3, 2)
        seen = torch.as_strided(given[name], shape, (row, 1, 5 * row, request))
        assert torch.equal(seen, tensor.permute(2, 3, 1, 0))
    for name, tensor in (("latent", inputs[2]), ("rope", inputs[3])):
        token, page = given[f"{name}_stride"], given[f"{name}_page_stride"]
        shape = (64, tensor.shape[-1], given["pages"])
        start = given[name].storage_offset()
        seen = torch.as_strided(given[name], shape, (token, 1, page), start)
        torch.testing.assert_close(seen, tensor.permute(1, 2, 0), equal_nan=True, rtol=0, atol=0)
    shape = (given["table_width"], 2)
    seen = torch.as_strided(given["table"], shape, (1, given["table_stride"]))
    assert torch.equal(seen, inputs[5].T)


@pytest.mark.parametrize(("splits", "workspace"), [(1, False), (2, True)])
def test_it_compiles_with_tensors_in_the_modes_of_the_example(fake, splits, workspace):
    tiling = CutlassMlaDecodeTiling(splits=splits)
    stage = empty(b=2, t=1000, page=64, cutlass_dir=str(fake), tiling=tiling)
    compiled = stage.compile("sm_100")
    assert compiled.target == "sm_100a" and compiled.cubin[:4] == b"\x7fELF"
    found = sys.modules[checkout.load_example(fake).cls.__module__].seen[-1]
    assert found.pop("workspace") is workspace
    types = {name: kind for name, (kind, _) in found.items()}
    assert types.pop("lse") == "Float32"
    assert types.pop("cache_seqs") == types.pop("page_table") == "Int32"
    assert set(types.values()) == {"Float16"}
    shapes = {name: layout.partition(":")[0] for name, (_, layout) in found.items()}
    assert shapes == {
        "q_latent": "(?,512,?,?)", "q_rope": "(?,64,?,?)", "c_latent": "(64,512,?)",
        "c_rope": "(64,64,?)", "page_table": "(?,?)", "o": "(?,512,?,?)", "lse": "(?,?,?)",
        "cache_seqs": "?",
    }  # fmt: skip
    for name in ("q_latent", "q_rope", "c_latent", "c_rope", "o"):
        assert found[name][1].partition(":")[2].split(",")[1] == "1", "columns are contiguous"


def test_a_changed_helper_is_another_program(tmp_path):
    hosts = []
    for n in (2, 4):
        folder = make_checkout(tmp_path / str(n), helpers=f"SPLITS = {n}\n")
        stage: Any = empty(b=1, t=1000, cutlass_dir=str(folder))
        assert {path.name for path in stage.source_files()} >= {"mla_helpers.py", "checkout.py"}
        hosts.append(cute_cache.host_identity(stage.host_fn(stage.tiling)))
        assert checkout.load_example(folder).cls.get_split_kv(1, 1, 1, (128, 128), 99) == n
    assert hosts[0] != hosts[1]


def test_what_does_not_compile_says_why(fake):
    """The example refuses it, or does not fit the installed release."""
    stage: Any = empty(t=6000, cutlass_dir=str(fake))
    with pytest.raises(UnsupportedError, match="the example refuses b=64 s=1 t=6000"):
        stage.compile("sm_100")
    path = fake / checkout.EXAMPLES / NEW
    path.write_text(path.read_text().replace("self.count(lse", "cute.gone_since(lse"))
    stage = empty(t=1000, cutlass_dir=str(fake))
    with pytest.raises(KernelCompileError, match=r"gone_since.*nvidia-cutlass-dsl 4\.9\.7"):
        stage.compile("sm_100")


def test_other_architectures_are_refused(fake):
    stage: Any = empty(cutlass_dir=str(fake))
    with pytest.raises(KernelCompileError, match="expected sm_100a"):
        stage.compile("sm_90")
    with pytest.raises(UnsupportedError, match=r"expected a GPU of sm_100a.*NVIDIA H200"):
        stage.require_target("sm_90", "NVIDIA H200")


def test_the_command_line_says_what_is_missing(capsys):
    argv = ["cutlass_mla_decode", "--language=cute-dsl", "--prof_type=static", "--b=1", "--t=200"]
    assert kernel_command.main(argv) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: cutlass_dir: expected a checkout of CUTLASS")


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason=f"needs a CUTLASS checkout: {checkout.VARIABLE} is unset")
@pytest.mark.parametrize(
    "tiling",
    [CutlassMlaDecodeTiling(1, True), CutlassMlaDecodeTiling(4, False)],
    ids=["whole", "split"],
)
@pytest.mark.parametrize("page", [TILE, 64])
def test_a_real_checkout_compiles(tiling, page):
    stage = empty(t=4096, page=page, cutlass_dir=REAL, tiling=tiling)
    report = compile_report(stage, "sm_100")
    assert report.error is None and not report.spills
    assert report.tensor_core == "UTCHMMA" and report.uses_tma
    assert (b"reduction_kernel" in stage.compile("sm_100").cubin) is (tiling.splits > 1)
