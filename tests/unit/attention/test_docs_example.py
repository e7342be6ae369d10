"""The examples of the pages about calls run as they stand."""

import re

import pytest


@pytest.mark.parametrize(
    ("name", "count", "printed"),
    [("attention", 4, "torch_tiled torch the tensors are on the CPU"), ("shared-prefixes", 1, "")],
)
def test_the_examples_run(name, count, printed, repo_root, capsys):
    page = (repo_root / "docs" / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= count
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"docs/{name}.md", "exec"), names)
    assert capsys.readouterr().out.startswith(printed)
