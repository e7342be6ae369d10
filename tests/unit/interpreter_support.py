"""Helpers of the interpreter's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from mla_var3.runtime import interpreter


def evaluate(body: Callable[..., Any], *args: Any) -> Any:
    """Runs `body` as kernel code in one block and returns what it returns."""
    results = []

    @ct.kernel
    def kernel(parameters):
        results.append(body(*parameters))

    interpreter.launch((1,), kernel, (args,))
    return results[0]


def elements(body: Callable[..., Any], *args: Any) -> torch.Tensor:
    """The elements of the tile that `body` returns."""
    return evaluate(body, *args).tensor


def values(body: Callable[..., Any], *args: Any) -> Any:
    """The elements of the tile that `body` returns, as nested lists or a number."""
    return elements(body, *args).tolist()
