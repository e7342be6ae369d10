"""The engines of this environment."""

from __future__ import annotations

import importlib.util
import platform

import pytest

from .stand_in import offer


def pytest_ignore_collect(collection_path):
    """Skip the tests of an engine that has no wheel for this machine, and say so."""
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
    # Triton is 0.9 GB, and torchvision's wheels need a CUDA build of torch.
    offer(("torchvision", "triton"))
    from sglang.srt.plugins import load_plugins

    load_plugins()
