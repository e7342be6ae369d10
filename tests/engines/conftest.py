"""The engines of this environment, and a stand-in for a package that SGLang imports needlessly."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import platform
import sys
import types

import pytest


def pytest_ignore_collect(collection_path):
    """Files for an engine that this machine has no wheel of are left out, with a word."""
    needed = {"test_vllm.py": "vllm", "test_sglang.py": "sglang", "test_transformers.py": "transformers"}
    package = needed.get(collection_path.name)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    print(f"tests/engines: {package} is not installed here ({platform.machine()}); skipped")
    return True


@pytest.fixture(scope="session")
def sglang_plugins() -> None:
    """SGLang with its plug-ins loaded, as its server does it."""
    _without_torchvision()
    from sglang.srt.plugins import load_plugins

    load_plugins()


def _without_torchvision() -> None:
    """SGLang's configurations import torchvision, whose builds need a CUDA torch; it is not used."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import import_utils

    # Both remember their answer, so transformers does not take the stand-in for the package.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    names = ("", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2",
             ".transforms.v2.functional")  # fmt: skip
    for name in names:
        module = types.ModuleType(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        module.__getattr__ = _anything
        sys.modules[module.__name__] = module


def _anything(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
