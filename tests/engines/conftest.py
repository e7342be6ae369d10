"""The engines of this environment, and a stand-in for a package that SGLang imports needlessly."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import platform
import sys
import types

import pytest
import torch.utils._triton


def pytest_ignore_collect(collection_path):
    """Files for an engine that this machine has no wheel of are left out, with a word."""
    needed = {
        "test_vllm.py": "vllm",
        "test_sglang.py": "sglang",
        "test_transformers.py": "transformers",
    }
    package = needed.get(collection_path.name)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    print(f"tests/engines: {package} is not installed here ({platform.machine()}); skipped")
    return True


@pytest.fixture(scope="session")
def sglang_plugins() -> None:
    """SGLang with its plug-ins loaded, as its server does it."""
    from transformers.utils import import_utils

    # All remember their answer, so nobody takes a stand-in for the package.
    torch.utils._triton.has_triton_package()
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    for package in ("torchvision", "triton"):
        if importlib.util.find_spec(package) is None:
            sys.meta_path.append(StandIn(package))
    from sglang.srt.plugins import load_plugins

    load_plugins()


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A package that can be imported and decorated with, for what SGLang does not use on the CPU.

    Triton is 0.9 GB, and torchvision's wheels need a CUDA build of torch.
    """

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
