"""Kernels are found by their names, so the names follow the rules."""

import ast
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from mla_var3.dev.clone import KERNEL_DECORATORS, is_decorated


def kernels_of(source: str) -> list[str]:
    """Kernel functions in either language; in CuTe DSL they are methods as well."""
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
    return [node.name for node in functions if is_decorated(node, KERNEL_DECORATORS)]


def kernel_plans_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Names of `KernelPlan` subclasses, direct or not, by the path that defines them."""
    bases: dict[str, set[str]] = {}
    defined: dict[str, set[str]] = {path: set() for path in sources}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                defined[path].add(node.name)
                names = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                bases.setdefault(node.name, set()).update(names)
    plans = {"KernelPlan"}
    while more := {name for name, parents in bases.items() if parents & plans} - plans:
        plans |= more
    plans.remove("KernelPlan")
    return {path: names & plans for path, names in defined.items()}


def naming_problems(sources: Mapping[str, str]) -> list[str]:
    """Everything that breaks the naming of kernels in a package, by relative path."""
    problems = []
    plans = kernel_plans_of(sources)
    designs: set[PurePosixPath] = set()
    versions: set[PurePosixPath] = set()
    for path in map(PurePosixPath, sources):
        # kernel/<language>/<layer>/<design>/<version>/<module>.py; names with _ first are helpers
        if path.parts[0] != "kernel" or any(part.startswith("_") for part in path.parts[:-1]):
            continue
        # A folder without versions and without __main__.py is code that designs share.
        if len(path.parts) >= 6 or (len(path.parts) == 5 and path.name == "__main__.py"):
            designs.add(PurePosixPath(*path.parts[:4]))
        if len(path.parts) >= 6:
            versions.add(PurePosixPath(*path.parts[:5]))
    for design in sorted(designs):
        if str(design / "__main__.py") not in sources:
            problems.append(f"{design}: has no __main__.py")
        if design / design.name not in versions:
            problems.append(f"{design}: has no base version {design.name}")
    for version in sorted(versions):
        design_name = version.parent.name
        if not re.fullmatch(re.escape(design_name) + r"(_v[1-9]\d*)?", version.name):
            problems.append(f"{version}: expected {design_name} or {design_name}_vN")
        entry = str(version / f"{version.name}.py")
        if entry not in sources:
            problems.append(f"{version}: has no module {version.name}.py")
        elif not plans[entry]:
            problems.append(f"{entry}: defines no KernelPlan subclass")
        for path, source in sources.items():
            module = PurePosixPath(path)
            if version in module.parents:
                kernels = kernels_of(source)
                if kernels and module.stem not in kernels:
                    problem = f"no kernel function is named {module.stem}, only {kernels}"
                    problems.append(f"{path}: {problem}")
    return problems


def test_kernels_follow_the_naming_rules(package_sources):
    assert naming_problems(GOOD) == []
    problems = naming_problems(package_sources)
    assert not problems, "\n" + "\n".join(problems)


GOOD = {
    "runtime/plan.py": "class KernelPlan: ...",
    "kernel/cutile/mla/tile_ops.py": "@ct.function\ndef anything(): ...",
    "kernel/cutile/mla/flash/__main__.py": "",
    "kernel/cutile/mla/flash/flash/__init__.py": "",
    "kernel/cutile/mla/flash/flash/flash.py": """
@ct.kernel
def flash(): ...
class CtFlash(base.KernelPlan): ...""",
    "kernel/cutile/mla/flash/flash/combine.py": """
@ct.kernel(occupancy=2)
def combine(): ...
@ct.kernel
def combine_small(): ...""",
    "kernel/cutile/mla/flash/flash_v2/flash_v2.py": """
@ct.kernel
def flash_v2(): ...
class Shared(KernelPlan): ...
class CtFlashV2(Shared[int]): ...""",
    "kernel/cute_python/mla/latent/merge.py": "class M:\n  @cute.kernel\n  def f(self): ...",
    "kernel/cute_python/mla/flash/__main__.py": "",
    "kernel/cute_python/mla/flash/flash/flash.py": """
class Host:
    @cute.kernel
    def flash(self): ...
class CuteFlash(KernelPlan): ...""",
    "kernel/cute_python/mla/flash/flash/combine.py": "@cute.kernel\ndef combine(): ...",
}
CUTE = "kernel/cute_python/mla/flash/flash/combine.py"


def test_a_planted_wrong_name_is_found():
    for changes, removed, message in (
        ({}, "flash/__main__.py", "has no __main__.py"),
        ({"flash/flash/combine.py": "@ct.kernel\ndef other(): ..."}, "", "is named combine"),
        ({"flash/flash/flash.py": "class CtFlash: ..."}, "", "no KernelPlan subclass"),
        ({}, "flash/flash/flash.py", "has no module flash.py"),
        ({"flash/flash_two/flash_two.py": "class A(KernelPlan): ..."}, "", "expected flash or"),
        ({"flash/flash_v3/flash_v2.py": ""}, "", "has no module flash_v3.py"),
        ({"new/__main__.py": ""}, "", "has no base version new"),
        ({CUTE: "@cute.kernel\ndef other(): ..."}, "", "is named combine"),
        ({CUTE: "class A:\n  @cute.kernel\n  def other(self): ..."}, "", "is named combine"),
    ):
        folder = "kernel/cutile/mla/"
        planted = GOOD | {
            path if path == CUTE else folder + path: changes[path] for path in changes
        }
        planted.pop(folder + removed, None)
        [problem] = naming_problems(planted)
        assert message in problem
