"""The objects that kernel code handles, and reading them as operands of an operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.cutile_api import DType, PaddingMode, TileTypeError, ct
from mla_var3.runtime.interpreter.dtypes import (
    KernelDType,
    Number,
    constant,
    implicit_cast,
    kernel_dtype,
    torch_dtype,
    wrap_integer,
)


def _refuse(message: str) -> Callable[..., NoReturn]:
    """A method that refuses, with a description of its object in the message."""

    def refuse(value: Any, *_: Any) -> NoReturn:
        raise TileTypeError(message.format(describe(value)))

    return refuse


class Tile(ct.Tile):  # type: ignore[misc]
    """A tile, or a dynamic scalar (a tile without axes).

    Tiles are immutable, so a tensor may be shared between tiles, be a view of another one or be
    expanded; no operation may write into it. Integer scalars, which drive loops and indices, are
    kept as Python integers and become tensors only when an operation needs one.

    Attributes:
        element: cuTile dtype of the elements.
        integer: The value, if this is an integer scalar kept on the Python side.
    """

    __slots__ = ("_tensor", "_widened", "element", "integer")

    def __init__(self, tensor: torch.Tensor, element: DType) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._widened: torch.Tensor | None = None
        self.element = element
        self.integer: int | None = None

    @classmethod
    def of_integer(cls, value: int, element: DType) -> Tile:
        """An integer or boolean scalar; `value` must be in the range of `element`."""
        tile = cls.__new__(cls)
        tile._tensor = None
        tile._widened = None
        tile.element = element
        tile.integer = value
        return tile

    @property
    def tensor(self) -> torch.Tensor:
        """The elements; never to be written to."""
        if self._tensor is None:
            self._tensor = torch.tensor(self.integer, dtype=torch_dtype(self.element))
        return self._tensor

    @property
    def widened(self) -> torch.Tensor:
        """The elements in the dtype that products are computed in, kept for the next product."""
        if self._widened is None:
            exact = api.is_integral(self.element) or self.element == ct.float64
            self._widened = self.tensor.to(torch.float64 if exact else torch.float32)
        return self._widened

    @property
    def dtype(self) -> KernelDType:
        return kernel_dtype(self.element)

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self._tensor is None else tuple(self._tensor.shape)

    @property
    def ndim(self) -> int:
        return 0 if self._tensor is None else self._tensor.ndim

    def scalar(self) -> Number:
        if self.integer is not None:
            return self.integer
        if self.ndim:
            raise TileTypeError(f"expected a scalar, got {describe(self)}")
        value: Number = self.tensor.item()
        return value

    def __index__(self) -> int:
        if not api.is_integral(self.element):
            raise TileTypeError(f"expected an integer scalar, got {describe(self)}")
        return int(self.scalar())

    def __bool__(self) -> bool:
        if self.ndim:
            raise InterpreterError(
                f"truth value of {describe(self)}: a condition must be a scalar; "
                "select elements with ct.where"
            )
        return bool(self.scalar())

    __int__ = _refuse("int() expects a constant, got {}")
    __float__ = _refuse("float() expects a constant, got {}")
    __setitem__ = _refuse("tiles are immutable: item assignment is not supported")
    __iter__ = _refuse("a tile cannot be iterated over")

    def __abs__(self) -> Any:
        return ct.abs(self)

    def __pos__(self) -> Tile:
        if api.is_boolean(self.element):
            return Tile(self.tensor.to(torch.int32), ct.int32)
        return self

    def __getitem__(self, index: Any) -> Tile:
        items = index if isinstance(index, tuple) else (index,)
        for item in items:
            full = isinstance(item, slice) and item == slice(None)
            if not (item is None or item is Ellipsis or full):
                raise TileTypeError(
                    f"a tile can be indexed with None, ... and : only, got {item!r}; "
                    "use extract() or item()"
                )
        return Tile(self.tensor[items], self.element)

    def __repr__(self) -> str:
        return format(self, "")

    def __format__(self, spec: str) -> str:
        values = self.integer if self._tensor is None else self._tensor.tolist()
        # cuTile prints through C formats: without a specification, %d and %f.
        return _format_nested(values, spec or ("f" if api.is_float(self.element) else "d"))


def _format_nested(value: Any, spec: str) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_format_nested(item, spec) for item in value) + "]"
    return format(int(value) if isinstance(value, bool) else value, spec)


def describe(value: object) -> str:
    """A short text for error messages: what kind of value this is."""
    if isinstance(value, Tile):
        return f"a {value.element} tile of shape {value.shape}"
    if isinstance(value, Array):
        return f"array {value.name} of shape {tuple(value.tensor.shape)}"
    return f"{value!r} of type {type(value).__name__}"


@dataclass(eq=False, repr=False)
class Array(ct.Array):  # type: ignore[misc]
    """A global array: a CPU tensor that loads read and stores write.

    `name` is the kernel parameter that it came from, `index_dtype` the type of its shape and
    strides in kernel code; those of the static axes are compile-time constants.
    """

    tensor: torch.Tensor
    element: DType
    name: str
    index_dtype: DType = ct.int32
    static_shape: frozenset[int] = frozenset()
    static_strides: frozenset[int] = frozenset()

    @property
    def dtype(self) -> KernelDType:
        return kernel_dtype(self.element)

    @property
    def shape(self) -> tuple[Any, ...]:
        return self._dimensions(self.tensor.shape, self.static_shape)

    @property
    def strides(self) -> tuple[Any, ...]:
        return self._dimensions(self.tensor.stride(), self.static_strides)

    def _dimensions(self, values: tuple[int, ...], static: frozenset[int]) -> tuple[Any, ...]:
        return tuple(
            value if axis in static else Tile.of_integer(value, self.index_dtype)
            for axis, value in enumerate(values)
        )

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    def replace(self, tensor: torch.Tensor, name: str, sliced: int) -> Array:
        """The same array with other bounds; the size of axis `sliced` is no longer a constant."""
        static = self.static_shape - {sliced}
        return Array(tensor, self.element, name, self.index_dtype, static, self.static_strides)

    __getitem__ = _refuse("arrays are not subscriptable: use load() or gather()")
    __setitem__ = _refuse("arrays do not support item assignment: use store() or scatter()")

    def __repr__(self) -> str:
        return f"<{describe(self)}, dtype {self.element}>"


@dataclass(eq=False)
class TiledView(ct.TiledView):  # type: ignore[misc]
    """An array divided into tiles of one shape."""

    array: Array
    padding_mode: PaddingMode
    # Defaults, because these are properties of cuTile's class, which an instance cannot set.
    tile_shape: tuple[int, ...] = ()
    traversal_steps: tuple[int, ...] = ()

    @property
    def dtype(self) -> KernelDType:
        return kernel_dtype(self.array.element)


class ArrayList(list[Array]):
    """A kernel parameter that is a list of arrays, indexed with integer scalars."""

    __iter__ = _refuse("a list of arrays cannot be iterated over")

    def __getitem__(self, index: Any) -> Any:
        position: int = index.__index__()
        if not 0 <= position < len(self):
            raise InterpreterError(f"list index {position} is outside a list of {len(self)} arrays")
        return super().__getitem__(position)


MAX_TILE_ELEMENTS = 1 << 24


def as_tile(value: Any) -> Tile:
    """A tile operand; a Python number becomes a scalar of the dtype cuTile gives it."""
    if isinstance(value, Tile):
        return value
    if not isinstance(value, bool | int | float):
        raise TileTypeError(f"expected a tile, got {describe(value)}")
    element = api.dtype_of_constant_scalar(value)
    if api.is_integral(element):
        return Tile.of_integer(wrap_integer(int(value), element), element)
    return Tile(constant(value, element), element)


def as_array(value: Any) -> Array:
    """An array operand."""
    if not isinstance(value, Array):
        raise TileTypeError(f"expected an array, got {describe(value)}")
    return value


def loose_type(value: Tile | Number) -> DType | Number:
    """What promotion looks at: a tile's dtype, or a Python number itself."""
    return value.element if isinstance(value, Tile) else value


def implicit(value: Any, target: DType) -> torch.Tensor:
    """The elements of an operand after the implicit cast to `target`."""
    tile = as_tile(value)
    return implicit_cast(loose_type(value), tile.tensor, target)


def broadcast(tensor: torch.Tensor, shape: tuple[int, ...], what: str) -> torch.Tensor:
    """`tensor` expanded to `shape`, which must not need more axes than `shape` has."""
    if not api.is_shape_broadcastable_to(tensor.shape, shape):
        raise TileTypeError(f"{what} of shape {tuple(tensor.shape)} does not broadcast to {shape}")
    return tensor.expand(shape)


def items_of(value: Any) -> tuple[Any, ...]:
    """The items of a tuple argument; anything else counts as a tuple of one."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def static_int(value: Any, what: str) -> int:
    """An integer that cuTile wants to be a compile-time constant."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TileTypeError(f"{what} must be an integer, got {describe(value)}")
    return int(value.__index__())


def static_ints(value: Any, what: str) -> tuple[int, ...]:
    """A tuple of constant integers; a single one counts as a tuple of one."""
    return tuple(static_int(item, what) for item in items_of(value))


def index_value(value: Any) -> int:
    """A signed integer scalar used as an index."""
    if type(value) is int:
        return value
    if isinstance(value, Tile) and api.is_integral(value.element) and api.is_signed(value.element):
        return int(value.scalar())
    raise TileTypeError(f"an index must be a signed integer scalar, got {describe(value)}")


def index_tuple(value: Any, rank: int, what: str) -> tuple[int, ...]:
    """The index of a tile or subtile in a space of `rank` axes."""
    index = tuple(index_value(item) for item in items_of(value))
    if len(index) != rank:
        raise TileTypeError(f"index {index} does not match the rank {rank} of {what}")
    return index


def tile_shape(value: Any, rank: int | None = None, zero_d: bool = False) -> tuple[int, ...]:
    """The shape of a tile to be made."""
    shape = static_ints(value, "a tile size")
    if rank is not None and len(shape) != rank and not (zero_d and not shape):
        raise TileTypeError(f"tile shape {shape} does not match the rank {rank}")
    for size in shape:
        if size <= 0 or size & (size - 1):
            raise TileTypeError(f"tile shape {shape}: {size} is not a power of two")
    if prod(shape) > MAX_TILE_ELEMENTS:
        raise TileTypeError(f"tile shape {shape} has more than {MAX_TILE_ELEMENTS} elements")
    return shape


def axis_of(value: Any, rank: int) -> int:
    """A constant axis number as a non-negative integer."""
    axis: int = api.normalize_axis(static_int(value, "an axis"), rank)
    return axis


def axes_of(value: Any, rank: int, what: str) -> tuple[int, ...]:
    """Constant axis numbers, each at most once."""
    axes = tuple(axis_of(item, rank) for item in items_of(value))
    if len(set(axes)) != len(axes):
        raise TileTypeError(f"{what} {axes} names an axis twice")
    return axes
