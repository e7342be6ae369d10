"""HyperMLA: Multi-head Latent Attention kernels and the workbench they are made on.

Importing this package loads neither torch nor a kernel language. The attention calls are loaded
when they are first used: `mla_attention`, `mla_latent_attention`, `LatentCache` and `explain`.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_ATTENTION = ("LatentCache", "explain", "mla_attention", "mla_latent_attention")


def __getattr__(name: str) -> Any:
    if name not in _ATTENTION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mla_var3 import attention

    value = globals()[name] = getattr(attention, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ATTENTION})
