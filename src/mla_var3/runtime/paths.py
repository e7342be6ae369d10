"""Where things are: kernel ids to modules and sources, and folders and files for outputs.

This is the only place that maps an id such as `mla_var6_plus_v4` to a module, and the only way by
which the runtime finds kernels (it never imports them by name).
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from mla_var3.errors import InvalidArgumentError, MissingToolError, UnknownNameError

KERNEL_PACKAGE = "mla_var3.kernel"
LANGUAGES = {"cutile-dsl": "cutile", "cute-dsl": "cute_python"}
"""Language key -> package below `mla_var3.kernel`."""
LANGUAGE_DISTRIBUTIONS = {"cutile-dsl": "cuda-tile", "cute-dsl": "nvidia-cutlass-dsl"}
LANGUAGE_EXTRAS = {"cutile-dsl": "cutile", "cute-dsl": "cute"}
DEFAULT_LANGUAGE = "cutile-dsl"
TARGETS = ("sm_90", "sm_100", "sm_120")
"""Compile targets of a static report: Hopper, data-centre Blackwell, consumer Blackwell."""
RENUMBERED = {("mla_var6_plus", 2, "cute-dsl"): 5, ("mla_var6_plus", 3, "cute-dsl"): 6}
"""Design, old number and language -> new number of versions whose number another language uses for
another idea. Records of measurements keep the old ids."""

log = logging.getLogger(__name__)

_VERSION = re.compile(r"^(?P<design>.+?)_v(?P<number>[1-9]\d*)$")


@dataclass(frozen=True, order=True)
class KernelId:
    """Identity of one kernel version, the same everywhere; number 0 is the base version."""

    design: str
    number: int
    language: str
    layer: str

    @property
    def full_name(self) -> str:
        """Name of the version package, for example "mla_var6_plus_v4"."""
        return f"{self.design}_v{self.number}" if self.number else self.design

    @property
    def version(self) -> str:
        """Version argument of the command line: "v0" is the base version."""
        return f"v{self.number}"

    @property
    def module(self) -> str:
        package = LANGUAGES[self.language]
        name = self.full_name
        return f"{KERNEL_PACKAGE}.{package}.{self.layer}.{self.design}.{name}.{name}"


def split_full_name(name: str) -> tuple[str, int]:
    """Design and number of a full name: `mla_var6_plus_v4` has 4, a base name has 0."""
    match = _VERSION.match(name)
    return (match["design"], int(match["number"])) if match else (name, 0)


@functools.cache
def current_name(name: str, language: str) -> str:
    """The full name that a version has today; logs once where it was renumbered."""
    design, number = split_full_name(name)
    new = RENUMBERED.get((design, number, language))
    if new is None:
        return name
    now = f"{design}_v{new}"
    log.warning("%s in %s is now %s: one id is one idea in every language", name, language, now)
    return now


def kernel_id_of_module(module: str) -> KernelId | None:
    """The kernel id of a module path below a version package, or None for any other module."""
    parts = module.split(".")
    if len(parts) < 7 or ".".join(parts[:2]) != KERNEL_PACKAGE:
        return None
    package, layer, design, full_name = parts[2:6]
    for language, folder in LANGUAGES.items():
        if folder == package:
            return KernelId(design, split_full_name(full_name)[1], language, layer)
    return None


def module_of(kind: type) -> str:
    """The module of a class; of a program run with -m its own name, of a script "__main__"."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if kind.__module__ == "__main__" and spec is not None and spec.name:
        return str(spec.name)
    return kind.__module__


def discover_kernels() -> list[KernelId]:
    """All kernel versions in the package, found by folder, without importing any of them."""
    root = _kernel_root()
    found = []
    for language, package in LANGUAGES.items():
        for file in (root / package).glob("*/*/*/__init__.py"):
            layer, design, version, _ = file.relative_to(root / package).parts
            owner, number = split_full_name(version)
            if owner == design:
                found.append(KernelId(design, number, language, layer))
    return sorted(found)


def version_folder(kernel: KernelId) -> Path:
    """The folder of a version's package, there or not."""
    layer = _kernel_root() / LANGUAGES[kernel.language] / kernel.layer
    return layer / kernel.design / kernel.full_name


@functools.cache
def declared_targets(kernel: KernelId) -> tuple[str, ...]:
    """The architectures that a version is written for, read from its source without importing it.

    This is the `targets` of its plan: the one place where a version states them.
    """
    path = version_folder(kernel) / f"{kernel.full_name}.py"
    return targets_in(path.read_text(encoding="utf-8")) if path.exists() else TARGETS


def targets_in(source: str) -> tuple[str, ...]:
    """The `targets` that a module's source assigns; all where it assigns none."""
    targets = TARGETS
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            names = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            if any(isinstance(name, ast.Name) and name.id == "targets" for name in names):
                with suppress(ValueError, TypeError):  # no literal
                    targets = tuple(ast.literal_eval(node.value))
    return targets


def _kernel_root() -> Path:
    return Path(importlib.import_module(KERNEL_PACKAGE).__path__[0])


def find_kernel(name: str, version: str | None = None, language: str | None = None) -> KernelId:
    """Resolve what a user typed.

    Args:
        name: design, or full name with version ("mla_var6_plus", "mla_var6_plus_v4"); version and
            language may follow, as in "flash_mla:cute-dsl" and "mla_var6_plus:v4".
        version: "v4", "4", "v0" or "base" for the base version, None to take it from the name.
        language: language key; None for the only language that has the version, else for cuTile.

    Raises:
        UnknownNameError: with the nearest names.
        InvalidArgumentError: the name and the other arguments contradict each other.
    """
    name, *suffixes = name.split(":")
    for suffix in map(_version_text, suffixes):
        if suffix in LANGUAGES:
            language = _agreeing("language", language, suffix)
        else:
            version = _agreeing("version", version and _version_text(version), suffix)
    if language is not None and language not in LANGUAGES:
        raise UnknownNameError("language", language, LANGUAGES)
    # An error about a name lists what any language has, unless one was asked for.
    named, kernels = language is not None, discover_kernels()
    design, number = split_full_name(name)
    offered = sorted({k.language for k in kernels if k.design == design})
    text = f"v{number}" if version is None else _version_text(version)
    having = sorted({k.language for k in kernels if k.design == design and k.version == text})
    if language is None:
        sole = offered if len(offered) == 1 else having
        language = sole[0] if len(sole) == 1 else DEFAULT_LANGUAGE
    if language not in offered:
        designs = {k.design for k in kernels if not named or k.language == language}
        hint = f"It exists in {', '.join(offered)}: use --language" if offered else ""
        raise UnknownNameError(f"{language} kernel" if named else "kernel", name, designs, hint)
    versions = {k.version: k for k in kernels if k.design == design and k.language == language}
    if number and text != f"v{number}":
        raise InvalidArgumentError("version", f"v{number}, as {name} says, or none", version)
    if text not in versions:
        text = current_name(f"{design}_{text}", language).removeprefix(f"{design}_")
    if text not in versions:
        hint = "v0 is the base version"
        if having:
            hint += f"; {text} exists in {', '.join(having)}"
        known = {k.version for k in kernels if k.design == design and not named} | versions.keys()
        raise UnknownNameError(f"version of {design}", text, known, hint)
    return versions[text]


def _version_text(version: str) -> str:
    """A version that a user typed as discovered kernels have it; other words stay as they are."""
    if version == "base":
        return "v0"
    return f"v{version}" if version.isdigit() else version


def _agreeing(argument: str, given: str | None, suffix: str) -> str:
    if given not in (None, suffix):
        raise InvalidArgumentError(argument, f"{suffix}, as the kernel's name says, or none", given)
    return suffix


def import_kernel_module(kernel: KernelId) -> ModuleType:
    """Import the version's module; says which extra to install when its language is missing."""
    try:
        return importlib.import_module(kernel.module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mla_var3"):
            raise
        raise MissingToolError(
            f"{kernel.full_name} ({kernel.language}) needs the package "
            f"{LANGUAGE_DISTRIBUTIONS[kernel.language]}, which is not installed: "
            f'pip install "hyper-mla[{LANGUAGE_EXTRAS[kernel.language]}]"'
        ) from error


def is_plan_class(value: object) -> TypeGuard[type[Any]]:
    """Whether a name in a kernel module is a `KernelPlan` class, told without importing that."""
    return isinstance(value, type) and hasattr(value, "benchmark_kernel_argparse")


def plan_class(kernel: KernelId) -> type[Any]:
    """The KernelPlan subclass that is the version's entry point: the last in its module."""
    module = import_kernel_module(kernel)
    plans = [
        value
        for value in vars(module).values()
        if is_plan_class(value) and value.__module__ == module.__name__
    ]
    if not plans:
        raise UnknownNameError("KernelPlan in", kernel.module, [], "The module must define one")
    return plans[-1]


def kernel_source_files(function: Callable[..., Any]) -> list[Path]:
    """The files of the kernel function and of every HyperMLA helper that its module imports.

    Device helpers are inlined into the kernel, so a change there is a change of the kernel.
    """

    def helpers(module: ModuleType) -> Iterator[ModuleType]:
        for value in vars(module).values():
            owner = inspect.getmodule(value) if inspect.isfunction(value) else None
            if owner is not None and owner.__name__.startswith(f"{KERNEL_PACKAGE}."):
                yield owner

    return _files_reached([function], helpers)


def traced_source_files(*roots: Any) -> list[Path]:
    """The files of functions, classes or instances, and of every kernel module they import.

    For languages whose host code is traced into the kernel as well: there a class, a constant or a
    whole module can decide what the kernel does, so every import counts. Only an import of nothing
    but plan classes does not: a plan calls the kernel, it is no part of it. Of the other rooms a
    module counts when a constant of it is imported, such as the order of packed tokens.
    """
    functions = [root.func if isinstance(root, functools.partial) else root for root in roots]
    return _files_reached(functions, _imported_modules)


def _files_reached(
    roots: Iterable[Any], follow: Callable[[ModuleType], Iterable[ModuleType]]
) -> list[Path]:
    found: set[Path] = set()
    pending = [module for root in roots if (module := inspect.getmodule(root)) is not None]
    while pending:
        module = pending.pop()
        path = getattr(module, "__file__", None)
        if path is not None and Path(path) not in found:
            found.add(Path(path))
            pending.extend(follow(module))
    return sorted(found)


def _imported_modules(module: ModuleType) -> Iterator[ModuleType]:
    """The loaded kernel modules that a module's import statements name."""
    package = module.__package__ or ""
    inside: tuple[str, ...] = (f"{KERNEL_PACKAGE}.",)
    if package and not _is_of_another_room(module.__name__):
        inside += (f"{package}.",)
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            values = [getattr(module, alias.asname or alias.name, None) for alias in node.names]
            if all(map(is_plan_class, values)):
                continue
            if _is_of_another_room(base) and any(map(_is_constant, values)):
                yield sys.modules[base]
            # A name in it may be a module itself.
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.startswith(inside) and name in sys.modules:
                yield sys.modules[name]


def _is_of_another_room(module: str) -> bool:
    return module.startswith("mla_var3.") and not module.startswith(f"{KERNEL_PACKAGE}.")


def _is_constant(value: object) -> bool:
    return value is not None and not (callable(value) or isinstance(value, ModuleType))


def output_root() -> Path:
    """Folder for run outputs: $HYPER_MLA_OUT_DIR, or `out` in the working directory."""
    return Path(os.environ.get("HYPER_MLA_OUT_DIR", "out"))


def cache_root() -> Path:
    """Folder for caches: $HYPER_MLA_CACHE_DIR, or `cache` in the working directory."""
    return Path(os.environ.get("HYPER_MLA_CACHE_DIR", "cache"))


def slug(text: str) -> str:
    """A file-name form of a device or label: lower case, words joined by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def timestamp() -> str:
    """Sortable UTC time for folder names, fine enough that two runs do not collide."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")


def profile_path(mode: str, kernel: str, params: str, label: str | None = None) -> Path:
    """A new path `out/profiles/<mode>/<kernel>/<params>/<timestamp>`."""
    name = timestamp() + (f"-{slug(label)}" if label else "")
    return output_root() / "profiles" / mode / kernel / params / name


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader, another writer or a kill never leaves half of it.

    The data goes to a temporary file in the same folder, to the disk, and then takes the name. The
    temporary name is unique, so two processes that write the same file do not mix: the last one
    wins as a whole.
    """
    content = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        # Not by `tempfile`, whose files are private to the user.
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> Path:
    """The folder, made if it is not there; an error before any work if nothing can go into it."""
    expected = "a folder that can be written to"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError("out_dir", expected, f"{path} ({error.strerror})") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidArgumentError("out_dir", expected, f"{path} (no permission)")
    return path


@contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """A folder for the artifacts of a run, made if it is not there.

    Of the folders that this made, those that are empty at the end are removed: a run that failed
    leaves nothing behind.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield make_folder(path)
    finally:
        with suppress(OSError):  # the first that is not empty ends it
            for folder in made:
                folder.rmdir()
