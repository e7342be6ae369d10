"""CPU interpreter for cuTile kernels.

`launch` runs the Python function inside a `@ct.kernel` object on CPU tensors, block by block, so
that the same kernel that compiles for a GPU can be checked on a machine without one. cuTile
forwards every `ct.*` call made outside its compiler to the current `DispatchMode`; the interpreter
installs its own mode and answers each call with torch code. Kernel sources are not rewritten.

The interpreter is stricter than a GPU. What is undefined there (a tile wholly outside its array, a
broken `check_bounds=False` promise, memory outside an allocation) raises, and undetermined padding
reads NaN, so that a kernel which depends on it fails its check instead of passing by luck.

Limits:
    * Blocks run one after another: races between blocks are not found, and a block that spins
      until a later block acts never ends.
    * Products are accumulated in float32 in torch's order, and `exp2`, `sin` and the like are
      torch's: results agree with a GPU within rounding, not bit by bit.
    * Whether a value is a compile-time constant, and whether loop-carried variables keep their
      type, is not checked; compiling the kernel finds those.
    * `not`, `and` and `or` give Python values instead of boolean scalars. Expressions inside
      `static_eval` see the names of kernel code; only `static_iter(range(...))` and
      `static_eval(range(...))` yield Python integers.
    * Alignment, TMA, latency and occupancy hints have no effect.
    * The sub-byte dtypes and `float8_e5m3fnu` have no torch counterpart and are refused.
"""

from __future__ import annotations

from mla_var3.runtime.interpreter.version import require_pinned_cutile

# Every other module here builds on private cuTile modules, so the check comes before their import.
require_pinned_cutile()

from mla_var3.runtime.interpreter.launcher import launch  # noqa: E402

__all__ = ["launch"]
