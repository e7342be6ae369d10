"""Checks that need the values of device tensors, asked for by HYPER_MLA_DEBUG=1.

They wait for the device, so they are off by default. Without them a wrong value is never followed
out of bounds by `torch_tiled`: lengths beyond the capacity end there, block table entries are
brought into range.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from mla_var3.attention.request.task import AttentionTask
from mla_var3.errors import InvalidArgumentError, UnsupportedError

VARIABLE = "HYPER_MLA_DEBUG"

# Every call asks. What `os.environ` looks into answers at once; `os.environ` itself translates the
# name and raises and catches two errors where the variable is not set, as it mostly is.
_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_KEY: Any = VARIABLE if _environment is os.environ else os.environ.encodekey(VARIABLE)
_OFF = (None, "", "0", b"", b"0")


def is_on() -> bool:
    """Whether the environment asks for the checks."""
    return _environment.get(_KEY) not in _OFF


def check_values(task: AttentionTask) -> None:
    """Check lengths, block table and query bounds of a call.

    Raises:
        InvalidArgumentError: a value cannot be right; names the argument and the first culprit.
        UnsupportedError: a CUDA graph is being captured, where nothing can be read back.
    """
    if task.q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{VARIABLE}: expected no CUDA graph capture, got one; the checks read from the device"
        )
    lengths = _check_lengths(task)
    _check_queries(task, lengths)
    _check_block_table(task, lengths)


def _check_lengths(task: AttentionTask) -> list[int]:
    cache = task.cache
    lengths: list[int] = cache.lengths.tolist()
    limit = cache.capacity if task.max_kv is None else min(cache.capacity, task.max_kv)
    name = "max_kv" if limit < cache.capacity else "t"
    for request, length in enumerate(lengths):
        if not 0 <= length <= limit:
            raise InvalidArgumentError(
                f"lengths[{request}]", f"a number from 0 to {name}={limit}", length
            )
    if cache.window_start is not None:
        for request, start in enumerate(cache.window_start.tolist()):
            if not max(0, lengths[request] - cache.window) <= start:
                raise InvalidArgumentError(
                    f"window_start[{request}]",
                    f"a position among the newest n={cache.window} of {lengths[request]}",
                    start,
                )
    return lengths


def _check_queries(task: AttentionTask, lengths: list[int]) -> None:
    if task.cu_seqlens_q is None:
        counts = [task.q.shape[1]] * len(lengths)
    else:
        bounds = task.cu_seqlens_q.tolist()
        total = task.q.shape[0]
        ascending = all(a <= b for a, b in pairwise(bounds))
        if bounds[0] != 0 or not ascending or bounds[-1] > total:
            raise InvalidArgumentError(
                "cu_seqlens_q", f"ascending bounds from 0 to at most {total} rows", bounds
            )
        counts = [b - a for a, b in pairwise(bounds)]
        if task.max_q is not None and max(counts, default=0) > task.max_q:
            raise InvalidArgumentError("max_q", f"at least {max(counts)}", task.max_q)
    if not task.causal or task.total_lengths is not None:
        return
    for request, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        # A request without tokens is padding of the batch; its rows are zero by definition.
        if count > length > 0:
            raise InvalidArgumentError(
                f"lengths[{request}]", f"at least the s={count} query tokens, or 0", length
            )


def _check_block_table(task: AttentionTask, lengths: list[int]) -> None:
    table, page = task.cache.block_table, task.cache.page_size
    if table is None or page is None:
        return
    num_pages = task.cache.latent.shape[0]
    for request, (row, length) in enumerate(zip(table.tolist(), lengths, strict=True)):
        for column in range(-(-length // page)):
            if not 0 <= row[column] < num_pages:
                raise InvalidArgumentError(
                    f"block_table[{request}, {column}]",
                    f"a page from 0 to {num_pages - 1}",
                    row[column],
                )
