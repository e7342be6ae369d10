"""What the tests on a GPU share."""

import pytest


@pytest.fixture(scope="module")
def hopper() -> None:
    """Skips the CuTe DSL kernels where they cannot run: without the language, on other GPUs."""
    pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"written for sm_90a, this is a {torch.cuda.get_device_name()}")
