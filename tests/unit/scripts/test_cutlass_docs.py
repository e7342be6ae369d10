"""The CUTLASS documentation builder, on a tiny checkout and with stand-ins for the converters."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs import run_program, tools_alone, write_script

TOOLS = (
    *("basename", "bash", "cat", "cp", "dirname", "env", "find", "grep", "ls", "mkdir", "mktemp"),
    *("mv", "rm", "sed", "sh", "sort", "touch", "wc"),
)

# Notes its arguments and writes the page it was asked for; fails on a page that says so.
PANDOC = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
for word in "$@"; do
    case $word in
        --output=*) target=${word#--output=} ;;
        *) source=$word ;;
    esac
done
grep -q "breaks pandoc" "$source" && exit 64
grep -q "nothing comes" "$source" && { touch "$target"; exit 0; }
{ echo "# from rst"; cat "$source"; } >"$target"
"""

# Copies a prepared export to the folder it was asked for.
DOXYBOOK = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
while (($#)); do
    [[ $1 == --output ]] && output=$2
    shift
done
[[ -d $output ]] || exit 3
cp "$EXPORT"/*.json "$output"
"""

FILL = {
    "kind": "function", "name": "fill", "refid": "classcutlass_1_1Array_1a1",
    "anchor": "#function-fill", "definition": "void cutlass::Array::fill",
    "argsString": "(T const & value)", "brief": "Sets every element.",
    "templateParams": [{"typePlain": "typename", "name": "T"}],
    "paramList": [{"name": "value", "text": "what to set"}], "note": "Costs `size()` stores.",
}  # fmt: skip
KIND = {
    "kind": "enum", "name": "Kind", "refid": "x", "definition": "enum Kind",
    "enumvalues": [{"name": "kDense", "initializer": "= 0", "brief": "no holes"}],
}  # fmt: skip
ARRAY = {"kind": "class", "name": "cutlass::Array"}
EXPORT: dict[str, dict[str, Any]] = {
    "classcutlass_1_1Array": {
        **ARRAY, "title": "cutlass::Array", "brief": "Fixed-size array.", "includes": "<array.h>",
        "baseClasses": [{"name": "cutlass::Base", "refid": "gone"}],
        "publicFunctions": [FILL], "publicTypes": [KIND],
    },
    "namespacecutlass": {
        "kind": "namespace", "name": "cutlass",
        "publicClasses": [{**ARRAY, "refid": "classcutlass_1_1Array"}],
    },
}  # fmt: skip


class Builder:
    """Runs the script against a checkout in a temporary folder."""

    def __init__(self, folder: Path, script: Path) -> None:
        self.script = script
        self.out = folder / "pages"
        self.calls = folder / "calls.log"
        self.checkout = folder / "cutlass"
        self.bin = tools_alone(folder / "bin", TOOLS)
        (self.bin / "python3").symlink_to(sys.executable)
        write_script(self.bin / "pandoc", PANDOC)
        self.write("media/docs/cpp/quickstart.md", "# Quick start\n![p](../../images/a.png)\n")
        self.write("media/docs/cpp/cute/00_layout.md", "# Layout\n![](../../../images/a.png)\n")
        self.write("media/docs/cpp/cute/index.rst", "CuTe\n====\n")
        self.write("media/images/a.png", "picture")
        self.export = folder / "export"
        self.export.mkdir()
        for refid, entry in EXPORT.items():
            entry = {"refid": refid, **entry}
            (self.export / f"{refid}.json").write_text(json.dumps(entry))
        (self.export / "manifest.json").write_text("[]")

    def write(self, name: str, text: str) -> None:
        path = self.checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def with_api(self) -> None:
        write_script(self.bin / "doxybook2", DOXYBOOK)
        self.write("doxygen/xml/index.xml", "<doxygenindex/>")

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        fixed = {"CALLS": str(self.calls), "EXPORT": str(self.export), "PYTHONPATH": ""}
        words = [self.bin / "bash", self.script, *arguments]
        return run_program(words, env={"PATH": str(self.bin), **fixed, **environment})

    def build(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.checkout), "--out", str(self.out), **environment)

    def leftovers(self) -> list[Path]:
        return list(self.out.parent.glob(".cutlass*"))


@pytest.fixture
def builder(tmp_path: Path, repo_root: Path) -> Builder:
    return Builder(tmp_path, repo_root / "scripts" / "convert-cutlass-html-docs-to-markdown.sh")


def test_guides_are_kept_and_rst_is_converted(builder):
    result = builder.build()
    assert result.returncode == 0, result.stderr
    for page, text in {
        "quickstart.md": "# Quick start\n![p](images/a.png)\n",
        "cute/00_layout.md": "# Layout\n![](../images/a.png)\n",
        "images/a.png": "picture",
    }.items():
        assert (builder.out / page).read_text() == text
    assert (builder.out / "cute/index.md").read_text().startswith("# from rst\nCuTe")
    assert not (builder.out / "cute/index.rst").exists()
    assert "--from=rst --to=gfm" in builder.calls.read_text()
    index = (builder.out / "index.md").read_text()
    for page in (
        "[Quick start](quickstart",
        "[Layout](cute/00_layout",
        "[API reference](api/index",
    ):
        assert f"- {page}.md)" in index
    assert "4 pages, 1 of them converted" in result.stdout and builder.leftovers() == []


def test_without_doxybook_or_xml_the_api_is_left_out_and_said(builder):
    out = f"--out={builder.out}"
    result = builder.run(out, HYPER_MLA_CUTLASS_DIR=str(builder.checkout))
    assert result.returncode == 0 and (builder.out / "quickstart.md").is_file()
    assert "API reference left out: doxybook2: expected on PATH" in result.stdout
    assert "Not exported here" in (builder.out / "api/index.md").read_text()
    write_script(builder.bin / "doxybook2", DOXYBOOK)
    (builder.checkout / "media/docs/cpp/quickstart.md").unlink()
    result = builder.build()
    assert "API reference left out: Doxygen XML: expected index.xml" in result.stdout
    assert not (builder.out / "quickstart.md").exists()  # the tree is replaced as a whole
    assert builder.leftovers() == []


def test_the_api_is_rendered(builder, repo_root):
    builder.with_api()
    result = builder.build()
    assert result.returncode == 0, result.stderr
    assert "API reference: 3 pages" in result.stdout
    config = repo_root / "scripts" / "doxybook2" / "config.json"
    assert f"--config {config}" in builder.calls.read_text()
    pinned = json.loads(config.read_text())  # the renderer relies on flat pages with .md links
    assert (pinned["useFolders"], pinned["linkSuffix"], pinned["baseUrl"]) == (False, ".md", "")
    index = (builder.out / "api/index.md").read_text()
    assert "- [`cutlass::Array`](classcutlass_1_1Array.md): Fixed-size array." in index
    assert index.index("## Namespaces") < index.index("## Classes")
    page = (builder.out / "api/classcutlass_1_1Array.md").read_text()
    for words in (
        "#include <array.h>", '<a id="function-fill"></a>', "Note: Costs `size()` stores.",
        "template <typename T>\nvoid cutlass::Array::fill(T const & value)",
        "- `value`: what to set", "- `kDense` = 0 no holes",
        "Inherits from: `cutlass::Base`",  # it has no page to link to
    ):  # fmt: skip
        assert words in page
    namespace = (builder.out / "api/namespacecutlass.md").read_text()
    assert "- [`cutlass::Array`](classcutlass_1_1Array.md)" in namespace
    assert not (builder.out / "json").exists()


def test_a_failure_leaves_the_old_tree_and_a_folder_of_others_is_refused(builder):
    builder.out.mkdir()
    (builder.out / "thesis.md").write_text("years of work")
    result = builder.build()
    assert result.returncode == 1
    assert "--out: expected a tree that this script made" in result.stderr
    assert [path.name for path in builder.out.iterdir()] == ["thesis.md"]
    (builder.out / "thesis.md").unlink()
    assert builder.build().returncode == 0
    builder.write("media/docs/cpp/quickstart.md", "# Newer\n")

    def fails(message: str) -> None:
        result = builder.build()
        assert result.returncode == 1 and message in result.stderr
        assert "Quick start" in (builder.out / "quickstart.md").read_text()
        assert builder.leftovers() == []

    for text in ("breaks pandoc", "nothing comes"):
        builder.write("media/docs/cpp/cute/index.rst", text)
        fails("pandoc")
    (builder.bin / "pandoc").unlink()
    fails("pandoc: expected on PATH")
    (builder.checkout / "media/docs/cpp/cute/index.rst").unlink()  # now it is not needed
    builder.with_api()
    (builder.export / "classcutlass_1_1Array.json").write_text('{"kind": "class"}')
    fails("expected kind, name and refid")


def test_arguments_are_checked(builder):
    for arguments, code, message in (
        ([f"{builder.checkout}/gone"], 1, "CUTLASS: expected a checkout"),
        ([f"{builder.checkout}/media"], 1, "CUTLASS: expected a checkout with media/docs/cpp"),
        (["--out"], 2, "--out: expected a folder, got nothing"),
        (["--format", "x"], 2, "unknown argument '--format'"),
        ([str(builder.checkout)] * 2, 2, "CUTLASS: expected one folder"),
        (["--help"], 0, ""),
    ):
        result = builder.run(*arguments)
        assert result.returncode == code and message in result.stderr
        assert [path.name for path in builder.checkout.iterdir()] == ["media"]
