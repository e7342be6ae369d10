"""The 8-bit formats of the latent cache: bytes in memory, rounding bounds, special values."""

import math
import struct

import pytest
import torch

from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.op.mla.cache_formats import (
    DS_MLA,
    FORMATS,
    PER_TENSOR,
    PER_TOKEN,
    QuantisedCache,
    cache_format,
    dequantise,
    format_of,
    quantise,
)
from mla_var3.op.mla.window.quantise import E4M3

K, P = 512, 64
FORMAT = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def tokens(generator: torch.Generator, count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 rows whose magnitudes fall from 1 to 2**-14 over the columns."""
    fall = torch.logspace(0, -14, K, base=2.0, dtype=torch.float64)
    latent = torch.randn(count, K, generator=generator, dtype=torch.float64) * fall
    return latent, torch.randn(count, P, generator=generator, dtype=torch.float64)


def test_bytes_of_a_token():
    assert [entry.row_bytes(K, P) for entry in (PER_TOKEN, DS_MLA, PER_TENSOR)] == [644, 656, 576]
    assert cache_format("fp8_ds_mla") is DS_MLA
    with pytest.raises(UnknownNameError, match="cache format"):
        cache_format("fp4")


@FORMAT
def test_rounding_stays_within_half_a_unit(fmt, generator):
    latent, rope = tokens(generator)
    rounded = quantise(latent, rope, fmt)
    found, found_rope = dequantise(rounded, torch.float64)
    scales = rounded.scales.double()
    if scales.dim() > 1:
        scales = scales.repeat_interleave(K // scales.shape[-1], dim=-1)
    bound = torch.maximum(latent.abs() * 2**-4, scales * 2**-10) * (1 + 1e-6)
    assert ((found - latent).abs() <= bound).all()
    assert format_of(rounded) is fmt
    unit = 2**-4 if fmt is PER_TENSOR else 2**-8
    assert ((found_rope - rope).abs() <= (rope.abs() * unit).clamp(min=2**-10) * 1.0001).all()


def test_finer_scales_round_better(generator):
    latent, rope = tokens(generator)
    # Two groups of columns whose magnitudes differ by 2**20: one scale cannot serve both.
    latent[:, K // 2 :] *= 2**-20
    small = slice(K // 2, None)
    errors = {}
    for fmt in FORMATS.values():
        found = dequantise(quantise(latent, rope, fmt), torch.float64)[0]
        errors[fmt.name] = float((found - latent)[:, small].norm() / latent[:, small].norm())
    assert errors["fp8_ds_mla"] < 0.05 < 0.9 < errors["fp8_per_token"] <= 1.0
    assert errors["fp8"] == 1.0


@FORMAT
def test_special_values(fmt):
    latent, rope = torch.zeros(5, K), torch.zeros(5, P)
    latent[1] = math.nan
    latent[2, 3], latent[2, 4], latent[2, 5] = math.inf, -math.inf, 2.0
    latent[3, 0], latent[3, 1] = math.nan, 100.0
    latent[4] = 1e-42  # subnormal in float32
    rounded = quantise(latent, rope, fmt)
    found, found_rope = dequantise(rounded)
    assert torch.equal(found[0], latent[0]) and not found_rope.any()
    assert found[1].isnan().all()
    assert found[2].isnan().nonzero().flatten().tolist() == [3, 4]
    assert found[2, 5] == 2.0
    assert found[3].isnan().nonzero().flatten().tolist() == [0]
    assert abs(found[3, 1] - 100.0) <= 100.0 / 16
    assert found[4].isfinite().all() and (found[4].abs() <= 1e-40).all()
    if fmt is not PER_TENSOR:
        assert (rounded.scales[0] == 1.0).all() and (rounded.scales[4] > 0.0).all()
        assert rounded.scales.isfinite().all()


def test_one_scale_saturates(generator):
    latent, rope = tokens(generator, 2)
    latent[0, 0], rope[1, 0] = 1e6, -1e6
    scale = torch.tensor([0.5])
    found, found_rope = dequantise(quantise(latent, rope, PER_TENSOR, scale))
    assert found[0, 0] == 224.0 and found_rope[1, 0] == -224.0
    with pytest.raises(InvalidArgumentError, match="scale: expected one float32"):
        quantise(latent, rope, PER_TENSOR, torch.ones(2))
    with pytest.raises(InvalidArgumentError, match="scale: expected none with fp8_ds_mla"):
        DS_MLA.parts(torch.zeros(1, 4, 656, dtype=torch.uint8), K, P, scale)


def e4m3(byte: int) -> float:
    return float(torch.tensor([byte], dtype=torch.uint8).view(E4M3).float())


@FORMAT
@pytest.mark.parametrize("dtype", [torch.uint8, E4M3])
def test_parts_of_a_buffer_that_was_written_byte_by_byte(fmt, dtype, generator):
    pages, page, row = 3, 4, fmt.row_bytes(K, P)
    raw = torch.randint(0, 120, (pages, page, row), generator=generator, dtype=torch.uint8)
    # Pages of an engine's pool may be spaced out.
    pool = torch.zeros(2 * pages, page, row, dtype=torch.uint8)
    pool[::2] = raw
    parts = fmt.parts(pool.view(dtype)[::2], K, P)
    data = [bytes(raw[index].flatten().tolist()) for index in range(pages)]
    number, token = 2, 3
    latent_at, scales_at, rope_at = {
        "fp8_per_token": (token * 512, 4 * 640 + token * 4, 4 * 512 + token * 128),
        "fp8_ds_mla": (token * 656, token * 656 + 512, token * 656 + 528),
        "fp8": (token * 576, None, token * 576 + 512),
    }[fmt.name]
    content = data[number]
    assert float(parts.latent[number, token, 5].float()) == e4m3(content[latent_at + 5])
    if fmt is PER_TENSOR:
        assert float(parts.rope[number, token, 7].float()) == e4m3(content[rope_at + 7])
        assert parts.scales.tolist() == [1.0]
    else:
        (high,) = struct.unpack_from("<H", content, rope_at + 14)
        expected = struct.unpack("<f", struct.pack("<I", high << 16))[0]
        assert float(parts.rope[number, token, 7]) == expected
        last = fmt.scales(K) - 1
        (scale,) = struct.unpack_from("<f", content, scales_at + 4 * last)
        assert float(parts.scales[number, token, last]) == pytest.approx(scale, nan_ok=True)
    assert parts.latent.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("fmt", "shape", "k", "message"),
    [
        (DS_MLA, (1, 4, 644), K, r"pages: expected \[num_pages, page, 656\]"),
        (DS_MLA, (1, 4, 100), 200, "k: expected a multiple of 128"),
        (DS_MLA, (1, 4, 260), 128, "k: expected a multiple of 128, 256 or more"),
        (PER_TOKEN, (1, 3, 644), K, "pages of a multiple of 4 tokens"),
        (PER_TOKEN, (4, 644), K, r"pages: expected \[num_pages, page, 644\]"),
    ],
)
def test_wrong_buffers(fmt, shape, k, message):
    with pytest.raises(InvalidArgumentError, match=message):
        fmt.parts(torch.zeros(shape, dtype=torch.uint8), k, P)
    with pytest.raises(InvalidArgumentError, match="p: expected rows of a multiple of 4 bytes"):
        DS_MLA.require_widths(K, P - 1)
    with pytest.raises(InvalidArgumentError, match="uint8, int8 or float8_e4m3fn"):
        PER_TENSOR.parts(torch.zeros(1, 4, 576), K, P)


def test_alignment_of_pages():
    """The copy engine of a GPU steps in 16 bytes."""
    for fmt in (PER_TOKEN, DS_MLA, PER_TENSOR):
        parts: QuantisedCache = fmt.parts(torch.zeros(2, 64, fmt.row_bytes(K, P), dtype=E4M3), K, P)
        for rows in (parts.latent, parts.rope):
            assert all(step * rows.element_size() % 16 == 0 for step in rows.stride()[:-1])
            assert rows.storage_offset() * rows.element_size() % 16 == 0
