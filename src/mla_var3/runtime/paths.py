"""Where things are: kernel ids to modules, and the folders for outputs and caches.

This is the only place that maps an id such as `mla_var6_plus_v4` to a module, and the only way by
which the runtime finds kernels (it never imports them by name).
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pkgutil
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_var3.errors import InvalidArgumentError, MissingToolError, UnknownNameError

KERNEL_PACKAGE = "mla_var3.kernel"
LANGUAGES = {"cutile-dsl": "cutile", "cute-dsl": "cute_python"}
"""Language key -> package below `mla_var3.kernel`."""
LANGUAGE_DISTRIBUTIONS = {"cutile-dsl": "cuda-tile", "cute-dsl": "nvidia-cutlass-dsl"}
LANGUAGE_EXTRAS = {"cutile-dsl": "cutile", "cute-dsl": "cute"}
DEFAULT_LANGUAGE = "cutile-dsl"
RENUMBERED = {("mla_var6_plus", 2, "cute-dsl"): 5, ("mla_var6_plus", 3, "cute-dsl"): 6}
"""Design, old number and language -> new number of versions whose number another language uses for
another idea. Records of measurements keep the old ids."""

log = logging.getLogger(__name__)

_VERSION = re.compile(r"^(?P<design>.+?)_v(?P<number>[1-9]\d*)$")


@dataclass(frozen=True, order=True)
class KernelId:
    """Identity of one kernel version, the same everywhere.

    Attributes:
        design: for example "mla_var6_plus".
        number: 0 for the base version, N for `_vN`.
        language: "cutile-dsl" or "cute-dsl".
        layer: for example "mla".
    """

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
        """Module that holds the version's KernelPlan."""
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
    message = "%s in %s is now %s_v%d: one id means one idea in every language"
    log.warning(message, name, language, design, new)
    return f"{design}_v{new}"


def kernel_id_of_module(module: str) -> KernelId | None:
    """The kernel id of a module path below a version package, or None for any other module."""
    parts = module.split(".")
    if len(parts) < 7 or ".".join(parts[:2]) != KERNEL_PACKAGE:
        return None
    languages = {package: key for key, package in LANGUAGES.items()}
    language, layer, design, full_name = parts[2], parts[3], parts[4], parts[5]
    if language not in languages:
        return None
    return KernelId(design, split_full_name(full_name)[1], languages[language], layer)


def discover_kernels() -> list[KernelId]:
    """All kernel versions in the package, found by folder, without importing any of them."""
    root = _kernel_root()
    found = []
    for language, package in LANGUAGES.items():
        for layer in _subpackages(root / package):
            for design in _subpackages(root / package / layer):
                for version in _subpackages(root / package / layer / design):
                    owner, number = split_full_name(version)
                    if owner == design:
                        found.append(KernelId(design, number, language, layer))
    return sorted(found)


def version_folder(kernel: KernelId) -> Path:
    """The folder of a version's package, there or not."""
    layer = _kernel_root() / LANGUAGES[kernel.language] / kernel.layer
    return layer / kernel.design / kernel.full_name


def _kernel_root() -> Path:
    return Path(importlib.import_module(KERNEL_PACKAGE).__path__[0])


def _subpackages(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return [info.name for info in pkgutil.iter_modules([str(folder)]) if info.ispkg]


def find_kernel(
    name: str, version: str | None = None, language: str = DEFAULT_LANGUAGE
) -> KernelId:
    """Resolve what a user typed.

    Args:
        name: design, or full name with version ("mla_var6_plus", "mla_var6_plus_v4").
        version: "v4", "4", "v0" or "base" for the base version, None to take it from the name.
        language: language key.

    Raises:
        UnknownNameError: with the nearest names.
    """
    if language not in LANGUAGES:
        raise UnknownNameError("language", language, LANGUAGES)
    kernels = discover_kernels()
    design, number = split_full_name(name)
    designs = {k.design for k in kernels if k.language == language}
    if design not in designs:
        elsewhere = sorted({k.language for k in kernels if k.design == design})
        hint = f"It exists in {', '.join(elsewhere)}: use --language" if elsewhere else ""
        raise UnknownNameError(f"{language} kernel", name, designs, hint)
    versions = {k.version: k for k in kernels if k.design == design and k.language == language}
    if version is not None:
        text = "v0" if version == "base" else version if version.startswith("v") else f"v{version}"
        if number and text != f"v{number}":
            raise InvalidArgumentError("version", f"v{number}, as {name} says, or none", version)
    else:
        text = f"v{number}"
    if text not in versions and text[1:].isdigit():
        text = f"v{split_full_name(current_name(f'{design}_{text}', language))[1]}"
    if text not in versions:
        raise UnknownNameError(f"version of {design}", text, versions, "v0 is the base version")
    return versions[text]


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


def plan_class(kernel: KernelId) -> type[Any]:
    """The KernelPlan subclass that is the version's entry point: the last in its module."""
    from mla_var3.runtime.plan import KernelPlan

    module = import_kernel_module(kernel)
    plans = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, KernelPlan)
        and value.__module__ == module.__name__
    ]
    if not plans:
        raise UnknownNameError("KernelPlan in", kernel.module, [], "The module must define one")
    return plans[-1]


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


def profile_dir(mode: str, kernel: str, params: str, label: str | None = None) -> Path:
    """A new folder `out/profiles/<mode>/<kernel>/<params>/<timestamp>`, created."""
    name = timestamp() + (f"-{slug(label)}" if label else "")
    folder = output_root() / "profiles" / mode / kernel / params / name
    folder.mkdir(parents=True, exist_ok=False)
    return folder


def autotune_file(device: str, language: str, kernel: str, stage: str, key: str) -> Path:
    """The autotuning history of one stage: `cache/kernel-autotune/<device>/...json`."""
    folder = cache_root() / "kernel-autotune" / slug(device) / language / kernel
    return folder / f"{stage}-{key}.json"
