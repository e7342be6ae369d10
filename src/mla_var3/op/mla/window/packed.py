"""Decompressed keys and values in 8 bits, laid out as the matrix units of Hopper read them.

Products of 8-bit numbers take their second operand with neighbours along the sum only: along the
columns of a head for keys, along the tokens for values. So values are stored transposed, 16 tokens
at a time. And where a product of scores leaves the probabilities of tokens 0, 1, 8 and 9 in one
thread, the next product wants four neighbours there: each group of 16 tokens is kept in
`TOKEN_ORDER`, in which these four are neighbours, so that probabilities need not move between
threads.

Slots are padded to whole blocks of 64. A padded slot holds NaN, like every slot without a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.window.quantise import E4M3, QuantisedRows, quantise

SLOT_MULTIPLE = 64
TOKEN_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Which token of a group of 16 is at each position."""
TOKEN_GROUP = len(TOKEN_ORDER)
# Token 8 x + 2 y + z of a group is at position 4 y + 2 x + z.
_BY_POSITION = (4, 2, 2)  # y, x, z
_BY_TOKEN = (2, 4, 2)  # x, y, z
_NAN_BYTE = 0x7F
"""NaN in e4m3."""


class PackedWindow(NamedTuple):
    """Keys and values in 8 bits; slots are in order, except for the tokens of `values`.

    Attributes:
        keys: float8_e4m3fn, `[b, h, slots, d]`.
        values: float8_e4m3fn, `[b, h, slots / 16, v, 16]`, the last in `TOKEN_ORDER`.
        scales: float32, `[b, h, slots, 2]`: the key's, and the binary logarithm of the value's, a
            whole number.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def zeros(
        cls, b: int, h: int, slots: int, d: int, v: int, device: torch.device
    ) -> PackedWindow:
        """A window of zeros; slots are a multiple of 64."""
        return cls(
            torch.zeros((b, h, slots, d), dtype=E4M3, device=device),
            torch.zeros((b, h, slots // TOKEN_GROUP, v, TOKEN_GROUP), dtype=E4M3, device=device),
            torch.zeros((b, h, slots, 2), dtype=torch.float32, device=device),
        )

    def part(self, first: int, last: int) -> PackedWindow:
        """The slots `first..last-1`, both multiples of 64."""
        groups = slice(first // TOKEN_GROUP, last // TOKEN_GROUP)
        return PackedWindow(
            self.keys[:, :, first:last], self.values[:, :, groups], self.scales[:, :, first:last]
        )

    def by_slot(
        self, requests: torch.Tensor, slots: torch.Tensor
    ) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        """Views of keys, values and scales, each with the indices of slots `[m]` of requests `[m]`.

        Returns:
            Views that give `[m, h, d]`, `[m, h, v]` (both as bytes) and `[m, h, 2]` at the indices.
        """
        values = self.values.view(torch.uint8).unflatten(-1, _BY_POSITION)  # b h g v y x z
        place = (slots // TOKEN_GROUP, slots // 8 % 2, slots // 2 % 4, slots % 2)
        return [
            (self.keys.view(torch.uint8).transpose(1, 2), (requests, slots)),
            (values.permute(0, 2, 5, 4, 6, 1, 3), (requests, *place)),
            (self.scales.transpose(1, 2), (requests, slots)),
        ]


def padded_slots(n: int) -> int:
    """Slots that a window of `n` tokens has when it is packed."""
    return -(-n // SLOT_MULTIPLE) * SLOT_MULTIPLE


def quantise_tokens(
    keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys `[m, h, d]` and values `[m, h, v]` in 8 bits, as `PackedWindow.by_slot` takes them.

    Nothing is read back.

    Returns:
        Bytes of the keys and of the values, and their scales `[m, h, 2]`.
    """
    k, v = quantise(keys), quantise(values, powers_of_two=True)
    scales = torch.stack([k.scales, _exponents(v.scales)], dim=-1)
    return k.values.view(torch.uint8), v.values.view(torch.uint8), scales


def pack_window(k: QuantisedRows, v: QuantisedRows) -> PackedWindow:
    """Lays out quantised keys and values `[b, h, n, d]`; numbers and scales stay what they are.

    The scales of the values are powers of two.
    """
    if k.values.dim() != 4:
        raise InvalidArgumentError("k", "[b, h, n, d]", list(k.values.shape))
    if v.values.dim() != 4 or v.values.shape[:3] != k.values.shape[:3]:
        b, h, n = k.values.shape[:3]
        raise InvalidArgumentError("v", f"[{b}, {h}, {n}, v]", list(v.values.shape))
    odd = ~v.scales.isnan() & (torch.frexp(v.scales).mantissa != 0.5)
    if not odd.is_meta and bool(odd.any()):
        expected = "scales that are powers of two, as quantise(..., powers_of_two=True) makes them"
        raise InvalidArgumentError("v", expected, "others")
    n = k.values.shape[2]
    slots = padded_slots(n)
    grouped = _pad_bytes(v.values, slots).unflatten(2, (-1, *_BY_TOKEN))  # b h g x y z v
    scales = torch.stack([k.scales, _exponents(v.scales)], dim=-1)
    return PackedWindow(
        keys=_pad_bytes(k.values, slots).view(E4M3),
        values=grouped.permute(0, 1, 2, 6, 4, 3, 5).flatten(4).contiguous().view(E4M3),
        scales=functional.pad(scales, (0, 0, 0, slots - n), value=torch.nan),
    )


def unpack_window(packed: PackedWindow, n: int) -> tuple[QuantisedRows, QuantisedRows]:
    """The quantised keys and values of the `n` tokens that were packed."""
    keys, values, scales = packed
    b, h, slots, _ = keys.shape
    if slots % SLOT_MULTIPLE:
        raise InvalidArgumentError("keys", f"slots in multiples of {SLOT_MULTIPLE}", slots)
    width = values.shape[3] if values.dim() == 5 else keys.shape[3]
    for name, tensor, shape in (
        ("values", values, (b, h, slots // TOKEN_GROUP, width, TOKEN_GROUP)),
        ("scales", scales, (b, h, slots, 2)),
    ):
        if tuple(tensor.shape) != shape:
            raise InvalidArgumentError(name, list(shape), list(tensor.shape))
    if not 0 <= n <= slots:
        raise InvalidArgumentError("n", f"an integer from 0 to {slots}", n)
    grouped = values.view(torch.uint8).unflatten(-1, _BY_POSITION)  # b h g v y x z
    tokens = grouped.permute(0, 1, 2, 5, 4, 6, 3).reshape(b, h, slots, width).view(E4M3)
    return (
        QuantisedRows(keys[:, :, :n], scales[:, :, :n, 0]),
        QuantisedRows(tokens[:, :, :n], scales[:, :, :n, 1].exp2()),
    )


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    """Binary logarithms of powers of two, in float32; NaN stays."""
    exponents = torch.frexp(scales).exponent - 1  # a mantissa is at least 0.5
    return torch.where(scales.isnan(), torch.nan, exponents.float())


def _pad_bytes(rows: torch.Tensor, slots: int) -> torch.Tensor:
    """The bytes of `[..., n, d]`, as `[..., slots, d]` with NaN in the slots that are new."""
    missing = slots - rows.shape[-2]
    return functional.pad(rows.view(torch.uint8), (0, 0, 0, missing), value=_NAN_BYTE)
