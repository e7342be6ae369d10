"""Names of the kernel languages that the documentation mentions, and whether they exist."""

import ast
import functools
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress

ALIASES = {
    "cutlass": "cutlass",
    "cute": "cutlass.cute",
    "pipeline": "cutlass.pipeline",
    "utils": "cutlass.utils",
    "sm90": "cutlass.utils.hopper_helpers",
    "cpasync": "cutlass.cute.nvgpu.cpasync",
    "warpgroup": "cutlass.cute.nvgpu.warpgroup",
    "tcgen05": "cutlass.cute.nvgpu.tcgen05",
    "warp": "cutlass.cute.nvgpu.warp",
    "ct": "cuda.tile",
    "cuda.tile": "cuda.tile",
}
"""First part of a name as the documentation writes it -> module."""

FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME = re.compile(r"@?((?:cuda\.tile|[a-z_]\w*)(?:\.[A-Za-z_]\w*)+)")


def full_name(name: str) -> str | None:
    """The name with its module in full, or None when it is not one of a kernel language."""
    for alias in sorted(ALIASES, key=len, reverse=True):
        if name.startswith(alias + "."):
            return ALIASES[alias] + name.removeprefix(alias)
    return None


def attribute_names(source: str) -> Iterator[str]:
    """Dotted names of a source, each as long as it goes."""
    tree = ast.parse(textwrap.dedent(source))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = ast.unparse(node)
            # A variable may be called like a module: `warp = cute.arch.warp_idx()`.
            if name.split(".")[0] not in assigned:
                yield name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def mentioned(page: str) -> set[str]:
    """Names of a kernel language that a page mentions, in full; in prose and in Python blocks."""
    candidates = NAME.findall(" ".join(INLINE_CODE.findall(FENCE.sub("", page))))
    for language, body in FENCE.findall(page):
        candidates += attribute_names(body) if language == "python" else []
    found = {full_name(name) for name in candidates if not name.startswith("cuda.bindings")}
    return {name for name in found if name is not None}


@functools.cache
def exists(name: str) -> bool:
    """Whether a dotted name leads from a module to an attribute of it."""
    with suppress(ImportError, AttributeError):
        pkgutil.resolve_name(name)
        return True
    return False
