"""The index of CuTe DSL examples, on a tiny checkout."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.programs import load_module, run_program

MLA = """
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.pipeline import PipelineTmaUmma


class Decode:
    @cute.jit
    def __call__(self, q):
        self.attend(q).launch(grid=(1, 1, 1), block=(32, 1, 1), use_pdl=True)

    @cute.kernel
    def attend(self, q):
        cute.arch.mbarrier_wait(q, 0)
"""
HOPPER = """
import cutlass
import cutlass.cute as cute


@cute.kernel(preprocess=True)
def multiply(a):
    op = cute.nvgpu.warpgroup.MmaF16BF16Op
    cute.arch.setmaxregister_increase(240)
"""
HELPERS = "import cutlass\n\n\ndef ceil(a, b):\n    return -(-a // b)\n"


@pytest.fixture(scope="module")
def script(repo_root: Path) -> Path:
    return repo_root / "scripts" / "index-cutlass-examples.py"


@pytest.fixture(scope="module")
def index(script: Path) -> ModuleType:
    return load_module(script)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "cutlass"
    sources = {
        **{"blackwell/mla/mla_decode_fp16.py": MLA, "blackwell/mla/mla_helpers.py": HELPERS},
        **{"hopper/fmha.py": HOPPER, "blackwell/fmha.py": MLA},
        "notebooks/plot.py": "import math\n",
    }
    for name, text in sources.items():
        path = root / "examples/python/CuTeDSL" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def run(index: ModuleType, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = index.main(list(words))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_sources_are_read_not_run(index, checkout, capsys):
    examples = {each.path: each for each in index.read_examples(checkout)}
    assert len(examples) == 4  # plot.py is none
    decode = examples["blackwell/mla/mla_decode_fp16.py"]
    assert (decode.needs, decode.kernels, decode.hosts) == ("sm_100", ("attend",), ("__call__",))
    assert decode.features == ("TMA pipeline", "mbarriers", "dependent launch", "tcgen05")
    assert examples["blackwell/mla/mla_helpers.py"].needs == "sm_100, by its folder"
    row = "| hopper/fmha.py | sm_90 | 1 | warp roles, wgmma |"
    assert row in run(index, capsys, str(checkout))[1]


def test_a_path_is_in_reading_order_and_says_what_is_missing(index, checkout, capsys):
    code, out, _ = run(index, capsys, str(checkout), "--path", "B", "--json")
    answer = json.loads(out)
    order = ["mla/mla_helpers.py", "mla/mla_decode_fp16.py", "fmha.py"]
    assert code == 0
    assert [each["path"] for each in answer["examples"]] == [f"blackwell/{name}" for name in order]
    assert answer["missing"] == ["mla/mla_decode_fp8.py"]
    out = run(index, capsys, str(checkout), "--goal", "mla-decode-fp8")[1]
    assert "not in this checkout: mla/mla_decode_fp8.py" in out


def test_notes_tick_what_names_show(index, checkout, tmp_path, capsys):
    target = tmp_path / "notes" / "fmha.md"
    words = (str(checkout), "--notes", "hopper/fmha.py", "--out", str(target))
    assert run(index, capsys, *words)[:2] == (0, f"{target}\n")
    text = target.read_text()
    assert all(line in text for line in ("- [x] wgmma", "- [ ] tcgen05", "- Kernel: multiply"))


def test_bad_arguments_say_what_was_expected(index, checkout, capsys):
    folder = str(checkout)
    for words, message in (
        ([f"{folder}/gone"], "CUTLASS: expected a checkout of CUTLASS"),
        ([folder, "--goal", "mla"], "unknown goal 'mla'"),
        ([folder, "--notes", "fmha.py"], "expected the path of one example, got fmha.py: "),
        ([folder, "--notes", "fmhaa.py"], "did you mean 'fmha.py'"),
    ):
        code, _, err = run(index, capsys, *words)
        assert code == 1 and message in err
    (checkout / "examples/python/CuTeDSL/broken.py").write_text("import cutlass\ndef (:\n")
    assert "broken.py: expected Python source" in run(index, capsys, folder)[2]


def test_the_checkout_may_come_from_the_environment(script, checkout):
    environment = {"HYPER_MLA_CUTLASS_DIR": str(checkout), "PATH": ""}
    result = run_program([sys.executable, script, "--goal", "mla-decode"], env=environment)
    assert result.returncode == 0, result.stderr
    assert "blackwell/mla/mla_decode_fp16.py" in result.stdout
