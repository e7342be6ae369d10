"""Clone a kernel version: copy its package and rename what carries the version.

Modules with a kernel or plan, kernel functions, plans, tilings and CuTe host classes get the new
version number. A name is replaced wherever it occurs as a whole word in the package's Python files:
in code, in strings such as pipeline names and forward references, and in docstrings.
"""

from __future__ import annotations

import ast
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.paths import DEFAULT_LANGUAGE, KernelId, find_kernel, version_folder

KERNEL_DECORATORS = {"ct.kernel", "cute.kernel"}
HOST_DECORATORS = {*KERNEL_DECORATORS, "cute.jit"}
"""A class with such a method is a CuTe host class."""
LINE_LENGTH = 100
_ORIGIN = re.compile(r"^(?:Base version\.|Parent: \w+\.)[ \t]*(\n?)", re.MULTILINE)


@dataclass(frozen=True)
class ClonePlan:
    """A clone that is worked out but not written.

    Attributes:
        files: path below the source's folder -> path below the new folder.
        contents: path below the new folder -> new text of a Python file; others are copied.
    """

    source: KernelId
    target: KernelId
    folder: Path
    files: Mapping[str, str]
    contents: Mapping[str, str]
    renames: Mapping[str, str]


def plan_clone(source: str, version: str, language: str = DEFAULT_LANGUAGE) -> ClonePlan:
    """Work out the clone of a kernel version such as "mla_var6_plus_v2" under the number "v5".

    Raises:
        UnknownNameError: there is no such source.
        InvalidArgumentError: the version is not vN, is the source itself or exists already, or
            the source does not compile.
    """
    if not re.fullmatch(r"v[1-9][0-9]*", version):
        raise InvalidArgumentError("version", "vN with N at least 1, such as v5", repr(version))
    old = find_kernel(source, language=language)
    new = replace(old, number=int(version[1:]))
    if new == old:
        raise InvalidArgumentError("version", f"another version than {old.full_name}", version)
    folder, origin = version_folder(new), version_folder(old)
    _refuse_existing(folder)
    paths = [p for p in sorted(origin.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
    texts = {path: path.read_bytes().decode() for path in paths if path.suffix == ".py"}
    if origin / f"{old.full_name}.py" not in texts:
        raise InvalidArgumentError("source", f"a package with {old.full_name}.py", str(origin))
    defined: dict[str, str] = {}
    modules = {old.full_name: new.full_name}
    for path, text in texts.items():
        found = {name: _renamed(name, old, new) for name in _versioned_names(text, path)}
        defined |= found
        if found and path.stem != "__init__":
            modules[path.stem] = _renamed(path.stem, old, new)
    files = {}
    for path in paths:
        stem = modules.get(path.stem, path.stem) if path in texts else path.stem
        files[str(path.relative_to(origin))] = str(path.relative_to(origin).with_stem(stem))
    contents = {}
    for path, text in texts.items():
        cloned = _excuse_long_imports(_rename(text, old, new, defined, modules))
        if path.stem == old.full_name:
            cloned = _with_parent(cloned, old.full_name)
        target = files[str(path.relative_to(origin))]
        _parse(cloned, folder / target)
        contents[target] = cloned
    return ClonePlan(old, new, folder, files, contents, {**modules, **defined})


def write_clone(plan: ClonePlan) -> list[Path]:
    """Write a clone, all of it or nothing; returns its files."""
    origin = version_folder(plan.source)
    # The dot keeps kernel discovery from seeing an unfinished clone.
    temporary = Path(tempfile.mkdtemp(dir=plan.folder.parent, prefix=f".{plan.folder.name}."))
    try:
        for before, after in plan.files.items():
            path = temporary / after
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(origin / before, path)
            if after in plan.contents:
                path.write_bytes(plan.contents[after].encode())
        shutil.copymode(origin, temporary)
        _refuse_existing(plan.folder)  # `replace` would overwrite an empty folder
        temporary.replace(plan.folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return [plan.folder / after for after in sorted(plan.files.values())]


def _refuse_existing(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise InvalidArgumentError("version", "one that does not exist yet", str(folder))


def _parse(text: str, path: Path) -> ast.Module:
    try:
        return ast.parse(text, str(path))
    except SyntaxError as error:
        place = f"{path.name}:{error.lineno}: {error.msg}"
        raise InvalidArgumentError("source", "modules that compile", place) from error


def _versioned_names(text: str, path: Path) -> Iterator[str]:
    """Kernel functions, plans, tilings and CuTe host classes of a module."""
    for node in ast.walk(_parse(text, path)):
        if isinstance(node, ast.FunctionDef) and is_decorated(node, KERNEL_DECORATORS):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            bases = [re.sub(r"\[.*", "", ast.unparse(base)) for base in node.bases]
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            is_host = any(is_decorated(each, HOST_DECORATORS) for each in methods)
            if is_host or any(base.endswith(("Plan", "Tiling")) for base in bases):
                yield node.name


def is_decorated(node: ast.FunctionDef, decorators: set[str]) -> bool:
    """Whether one of its decorators, without their arguments, is among some names."""
    plain = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(decorator) in decorators for decorator in plain)


def _renamed(name: str, old: KernelId, new: KernelId) -> str:
    """`flash_mla` -> `flash_mla_v5`, `CtFlashMLA` -> `CtFlashMLAV5`, `XV2Tiling` -> `XV5Tiling`."""
    if name.islower():
        return f"{name.removesuffix(f'_v{old.number}')}_v{new.number}"
    replaced, count = re.subn(rf"V{old.number}(?=(?:Tiling)?$)", f"V{new.number}", name)
    return replaced if count else f"{name}V{new.number}"


def _rename(
    text: str, old: KernelId, new: KernelId, defined: Mapping[str, str], modules: Mapping[str, str]
) -> str:
    """The text with its names replaced, as whole words.

    An attribute that merely has a module's name, such as `Host.flash_mla` of a shared host class,
    stays; so does the design's own component in the dotted path of the package.
    """
    design, full = re.escape(old.design), re.escape(old.full_name)
    said = f"version {old.number}" if old.number else "the base version"
    phrase = rf"(?P<phrase>(?i:{said}) of {design}\b)"
    not_in_path = rf"(?!(?<=\b{design})\.{full}\b)"
    anywhere = "|".join(map(re.escape, defined)) or r"(?!)"
    by_module = "|".join(map(re.escape, modules))
    not_attribute = rf"(?:(?<!\w\.)|(?<=\b{design}\.)|(?<=\b{full}\.))"
    words = rf"(?<!\w)(?:(?:{anywhere})|{not_attribute}(?:{by_module}))(?!\w){not_in_path}"

    def substitute(match: re.Match[str]) -> str:
        if match["phrase"]:
            word = "Version" if match[0][0].isupper() else "version"
            return f"{word} {new.number} of {new.design}"
        return defined.get(match[0]) or modules[match[0]]

    return re.sub(f"{phrase}|{words}", substitute, text)


def _with_parent(text: str, parent: str) -> str:
    """The entry module with a line in its docstring that names the parent."""
    line = f"Parent: {parent}."
    quote = text.index('"""', text.index('"""') + 3)
    doc, rest = text[:quote], text[quote:]
    if _ORIGIN.search(doc):
        return _ORIGIN.sub(f"{line}\n", doc, count=1) + rest
    summary, _, more = doc.partition("\n")
    return f"{summary}\n\n{line}\n{more}{rest}"


def _excuse_long_imports(text: str) -> str:
    """Mark imports whose dotted path alone is too long: no formatter can wrap them."""
    too_long = rf"^(from .{{{LINE_LENGTH - 13},}} import \()$"
    return re.sub(too_long, r"\1  # noqa: E501", text, flags=re.MULTILINE)
