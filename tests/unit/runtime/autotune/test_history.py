"""Tuning files: keys, and that a file is whole whatever happens while it is written."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.runtime.autotune import history as autotune_cache
from mla_var3.runtime.autotune.history import History, canonical, history_path, tuning_key
from mla_var3.runtime.measure import summarise
from mla_var3.runtime.paths import write_atomic
from mla_var3.runtime.stage import Tiling

SPEC: Any = SimpleNamespace(name="NVIDIA Fake", compute_capability=(9, 0))
TIMING = summarise([1.0], timer="cuda-event", cold_l2=True)


class FakePlan:
    name = "fake"
    kernel_id = SimpleNamespace(language="cutile-dsl")

    tiling: Any = None

    def __init__(self, **params: Any) -> None:
        self._params = params

    def params(self) -> dict[str, Any]:
        return self._params


def fake_kernel(*files: Path) -> Any:
    return SimpleNamespace(
        language="cutile-dsl", plan=FakePlan(), tiling=Tiling(), source_files=lambda: list(files)
    )


def make_key(
    *files: Path, stage: str = "attend", spec: Any = SPEC, **params: Any
) -> dict[str, Any]:
    plan: Any = FakePlan(**params)
    return tuning_key(plan, spec, stage, [fake_kernel(*files)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.py"
    path.write_text("one")
    return path


def test_each_part_of_the_key_changes_the_file(source, monkeypatch):
    another = SimpleNamespace(**{**vars(SPEC), "name": "NVIDIA Other"})
    keys = [make_key(source, b=2), make_key(source, b=3), make_key(source, b=2, stage="other")]
    keys.append(make_key(source, b=2, spec=another))
    assert keys[0] == make_key(source, b=2), "the same twice is the same file"
    source.write_text("two")
    keys.append(make_key(source, b=2))
    monkeypatch.setattr(autotune_cache, "toolkit_versions", lambda language: {"cuda-tile": "9"})
    keys.append(make_key(source, b=2))
    assert len({history_path(FakePlan(), SPEC, key) for key in keys}) == 6


def test_a_checkout_may_move(tmp_path):
    hashes = set()
    for folder in ("here", "there"):
        path = tmp_path / folder / "source.py"
        path.parent.mkdir()
        path.write_text("same")
        hashes.add(make_key(path)["source"])
    assert len(hashes) == 1


def test_tilings_of_nested_plans_are_not_in_the_key():
    nested = FakePlan(t=8)
    nested.tiling = Tiling()
    assert canonical({"part": nested}) == '{"part":{"t":8}}'


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "attend-x.json"
    key = {"stage": "attend", "problem": {}}
    history = History(path, key)
    history.record({"rows": 1}, "ok", timing=TIMING)
    old = path.read_bytes()

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        history.record({"rows": 2}, "ok", timing=TIMING)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert len(History(path, key).entries) == 1


WRITER = """
import json, sys
from pathlib import Path
from mla_var3.runtime.paths import write_atomic
path, who = Path(sys.argv[1]), sys.argv[2]
for i in range(60):
    write_atomic(path, json.dumps({"who": who, "data": [i] * 4000}))
"""


def test_two_processes_that_write_the_same_file_do_not_mix(tmp_path, package_environment):
    path = tmp_path / "shared.json"
    write_atomic(path, json.dumps({"who": "nobody", "data": [0] * 4000}))
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, who], env=package_environment) for who in ("a", "b")]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        stored = json.loads(path.read_text())
        assert len(stored["data"]) == 4000 and len(set(stored["data"])) == 1
        reads += 1
    assert [writer.returncode for writer in writers] == [0, 0] and reads > 1
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["shared.json"]
