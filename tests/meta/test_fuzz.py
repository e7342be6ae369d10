"""The fuzzer finds what is planted, shrinks it to a few tokens, and says how to repeat it."""

import json
import re
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mla_var3
from tests import soak
from tests.fuzz import __main__ as program
from tests.fuzz import cases
from tests.fuzz.mirror import Mirror, WrongResult
from tests.fuzz.plants import LONG, plant

right = mla_var3.mla_attention


def reads_one_slot_too_many(q: Any, q_rope: Any, cache: Any, *rest: Any, **options: Any) -> Any:
    if isinstance(cache, mla_var3.LatentCache) and int(cache.lengths.max()) < cache.view().capacity:
        options["lengths"] = cache.lengths + (cache.lengths < cache.view().capacity).int()
    return right(q, q_rope, cache, *rest, **options)


def forgets_the_tree(*operands: Any, **options: Any) -> Any:
    return right(*operands, **{**options, "tree_mask": None})


def first_failure() -> cases.Case:
    for number in range(300):
        case = cases.draw(f"1/{number}", "cpu", [])
        if cases.run(case, "cpu")[0] == "wrong":
            return case
    raise AssertionError("nothing found in 300 cases")


def test_right_results_pass():
    found = [cases.run(cases.draw(f"2/{number}", "cpu", []), "cpu") for number in range(40)]
    assert [result for result in found if result[0] != "ok"] == []


@pytest.mark.parametrize("defect", [reads_one_slot_too_many, forgets_the_tree])
def test_a_planted_wrong_result_is_found(defect, monkeypatch):
    monkeypatch.setattr(mla_var3, "mla_attention", defect)
    case = first_failure()
    monkeypatch.undo()
    assert cases.run(case, "cpu") == ("ok", "")


def test_a_failure_is_shrunk(monkeypatch):
    monkeypatch.setattr(mla_var3, "mla_attention", right)
    plant("wrong")
    worker = SimpleNamespace(run=lambda case, limit_s: cases.run(case, "cpu"))
    case = program.shrink(first_failure(), "wrong", worker, 1.0, 120.0)
    assert case["b"] == case["h"] == case["d"] == 1
    assert [step["op"] for step in case["steps"]] == ["append", "attend"]
    assert case["steps"][0]["counts"] == [LONG + 1]


def test_a_cache_that_forgets_to_drop_is_found(monkeypatch):
    monkeypatch.setattr(mla_var3.LatentCache, "truncate", lambda *args, **options: None)
    mirror = Mirror(device="cpu", seed=0, dtype="float32", b=1, t=9, h=1, d=1, k=1, p=1)
    mirror.append([5])
    with pytest.raises(WrongResult, match=r"lengths: expected \[3\], got \[5\]"):
        mirror.truncate([2])


def test_what_no_call_may_read_holds_nan():
    sizes = {"b": 2, "t": 130, "h": 1, "d": 2, "k": 2, "p": 1}
    mirror = Mirror(device="cpu", seed=0, dtype="float32", **sizes, kind="paged", window=4)
    mirror.append([70, 3])
    mirror.truncate([9, 0])
    assert mirror.cache is not None
    assert int((~mirror.cache.buffer.isnan()).all(-1).sum()) == 61 + 3
    view = mirror.cache.view()
    assert view.k_new is not None
    # 70 tokens turned the window over, and of its four slots none holds one of the 61 first.
    assert torch.equal((~view.k_new.isnan()).all(-1).sum((1, 2)), torch.tensor([0, 3]))


def test_the_soak_serves_and_compares(monkeypatch, capsys):
    assert soak.main(["--seconds=2", "--seed=1"]) == 0
    monkeypatch.setattr(mla_var3, "mla_attention", right)
    plant("wrong")
    assert soak.main(["--seconds=20", "--seed=1"]) == 1
    assert "WRONG after " in capsys.readouterr().out


@pytest.mark.slow
def test_a_hang_is_killed_and_repeated(monkeypatch, capsys):
    """Through the command line, with a worker process."""
    monkeypatch.setattr(program, "HANG_TRIES", 0)
    monkeypatch.setattr(program, "MOST_FAILURES", 1)
    assert program.main(["--seconds=120", "--seed=1", "--plant=hang", "--limit=5"]) == 1
    printed = capsys.readouterr().out
    [repro] = re.findall(r"python -m tests.fuzz (--repro='.*')", printed)
    [option] = shlex.split(repro)
    assert "HANG: case " in printed and json.loads(option.partition("=")[2])["steps"]
    assert program.main([option]) == 0
