"""Checks of the values of a call: always where the host has them, else with HYPER_MLA_DEBUG=1.

Without the variable, values on a GPU are never read. A wrong one then never leads outside of a
buffer: lengths beyond the capacity end there, block table entries are clamped.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from mla_var3.attention.request.checks import (
    debug_on,
    readable,
    require_bounds,
    require_range,
)
from mla_var3.attention.request.task import AttentionTask
from mla_var3.errors import InvalidArgumentError


def check_values(task: AttentionTask) -> None:
    """Check lengths, block table, window and query bounds of a call, where they can be read.

    Raises:
        InvalidArgumentError: A value cannot be right; names the argument and the first culprit.
        UnsupportedError: The variable is set while a CUDA graph is captured.
    """
    cache = task.cache
    limit, limit_name = cache.capacity, "t"
    if task.max_kv is not None and task.max_kv < limit:
        limit, limit_name = task.max_kv, "max_kv"
    require_range("lengths", cache.lengths, 0, limit, limit_name)
    if task.cu_seqlens_q is not None:
        require_bounds("cu_seqlens_q", task.cu_seqlens_q, task.q.shape[0])
    if readable(cache.lengths):
        _check_block_table(task)
        _check_queries(task)
        _check_window(task)


def _check_window(task: AttentionTask) -> None:
    start, lengths = task.cache.window_start, task.cache.lengths
    if start is None:
        return
    for request, (first, length) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
        if first < max(0, length - task.cache.window):
            raise InvalidArgumentError(
                f"window_start[{request}]",
                f"a position among the newest n={task.cache.window} of {length}",
                first,
            )


def _check_queries(task: AttentionTask) -> None:
    lengths = task.cache.lengths.tolist()
    if task.cu_seqlens_q is None:
        counts = [task.q.shape[1]] * len(lengths)
    else:
        counts = [b - a for a, b in pairwise(task.cu_seqlens_q.tolist())]
        if task.max_q is not None and max(counts, default=0) > task.max_q:
            raise InvalidArgumentError("max_q", f"at least {max(counts)}", task.max_q)
    if not debug_on() or not task.causal or task.total_lengths is not None:
        return
    for request, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        # A request without tokens is padding of the batch; its rows are zero by definition.
        if count > length > 0:
            raise InvalidArgumentError(
                f"lengths[{request}]", f"at least the s={count} query tokens, or 0", length
            )


def _check_block_table(task: AttentionTask) -> None:
    table, page = task.cache.block_table, task.cache.page_size
    if table is None or page is None:
        return
    used = -(-task.cache.lengths // page)
    columns = torch.arange(table.shape[1], device=table.device)
    # Entries beyond a request's tokens may be anything.
    entries = torch.where(columns < used[:, None], table, 0)
    last = task.cache.latent.shape[0] - 1
    wrong = ((entries < 0) | (entries > last)).nonzero()
    if len(wrong):
        request, column = wrong[0].tolist()
        raise InvalidArgumentError(
            f"block_table[{request}, {column}]",
            f"a page from 0 to {last}",
            int(table[request, column]),
        )
