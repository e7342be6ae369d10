"""Helpers of the interpreter's tests."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._stub import RawArrayMemory

from mla_var3.runtime import interpreter

REFUSED = re.compile(
    r"offset|foreign|advanced_indexing|Slice|atomic_(cas|store)|get_raw_memory|^reduce|^scan"
    r"|mma_scaled|pack_to_bytes|unpack_from_bytes|printf"
)
"""Operations of cuTile that the interpreter leaves out."""


def public_objects() -> Iterator[tuple[str, Any]]:
    """Everything that cuTile exports, and the members of its classes, by name."""
    for name in ct.__all__:
        yield name, getattr(ct, name)
    for owner in (ct.Array, ct.Tile, ct.TiledView, ct.Slice, RawArrayMemory):
        for name, member in vars(owner).items():
            yield f"{owner.__name__}.{name}", getattr(member, "__func__", member)


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


def load(array: Any, shape: Any) -> Any:
    """The tile of `shape` at the origin of an array; for use in kernel code."""
    return ct.load(array, (0,) * array.ndim, shape)


def apply(function: Callable[..., Any], *tensors: torch.Tensor) -> torch.Tensor:
    """The result of a function of whole arrays, each loaded as one tile."""
    shapes = [tuple(tensor.shape) for tensor in tensors]

    def body(*arrays):
        return function(*(load(a, s) for a, s in zip(arrays, shapes, strict=True)))

    return elements(body, *tensors)
