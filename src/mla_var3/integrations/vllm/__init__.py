"""vLLM plug-in: `--attention-backend HYPER_MLA`, or `CUSTOM` where vLLM takes no new names.

vLLM calls `register` through the entry point group `vllm.general_plugins`, in every process.
"""

from __future__ import annotations

NAME = "HYPER_MLA"
BACKEND = "mla_var3.integrations.vllm.backend.HyperMLABackend"


def register() -> None:
    """Register the backend under its own name, where vLLM allows that, and as `CUSTOM`.

    Loads neither torch nor a kernel. Calling it again changes nothing, and a `CUSTOM` backend of
    somebody else is left alone.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if hasattr(AttentionBackendEnum, "register") and NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, BACKEND)
    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, BACKEND)


def flag() -> str:
    """The value of `--attention-backend` that selects this plug-in in the installed vLLM."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return NAME if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
