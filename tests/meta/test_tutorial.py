"""The tutorial does what it says: its files, changes and commands are made and run, in order.

The page is followed in a copy of the package, where the new kernel exists. Its commands stand in
blocks marked `{.bash}` for that reason: in this checkout, where there is no such kernel, they could
not even be parsed.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import run_program, write_script

BLOCK = re.compile(
    r"(?:^<!-- (?P<note>file|says): (?P<text>[^\n]+) -->\n)?"
    r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Step(NamedTuple):
    """A block: a file to write, a change, commands to run, or commands that have to fail.

    The text is the file's path, or what the commands have to print.
    """

    kind: str
    body: str
    text: str
    line: int


def steps_of(page: str) -> Iterator[Step]:
    """What a page asks for, in order; plain blocks are for reading."""
    kinds = {"diff": "diff", "{.bash}": "run", "{.bash .fails}": "fails"}
    for block in BLOCK.finditer(page):
        kind = "file" if block["note"] == "file" else kinds.get(block["info"])
        if kind is not None:
            line = page.count("\n", 0, block.start()) + 1
            yield Step(kind, block["body"], block["text"] or "", line)


def unnamed_files(page: str) -> list[str]:
    """Files whose name the paragraph before them does not tell the reader: comments are hidden."""
    unnamed = []
    for block in BLOCK.finditer(page):
        paragraph = page[: block.start()].rstrip("\n").rpartition("\n\n")[2]
        name = re.escape(Path(block["text"] or "").name)
        if block["note"] == "file" and not re.search(rf"`[^`]*\b{name}`", paragraph):
            unnamed.append(block["text"])
    return unnamed


class Copy:
    """A copy of the package in which a page is followed."""

    def __init__(self, root: Path, repo_root: Path) -> None:
        self.root = root
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repo_root / "src" / "mla_var3", root / "src" / "mla_var3", ignore=skip)
        (root / "tests" / "kernel").mkdir(parents=True)
        for name in ("pyproject.toml", "tests/conftest.py"):
            shutil.copy(repo_root / name, root / name)
        programs = root / "bin"
        programs.mkdir()
        command = "-c 'import sys; from mla_var3.cli.main import main; sys.exit(main())'"
        start = {"python": "", "ruff": "-m ruff", "hyper-mla": command}
        for program, arguments in start.items():
            call = f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n'
            write_script(programs / program, call)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(root / "src"),
            "HYPER_MLA_OUT_DIR": str(root / "out"),
            "HYPER_MLA_CACHE_DIR": str(root / "cache"),
            "COLUMNS": "200",
        }

    def follow(self, step: Step) -> None:
        """Do one step, which has to come out as the page says."""
        if step.kind == "file":
            path = self.root / step.text
            assert path.parent.is_dir(), f"line {step.line}: no folder for {step.text}"
            path.write_text(step.body)
            return
        command, stdin = ["bash", "-c", "set -euo pipefail\n" + step.body], None
        if step.kind == "diff":
            command, stdin = ["git", "apply", "-"], step.body
        result = run_program(command, cwd=self.root, env=self.environment, input=stdin)
        printed = result.stdout + result.stderr
        where = f"line {step.line}:\n{step.body}\n{printed}"
        failed = step.kind == "fails"
        assert bool(result.returncode) == failed, f"exit code {result.returncode}, {where}"
        assert step.text in printed, f"expected {step.text!r}, {where}"


@pytest.fixture
def copy(tmp_path: Path, repo_root: Path) -> Copy:
    return Copy(tmp_path, repo_root)


@pytest.mark.slow
def test_the_tutorial_can_be_followed(copy, repo_root):
    pytest.importorskip("cuda.tile")
    page = (repo_root / "docs" / "tutorial.md").read_text()
    steps = list(steps_of(page))
    assert {step.kind for step in steps} == {"file", "diff", "run", "fails"}
    assert unnamed_files(page) == []
    for step in steps:
        copy.follow(step)
    # What a reader writes after this page has to pass the same gates as everything else.
    written = [str(copy.root / step.text) for step in steps if step.kind == "file"]
    designs = [str(Path(each).parent) for each in written]
    for arguments in (["format", "--check"], ["check"]):
        result = run_program([sys.executable, "-m", "ruff", *arguments, *designs], cwd=copy.root)
        assert result.returncode == 0, result.stdout + result.stderr


PAGE = """
<!-- file: src/new.py -->
```python
x = 1
```

```diff
--- a/src/new.py
+++ b/src/new.py
@@ -1 +1 @@
-x = 1
+x = 2
```

<!-- says: two -->
```{.bash}
test "$(cat src/new.py)" = "x = 2" && echo two
```

```{.bash .fails}
echo no; exit 3
```

```bash
rm -rf not run
```
"""


def test_a_step_that_comes_out_otherwise_is_found(copy):
    for old, new in (
        ("echo two", "echo three"),
        ("exit 3", "exit 0"),
        ("-x = 1", "-x = 7"),
        ("src/new.py -->", "gone/new.py -->"),
        ("&& echo two", "&& false"),
    ):
        assert old in PAGE
        with pytest.raises(AssertionError):
            for step in steps_of(PAGE.replace(old, new, 1)):
                copy.follow(step)
