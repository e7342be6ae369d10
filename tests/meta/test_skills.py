"""The skills: front matter, what they name exists, catalogues are complete, commands parse.

Paths, links and the commands of `hyper-mla` in them are checked with all other pages in
`test_docs.py`.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.programs import run_program

from .api_names import exists, mentioned

SKILLS = (
    *("cute-dsl-ref", "design-cute-dsl-kernel", "design-cutile-dsl-kernel", "design-kernel"),
    *("learn-cute-dsl", "mla-analysis", "profile-kernel"),
    *("optimization-catalog", "optimization-catalog-cute-dsl"),
)
FRONT_MATTER = re.compile(r"\A---\n(?P<fields>(?:[a-z]+: [^\n]+\n)+)---\n\n# \S")
LINES = 120
"""A skill is loaded as a whole: details go to files beside it."""


def skill_problems(text: str, folder_name: str) -> list[str]:
    """What is wrong with the head or the length of a skill."""
    head = FRONT_MATTER.match(text)
    fields = dict(line.split(": ", 1) for line in head["fields"].splitlines()) if head else {}
    if sorted(fields) != ["description", "name"]:
        return [f"expected front matter with name and description, got {sorted(fields)}"]
    name, description = fields["name"], fields["description"]
    rules = {
        f"name: expected {folder_name}, got {name}": name == folder_name,
        "description: expected the triggers": re.search("Use (when|after)", description),
        "description: expected 80 to 1024 characters": 80 <= len(description) <= 1024,
        # A colon and a space would end the value for a YAML reader.
        "description: expected plain YAML text": not re.search(r"""^[\[{"']|: """, description),
        f"expected at most {LINES} lines": len(text.splitlines()) <= LINES,
    }
    return [problem for problem, right in rules.items() if not right]


def script_commands(text: str) -> list[list[str]]:
    """Documented calls of our scripts, without the interpreter."""
    commands = []
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            words = words[1:] if words[:1] in (["python"], ["bash"]) else words
            if words and words[0].removeprefix("./").startswith("scripts/"):
                commands.append([words[0].removeprefix("./"), *words[1:]])
    return commands


@pytest.fixture(scope="module")
def folder(repo_root: Path) -> Path:
    return repo_root / ".claude" / "skills"


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, str]:
    """All pages of the skills by their path below the folder."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.md")}


def test_the_skills_belong_to_the_repository(repo_files, folder):
    """They must not be ignored by git."""
    assert {folder / name / "SKILL.md" for name in SKILLS} <= set(repo_files)


@pytest.mark.parametrize("name", SKILLS)
def test_a_skill_has_a_head_is_short_and_links_its_references(folder, name):
    text = (folder / name / "SKILL.md").read_text()
    assert skill_problems(text, name) == []
    linked = re.findall(r"\]\((references/[^)#]+)", text)
    there = [path.relative_to(folder / name).as_posix() for path in (folder / name).rglob("*.md")]
    assert sorted(set(linked)) == sorted(path for path in there if path != "SKILL.md")


@pytest.mark.parametrize("language", ["cuda.tile", "cutlass"])
def test_names_of_the_languages_exist(texts, language):
    pytest.importorskip(language)
    named = set().union(*map(mentioned, texts.values()))
    names = [name for name in named if name.startswith(f"{language}.")]
    assert len(names) >= 5
    assert sorted(name for name in names if not exists(name)) == []


def test_the_catalogues_are_complete(repo_root, folder):
    knowledge = repo_root / "docs" / "knowledge"
    paths = [path for path in knowledge.rglob("*.md") if path.name != "README.md"]
    pages = [path.relative_to(repo_root).as_posix() for path in paths]
    for name, is_cute in (("optimization-catalog", False), ("optimization-catalog-cute-dsl", True)):
        catalogue = (folder / name / "SKILL.md").read_text()
        named = re.findall(r"`(docs/knowledge/[^`*]+\.md)`", catalogue)
        expected = [page for page in pages if ("/cute-dsl/" in page) is is_cute]
        assert [page for page in expected if named.count(page) != 1] == []


def test_options_of_scripts_exist(texts, repo_root):
    commands = [command for text in texts.values() for command in script_commands(text)]
    assert len(commands) >= 5
    for script, *arguments in commands:
        path = repo_root / script
        runner = sys.executable if path.suffix == ".py" else "bash"
        shown = run_program([runner, path, "--help"])
        assert shown.returncode == 0, script
        options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert {option for option in options if option not in shown.stdout} == set(), script


GOOD = (
    "---\nname: some-skill\ndescription: Does something well for those who ask for it. "
    "Use when it has to be done again and again.\n---\n\n# Title\n"
)


def test_a_bad_skill_is_found():
    for old, new, problem in (
        ("---\nname", "name", "front matter"),
        ("name: some-skill\n", "", "front matter"),
        ("name: some-skill", "name: other", "name: expected some-skill"),
        ("Use when", "Made for when", "triggers"),
        ("well for", "well: for", "plain YAML"),
        ("# Title\n", "# Title\n" + "line\n" * LINES, "at most"),
        (" for those who ask for it", "", "80 to 1024"),
    ):
        assert old in GOOD
        assert problem in "\n".join(skill_problems(GOOD.replace(old, new, 1), "some-skill"))
