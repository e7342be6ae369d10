"""Imports go one way, and each kernel language stays in its folders."""

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath
from typing import NamedTuple

PACKAGE = "mla_var3"

# A room may import itself and the rooms listed before it.
ROOMS = (
    "errors", "conf", "op", "runtime", "kernel", "attention", "integrations", "bench", "report",
    "dev", "cli",
)  # fmt: skip
RANK = {room: rank for rank, room in enumerate(ROOMS)}

# Language of the kernels: where it may be imported, as folders (ending in /) and files.
LANGUAGE_HOMES = {
    "cuda.tile": ("runtime/ct_kernel.py", "runtime/interpreter/", "kernel/cutile/"),
    "cutlass": ("runtime/cute_kernel.py", "kernel/cute_python/"),
}


class Import(NamedTuple):
    """One imported module or name, and whether a function imports it."""

    name: str
    line: int
    in_function: bool


def module_name(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join((PACKAGE, *(part for part in parts if part != "__init__")))


def imports_of(path: str, source: str | ast.Module) -> Iterator[Import]:
    """All imports of a module, relative ones resolved, also `import_module("literal")`."""
    package = module_name(path).split(".")
    if PurePosixPath(path).name != "__init__.py":
        package = package[:-1]

    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import():
                    yield from (Import(name.name, child.lineno, inside) for name in child.names)
                case ast.ImportFrom():
                    base = package[: len(package) - child.level + 1] if child.level else []
                    base = [*base, *(child.module.split(".") if child.module else [])]
                    for name in child.names:
                        yield Import(".".join([*base, name.name]), child.lineno, inside)
                case ast.Call(args=[ast.Constant(value=str(target)), *_]) if re.search(
                    r"\b(import_module|__import__)$", ast.unparse(child.func)
                ):
                    yield Import(target, child.lineno, inside)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, inside or is_function)

    return walk(ast.parse(source, path), False)


def versions_in(paths: Mapping[str, str]) -> set[tuple[str, ...]]:
    """Version packages, as (language, layer, design, version)."""
    version = re.compile(r"kernel/(\w+/\w+/(\w+)/\2(_v\d+)?)/[^/]+")
    found = filter(None, map(version.fullmatch, paths))
    return {tuple(match[1].split("/")) for match in found}


def kernel_violation(path: str, imported: Import, versions: set[tuple[str, ...]]) -> str | None:
    """What is wrong with an import from one kernel module to another, if anything."""
    target = tuple(imported.name.split(".")[2:])
    own = PurePosixPath(path).parts[1:]
    designs = {version[:3] for version in versions}
    if target[:3] in designs and own[:3] != target[:3]:
        return f"imports another design, {imported.name}"
    if own[:4] in versions and target[:4] in versions and own[:4] != target[:4]:
        return f"imports another version, {imported.name}"
    return None


def violations_in(sources: Mapping[str, str]) -> list[str]:
    """Every import against the rules in a package, from its sources by relative path."""
    found = []
    versions = versions_in(sources)
    for path, source in sources.items():
        own_room = PurePosixPath(path).parts[0].removesuffix(".py")
        is_main = PurePosixPath(path).name == "__main__.py"
        is_root = path == "__init__.py"
        if own_room not in RANK and not (is_main or is_root):
            found.append(f"{path}: is in no known room ({', '.join(ROOMS)})")
            continue
        for imported in imports_of(path, source):
            place, name = f"{path}:{imported.line}", f"{imported.name}."
            for language, homes in LANGUAGE_HOMES.items():
                if name.startswith(f"{language}.") and not path.startswith(homes):
                    found.append(f"{place}: imports {language}, allowed only in {', '.join(homes)}")
            if not name.startswith(f"{PACKAGE}."):
                continue
            room = imported.name.removeprefix(PACKAGE).lstrip(".").partition(".")[0]
            if room not in RANK or is_main:  # a name of the package itself, such as __version__
                continue
            problem: str | None = None
            if is_root:
                if not imported.in_function and room != "errors":
                    problem = f"imports {room} when the package is imported"
            elif RANK[room] > RANK[own_room]:
                problem = f"{own_room} imports {room} ({imported.name})"
            elif room == own_room == "kernel":
                problem = kernel_violation(path, imported, versions)
            found += [f"{place}: {problem}"] if problem else []
    return found


def test_the_package_keeps_its_layers_and_has_no_import_circles(package_sources):
    assert "errors.py" in package_sources
    violations = violations_in(package_sources)
    assert not violations, "\n" + "\n".join(violations)
    assert not circle_in(import_graph(package_sources))


FLASH = "kernel/cutile/mla/flash/flash/flash.py"
FLASH_V2 = "kernel/cutile/mla/flash/flash_v2/flash_v2.py"
OTHER = "kernel/cutile/mla/other/other/other.py"
CUTE = "kernel/cute_python/mla/flash/flash/flash.py"
KERNELS = {FLASH: "", FLASH_V2: "", OTHER: "", "kernel/cutile/mla/shared.py": ""}


def test_a_planted_violation_is_found():
    for path, source, message in (
        ("runtime/plan.py", "import mla_var3.kernel.cutile", "runtime imports kernel"),
        ("runtime/plan.py", "from ..kernel import paths", "runtime imports kernel"),
        ("runtime/a/b.py", "from ...kernel.cutile import mla", "runtime imports kernel"),
        ("runtime/plan.py", "def f():\n  from mla_var3.cli import main", "runtime imports cli"),
        ("runtime/a.py", "if TYPE_CHECKING:\n  import mla_var3.report", "runtime imports report"),
        ("runtime/x.py", "importlib.import_module('mla_var3.kernel')", "runtime imports kernel"),
        ("errors.py", "from mla_var3.conf import devices", "errors imports conf"),
        ("kernel/cutile/mla/shared.py", "import mla_var3.attention", "kernel imports attention"),
        ("helpers/x.py", "", "no known room"),
        ("__init__.py", "from mla_var3.runtime import plan", "when the package is imported"),
        ("op/mla/inputs.py", "import cuda.tile as ct", "imports cuda.tile"),
        ("runtime/compile.py", "from cuda import tile as ct", "imports cuda.tile"),
        ("runtime/ct_kernel.py", "import cutlass.cute as cute", "imports cutlass"),
        ("kernel/cute_python/mla/x.py", "import cuda.tile", "imports cuda.tile"),
        (FLASH, "from cutlass import cute", "imports cutlass"),
        (FLASH, "from mla_var3.kernel.cutile.mla.flash.flash_v2 import x", "another version"),
        (FLASH_V2, "from ..flash.flash import flash", "another version"),
        (FLASH, "from mla_var3.kernel.cutile.mla.other.other.other import f", "another design"),
        (CUTE, "from mla_var3.kernel.cutile.mla.flash.flash import flash", "another design"),
    ):
        [violation] = violations_in({**KERNELS, path: source})
        assert violation.startswith(path) and message in violation


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Modules and the modules that they import, inside of functions too, types apart.

    Package `__init__` modules are left out: they load what they offer when it is used, and the
    implicit import of a parent package says nothing.
    """
    modules = {module_name(path): path for path in sources if not path.endswith("__init__.py")}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = [each.name for each in imports_of(path, without_type_checking(sources[path]))]
        # `from a.b import c` names the module a.b or the module a.b.c.
        found = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = found & set(modules) - {module}
    return graph


def without_type_checking(source: str) -> ast.Module:
    """A module without what only type checkers import."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    return tree


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in turn, the first one again at the end; empty for none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_planted_circle_is_found():
    for sources, circle in (
        ({"op/a.py": "from mla_var3.op import b", "op/b.py": "import mla_var3.op.a"}, "ab"),
        (
            {"op/a.py": "def f():\n  from .b import x", "op/b.py": "from .c import y",
             "op/c.py": "from . import a"},
            "abc",
        ),
        ({"op/a.py": "from .b import x", "op/b.py": ""}, ""),
        ({"op/a.py": "from .b import x", "op/b.py": "if TYPE_CHECKING:\n  from .a import y"}, ""),
        ({"op/__init__.py": "from .a import x", "op/a.py": "import mla_var3.op"}, ""),
    ):  # fmt: skip
        found = circle_in(import_graph(sources))
        assert {name.rpartition(".")[2] for name in found} == set(circle)
