"""`import mla_var3` is silent and cheap, and the console script can start."""

import json
import subprocess
import sys
import tomllib

from tests.programs import run_program

CPU_LIMIT_S = 0.3

PROBE = """
import json, sys, time
before = time.process_time()
import mla_var3
spent = time.process_time() - before
heavy = [name for name in ("torch", "numpy", "cuda.tile", "cutlass") if name in sys.modules]
print(json.dumps({"cpu_s": spent, "heavy": heavy, "version": mla_var3.__version__}))
"""


def run_python(
    code: str, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, "-c", code, *arguments], env=environment)


def test_import_is_cheap_and_loads_no_heavy_package(package_environment):
    result = run_python(PROBE, package_environment)
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)  # and nothing else was printed
    assert report["heavy"] == []
    assert report["cpu_s"] < CPU_LIMIT_S
    assert report["version"]


def test_console_script_starts(repo_root, package_environment):
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["hyper-mla"].split(":")
    # The same two lines that the installed script runs.
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    result = run_python(code, package_environment, "--help")
    assert result.returncode == 0, result.stderr
    assert "usage" in result.stdout.lower()
