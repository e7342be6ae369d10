"""vLLM plug-in: `--attention-backend HYPER_MLA`, or `CUSTOM` where vLLM takes no new names.

vLLM calls `register` through the entry point group `vllm.general_plugins`, in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "HYPER_MLA"
BACKEND = "mla_var3.integrations.vllm.backend.HyperMLABackend"
PREFILL_BACKEND = "mla_var3.integrations.vllm.prefill.HyperMLAPrefillBackend"

HOPPER = 9
"""Major compute capability of the GPUs that the kernels run on."""
NO_CUTE = "the kernel needs nvidia-cutlass-dsl: pip install 'hyper-mla[vllm]'"


def register() -> None:
    """Register both backends under our name, where vLLM allows that, and as `CUSTOM`.

    Imports no kernel. Calling it again changes nothing, and a `CUSTOM` backend of somebody else is
    left alone.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _register(AttentionBackendEnum, register_backend, BACKEND)
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )
    except ImportError:  # a vLLM that takes no prefill backends
        return
    _register(MLAPrefillBackendEnum, register_mla_prefill_backend, PREFILL_BACKEND)


def _register(names: Any, register_as: Callable[[Any, str], Any], path: str) -> None:
    if hasattr(names, "register") and NAME not in names.__members__:
        register_as(NAME, path)
    if not names.CUSTOM.is_overridden():
        register_as(names.CUSTOM, path)


def flag() -> str:
    """The value of `--attention-backend` that selects this plug-in in the installed vLLM."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return NAME if hasattr(AttentionBackendEnum, "register") else "CUSTOM"


def other_gpu(capability: Any) -> list[str]:
    """Why a GPU is not served: a reason, or none."""
    if capability is None or capability.major == HOPPER:
        return []
    found = f"sm_{capability.major}{capability.minor}"
    return [f"{NAME} runs on Hopper (sm_90: H100, H200, H20), this GPU is {found}"]
