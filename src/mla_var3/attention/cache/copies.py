"""Decompressed copies of part of a latent cache: a ring of the newest tokens, a shared prefix.

The latent cache always holds every token, so a kernel that reads no copy loses only time. A ring in
8 bits is laid out as its kernel reads it (`op/mla/window/packed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.cache.tokens import masked_put
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.request.checks import Shape, require_tensor
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.window.packed import PackedWindow, quantise_tokens
from mla_var3.op.mla.window.quantise import E4M3
from mla_var3.op.product import product


def decompress_rows(latent: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[m, h, d]` and values `[m, h, v]` of latent rows `[m, k]`, in the input dtype."""
    heads, width = w_uk.shape[0], w_uk.shape[1]
    keys = product(latent, w_uk.reshape(heads * width, -1).T)
    values = product(latent, w_uv.transpose(0, 1).reshape(latent.shape[-1], -1))
    return keys.view(-1, heads, width), values.view(-1, heads, w_uv.shape[2])


def copy_row(rows: Tensor, source: Tensor, targets: Tensor) -> None:
    """Copy the row `source`, int64 `[1]`, to the rows where `targets`, bool `[b]`, is true."""
    if rows.dtype.itemsize == 1:  # few operations of torch know e4m3
        rows = rows.view(torch.uint8)
    places = torch.where(targets, torch.arange(targets.shape[0], device=targets.device), source)
    rows.index_copy_(0, places, rows[source].expand_as(rows))


def _as_bytes(part: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    """A tensor of one dtype with 8 bits as another; anything else as it is."""
    return part.view(wanted) if isinstance(part, Tensor) and part.dtype is given else part


class Window:
    """A ring of the newest tokens of every request, decompressed.

    Position x is in slot x % n. The ring of a request holds the positions from `start` to its
    length; older ones are attended latent. Dropping tokens shortens the range from above. The slots
    below `start` have been overwritten by the dropped tokens, so the ring stays shorter than n
    until new tokens come or `refill` decompresses the missing ones again.

    Attributes:
        k_new, v_new, scales: `[b, h, n, d]` and `[b, h, n, v]`; in 8 bits as in `PackedWindow`,
            otherwise without scales.
        k_rope_new: `[b, n, p]`, the rope keys of the same tokens once more: a kernel that reads the
            slots in their order needs all parts of a token in the same slot.
        start: int32 `[b]`, the oldest position in the ring.
        dtype: of the tokens that are written.
    """

    def __init__(
        self,
        b: int,
        h: int,
        n: int,
        d: int,
        v: int,
        p: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool = False,
    ) -> None:
        """Make an empty ring; one in 8 bits has a multiple of 64 slots."""
        self.scales: Tensor | None = None
        if fp8:
            self.k_new, self.v_new, self.scales = PackedWindow.zeros(b, h, n, d, v, device)
        else:
            self.k_new = torch.zeros((b, h, n, d), dtype=dtype, device=device)
            self.v_new = torch.zeros((b, h, n, v), dtype=dtype, device=device)
        self.dtype = dtype
        self.k_rope_new = torch.zeros((b, n, p), dtype=dtype, device=device)
        self.start = torch.zeros((b,), dtype=torch.int32, device=device)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled or copied: as bytes where pickle does not know the dtype."""
        return {name: _as_bytes(part, E4M3, torch.uint8) for name, part in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, part in state.items():
            setattr(self, name, _as_bytes(part, torch.uint8, E4M3))

    @property
    def n(self) -> int:
        return self.k_new.shape[2]

    def decompressed(
        self, latent: Tensor, leading: Shape, given: Mapping[str, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Keys `[m, h, d]` and values `[m, h, v]` of new tokens, whose latent rows are `[m, k]`.

        As given in `k_new` and `v_new`, `[*leading, h, ...]`, or from `w_uk` and `w_uv`.
        """
        names = [name for name, value in given.items() if value is not None]
        _, h, _, d = self.k_new.shape
        v = ("v", self.v_new.shape[3])
        shapes: dict[str, Shape]
        if names == ["w_uk", "w_uv"]:
            k = ("k", latent.shape[-1])
            shapes = {"w_uk": [("h", h), ("d", d), k], "w_uv": [("h", h), k, v]}
        elif names == ["k_new", "v_new"]:
            shapes = {"k_new": [*leading, ("h", h), ("d", d)], "v_new": [*leading, ("h", h), v]}
        else:
            expected = "k_new and v_new, or w_uk and w_uv, for a cache with a window"
            raise InvalidArgumentError("k_new", expected, ", ".join(names) or "none of them")
        dtypes, device = [self.dtype], self.k_new.device
        first, second = (
            require_tensor(name, given[name], shape, dtypes, device)
            for name, shape in shapes.items()
        )
        if "w_uk" in shapes:
            return decompress_rows(latent, first, second)
        return first.flatten(0, -3), second.flatten(0, -3)

    def write(
        self,
        requests: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        rope: Tensor,
        valid: Tensor,
    ) -> None:
        """Put the valid tokens into their slots, which must differ.

        Requests and positions are int64 `[m]`, the rows `[m, h, d]`, `[m, h, v]` and `[m, p]`.
        """
        ring = self.k_new, self.v_new, self.scales, self.k_rope_new
        _put(ring, (requests, positions % self.n), keys, values, rope, valid)

    def grow(self, lengths: Tensor) -> None:
        """After tokens were written up to `lengths`, int32: the oldest slots hold newer tokens."""
        self.start.clamp_(min=lengths - self.n)

    def fork(self, request: Tensor, targets: Tensor) -> None:
        """Copy the ring of one request, int64 `[1]`, to others, bool `[b]`."""
        for part in (self.k_new, self.v_new, self.scales, self.k_rope_new, self.start):
            if part is not None:
                copy_row(part, request, targets)

    def shrink(self, lengths: Tensor) -> None:
        """After tokens at and beyond `lengths`, int32, were dropped."""
        self.start.clamp_(max=lengths)


def fill_ring(view: CacheView, w_uk: Tensor, w_uv: Tensor, oldest: Tensor, most: int) -> None:
    """Decompress tokens that a ring lacks into their slots, in place.

    The lengths of the view are those that its ring was filled for. The ring has to hold the
    positions from `oldest` on, int64 `[b]`; of each request at most `most` are missing.
    """
    keys, values, starts = view.k_new, view.v_new, view.window_start
    if keys is None or values is None or starts is None or most <= 0:
        return
    start = torch.minimum(starts, view.lengths).long()
    positions = start[:, None] - 1 - torch.arange(most, device=start.device)
    valid = (positions >= oldest[:, None]).flatten()
    latent, rope = (rows.flatten(0, 1) for rows in view.rows(positions, w_uk.dtype))
    requests = torch.arange(start.shape[0], device=start.device)[:, None].expand_as(positions)
    places = (requests.flatten(), (positions % view.window).flatten())
    ring = keys, values, view.window_scales, view.k_rope_new
    _put(ring, places, *decompress_rows(latent, w_uk, w_uv), rope, valid)
    lowest = torch.maximum(start - most, oldest)
    starts.copy_(torch.minimum(starts.long(), lowest))


def _put(
    ring: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    places: tuple[Tensor, Tensor],
    new_keys: Tensor,
    new_values: Tensor,
    new_rope: Tensor,
    valid: Tensor,
) -> None:
    """Write the valid tokens into a ring of keys, values, scales and rope keys.

    `places` are request and slot of each. A ring in 8 bits, which has scales, rounds them.
    """
    keys, values, scales, rope = ring
    if rope is not None:
        masked_put(rope, places, new_rope, valid)
    if scales is None:
        masked_put(keys.transpose(1, 2), places, new_keys, valid)
        masked_put(values.transpose(1, 2), places, new_values, valid)
        return
    targets = PackedWindow(keys, values, scales).by_slot(*places)
    for (target, index), rows in zip(targets, quantise_tokens(new_keys, new_values), strict=True):
        masked_put(target, index, rows, valid)


class Prefix:
    """The first tokens of all requests, the same for each, decompressed once.

    Keys and values are `[h, length, d]` and `[h, length, v]`; their rope keys, `[length, p]`, are
    beside those in the latent cache.
    """

    def __init__(
        self, h: int, length: int, d: int, v: int, p: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = length
        self.k_prefix = torch.zeros((h, length, d), dtype=dtype, device=device)
        self.v_prefix = torch.zeros((h, length, v), dtype=dtype, device=device)
        self.k_rope_prefix = torch.zeros((length, p), dtype=dtype, device=device)

    def write(self, keys: Tensor, values: Tensor, rope: Tensor) -> None:
        """Fill it with keys `[length, h, d]`, values `[length, h, v]` and rope `[length, p]`."""
        self.k_prefix.copy_(keys.transpose(0, 1))
        self.v_prefix.copy_(values.transpose(0, 1))
        self.k_rope_prefix.copy_(rope)
