"""Stand-ins for packages that an engine imports and a test does not use."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable

import torch.utils._triton


def offer(packages: Iterable[str]) -> None:
    """Offer stand-ins for those of the packages that are not installed."""
    from transformers.utils import import_utils

    # All remember their answer, so nobody takes a stand-in for the package.
    torch.utils._triton.has_triton_package()
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    for package in packages:
        if importlib.util.find_spec(package) is None:
            sys.meta_path.append(StandIn(package))


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A package that can be imported and decorated with."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = self.attribute
        return module

    def exec_module(self, module) -> None:
        pass

    @staticmethod
    def attribute(name: str):
        if name == "__version__":
            return "0"
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {})


class Attributes(type):
    """Classes whose attributes are such classes again."""

    def __getattr__(cls, name: str):
        return StandIn.attribute(name)


class Anything(metaclass=Attributes):
    """Takes any arguments; as a decorator it returns the function."""

    def __new__(cls, *arguments, **options):
        return (
            arguments[0] if len(arguments) == 1 and callable(arguments[0]) else object.__new__(cls)
        )

    def __init__(self, *arguments, **options) -> None:
        pass

    def __call__(self, *arguments, **options):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self
