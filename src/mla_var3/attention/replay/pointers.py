"""The addresses of a launch, taken from the tensors of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

import torch

from mla_var3.attention.replay.key import Tensors

AddressReader = Callable[[Tensors, int, int], tuple[int, ...]]
"""Takes the tensors of a call and the addresses of output and log-sum-exp; all addresses in the
order of a launch."""

_LATENT_ORDER = (
    "q", "q_rope", "latent", "rope", "block_table", "lengths", "cu_seqlens_q", "tree_mask"
)  # fmt: skip
_WHOLE_ORDER = ("w_uk", "w_uv", *_LATENT_ORDER)


def _latent_paged(tensors: Tensors, out: int, sums: int) -> tuple[int, ...]:
    q, q_rope, latent, rope, block_table, lengths = tensors
    return (
        q.data_ptr(), q_rope.data_ptr(), latent.data_ptr(), rope.data_ptr(),
        block_table.data_ptr(), lengths.data_ptr(), 0, 0, out, sums,
    )  # fmt: skip


def _latent_dense(tensors: Tensors, out: int, sums: int) -> tuple[int, ...]:
    q, q_rope, latent, rope, lengths = tensors
    return (
        q.data_ptr(), q_rope.data_ptr(), latent.data_ptr(), rope.data_ptr(),
        0, lengths.data_ptr(), 0, 0, out, sums,
    )  # fmt: skip


def _whole_paged(tensors: Tensors, out: int, sums: int) -> tuple[int, ...]:
    w_uk, w_uv, q, q_rope, latent, rope, block_table, lengths = tensors
    return (
        w_uk.data_ptr(), w_uv.data_ptr(), q.data_ptr(), q_rope.data_ptr(), latent.data_ptr(),
        rope.data_ptr(), block_table.data_ptr(), lengths.data_ptr(), 0, 0, out, sums,
    )  # fmt: skip


def _whole_dense(tensors: Tensors, out: int, sums: int) -> tuple[int, ...]:
    w_uk, w_uv, q, q_rope, latent, rope, lengths = tensors
    return (
        w_uk.data_ptr(), w_uv.data_ptr(), q.data_ptr(), q_rope.data_ptr(), latent.data_ptr(),
        rope.data_ptr(), 0, lengths.data_ptr(), 0, 0, out, sums,
    )  # fmt: skip


# A call that is written out costs half of one that is made for each tensor of a sequence.
_FREQUENT: dict[tuple[str, ...], AddressReader] = {
    ("q", "q_rope", "latent", "rope", "block_table", "lengths"): _latent_paged,
    ("q", "q_rope", "latent", "rope", "lengths"): _latent_dense,
    ("w_uk", "w_uv", "q", "q_rope", "latent", "rope", "block_table", "lengths"): _whole_paged,
    ("w_uk", "w_uv", "q", "q_rope", "latent", "rope", "lengths"): _whole_dense,
}


def address_reader(names: Sequence[str], lengths: torch.Tensor | None) -> AddressReader:
    """What takes the addresses of a launch, in its order, from the tensors of a call.

    Args:
        names: of the call's tensors; the last of two of one name counts. The launch is one of a
            whole call where the weights are among them, and of the latent part otherwise.
        lengths: those of a pair of tensors, where every slot is used, which are kept; None for
            other caches.
    """
    if lengths is None and tuple(names) in _FREQUENT:
        return _FREQUENT[tuple(names)]
    # Addresses that every call has: of nothing, and of lengths that are kept here.
    fixed = (0, 0 if lengths is None else lengths.data_ptr())
    known = {"lengths": 0 if lengths is None else 1}
    places = known | {name: len(fixed) + place for place, name in enumerate(names)}
    order = _WHOLE_ORDER if "w_uk" in places else _LATENT_ORDER
    pick = itemgetter(*(places.get(name, 0) for name in order))
    # The memory of the lengths lives as long as what knows their address.
    return partial(_picked, pick, fixed, lengths)


def _picked(
    pick: Callable[[tuple[int, ...]], tuple[int, ...]],
    fixed: tuple[int, ...],
    lengths: torch.Tensor | None,
    tensors: Tensors,
    out: int,
    sums: int,
) -> tuple[int, ...]:
    return (*pick((*fixed, *[tensor.data_ptr() for tensor in tensors])), out, sums)


def column_reader(rope_at: int) -> AddressReader:
    """The same for a call whose queries and pages hold latent and rope part side by side.

    Its tensors are queries, pages, block table and lengths.

    Args:
        rope_at: bytes from a row's start to its rope part.
    """

    def read(tensors: Tensors, out: int, sums: int) -> tuple[int, ...]:
        q, pages, block_table, lengths = tensors
        row, page = q.data_ptr(), pages.data_ptr()
        return (
            row, row + rope_at, page, page + rope_at, block_table.data_ptr(), lengths.data_ptr(),
            0, 0, out, sums,
        )  # fmt: skip

    return read
