"""All that the interpreter uses of cuda.tile: its namespace `ct`, private parts, operations.

Other modules of the interpreter import cuTile names from here only, which keeps the list of private
names that a new cuTile version may break in one place. Rules that cuTile already implements (dtype
promotion, implicit casts, mma dtypes, rounding and memory-order checks) are called, not repeated.
The package ships no type information, so all of it is `Any` to a type checker, base classes too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import cuda.tile as ct
from cuda.tile import _annotated_function, _datatype, _dispatch_mode, _exception, _execution
from cuda.tile._ir import arithmetic_ops, cast_ops, op_impl, ops, ops_utils, typing_support
from cuda.tile._ir import type as ir_type

DType: TypeAlias = Any
PaddingMode: TypeAlias = Any
RoundingMode: TypeAlias = Any

DispatchMode = _dispatch_mode.DispatchMode
is_stub = _execution.is_stub

HeterogeneousTupleNode = _annotated_function.HeterogeneousTupleNode
HomogeneousTupleNode = _annotated_function.HomogeneousTupleNode

TileError = _exception.TileError
TileTypeError = _exception.TileTypeError
TileStaticAssertionError = _exception.TileStaticAssertionError
make_static_exception = _exception.make_static_exception

is_arithmetic = _datatype.is_arithmetic
is_boolean = _datatype.is_boolean
is_float = _datatype.is_float
is_integral = _datatype.is_integral
is_restricted_float = _datatype.is_restricted_float
is_signed = _datatype.is_signed
is_unrestricted_float = _datatype.is_unrestricted_float
integer_dtype_max = _datatype.integer_dtype_max
integer_dtype_min = _datatype.integer_dtype_min
resolve_mma_dtype = _datatype._resolve_mma_supported_dtype

to_dtype = typing_support.to_dtype
dtype_of_constant_scalar = typing_support.dtype_of_constant_scalar
LooselyTypedScalar = ir_type.LooselyTypedScalar
promote_dtypes = ops_utils.promote_dtypes
check_implicit_cast = cast_ops.check_implicit_cast
get_ftof_rounding_min_version = ops_utils.get_ftof_rounding_min_version
integer_exponent_dtype = arithmetic_ops._fpowi_exponent_dtype

BINOP_REGISTRY = ops_utils.BINOP_REGISTRY
UNARYOP_REGISTRY = ops_utils.UNARYOP_REGISTRY
check_rd_and_ftz = ops_utils.check_rd_and_ftz
broadcast_shapes = ops_utils.broadcast_shapes2
is_shape_broadcastable_to = ops_utils.is_shape_broadcastable_to
reraise_tile_exception = ops_utils.reraise_tile_exception
normalize_axis = op_impl.normalize_axis

ATOMIC_SPECS = ops._ATOMIC_RMW_SPECS
TileAtomicRMW = ops.TileAtomicRMW
TileLoad = ops.TileLoad
TileStore = ops.TileStore
check_load_store_hints = ops._check_load_store_hints
matmul_shapes = ops._matmul_broadcast_shape
validate_memory_order_and_scope = ops_utils.validate_memory_order_and_scope

__all__ = ["ct"]  # Re-exported on purpose; the other names are defined here.

# --- the table from its operations to the functions that carry them out ---


_Function = TypeVar("_Function", bound=Callable[..., Any])

IMPLEMENTATIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Keyed by the function object that cuTile passes to the dispatch mode."""


def implements(*stubs: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Registers a function as the implementation of cuTile operations."""

    def register(function: _Function) -> _Function:
        for stub in stubs:
            implement(stub, function)
        return function

    return register


def implement(stub: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Registers `function` for `stub` and for the functions that `stub` wraps.

    Some operations are wrapped once more for their documentation, and the dispatch mode is handed
    an inner function.
    """
    layer: Callable[..., Any] | None = stub
    while layer is not None:
        IMPLEMENTATIONS[layer] = function
        layer = getattr(layer, "__wrapped__", None)
