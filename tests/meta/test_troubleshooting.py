"""The messages that the troubleshooting page quotes are those of the program."""

import re
from pathlib import Path

import pytest

from mla_var3.errors import UnknownNameError


def quoted(page: str) -> list[str]:
    """The quotes in the first column of the tables `it says` and `symptom`."""
    rows = re.findall(r"^\| ([^|\n]+) \|", page, re.MULTILINE)
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]


def unknown(quotes: list[str], sources: str) -> list[str]:
    return [quote for quote in quotes if quote not in sources]


@pytest.fixture(scope="module")
def sources(repo_root: Path) -> str:
    files = [
        *(repo_root / "src").rglob("*.py"),
        *(repo_root / "scripts").glob("*.sh"),
        repo_root / "setup_cutile.sh",
    ]
    return "\n".join(path.read_text() for path in files)


def test_quoted_messages_exist(repo_root, sources):
    quotes = quoted((repo_root / "docs" / "troubleshooting.md").read_text())
    assert len(quotes) >= 20
    # An error class may write the words around its parts itself.
    written = str(UnknownNameError("device", "some card", []))
    assert unknown(quotes, f"{sources}\n{written}") == []


def test_a_message_that_is_gone_is_found():
    page = (
        "| it says | why |\n|---|---|\n| `old words` | because of `this` |\n| `new words` | x |\n"
    )
    assert quoted(page) == ["old words", "new words"]
    assert unknown(quoted(page), "the new words are here") == ["old words"]
