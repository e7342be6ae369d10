"""Docstrings and long lines of a cloned version: the text around the names."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping

LINE_LENGTH = 100
_ORIGIN = re.compile(r"^(\s*)(?:Base version\.|Parent: \w+\.)[ \t]*", re.MULTILINE)


def describe_clone(
    literal: str,
    *,
    of_module: bool,
    words: Mapping[str, str],
    phrases: Mapping[str, str],
    quoted: Mapping[str, str],
) -> str:
    """A docstring, as it is written in the source, that speaks of the new version.

    Args:
        literal: the docstring with its quotes.
        of_module: whether it is a module's; then its first line names the version.
        words: names to replace in such a first line.
        phrases: phrases to replace everywhere, "the base version of ..." for example.
        quoted: names to replace where they stand in backticks.
    """
    first, newline, rest = literal.partition("\n")
    told = _replace_phrases(first, phrases)
    if of_module and told == first:
        told = _replace_words(first, words)
    more = _replace_phrases(rest, phrases)
    for old, new in quoted.items():
        told, more = told.replace(f"`{old}`", f"`{new}`"), more.replace(f"`{old}`", f"`{new}`")
    if of_module:
        told = _short_summary(told, is_whole=not newline)
    if more != rest:
        more = _wrap_paragraphs(more)
    return told + newline + more


def _replace_words(text: str, words: Mapping[str, str]) -> str:
    pattern = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda match: words[match[0]], text)


def _replace_phrases(text: str, phrases: Mapping[str, str]) -> str:
    for old, new in phrases.items():
        for before, after in ((old, new), (old.capitalize(), new.capitalize())):
            text = re.sub(rf"(?<!\w){re.escape(before)}(?!\w)", after, text)
    return text


def _short_summary(line: str, is_whole: bool) -> str:
    """A summary `name: what it does` that became too long, as a summary and a paragraph."""
    closing = '"""' if is_whole else ""
    summary, colon, more = line.removesuffix(closing).partition(": ")
    if len(line) <= LINE_LENGTH or not colon or not line.startswith('"""'):
        return line
    paragraph = f"{summary}.\n\n{more[:1].upper()}{more[1:]}"
    return f"{paragraph}\n{closing}" if is_whole else paragraph


def _wrap_paragraphs(text: str) -> str:
    """Wrap prose again where longer names made a line too long; tables stay as they are."""
    end = re.search(r"\s*[\"']*$", text)
    tail = end[0] if end else ""
    parts = re.split(r"((?:^|\n)[ \t]*\n)", text.removesuffix(tail))
    for i, part in enumerate(parts):
        lines = part.split("\n")
        indents = {len(line) - len(line.lstrip()) for line in lines}
        if max(map(len, lines)) > LINE_LENGTH and len(indents) == 1:
            indent = " " * indents.pop()
            parts[i] = textwrap.fill(
                " ".join(line.strip() for line in lines),
                LINE_LENGTH,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "".join(parts) + tail


def with_parent(text: str, parent: str) -> str:
    """A module whose contract names its parent, instead of what the parent said of itself."""
    line = f"Parent: {parent}."
    match ast.parse(text).body[:1]:
        case [ast.Expr(value=ast.Constant(value=str()) as node)]:
            pass
        case _:
            return f'"""{line}"""\n\n{text}'
    lines = text.split("\n")
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    doc = "\n".join(lines[first : last + 1])
    origin = _ORIGIN.search(doc)
    if origin:
        after = doc[origin.end() :]
        gap = "" if after[:1] in ("\n", "\r", "") else "\n"
        doc = f"{doc[: origin.start()]}{origin[1]}{line}{gap}{after}"
    elif first == last:
        quote = doc.rstrip()[-3:]
        summary, _, after = doc.rpartition(quote)
        doc = f"{summary}\n\n{line}\n{quote}{after}"
    else:
        summary, _, rest = doc.partition("\n")
        doc = f"{summary}\n\n{line}\n{rest}"
    return "\n".join([*lines[:first], doc, *lines[last + 1 :]])


def excuse_long_imports(text: str) -> str:
    """Mark imports whose path alone passes the line length: no formatter can make them shorter."""
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            line = lines[node.lineno - 1]
            if len(line) > LINE_LENGTH and line.rstrip().endswith("import ("):
                lines[node.lineno - 1] = f"{line.rstrip()}  # noqa: E501"
    return "\n".join(lines)
