"""What is loaded when: light parts import nothing heavy, print nothing and start at once."""

import json
import sys
import tomllib

import pytest

from tests.programs import run_program

HEAVY = ("torch", "numpy", "cuda.tile", "cutlass", "matplotlib")
COMMANDS = ("--help", "list", "list --json", "run --help")
BEFORE = "import json, sys, time\nbefore = time.process_time()\n"
# CPU time, because the machine that runs the tests may be busy with others.
AFTER = """
report = {"cpu_s": time.process_time() - before, "modules": list(sys.modules)}
print(json.dumps(report), file=sys.stderr)
"""
CALL = """
import torch, mla_var3
cache = mla_var3.LatentCache.allocate(1, 8, k=4, p=2, dtype=torch.float32)
cache.append(torch.ones(1, 3, 4), torch.ones(1, 3, 2))
q = torch.ones(1, 1, 1, 2)
mla_var3.mla_attention(q, q, cache, torch.ones(1, 2, 4), torch.ones(1, 4, 2))
"""
FACTS = "import mla_var3.op.mla.problem, mla_var3.op.mla.cost, mla_var3.conf.devices"
KERNELS = "from mla_var3.runtime.paths import discover_kernels; assert len(discover_kernels()) >= 4"
CASES = {
    "package": ("import mla_var3; assert mla_var3.__version__", HEAVY, 0.3),
    "problem, cost and devices": (FACTS, HEAVY, None),
    "kernels by name": (KERNELS, (*HEAVY, "mla_var3.kernel."), None),
    "call on the CPU": (CALL, ("cuda.tile", "cutlass"), None),
    **{
        f"hyper-mla {argv}": (
            f"from mla_var3.cli.main import main; assert main({argv.split()}) == 0", HEAVY, 1.5,
        )
        for argv in COMMANDS
    },
}  # fmt: skip
"""Name -> the code, what it must not load, and the seconds of CPU time that it may take: commands
took 0.3 to 0.7 on slow and busy machines, torch alone takes two."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_loaded(name, package_environment, tmp_path):
    code, absent, limit = CASES[name]
    program = [sys.executable, "-c", f"{BEFORE}{code}{AFTER}"]
    done = run_program(program, env=package_environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout) is name.startswith("hyper-mla")
    report = json.loads(done.stderr)  # and nothing else was printed
    assert [module for module in report["modules"] if module.startswith(absent)] == []
    assert limit is None or report["cpu_s"] < limit


def test_console_script_starts(repo_root, package_environment):
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["hyper-mla"].split(":")
    # The same two lines that the installed script runs.
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    result = run_program([sys.executable, "-c", code, "--help"], env=package_environment)
    assert result.returncode == 0, result.stderr
    assert "usage" in result.stdout.lower()
