"""SGLang plug-in: `--attention-backend hyper_mla`.

SGLang calls `register` through the entry point group `sglang.srt.plugins`, in every process. The
backend serves decode and speculative verification; SGLang's own hybrid backend sends prefill to
FlashAttention-3, and the draft model uses it too.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

NAME = "hyper_mla"
PREFILL = "fa3"
"""SGLang's backend for prefill and for draft models."""


def register() -> None:
    """Register the backend, its command line choice, and the settings that it implies."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in ATTENTION_BACKENDS:
        return
    server_args.add_attention_backend_choices([NAME])
    server_args.add_chunked_prefix_cache_attention_backend(NAME)
    register_attention_backend(NAME)(create)
    # Where SGLang turns the settings as given into resolved ones.
    late = hasattr(server_args.ServerArgs, "resolve_once")
    HookRegistry.register(
        f"sglang.srt.server_args.ServerArgs.{'resolve_once' if late else '__post_init__'}",
        complete_settings,
        HookType.BEFORE,
    )


def create(runner: Any) -> Any:
    """The backend of a model runner."""
    from mla_var3.integrations.sglang.backend import HyperMLABackend

    return HyperMLABackend(runner)


def complete_settings(arguments: Any) -> None:
    """Settings that follow from `--attention-backend hyper_mla`, before SGLang resolves its own."""
    from mla_var3.integrations.paged import PAGE_SIZE

    if getattr(arguments, "_resolution_finished", False):
        return
    if arguments.prefill_attention_backend == NAME:
        raise ValueError(f"--prefill-attention-backend: {NAME} serves decode and verification only")
    if arguments.attention_backend == NAME:
        arguments.attention_backend = arguments.prefill_attention_backend or PREFILL
        arguments.decode_attention_backend = arguments.decode_attention_backend or NAME
    if arguments.decode_attention_backend != NAME:
        return
    _refuse_options(arguments)
    if arguments.page_size is None:
        arguments.page_size = PAGE_SIZE
    elif arguments.page_size % PAGE_SIZE:
        got = arguments.page_size
        raise ValueError(f"--page-size: {NAME} needs {PAGE_SIZE} or a multiple, got {got}")
    if arguments.speculative_algorithm is not None:
        # Else verification would run on the prefill backend.
        arguments.speculative_attention_mode = "decode"
        if arguments.speculative_draft_attention_backend in (None, NAME):
            arguments.speculative_draft_attention_backend = PREFILL
    log.info(
        "%s: prefill on %s, drafts on %s, decode and verification on %s, page size %d",
        NAME,
        arguments.prefill_attention_backend or arguments.attention_backend or "SGLang's default",
        arguments.speculative_draft_attention_backend if arguments.speculative_algorithm else None,
        NAME,
        arguments.page_size,
    )


def _refuse_options(arguments: Any) -> None:
    """Refuse what SGLang would let through because prefill has another backend."""

    def given(name: str) -> Any:
        return getattr(arguments, name, None)

    if given("rl_on_policy_target"):
        raise ValueError(f"--rl-on-policy-target: the trainer does not run {NAME}")
    if (given("dcp_size") or 1) > 1:
        raise ValueError(f"--dcp-size: {NAME} needs 1 in SGLang, got {given('dcp_size')}")
    if given("enable_two_batch_overlap") and (given("speculative_eagle_topk") or 1) > 1:
        raise ValueError(f"--speculative-eagle-topk: {NAME} needs 1 with two-batch overlap")
