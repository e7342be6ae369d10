"""Hugging Face transformers models with MLA, attending through `mla_attention`.

For checking against a reference model and for trying things out, not for serving: the caches of
transformers are copied at every step. The layers keep the latents in their cache and decompress
them before the attention; `use` passes the latents on instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_var3.attention import mla_attention
from mla_var3.errors import UnsupportedError

NAME = "hyper_mla"


def use(model: Any, kernel: str = "auto") -> Any:
    """Make every MLA layer of a model attend through this package; `kernel` as for `mla_attention`.

    Its attention layers have `expand_kv` and `kv_b_proj`, as those of DeepSeek V3. Returns the
    model itself. `model.set_attn_implementation("sdpa")` alone does not undo it; load the model
    again for that.
    """
    layers = [module for module in model.modules() if hasattr(module, "expand_kv")]
    if not layers:
        raise UnsupportedError(
            "model: expected layers with expand_kv (MLA, transformers 5.15 or newer), got none"
        )
    for part in ("indexer", "sinks"):
        if any(getattr(layer, part, None) is not None for layer in layers):
            raise UnsupportedError(f"model: expected dense attention, got layers with {part}")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    for layer in layers:
        layer.expand_kv = lambda latent, rope: (rope, latent)
        layer.hyper_mla_kernel = kernel
    model.set_attn_implementation(NAME)
    return model


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: the output `[b, s, h, v]`, and None for the weights.

    Queries are `[b, h, s, d+p]`, keys the rope keys `[b, 1, t, p]`, values the latents `[b, 1, t,
    k]`, positions `[b, s]` or `[1, s]`; a static cache has more slots. A mask has ones only. What
    would change the result is refused, also among the other options.
    """
    if dropout:
        raise UnsupportedError("dropout: expected 0 (inference), got " + str(dropout))
    for name in ("indices", "s_aux", "sliding_window", "softcap"):
        if options.get(name) is not None:
            raise UnsupportedError(f"{name}: expected none, which this adapter does not compute")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedError("attention_mask: expected no padding; batch prompts of one length")
    b, h, s, width = query.shape
    d = width - key.shape[-1]
    lengths = None
    if position_ids is not None:
        last = position_ids[:, -1:]
        behind = torch.arange(1 - s, 1, device=last.device)
        if not bool(((position_ids == last + behind) & (last < key.shape[2])).all()):
            raise UnsupportedError(
                "position_ids: expected the newest tokens of one sequence per row, counted from 0"
            )
        lengths = (position_ids[:, -1] + 1).to(torch.int32).expand(b).contiguous()
    weights = module.kv_b_proj.weight.view(h, -1, value.shape[-1])  # [h, d+v, k]
    output = mla_attention(
        query[..., :d].transpose(1, 2), query[..., d:].transpose(1, 2), (value[:, 0], key[:, 0]),
        weights[:, :d], weights[:, d:].transpose(1, 2), lengths=lengths, scale=scaling,
        kernel=module.hyper_mla_kernel,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output, None
