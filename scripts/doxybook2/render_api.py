#!/usr/bin/env python3
"""Markdown pages from the JSON that `doxybook2 --json` exports: render_api.py <json> <out>.

One page per class, namespace, group, file and page, and index.md as the landing page. Links between
pages are the file names that doxybook2 writes with scripts/doxybook2/config.json.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

KINDS = {
    "namespace": "Namespaces",
    "group": "Modules",
    "class": "Classes",
    "struct": "Structs",
    "union": "Unions",
    "interface": "Interfaces",
    "page": "Pages",
    "dir": "Folders",
    "file": "Files",
}
"""The compounds that get a page, in the order of the landing page, with their headings there."""

NOT_MEMBERS = ("baseClasses", "derivedClasses", "parentBreadcrumbs", "moduleBreadcrumbs")
NOTES = ("note", "warning", "attention", "remark", "pre", "post", "invariant", "deprecated")


class ExportError(Exception):
    """The export is not what doxybook2 writes; the message says what was expected."""


def read_export(folder: Path) -> list[Entry]:
    """The compounds of an export that get a page, by kind and name."""
    if not folder.is_dir():
        raise ExportError(f"json: expected a folder with the export of doxybook2, got {folder}")
    compounds = []
    for path in sorted(folder.glob("*.json")):
        if path.name == "manifest.json":
            continue
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ExportError(f"{path.name}: expected JSON, got: {error}") from error
        missing = [key for key in ("kind", "name", "refid") if key not in entry]
        if missing:
            raise ExportError(f"{path.name}: expected kind, name and refid, got no {missing}")
        if entry["kind"] in KINDS:
            compounds.append(entry)
    if not compounds:
        raise ExportError(f"json: expected at least one compound in {folder}, got none")
    order = list(KINDS)
    return sorted(compounds, key=lambda entry: (order.index(entry["kind"]), entry["name"]))


def member_groups(entry: Entry) -> Iterator[tuple[str, list[Entry]]]:
    """The lists of members of a compound with a heading each: publicFunctions, defines, ..."""
    for key, value in entry.items():
        if key in NOT_MEMBERS or not isinstance(value, list):
            continue
        members = [item for item in value if isinstance(item, dict) and "kind" in item]
        if members:
            yield re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key).capitalize(), members


def page_of(entry: Entry) -> str:
    """The file name of a compound's page."""
    return f"{entry['refid']}.md"


def code(text: str) -> str:
    """Inline code; a text with back-ticks needs a longer fence."""
    fence = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def link(entry: Entry, pages: set[str]) -> str:
    """A link to a compound's page, or its name where there is none."""
    name = code(str(entry.get("title") or entry["name"]))
    target = page_of(entry) if "refid" in entry else ""
    return f"[{name}]({target})" if target in pages else name


def signature(member: Entry) -> str:
    """The declaration of a member as C++."""
    parameters = [
        " ".join(part for part in (item.get("typePlain", ""), item.get("name", "")) if part)
        for item in member.get("templateParams", [])
    ]
    lines = [f"template <{', '.join(parameters)}>"] if parameters else []
    definition = member.get("definition") or member.get("typePlain") or ""
    if not definition:
        definition = f"{member['kind']} {member['name']}"
    lines.append(definition + member.get("argsString", "") + _initializer(member))
    return "\n".join(lines)


def _initializer(member: Entry) -> str:
    text = str(member.get("initializer", ""))
    return f" {text}" if text.startswith("=") else f" = {text}" if text else ""


def prose(entry: Entry) -> Iterator[str]:
    """Brief, details, parameters, result and notes of an entry as paragraphs."""
    for key in ("brief", "details"):
        if text := str(entry.get(key, "")).strip():
            yield text
    for key, heading in (
        ("templateParamsList", "Template parameters"),
        ("paramList", "Parameters"),
    ):
        if items := entry.get(key):
            lines = [f"- {code(item['name'])}: {item['text'].strip()}" for item in items]
            yield "\n".join([f"{heading}:", "", *lines])
    if text := str(entry.get("returns", "")).strip():
        yield f"Returns: {text}"
    for key in NOTES:
        if text := str(entry.get(key, "")).strip():
            yield f"{key.capitalize()}: {text}"


def member_section(member: Entry) -> Iterator[str]:
    """The paragraphs of one member that has no page of its own."""
    if anchor := str(member.get("anchor", "")).removeprefix("#"):
        yield f'<a id="{anchor}"></a>'
    yield f"### {code(member['name'])}"
    yield f"```cpp\n{signature(member)}\n```"
    yield from prose(member)
    if values := member.get("enumvalues"):
        yield "\n".join(
            f"- {code(value['name'])}{_initializer(value)} {value.get('brief', '')}".rstrip()
            for value in values
        )


def render(entry: Entry, pages: set[str]) -> str:
    """The page of one compound."""
    title = entry.get("title") or entry["name"]
    blocks = [f"# {entry['kind']} {code(title)}", "[API reference](index.md)"]
    if includes := entry.get("includes"):
        blocks.append(f"```cpp\n#include {includes}\n```")
    blocks += prose(entry)
    for key, heading in (("baseClasses", "Inherits from"), ("derivedClasses", "Inherited by")):
        if related := entry.get(key):
            blocks.append(f"{heading}: {', '.join(link(other, pages) for other in related)}")
    for heading, members in member_groups(entry):
        blocks.append(f"## {heading}")
        linked = [member for member in members if page_of(member) in pages]
        if linked:
            blocks.append("\n".join(f"- {link(member, pages)}" for member in linked))
        for member in members:
            if member not in linked:
                blocks += member_section(member)
    return "\n\n".join(blocks) + "\n"


def landing(compounds: list[Entry], pages: set[str]) -> str:
    """The landing page: every compound by kind."""
    blocks = ["# CUTLASS C++ API", "[Guides](../index.md)"]
    for kind, heading in KINDS.items():
        lines = []
        for entry in compounds:
            if entry["kind"] == kind:
                brief = str(entry.get("brief", "")).strip()
                lines.append(f"- {link(entry, pages)}{': ' + brief if brief else ''}")
        if lines:
            blocks += [f"## {heading}", "\n".join(lines)]
    return "\n\n".join(blocks) + "\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: render_api.py <json folder> <output folder>", file=sys.stderr)
        return 2
    source, target = map(Path, arguments)
    try:
        compounds = read_export(source)
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    pages = {page_of(entry) for entry in compounds}
    target.mkdir(parents=True, exist_ok=True)
    for entry in compounds:
        (target / page_of(entry)).write_text(render(entry, pages), encoding="utf-8")
    (target / "index.md").write_text(landing(compounds, pages), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
