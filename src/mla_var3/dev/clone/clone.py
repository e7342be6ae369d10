"""A new version of a kernel from an existing one: its package copied under new names.

Everything is worked out first and written into a folder beside the target, which takes the
target's name at the end: a clone is there as a whole or not at all.
"""

from __future__ import annotations

import ast
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from mla_var3.dev.clone.names import Module, PackageNames, follow_imports
from mla_var3.dev.clone.source import rewrite
from mla_var3.dev.clone.text import excuse_long_imports, with_parent
from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.paths import DEFAULT_LANGUAGE, KernelId, find_kernel, version_folder

KERNEL_DECORATORS = ("ct.kernel", "cute.kernel")
HOST_DECORATORS = ("cute.jit",)
"""What marks the method of a class that launches kernels."""
ROOT_CLASSES = ("KernelPlan", "Tiling")


@dataclass(frozen=True)
class ClonePlan:
    """What a clone will be; nothing is written yet.

    Attributes:
        source: the version that is copied.
        target: the new version.
        folder: where it will lie.
        files: path below the source's folder -> path below the target's.
        contents: path below the target's folder -> new text; other files are copied as they are.
        renames: old name -> new name of modules, kernel functions, host classes, plans and tilings.
    """

    source: KernelId
    target: KernelId
    folder: Path
    files: Mapping[str, str]
    contents: Mapping[str, str]
    renames: Mapping[str, str]


def plan_clone(source: str, version: str, language: str = DEFAULT_LANGUAGE) -> ClonePlan:
    """Work out the clone of a kernel version.

    Args:
        source: full name of the version to copy, for example "mla_var6_plus_v2".
        version: the new one, for example "v5".
        language: language key.

    Raises:
        UnknownNameError: there is no such source.
        InvalidArgumentError: the version is not vN, is the source itself or exists already, or
            the source is not a package that can be renamed.
    """
    if not re.fullmatch(r"v[1-9][0-9]*", version):
        raise InvalidArgumentError("version", "vN with N at least 1, such as v5", repr(version))
    old = find_kernel(source, language=language)
    new = replace(old, number=int(version[1:]))
    if new == old:
        raise InvalidArgumentError("version", f"another version than {old.full_name}", version)
    folder = version_folder(new)
    if folder.exists() or folder.is_symlink():
        raise InvalidArgumentError(
            "version", "one that does not exist yet", f"{version}: {folder} is there already"
        )
    origin = version_folder(old)
    files = _package_files(origin)
    modules = _read_modules(origin, files)
    if (old.full_name,) not in modules:
        raise InvalidArgumentError("source", f"a package with {old.full_name}.py", str(origin))
    names, renames = _new_names(old, new, modules, origin)
    moved = {str(path): str(_moved(path, names)) for path in files}
    contents = {}
    for module in modules.values():
        text = excuse_long_imports(rewrite(module, names))
        if module.name == (old.full_name,):
            text = with_parent(text, old.full_name)
        target = moved[_file_of(module)]
        contents[target] = text
        _parse(text, folder / target)
    return ClonePlan(old, new, folder, moved, contents, renames)


def write_clone(plan: ClonePlan) -> list[Path]:
    """Write a clone, all of it or nothing; returns its files.

    Raises:
        InvalidArgumentError: the target appeared in the meantime.
    """
    origin = version_folder(plan.source)
    parent = plan.folder.parent
    # With a dot in its name the folder is no package, should anyone look for kernels now.
    temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{plan.folder.name}."))
    try:
        for before, after in plan.files.items():
            path = temporary / after
            path.parent.mkdir(parents=True, exist_ok=True)
            if after in plan.contents:
                path.write_bytes(plan.contents[after].encode())
            else:
                shutil.copyfile(origin / before, path)
            shutil.copymode(origin / before, path)
        for after in plan.contents:
            _parse((temporary / after).read_bytes().decode(), temporary / after)
        shutil.copymode(origin, temporary)
        # A rename would replace an empty folder without a word.
        if plan.folder.exists() or plan.folder.is_symlink():
            raise InvalidArgumentError("version", "one that does not exist yet", str(plan.folder))
        temporary.replace(plan.folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return [plan.folder / after for after in sorted(plan.files.values())]


def _package_files(origin: Path) -> list[PurePosixPath]:
    """Files of a version package, below its folder, without what Python caches."""
    paths = [path.relative_to(origin) for path in sorted(origin.rglob("*"))]
    return [
        PurePosixPath(path.as_posix())
        for path in paths
        if (origin / path).is_file() and "__pycache__" not in path.parts
    ]


def _read_modules(origin: Path, files: Iterable[PurePosixPath]) -> dict[tuple[str, ...], Module]:
    modules = {}
    for path in files:
        if path.suffix == ".py":
            is_package = path.name == "__init__.py"
            name = path.parts[:-1] if is_package else path.with_suffix("").parts
            text = (origin / path).read_bytes().decode()
            tree = _parse(text, origin / path)
            modules[name] = Module(name, is_package, text, tree)
    return modules


def _parse(text: str, path: Path) -> ast.Module:
    try:
        tree = ast.parse(text, str(path))
        compile(tree, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{path.name}:{error.lineno}: {error.msg}"
        raise InvalidArgumentError("source", "modules that compile", place) from error
    return tree


def _file_of(module: Module) -> str:
    if module.is_package:
        return str(PurePosixPath(*module.name, "__init__.py"))
    return str(PurePosixPath(*module.name).with_suffix(".py"))


def _moved(path: PurePosixPath, names: PackageNames) -> PurePosixPath:
    stem = path.with_suffix("").parts
    if path.suffix != ".py" or stem not in names.stems:
        return path
    return path.with_name(names.stems[stem] + ".py")


def _new_names(
    old: KernelId, new: KernelId, modules: Mapping[tuple[str, ...], Module], origin: Path
) -> tuple[PackageNames, dict[str, str]]:
    """All names that change; the modules get theirs."""
    kinds = _plans_and_tilings(modules.values(), origin)
    stems: dict[tuple[str, ...], str] = {}
    labels = {old.full_name: new.full_name}
    renames: dict[str, str] = {}
    for name, module in modules.items():
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_kernel(node):
                module.renames[node.name] = _snake(node.name, old.number, new.number)
                labels[node.name] = module.renames[node.name]
            elif isinstance(node, ast.ClassDef) and (node.name in kinds or _is_host(node)):
                module.renames[node.name] = _camel(node.name, old.number, new.number)
                kernels = [method.name for method in _methods(node) if _is_kernel(method)]
                if kernels:
                    found = {name: _snake(name, old.number, new.number) for name in kernels}
                    module.methods[node.name] = found
                    labels |= found
        if not module.is_package and (module.renames or name == (old.full_name,)):
            stems[name] = _snake(name[-1], old.number, new.number)
            labels[name[-1]] = stems[name]
        renames |= module.renames
    renames |= labels
    _refuse_clashes(modules.values(), renames)
    said = f"version {old.number}" if old.number else "the base version"
    names = PackageNames(
        package=tuple(old.module.split(".")[:-1]),
        new_name=new.full_name,
        modules=modules,
        stems=stems,
        labels=labels,
        phrases={f"{said} of {old.design}": f"version {new.number} of {new.design}"},
    )
    follow_imports(names)
    return names, renames


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is decorated as a kernel: `@ct.kernel(occupancy=2)` is one."""
    return _is_decorated(node, KERNEL_DECORATORS)


def _is_host(node: ast.ClassDef) -> bool:
    """Whether a class holds kernels or launches them."""
    decorators = KERNEL_DECORATORS + HOST_DECORATORS
    return any(_is_decorated(method, decorators) for method in _methods(node))


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [method for method in node.body if isinstance(method, ast.FunctionDef)]


def _is_decorated(
    node: ast.FunctionDef | ast.AsyncFunctionDef, decorators: tuple[str, ...]
) -> bool:
    plain = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(decorator) in decorators for decorator in plain)


def _plans_and_tilings(modules: Iterable[Module], origin: Path) -> set[str]:
    """Classes that derive from KernelPlan or Tiling, also through helpers beside the designs."""
    trees = [module.tree for module in modules]
    for folder in origin.parents[:4]:  # design, layer, language, all kernels
        trees += [_parse(path.read_text(), path) for path in sorted(folder.glob("*.py"))]
    bases: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                bases.setdefault(node.name, set()).update(own)
    found = set(ROOT_CLASSES)
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return found


def _snake(name: str, old: int, new: int) -> str:
    return f"{name.removesuffix(f'_v{old}')}_v{new}"


def _camel(name: str, old: int, new: int) -> str:
    """`CtFlashMLA` -> `CtFlashMLAV5`; a version in front of a last `Tiling` stays there."""
    replaced, count = re.subn(rf"V{old}(?=(?:Tiling)?$)", f"V{new}", name, count=1)
    return replaced if count else f"{name}V{new}"


def _refuse_clashes(modules: Iterable[Module], renames: Mapping[str, str]) -> None:
    taken = {
        name
        for module in modules
        for node in ast.walk(module.tree)
        for name in (getattr(node, "id", None), getattr(node, "name", None))
        if isinstance(name, str)
    }
    for old, new in renames.items():
        if new in taken and new not in renames:
            raise InvalidArgumentError("source", f"no other use of {new}, the new {old}", new)
    if len(set(renames.values())) < len(renames):
        twice = sorted(v for v in renames.values() if [*renames.values()].count(v) > 1)
        raise InvalidArgumentError("source", "names that stay apart in the clone", twice[0])
