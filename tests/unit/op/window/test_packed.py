"""The 8-bit window as the kernels read it: order, padding, round trip, errors."""

import pytest
import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.window.packed import (
    SLOT_MULTIPLE,
    TOKEN_ORDER,
    pack_window,
    padded_slots,
    unpack_window,
)
from mla_var3.op.mla.window.quantise import E4M3, QuantisedRows, dequantise, quantise

B, H, D = 2, 3, 32


def window(n: int, generator: torch.Generator) -> tuple[QuantisedRows, QuantisedRows]:
    rows = torch.randn(2, B, H, n, D, generator=generator)
    spread = torch.logspace(-3, 3, max(n, 1))[:n, None]  # every token has another scale
    return quantise(rows[0] * spread), quantise(rows[1] / spread, powers_of_two=True)


@pytest.mark.parametrize(
    ("n", "slots"), [(0, 0), (1, 64), (16, 64), (63, 64), (64, 64), (65, 128), (192, 192)]
)
def test_slots_are_whole_blocks_and_come_back(n, slots, generator):
    assert padded_slots(n) == slots
    before = window(n, generator)
    packed = pack_window(*before)
    assert packed.keys.shape == (B, H, slots, D)
    assert packed.values.shape == (B, H, slots // 16, D, 16)
    assert packed.scales.shape == (B, H, slots, 2)
    assert packed.keys.dtype is packed.values.dtype is E4M3
    assert packed.scales.dtype is torch.float32
    assert all(tensor.is_contiguous() for tensor in packed)
    for found, given in zip(unpack_window(packed, n), before, strict=True):
        assert torch.equal(found.values.view(torch.uint8), given.values.view(torch.uint8))
        assert torch.equal(found.scales, given.scales)


def test_where_each_token_lies(generator):
    """Token by token, not by the code under test."""
    n = 100
    k, v = window(n, generator)
    packed = pack_window(k, v)
    for slot in range(padded_slots(n)):
        token = slot // 16 * 16 + TOKEN_ORDER[slot % 16]
        column = packed.values[:, :, slot // 16, :, slot % 16].float()
        if token < n:
            assert torch.equal(column, v.values[:, :, token].float())
        else:
            assert bool(column.isnan().all())
        if slot < n:
            assert torch.equal(packed.keys[:, :, slot].float(), k.values[:, :, slot].float())
            assert torch.equal(packed.scales[:, :, slot, 0], k.scales[:, :, slot])
            assert torch.equal(2.0 ** packed.scales[:, :, slot, 1], v.scales[:, :, slot])
        else:
            for tensor in (packed.keys[:, :, slot], packed.scales[:, :, slot]):
                assert bool(tensor.float().isnan().all())


def test_slots_without_a_token_stay_poisoned(generator):
    rows = torch.randn(B, H, 20, D, generator=generator)
    rows[:, :, 7] = torch.nan
    k, v = unpack_window(pack_window(quantise(rows), quantise(rows, powers_of_two=True)), 20)
    for found in (dequantise(k), dequantise(v)):
        assert bool(found[:, :, 7].isnan().all())
        assert not bool(found[:, :, :7].isnan().any())


def test_wrong_operands_are_named(generator):
    k, v = window(10, generator)
    packed = pack_window(k, v)
    flat = QuantisedRows(k.values[0], k.scales[0])
    short = QuantisedRows(v.values[:, :, :9], v.scales[:, :, :9])
    others = QuantisedRows(v.values, v.scales * 1.5)

    def unpacked(n: int = 10, **changes: torch.Tensor) -> object:
        return unpack_window(packed._replace(**changes), n)

    for message, call in {
        r"k: expected \[b, h, n, d\]": lambda: pack_window(flat, flat),
        r"v: expected \[2, 3, 10, v\]": lambda: pack_window(k, short),
        "v: expected scales that are powers of two": lambda: pack_window(k, others),
        f"keys: expected slots in multiples of {SLOT_MULTIPLE}, got 10": lambda: unpacked(
            keys=packed.keys[:, :, :10]
        ),
        r"values: expected \[2, 3, 4, 32, 16\]": lambda: unpacked(values=packed.keys),
        r"scales: expected \[2, 3, 64, 2\]": lambda: unpacked(scales=packed.scales[..., :1]),
        "n: expected an integer from 0 to 64, got 65": lambda: unpacked(65),
    }.items():
        with pytest.raises(InvalidArgumentError, match=message):
            call()
