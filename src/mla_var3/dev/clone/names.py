"""Which names of a version package change in a clone, and where they are known by import."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass
class Module:
    """One module of the package that is cloned.

    Attributes:
        name: dotted path below the package, empty for the package's `__init__`.
        is_package: whether it is an `__init__`, which changes what its relative imports mean.
        text: its source.
        tree: its syntax tree.
        renames: names it offers, its own and imported ones, that get another name.
        methods: class of it -> its methods that get another name, old to new: kernels that are
            methods of their host class.
    """

    name: tuple[str, ...]
    is_package: bool
    text: str
    tree: ast.Module
    renames: dict[str, str] = field(default_factory=dict)
    methods: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class PackageNames:
    """Every name of a package that changes.

    Attributes:
        package: dotted path of the package.
        new_name: last part of the package's new path.
        modules: the modules by dotted path below the package.
        stems: dotted path of a module -> its new last part; modules that keep theirs are absent.
        labels: names that composites may be called by -> new names.
        phrases: what docstrings call the version -> what they call it now.
    """

    package: tuple[str, ...]
    new_name: str
    modules: Mapping[tuple[str, ...], Module]
    stems: Mapping[tuple[str, ...], str]
    labels: Mapping[str, str]
    phrases: Mapping[str, str]

    def below(self, path: tuple[str, ...]) -> tuple[str, ...] | None:
        """The part of an absolute dotted path below the package; None when it is elsewhere."""
        size = len(self.package)
        return path[size:] if path[:size] == self.package else None

    def renamed(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """An absolute dotted path to a module or a name in one, as it is in the clone."""
        rest = self.below(path)
        if rest is None:
            return path
        new = [*self.package[:-1], self.new_name]
        for i, part in enumerate(rest):
            owner = self.modules.get(rest[:i])
            if rest[: i + 1] in self.modules:
                new.append(self.stems.get(rest[: i + 1], part))
            elif owner is not None:
                new.append(owner.renames.get(part, part))
            else:
                holder = self.modules.get(rest[: i - 1])
                methods = holder.methods.get(rest[i - 1], {}) if holder is not None else {}
                new.append(methods.get(part, part))
        return tuple(new)


def import_base(module: Module, node: ast.ImportFrom, package: tuple[str, ...]) -> tuple[str, ...]:
    """Absolute dotted path that an import takes names from."""
    named = tuple(node.module.split(".")) if node.module else ()
    if not node.level:
        return named
    own = (*package, *(module.name if module.is_package else module.name[:-1]))
    return (*own[: len(own) - node.level + 1], *named)


def follow_imports(names: PackageNames) -> None:
    """Pass new names on to the modules that import them, also through a third module."""
    changed = True
    while changed:
        changed = False
        for module in names.modules.values():
            for node in ast.walk(module.tree):
                if not isinstance(node, ast.ImportFrom):
                    continue
                for old, new in _imported_renames(names, module, node):
                    changed = changed or module.renames.get(old) != new
                    module.renames[old] = new
                for name, methods in _imported_methods(names, module, node):
                    changed = changed or module.methods.get(name) != methods
                    module.methods[name] = methods


def _imported_renames(
    names: PackageNames, module: Module, node: ast.ImportFrom
) -> Iterator[tuple[str, str]]:
    base = import_base(module, node, names.package)
    for alias in node.names:
        below = names.below(base)
        if alias.name == "*" and below is not None and below in names.modules:
            yield from names.modules[below].renames.items()
        elif alias.asname is None:
            new = names.renamed((*base, alias.name))[-1]
            if new != alias.name:
                yield alias.name, new


def _imported_methods(
    names: PackageNames, module: Module, node: ast.ImportFrom
) -> Iterator[tuple[str, dict[str, str]]]:
    """Classes with renamed methods that an import brings, by the names that it gives them."""
    below = names.below(import_base(module, node, names.package))
    owner = names.modules.get(below) if below is not None else None
    if owner is None:
        return
    for alias in node.names:
        if alias.name == "*":
            yield from owner.methods.items()
        elif alias.name in owner.methods:
            yield alias.asname or alias.name, owner.methods[alias.name]
