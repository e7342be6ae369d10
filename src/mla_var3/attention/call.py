"""The public calls: `mla_attention`, `mla_latent_attention` and `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.backends.latent import Attended
from mla_var3.attention.backends.registry import AUTO
from mla_var3.attention.prefix.layout import Prefix, sharing
from mla_var3.attention.replay.key import CallKey, find_replay, latent_key, whole_key
from mla_var3.attention.replay.replay import keep_replay
from mla_var3.attention.request.checks import debug_on
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.attention.request.validate import Cache, Options, full_task, latent_task
from mla_var3.attention.select.choice import Explanation, choose, run, spec_for
from mla_var3.attention.step import Step
from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError, UnknownNameError, UnsupportedError
from mla_var3.runtime.workflow import planning_device

HEAD_WIDTH = 128
"""d of the published models, for the default scale where the queries do not show it."""

_is_compiling = torch.compiler.is_compiling
# Asked in every call. Other tracers bring tensors of a class of their own, which have no key.
is_traced, checks_values = torch.compiler.is_dynamo_compiling, debug_on

_OPTION_NAMES = tuple(field.name for field in fields(Options))
_SIZE_NAMES = tuple(field.name for field in fields(CallShape))


def mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: Cache,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    causal: bool = True,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = AUTO,
    cu_seqlens_q: Tensor | None = None,
    max_q: int | None = None,
    tree_mask: Tensor | None = None,
    max_kv: int | None = None,
    total_lengths: Tensor | Sequence[int] | None = None,
    shards: int = 1,
    shard: int = 0,
    batch_invariant: bool = False,
    sliding_window: int | None = None,
    prefix: Prefix | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head Latent Attention of the newest tokens of every request over its cache.

    The queries are the newest tokens: query i of a request of length L with s queries has position
    L - s + i. A query that sees no token gives zeros and an LSE of -inf. For inference: no
    gradients are kept.

    Args:
        q_nope: queries without rope, `[b, s, h, d]`, or packed `[total_q, h, d]` with
            `cu_seqlens_q`; bfloat16, float16 or (PyTorch path only) float32.
        q_rope: their rope part, `[b, s, h, p]` or `[total_q, h, p]`.
        cache: a `LatentCache`, a `CacheView`, or a pair `(c_kv [b, t, k], k_rope [b, t, p])`. Slots
            beyond a length may hold anything.
        w_uk: up-projection of the keys, `[h, d, k]`.
        w_uv: up-projection of the values, `[h, k, v]`; v may differ from d.
        lengths: tokens of each request, `[b]`; by default those of the cache, or t for a pair.
        causal: whether a query sees no position after its own.
        scale: factor on the logits; `(d + p) ** -0.5` by default.
        out: where the output goes, of the output's shape and dtype.
        return_lse: also return the LSE, the natural log-sum-exp per query row.
        kernel: "auto" for the best one that serves the call, or an id such as "flash_mla",
            "mla_var6_plus" or "torch_tiled", with ":<language>" to name the language too. A named
            kernel is used or an error is raised, never another one.
        cu_seqlens_q: first query of each request in packed queries, int32 `[b+1]`.
        max_q: the most queries of any request, where they differ; the PyTorch path needs it on a
            GPU.
        tree_mask: which of the newest tokens a query sees, bool `[s, s]` or `[b, s, s]`, or the
            parent of each token, int `[s]` or `[b, s]`, -1 for a child of the context. A parent
            comes before its children; a query never sees later tokens, and always sees the context.
        max_kv: a host-side bound on the lengths, to look at less of the cache.
        total_lengths: length of each request counted from the first slot of the cache, `[b]`, when
            the cache holds only a part of the request (see `attention.distributed`).
        shards: with `total_lengths`, over how many caches the tokens of a request are dealt out in
            turns: token i is in cache i % shards.
        shard: which of them this cache is.
        batch_invariant: whether the result of a request must not depend, bit by bit, on the other
            requests of the batch. No request is then split over SMs, which costs time where there
            are few of them.
        sliding_window: how many of the newest tokens a query sees, counted from itself backwards:
            those at positions above its own minus `sliding_window`; None for all. Later tokens that
            it sees without `causal` are seen beside them.
        prefix: which requests share their first tokens, `PrefixGroups`, or those laid out for a
            step by `prefix_layout`. It changes no result: a kernel may read shared tokens once.

    Returns:
        The output `[b, s, h, v]` (or `[total_q, h, v]`); with `return_lse` also the LSE
        `[b, s, h]` (or `[total_q, h]`), float32.
    """
    # Only what is given, so that the key stays short.
    options: dict[str, Any] = {}
    if lengths is not None:
        options["lengths"] = lengths
    if causal is not True:
        options["causal"] = causal
    if scale is not None:
        options["scale"] = scale
    if out is not None:
        options["out"] = out
    if cu_seqlens_q is not None:
        options["cu_seqlens_q"] = cu_seqlens_q
    if max_q is not None:
        options["max_q"] = max_q
    if tree_mask is not None:
        options["tree_mask"] = tree_mask
    if max_kv is not None:
        options["max_kv"] = max_kv
    if total_lengths is not None:
        options["total_lengths"] = total_lengths
    if shards != 1 or shard != 0:
        options["shards"], options["shard"] = shards, shard
    if batch_invariant is not False:
        options["batch_invariant"] = batch_invariant
    if sliding_window is not None:
        options["sliding_window"] = sliding_window
    if prefix is not None and sharing(prefix):
        options["prefix"] = prefix
    key = result = None
    if not (is_traced() or checks_values()):
        key = whole_key(q_nope, q_rope, cache, w_uk, w_uv, kernel, options)
        replay = find_replay(key)
        if replay is not None and key is not None:
            result = replay.attend(key[1], return_lse)
    if result is None:
        task = full_task(q_nope, q_rope, cache, w_uk, w_uv, Options(**options))
        result = _execute_and_keep(task, kernel, key, cache, options)
    return result if return_lse else result[0]


def mla_latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Cache,
    *,
    d: int = HEAD_WIDTH,
    kernel: str = AUTO,
    prefix: Prefix | None = None,
    step: Step | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The latent attention alone, for engines that do the projections themselves.

    Args:
        q_latent: latent queries `q_nope @ w_uk`, `[b, s, h, k]`, or `[total_q, h, k]` with
            `cu_seqlens_q`.
        q_rope: `[b, s, h, p]` or `[total_q, h, p]`.
        cache: as for `mla_attention`; decompressed tokens are not used.
        d: head width without rope, for the default scale `(d + p) ** -0.5`.
        kernel: as for `mla_attention`.
        prefix: as for `mla_attention`.
        step: the forward pass that the call is part of, so that its layers share a schedule. It
            changes no result. Not used with a prefix.
        options: `lengths`, `causal`, `scale`, `out` (of the shape of `q_latent`), `cu_seqlens_q`,
            `max_q`, `tree_mask`, `max_kv`, `total_lengths`, `shards`, `shard`, `batch_invariant`
            and `sliding_window`, as for `mla_attention`.

    Returns:
        The latent output, of the shape of `q_latent`, and the LSE, float32.
    """
    key = result = None
    if prefix is not None and sharing(prefix):
        options["prefix"] = prefix
        step = None
    if not (is_traced() or checks_values()):
        key = latent_key(q_latent, q_rope, cache, d, kernel, options)
    if step is not None:
        if not isinstance(step, Step):
            raise InvalidArgumentError("step", "a Step", type(step).__name__)
        key = step.join(key)
    if key is not None:
        replay = find_replay(key)
        if replay is not None:
            result = replay.attend(key[1])
    if result is None:
        task = latent_task(q_latent, q_rope, cache, _options(options), d)
        if step is not None:
            shared = step.options(task.q.device)
            task, options = replace(task, **shared), options | shared
        result = _execute_and_keep(task, kernel, key, cache, options)
    if step is not None:
        step.done()
    return result


def explain(
    *operands: Any, kernel: str = AUTO, device_name: str | None = None, **options: Any
) -> Explanation:
    """Say which kernel a call would use, and why; nothing is computed.

    Either with the operands and options of a call (`q_nope, q_rope, cache, w_uk, w_uv`, or
    `q_latent, q_rope, cache`), or with sizes, `explain(b=32, s=16, t=4096, h=128)`, and any other
    field of `CallShape`.

    Args:
        operands: those of `mla_attention` or `mla_latent_attention`; none for sizes.
        kernel: as for the calls.
        device_name: the device that predictions are for; by default the current GPU, or an
            NVIDIA H200 where there is none.
        options: the other arguments of the call, or sizes.
    """
    if not operands:
        spec = planning_device() if device_name is None else device_spec(device_name)
        return choose(_shape_of(options), spec, kernel=kernel)[0]
    for name in ("return_lse", "step"):  # they change no choice
        options.pop(name, None)
    if len(operands) == 5:
        task = full_task(*operands, _options(options))
    elif len(operands) == 3:
        d = options.pop("d", HEAD_WIDTH)
        task = latent_task(*operands, _options(options), d)
    else:
        raise InvalidArgumentError(
            "operands",
            "5 (q_nope, q_rope, cache, w_uk, w_uv), 3 (q_latent, q_rope, cache) or sizes by name",
            len(operands),
        )
    runs_on = task.q.device.type
    spec = spec_for(runs_on) if device_name is None else device_spec(device_name)
    return choose(task.shape(), spec, kernel=kernel, runs_on=runs_on)[0]


def execute(task: AttentionTask, kernel: str) -> Attended:
    """Compute a checked call as `run`; inside of a traced program, by its operator."""
    if not _is_compiling():
        return run(task, kernel)
    if task.prefix is not None:
        raise UnsupportedError("prefix: expected none in a traced program, got one")
    from mla_var3.attention.ops import traced

    output, lse = traced(task, kernel)
    output = output if task.out is None else task.out.copy_(output)
    return output, task.with_empty_sums(lse), None


def _execute_and_keep(
    task: AttentionTask, kernel: str, key: CallKey | None, cache: Cache, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Compute a checked call, and keep its launch for the next calls of its key."""
    output, lse, launch = execute(task, kernel)
    keep_replay(key, task, launch, cache, options)
    return output, lse


def _options(given: dict[str, Any]) -> Options:
    _require_names("option", given, _OPTION_NAMES)
    return Options(**given)


def _require_names(kind: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise UnknownNameError(kind, name, known)


def _shape_of(sizes: dict[str, Any]) -> CallShape:
    _require_names("size", sizes, _SIZE_NAMES)
    if "shared" not in sizes and "prefix" in sizes:
        sizes = {**sizes, "shared": sizes["prefix"]}
    for name in ("b", "s", "t", "h"):
        if name not in sizes:
            raise InvalidArgumentError(name, "a positive integer", "nothing")
    shape = CallShape(**sizes)
    if shape.causal and not shape.ragged and shape.s > shape.t:
        raise InvalidArgumentError("s", f"at most t={shape.t} (causal)", shape.s)
    if shape.tree and not shape.causal:
        raise InvalidArgumentError("tree", "False with causal=False", True)
    for name in ("window", "prefix", "shared", "prefix_copies"):
        if getattr(shape, name) > shape.t:
            expected = f"an integer from 0 to t={shape.t}"
            raise InvalidArgumentError(name, expected, getattr(shape, name))
    if shape.groups > shape.b:
        raise InvalidArgumentError("groups", f"an integer from 1 to b={shape.b}", shape.groups)
    if shape.groups > 1 and not (shape.shared or shape.prefix_copies):
        raise InvalidArgumentError("groups", "1 without a shared prefix", shape.groups)
    return shape
