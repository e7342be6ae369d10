"""The examples of docs/attention.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_examples_run(repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (repo_root / "docs" / "attention.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/attention.md", "exec"), names)
    assert capsys.readouterr().out.startswith("torch_tiled torch the tensors are on the CPU")
