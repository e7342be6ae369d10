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
from mla_var3.op.mla.window.quantise import E4M3, QuantisedRows

SLOT_MULTIPLE = 64
TOKEN_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Which token of a group of 16 is at each position."""
TOKEN_GROUP = len(TOKEN_ORDER)
_NAN_BYTE = 0x7F
"""NaN in e4m3."""


class PackedWindow(NamedTuple):
    """Keys and values in 8 bits; slots are in order, except for the tokens of `values`.

    Attributes:
        keys: float8_e4m3fn, `[b, h, slots, d]`.
        values: float8_e4m3fn, `[b, h, slots / 16, d, 16]`, the last in `TOKEN_ORDER`.
        scales: float32, `[b, h, slots, 2]`: the key's, and the binary logarithm of the value's, a
            whole number.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor


def padded_slots(n: int) -> int:
    """Slots that a window of `n` tokens has when it is packed."""
    return -(-n // SLOT_MULTIPLE) * SLOT_MULTIPLE


def pack_window(k: QuantisedRows, v: QuantisedRows) -> PackedWindow:
    """Lays out quantised keys and values; their numbers and scales stay what they are.

    Args:
        k: Keys, `[b, h, n, d]` with scales `[b, h, n]`.
        v: Values, likewise; their scales are powers of two.
    """
    if k.values.dim() != 4:
        raise InvalidArgumentError("k", "[b, h, n, d]", list(k.values.shape))
    if v.values.shape != k.values.shape:
        raise InvalidArgumentError("v", list(k.values.shape), list(v.values.shape))
    exponents = _exponents(v.scales)
    b, h, n, d = k.values.shape
    slots = padded_slots(n)
    grouped = _pad_bytes(v.values, slots).view(b, h, slots // TOKEN_GROUP, TOKEN_GROUP, d)
    order = torch.tensor(TOKEN_ORDER, device=grouped.device)
    return PackedWindow(
        keys=_pad_bytes(k.values, slots).view(E4M3),
        values=grouped.index_select(3, order).transpose(3, 4).contiguous().view(E4M3),
        scales=functional.pad(
            torch.stack([k.scales, exponents], dim=-1), (0, 0, 0, slots - n), value=torch.nan
        ),
    )


def unpack_window(packed: PackedWindow, n: int) -> tuple[QuantisedRows, QuantisedRows]:
    """The quantised keys and values that were packed.

    Args:
        packed: Of `pack_window`.
        n: Tokens of the window, without the padding.
    """
    keys, values, scales = packed
    b, h, slots, d = keys.shape
    if slots % SLOT_MULTIPLE:
        raise InvalidArgumentError("keys", f"slots in multiples of {SLOT_MULTIPLE}", slots)
    groups = slots // TOKEN_GROUP
    for name, tensor, shape in (
        ("values", values, (b, h, groups, d, TOKEN_GROUP)),
        ("scales", scales, (b, h, slots, 2)),
    ):
        if tuple(tensor.shape) != shape:
            raise InvalidArgumentError(name, list(shape), list(tensor.shape))
    if not 0 <= n <= slots:
        raise InvalidArgumentError("n", f"an integer from 0 to {slots}", n)
    places = [TOKEN_ORDER.index(token) for token in range(TOKEN_GROUP)]
    places_tensor = torch.tensor(places, device=values.device)
    tokens = values.view(torch.uint8).index_select(4, places_tensor).transpose(3, 4)
    return (
        QuantisedRows(keys[:, :, :n], scales[:, :, :n, 0]),
        QuantisedRows(
            tokens.reshape(b, h, slots, d).view(E4M3)[:, :, :n], scales[:, :, :n, 1].exp2()
        ),
    )


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    """Binary logarithms of powers of two, in float32; NaN stays."""
    mantissas, exponents = torch.frexp(scales)  # a mantissa is at least 0.5
    known = ~scales.isnan()
    if not scales.is_meta and bool((known & (mantissas != 0.5)).any()):
        expected = "scales that are powers of two, as quantise(..., powers_of_two=True) makes them"
        raise InvalidArgumentError("v", expected, "others")
    return torch.where(known, (exponents - 1).float(), torch.nan)


def _pad_bytes(rows: torch.Tensor, slots: int) -> torch.Tensor:
    """The bytes of `[..., n, d]`, as `[..., slots, d]` with NaN in the slots that are new."""
    missing = slots - rows.shape[-2]
    return functional.pad(rows.view(torch.uint8), (0, 0, 0, missing), value=_NAN_BYTE)
