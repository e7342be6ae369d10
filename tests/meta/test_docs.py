"""What the documentation names exists: paths, links, make targets, commands and options."""

import contextlib
import functools
import io
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import dropwhile, groupby
from pathlib import Path
from typing import NamedTuple

import pytest

from mla_var3.cli.main import main

# Folders that a token must start with to be read as a path, there or not.
FOLDERS = (".ci", ".claude", "docs", "scripts", "src", "tests", "third_party")
# Made by running things, so they need not exist in a clone.
PRODUCTS = ("out", "cache", "site", "build", "dist", ".venv")

FENCE = re.compile(r"^( *)(```+|~~~+) *([\w-]*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"!?\[[^\]\n]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


class Command(NamedTuple):
    """One documented shell command, without environment assignments."""

    place: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def without_fences(text: str) -> str:
    """The text with the lines of fenced blocks emptied, so that line numbers stay."""
    return FENCE.sub(lambda match: "\n" * match.group(0).count("\n"), text)


def path_named(token: str, top_files: set[str]) -> str | None:
    """The repository path that a back-ticked token means, or None when it means none.

    A path starts with a top folder of the repository and goes on with a slash, or is the name of a
    top file. Placeholders (`<...>`, `...`, `{a,b}`) and products of a run are not checked.
    """
    token = token.strip().removeprefix("./")
    token = re.sub(r"(::[\w:.]+|:\d+(-\d+)?)$", "", token)
    if not re.fullmatch(r"[\w.\-/*]+", token) or "..." in token:
        return None
    first, slash, _ = token.partition("/")
    if first in PRODUCTS:
        return None
    if slash and first in FOLDERS:
        return token
    return token if token in top_files else None


def missing_paths(text: str, root: Path) -> list[str]:
    """Back-ticked repository paths in a markdown text that do not exist, with their lines."""
    # Names of usual top files are paths even when the file is gone.
    top_files = {path.name for path in root.iterdir() if path.is_file()}
    top_files |= {"README.md", "AGENTS.md", "CHANGELOG.md", "Makefile", "pyproject.toml"}
    prose = without_fences(text)
    missing = []
    for number, line in enumerate(prose.splitlines(), 1):
        for token in INLINE_CODE.findall(line):
            named = path_named(token, top_files)
            if named is not None and not any(root.glob(named.rstrip("/"))):
                missing.append(f"{number}: `{named}` does not exist")
    return missing


def anchors_of(text: str) -> set[str]:
    """Anchors that the headings of a markdown text get."""
    anchors: set[str] = set()
    for heading in HEADING.findall(without_fences(text)):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        number = 1
        while (name := anchor if number == 1 else f"{anchor}-{number - 1}") in anchors:
            number += 1
        anchors |= {name, re.sub(r"-+", "-", name)}
    return anchors


def broken_links(text: str, page: Path, root: Path) -> list[str]:
    """Relative links of a page that lead nowhere, or out of the repository."""
    prose = INLINE_CODE.sub(lambda match: "`" * len(match.group(0)), without_fences(text))
    broken = []
    for match in LINK.finditer(prose):
        target, _, anchor = match.group(1).partition("#")
        number = prose.count("\n", 0, match.start()) + 1
        place = f"{number}: link to {match.group(1)}"
        if re.match(r"[a-z][a-z0-9+.-]*:", target, re.IGNORECASE):
            continue
        aim = (page.parent / target).resolve() if target else page
        if not aim.is_relative_to(root) or not aim.exists():
            broken.append(f"{place}: no such file")
        elif anchor and aim.suffix == ".md" and anchor not in anchors_of(aim.read_text()):
            broken.append(f"{place}: no such heading")
    return broken


def commands_of(text: str, page: str) -> Iterator[Command]:
    """Commands in the shell blocks of a markdown text.

    In `bash`, `sh` and `shell` blocks every line is a command; in `console` blocks only those after
    a prompt. Commands joined by `&&`, `;` or `|` count one by one, those with placeholders not.
    """
    for block in FENCE.finditer(text):
        language = block.group(3)
        if language not in ("bash", "sh", "shell", "console"):
            continue
        body = re.sub(r"\\\n\s*", " ", block.group(4))
        for line in body.splitlines():
            line = line.strip()
            if language == "console":
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            if re.search(r"<[^>]*>|\[[^\]]*\]|\.\.\.", line):
                continue
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            for joint, part in groupby(lexer, lambda word: bool(re.fullmatch(r"[;&|]+", word))):
                words = tuple(dropwhile(lambda word: re.match(r"\w+=", word), part))
                if words and not joint:
                    yield Command(page, words)


def program_of(command: Command) -> tuple[str, list[str]] | None:
    """Our program and its arguments: `hyper-mla` or a module run with -m; None for others."""
    words = [word.removeprefix(".venv/bin/") for word in command.words]
    if words[0] == "hyper-mla":
        return "hyper-mla", words[1:]
    if re.match(r"python3? -m mla_var3\b", " ".join(words)):
        return words[2], words[3:]
    return None


def command_problems(
    commands: list[Command],
    help_of: Callable[[str, tuple[str, ...]], subprocess.CompletedProcess[str]],
) -> list[str]:
    """Documented commands of ours that their program would refuse.

    `help_of` starts a program with its arguments and --help added at the end. A parser that reads
    from left to right judges the values before it meets --help, and then shows the options that it
    knows; a documented option has to be among them.
    """
    problems = []
    for command in commands:
        if (ours := program_of(command)) is None:
            continue
        program, arguments = ours
        result = help_of(program, tuple(word for word in arguments if word != "--help"))
        if result.returncode:
            problems.append(f"{command}\n    {result.stderr.strip()[-500:]}")
            continue
        options = [word.partition("=")[0] for word in arguments if re.match(r"--[a-zA-Z]", word)]
        problems += [
            f"{command}\n    {option} is not in its --help"
            for option in options
            if not re.search(re.escape(option) + r"(?![\w-])", result.stdout)
        ]
    return problems


@pytest.fixture(scope="module")
def pages(repo_root: Path, repo_files: list[Path]) -> dict[str, str]:
    """Markdown pages of the repository; third-party checkouts are not ours to check."""
    names = {path.relative_to(repo_root).as_posix(): path for path in repo_files}
    ours = re.compile(r"(?!third_party/).*\.md|.*/README\.md")
    return {name: path.read_text() for name, path in names.items() if ours.fullmatch(name)}


@pytest.fixture(scope="module")
def commands(pages: dict[str, str]) -> list[Command]:
    return [command for name, text in pages.items() for command in commands_of(text, name)]


def test_named_paths_exist_and_links_resolve(pages, repo_root):
    problems = []
    for name, text in pages.items():
        broken = broken_links(text, repo_root / name, repo_root)
        problems += [f"{name}:{each}" for each in (*missing_paths(text, repo_root), *broken)]
    assert not problems, "\n" + "\n".join(problems)


def test_documented_make_targets_exist(commands, repo_root):
    makefile = (repo_root / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    calls = [command for command in commands if command.words[0] == "make"]
    named = {(str(call), word) for call in calls for word in call.words[1:] if "=" not in word}
    assert [call for call, word in sorted(named) if word not in targets] == []


def test_documented_scripts_exist(commands, repo_root):
    missing = []
    for command in commands:
        runner, *rest = command.words
        script = rest[0] if runner in ("bash", "sh", "python", "python3") and rest else runner
        is_ours = "/" in script and not script.startswith((".venv/", "/", "-", "~"))
        if is_ours and not (repo_root / script).is_file():
            missing.append(str(command))
    assert missing == []


def test_documented_commands_parse(commands, pages, repo_root, monkeypatch):
    monkeypatch.chdir(repo_root)
    monkeypatch.setenv("COLUMNS", "200")

    @functools.cache
    def help_of(program: str, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        """In this process: an interpreter for each command would take a minute."""
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", [program, *arguments, "--help"])
        code: object = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                if program == "hyper-mla":
                    code = main()
                else:
                    runpy.run_module(program, run_name="__main__", alter_sys=True)
            except SystemExit as stopped:
                code = stopped.code or 0
        return subprocess.CompletedProcess(arguments, bool(code), out.getvalue(), err.getvalue())

    problems = command_problems(commands, help_of)
    assert not problems, "\n" + "\n".join(problems)
    assert pages["AGENTS.md"].count("\n") < 150 and pages["CLAUDE.md"].strip() == "@AGENTS.md"


@pytest.fixture
def small_repo(tmp_path: Path) -> Path:
    for name in ("Makefile", "src/a.py", "docs/page.md"):
        path = tmp_path / "repo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# The `first` part, and more\n")
    return tmp_path / "repo"


def test_a_missing_path_is_found(small_repo):
    bad = "docs/gone.md ./docs/gone.md src/b.py:12 src/b.py::test_x scripts/ docs/*.txt README.md"
    for token in bad.split():
        assert len(missing_paths(f"Read `{token}` first.", small_repo)) == 1, token


def test_broken_links_are_found(small_repo):
    page = small_repo / "docs" / "page.md"
    text = (
        "[a](page.md) [b](#the-first-part-and-more) [c](../src/a.py) [d](https://example.com/x)\n"
        "`[code](nowhere.md)`\n[e](gone.md) [f](page.md#gone) ![g](gone.png) [h](../../x)\n"
    )
    found = [re.sub(r":.*to ", ":", line) for line in broken_links(text, page, small_repo)]
    files = [f"3:{name}: no such file" for name in ("gone.md", "gone.png", "../../x")]
    assert sorted(found) == sorted(["3:page.md#gone: no such heading", *files])


def test_a_command_that_would_be_refused_is_found():
    for line, message in (
        ("hyper-mla run --bench_runs=3", ""),
        ("hyper-mla run --help", ""),
        ("hyper-mla run --bench=3", "--bench is not in its --help"),
        ("python -m mla_var3.kernel flush_mla", "invalid choice"),
        ("python -m other.package --anything", ""),
    ):

        def help_of(program: str, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
            code = 2 * ("flush_mla" in arguments)
            said = ("usage: [--help] [--bench_runs N]", "invalid choice: flush_mla")
            return subprocess.CompletedProcess(arguments, code, *said)

        problems = command_problems(list(commands_of(f"```bash\n{line}\n```\n", "x.md")), help_of)
        assert len(problems) == bool(message), problems
        assert message in "".join(problems)


def test_the_start_line_on_the_serving_page_has_the_crossover_of_today(repo_root):
    pytest.importorskip("torch")
    from mla_var3.integrations.paged import latent_crossover

    text = (repo_root / "docs" / "serving.md").read_text(encoding="utf-8")
    line = f"on NVIDIA H200, 16 heads, latent up to {latent_crossover(16, 'NVIDIA H200')} query"
    assert line in text
