"""CPU interpreter for cuTile kernels.

`launch` runs the Python function inside a `@ct.kernel` object on CPU tensors, block by block. So
the kernel that compiles for a GPU can be checked on a machine without one. cuTile forwards every
`ct.*` call made outside its compiler to the current `DispatchMode`; the interpreter installs a mode
that answers each call with torch code. Kernel sources are not rewritten.

The interpreter is stricter than a GPU. What is undefined there raises: a tile wholly outside its
array, a tile that leaves the array in spite of `check_bounds=False`, memory outside an allocation.
Undetermined padding reads NaN, so a kernel that depends on it fails its check.

Limits:
    * Blocks run one after another. Races between blocks are not found, and a block that spins until
      a later block acts never ends.
    * Products are accumulated in float32 in torch's order, and `exp2`, `sin` and the like are
      torch's. Results agree with a GPU within rounding, not bit by bit.
    * Whether a value is a compile-time constant, and whether loop-carried variables keep their
      type, is not checked. Compiling the kernel finds those.
    * `not`, `and` and `or` give Python values instead of boolean scalars. Expressions inside
      `static_eval` see the names of kernel code; only `static_iter(range(...))` and
      `static_eval(range(...))` yield Python integers.
    * Alignment, TMA, latency and occupancy hints have no effect.
    * It has the part of cuTile that attention and matrix kernels need. Refused by name: raw memory,
      foreign pointers, advanced indexing, compare-and-swap, atomics on tiled views, custom
      reductions and scans, block-scaled products, packing into bytes, `printf`, directed rounding.
    * Unsigned integers wider than a byte can be moved, but torch has no arithmetic on them. The
      sub-byte dtypes and `float8_e5m3fnu` have no torch counterpart and are refused.
"""

from __future__ import annotations

import importlib.metadata

from mla_var3.errors import MissingToolError

PINNED_CUTILE_VERSION = "1.7.0"


def require_pinned_cutile() -> None:
    """Refuse a cuTile whose private interface may differ from the one used here."""
    wanted = f"cuda-tile=={PINNED_CUTILE_VERSION}"
    try:
        found = importlib.metadata.version("cuda-tile")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingToolError(
            f"the CPU interpreter needs {wanted}, but cuda-tile is not installed"
        ) from error
    if found != PINNED_CUTILE_VERSION:
        raise MissingToolError(
            f"the CPU interpreter is written for {wanted}, because it builds on private modules "
            f"of that package, but version {found} is installed"
        )


# Every other module here builds on private cuTile modules, so the check comes before their import.
require_pinned_cutile()

from mla_var3.runtime.interpreter.launcher import launch  # noqa: E402

__all__ = ["launch", "require_pinned_cutile"]
