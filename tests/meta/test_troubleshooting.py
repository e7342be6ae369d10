"""The messages that the troubleshooting page quotes are those of the program."""

import re

from mla_var3.errors import UnknownNameError


def quoted(page: str) -> list[str]:
    """The quotes in the first column of the tables `it says` and `symptom`."""
    rows = re.findall(r"^\| ([^|\n]+) \|", page, re.MULTILINE)
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]


def test_quoted_messages_exist(repo_root, package_sources):
    page = (
        "| it says | why |\n|---|---|\n| `old words` | because of `this` |\n| `new words` | x |\n"
    )
    assert quoted(page) == ["old words", "new words"]
    quotes = quoted((repo_root / "docs" / "troubleshooting.md").read_text())
    assert len(quotes) >= 20
    scripts = [*(repo_root / "scripts").glob("*.sh"), repo_root / "setup_cutile.sh"]
    # An error class may write the words around its parts itself.
    written = str(UnknownNameError("device", "some card", []))
    known = "\n".join([*package_sources.values(), *(p.read_text() for p in scripts), written])
    assert [quote for quote in quotes if quote not in known] == []
