"""HyperMLA: Multi-head Latent Attention kernels and the workbench they are made on.

Importing this package loads neither torch nor a kernel language. Its names are loaded when they are
first used: the attention calls `mla_attention`, `mla_latent_attention`, `LatentCache`,
`PrefixGroups`, `find_shared_prefixes` and `explain`; `model`, the widths and heads of a published
model; `benchmark_kernel` and `run_plan`, which profile a kernel plan and run its command line.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_MODULES = {
    "LatentCache": "attention",
    "PrefixGroups": "attention",
    "explain": "attention",
    "find_shared_prefixes": "attention",
    "mla_attention": "attention",
    "mla_latent_attention": "attention",
    "model": "conf.models",
    "benchmark_kernel": "runtime.profiling.modes",
    "run_plan": "cli.commands.kernel",
}
"""Name -> module that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
