"""What is recorded about the machine, and that a missing thing is None, not an error."""

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import mla_var3
from mla_var3.runtime import environment as env
from tests.programs import write_script


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test reads the machine anew."""
    cached = (env._version, env._git)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_record_is_json_and_complete():
    record = env.environment()
    assert json.loads(json.dumps(record)) == record
    names = "date command versions cuda_runtime platform arch git gpu"
    assert set(record) == set(names.split())
    assert record["versions"]["hyper-mla"] == mla_var3.__version__
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["versions"]["torch"]


def test_nothing_installed_is_none(monkeypatch, tmp_path):
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(env, "find_tool", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(env, "_torch", lambda: None)
    record = env.environment()
    assert record["versions"]["tileiras"] is None
    assert record["versions"]["torch"] is None
    assert (record["git"], record["gpu"], record["cuda_runtime"]) == (None, None, None)


def test_tools_are_looked_for_in_order(monkeypatch, tmp_path):
    wheel, path, home = tmp_path / "wheel", tmp_path / "path", tmp_path / "home" / "bin"
    monkeypatch.setattr(env, "_wheel_bin_folders", lambda: [wheel])
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("CUDA_HOME", str(home.parent))
    found = []
    for folder in (home, path, wheel):
        folder.mkdir(parents=True)
        write_script(folder / "hyper-mla-tool", "#!/bin/sh\n")
        found.append(env.find_tool("hyper-mla-tool"))
    assert found == [folder / "hyper-mla-tool" for folder in (home, path, wheel)]
    assert env.find_tool("hyper-mla-no-such-tool") is None


def test_commit_only_of_our_own_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "_SOURCE_ROOT", tmp_path / "site-packages")
    answers = {"--show-toplevel": f"{tmp_path}\n", "HEAD": "abc\n", "--porcelain": ""}
    monkeypatch.setattr(env, "run_tool", lambda *command: answers[command[-1]])
    assert env._git() is None
    env._git.cache_clear()
    monkeypatch.setattr(env, "_SOURCE_ROOT", tmp_path)
    assert env._git() == {"commit": "abc", "dirty": False}


def test_the_record_is_about_the_gpu_that_is_current_now(monkeypatch):
    current = [0]

    def properties(index: int) -> Any:
        sizes = {"major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 1}
        return SimpleNamespace(name=f"GPU {index}", **sizes)

    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: current[0],
        get_device_properties=properties,
    )
    monkeypatch.setattr(env, "_torch", lambda: SimpleNamespace(cuda=cuda))
    assert env._gpu()["name"] == "GPU 0"
    current[0] = 1
    assert env._gpu()["name"] == "GPU 1"
