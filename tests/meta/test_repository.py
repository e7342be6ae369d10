"""Rules for the files of the repository: words, sizes, versions, packaging."""

import re
import subprocess
import tomllib
from contextlib import suppress

import mla_var3

HOST_LIMIT, KERNEL_LIMIT = 500, 700

# Written in pieces, so that this file does not hold what it forbids.
REGISTRIES = (
    *("pypi org", "pythonhosted org", "pypi nvidia com", "download pytorch org", "nvcr io"),
    *("ghcr io", "docker io", "registry npmjs org", "conda anaconda org"),
)
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.}])/(?:work|root|farm)/"),
    "a note to self": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
    "an issue number": re.compile(r"\bissue\s+#", re.IGNORECASE),
    "the host of a registry": re.compile(
        r"\b(?:" + "|".join(REGISTRIES).replace(" ", r"\.") + r")\b", re.IGNORECASE
    ),
}


def forbidden_in(text: str) -> list[str]:
    """Forbidden words of a text, each as 'line: what it is (the match)'."""
    return [
        f"{number}: {what} ({match.group(0)})"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        for match in pattern.finditer(line)
    ]


def test_no_forbidden_words(repo_files, repo_root):
    found = []
    for path in repo_files:
        with suppress(UnicodeDecodeError):  # not a text file
            text = path.read_text(encoding="utf-8")
            found += [f"{path.relative_to(repo_root)}:{problem}" for problem in forbidden_in(text)]
    assert not found, "\n" + "\n".join(found)


def test_a_forbidden_word_is_found():
    for start, end in (
        ("cd /", "work/main"), ("see '/", "root/.cache'"), ("# TO", "DO: later"), ("FIX", "ME"),
        ("see issue", " #12"), ("https://pypi", ".org/simple"), ("at download.pytorch", ".org/whl"),
    ):  # fmt: skip
        assert len(forbidden_in(f"fine\n{start}{end}\n")) == 1, start


def test_modules_stay_short(package_sources):
    lengths = {name: source.count("\n") for name, source in package_sources.items()}
    limits = {name: KERNEL_LIMIT if name[:7] == "kernel/" else HOST_LIMIT for name in lengths}
    assert {name: lines for name, lines in lengths.items() if lines > limits[name]} == {}


def test_changelog_starts_with_this_version(repo_root):
    changelog = (repo_root / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    assert versions[:1] == [mla_var3.__version__]


def test_setup_installs_what_the_package_accepts_and_knows_its_extras(repo_root):
    script = (repo_root / "setup_cutile.sh").read_text()
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    for wanted in (project["dependencies"][0], *project["optional-dependencies"]["cute"]):
        bounds = re.fullmatch(r"([\w-]+)>=([\d.]+),<([\d.]+)", wanted)
        assert bounds
        pinned = re.search(rf'_REQUIREMENT="{bounds[1]}==([\d.]+)"', script)
        assert pinned
        low, version, high = (
            tuple(map(int, text.split("."))) for text in (bounds[2], pinned[1], bounds[3])
        )
        assert low <= version < high

    named = re.findall(r'^readonly (?:BASE|OPTIONAL)_EXTRAS="([^"]+)"', script, re.MULTILINE)
    engines = {"sglang", "transformers", "vllm"}  # for environments that engines are installed in
    assert {*",".join(named).split(","), *engines} == set(project["optional-dependencies"])


def test_make_lists_every_target(repo_root):
    makefile = (repo_root / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    shown = subprocess.run(
        ["make", "--no-print-directory"], cwd=repo_root, capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"^  make ([a-z-]+) ", shown, re.MULTILINE) == phony[1].split()
