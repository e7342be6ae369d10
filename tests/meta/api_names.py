"""Names of the kernel languages that the documentation mentions, and whether they exist."""

import ast
import functools
import importlib
import re
import textwrap
from collections.abc import Iterator

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
    assigned = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
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
    candidates: list[str] = []
    for language, body in FENCE.findall(page):
        if language == "python":
            candidates += attribute_names(body)
    for code in INLINE_CODE.findall(FENCE.sub("", page)):
        candidates += NAME.findall(code)
    found = {full_name(name) for name in candidates if not name.startswith("cuda.bindings")}
    return {name for name in found if name is not None}


@functools.cache
def exists(name: str) -> bool:
    """Whether a dotted name leads from a module to an attribute of it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
        return True
    return False
