"""The package installs beside the engines: a resolver finds versions that all accept.

Nothing is installed. It resolves for an x86_64 server, whatever machine this is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
ENGINES = {
    "vllm==0.26.0": "vllm", "vllm==0.30.0": "vllm", "vllm==0.32.0": "vllm",
    "sglang==0.5.17": "sglang", "sglang==0.5.23": "sglang",
}  # fmt: skip
COMMAND = [
    UV, "pip", "compile", "-", "--native-tls", "--quiet", "--no-header", "--no-annotate",
    "--no-build", "--python-version=3.12", "--python-platform=x86_64-manylinux_2_39",
]  # fmt: skip


def requirements(extra: str) -> list[str]:
    """What `hyper-mla[extra]` asks for, extras of its own resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    for line in project["optional-dependencies"][extra]:
        own = re.fullmatch(r"hyper-mla\[(\w+)\]", line)
        found += project["optional-dependencies"][own.group(1)] if own else [line]
    return found


@pytest.fixture(scope="module")
def resolved() -> dict[str, tuple[int, str]]:
    """Exit code and output of the resolver for every engine; all at once: most is waiting."""
    running = {}
    for engine, extra in ENGINES.items():
        process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        process.stdin.write("\n".join([engine, *requirements(extra)]))
        process.stdin.close()
        running[engine] = process
    texts = {engine: process.stdout.read() for engine, process in running.items()}
    return {engine: (process.wait(), texts[engine]) for engine, process in running.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_resolves_beside(engine, resolved) -> None:
    code, text = resolved[engine]
    if code != 0 and re.search("client error|dns|connect|timed? ?out", text, re.IGNORECASE):
        pytest.skip(f"the package index could not be reached: {text.strip().splitlines()[-1]}")
    assert code == 0, text
    lines = text.splitlines()
    assert engine in lines
    compiler = next(line for line in lines if line.startswith("nvidia-cutlass-dsl=="))
    assert (4, 6) <= tuple(map(int, compiler.split("==")[1].split(".")[:2])) < (4, 9)


@pytest.mark.parametrize("extra", ["vllm", "sglang", "cute"])
def test_serving_needs_no_cutile(extra) -> None:
    assert not [line for line in requirements(extra) if "tile" in line]


def test_a_pin_of_one_release_would_not_install(resolved) -> None:
    """The resolver is really asked: with the release of the development environment it fails."""
    lines = ["vllm==0.32.0", "nvidia-cutlass-dsl==4.8.1"]
    done = subprocess.run(COMMAND, input="\n".join(lines), capture_output=True, text=True)
    if resolved["vllm==0.32.0"][0] != 0:
        pytest.skip("the package index could not be reached")
    assert done.returncode != 0
    assert "nvidia-cutlass-dsl" in done.stderr
