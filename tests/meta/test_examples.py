"""The examples run as they are, without a GPU."""

import sys
from pathlib import Path

import pytest

from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# `own_kernel.py` profiles by default; the check alone is enough here.
OPTIONS = {"own_kernel.py": ["--device=cpu", "--prof_type=disabled", "--check"]}
# Need an engine of their own, see `docs/serving.md`.
ENGINES = {"vllm_deepseek.py", "capture_latents.py"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ENGINES])
def test_an_example_runs(name, tmp_path, package_environment):
    command = [sys.executable, ROOT / "examples" / name, *OPTIONS.get(name, [])]
    done = run_program(command, cwd=tmp_path, env=package_environment)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "package"), [("capture_latents", "transformers"), ("vllm_deepseek", "vllm")]
)
def test_a_missing_engine_is_named_with_its_extra(name, package, package_environment):
    program = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv[1:] = ['--dummy'];"
        f"runpy.run_path({str(ROOT / 'examples' / name)!r} + '.py', run_name='__main__')"
    )
    done = run_program([sys.executable, "-c", program], env=package_environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f'pip install "hyper-mla[{package}]"' in done.stderr


def test_the_page_lists_every_example():
    page = (ROOT / "examples" / "README.md").read_text()
    assert [name for name in EXAMPLES if name not in ENGINES and f"`{name}`" not in page] == []
