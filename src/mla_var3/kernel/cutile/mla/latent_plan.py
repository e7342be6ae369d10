"""What the plans of the latent kernels share: their inputs, dense or paged, and the call's options.

    q_latent [b, s, h, k], q_rope [b, s, h, p]; packed: [tokens, h, k] and [tokens, h, p]
    c_kv [b, t, k], k_rope [b, t, p]; paged: [pages, page, k] and [pages, page, p]
    lengths [b] int32         KV length per request
    block_table [b, pages of a request] int32, for a paged cache
    cu_seqlens_q [b+1] int32  first query of each request and the end of the last, for packed ones
    tree [b, s, s] bool       which of the s newest tokens a query sees, within causal order
    scales float32            of an 8-bit cache: [b, t, g] or [pages, page, g], or [1] for all of it

The cache is in the dtype of the queries or in one of the 8-bit formats of
`op/mla/cache_formats.py`, read where it lies: c_kv is e4m3, k_rope bfloat16 or e4m3.

With packed queries s is the most that a request has; further ones, and rows of no request, give 0
and an LSE of -inf. A length beyond the slots of a request, an entry of the table outside of the
pool and a wrong `cu_seqlens_q` are clamped: the result is then wrong, but nothing outside of the
tensors is read or written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cutile.mla.plan import CutilePlan
from mla_var3.kernel.cutile.mla.tilings import LatentTiling, scale_columns
from mla_var3.kernel.mla_plan import sliding_window_field
from mla_var3.kernel.paging import check_pages, dense_inputs, paged_inputs
from mla_var3.op.mla.cache_formats import (
    PER_TENSOR,
    CacheFormat,
    QuantisedCache,
    cache_format,
    dequantise,
    quantise,
)
from mla_var3.op.mla.problem import require_int
from mla_var3.op.mla.window.quantise import E4M3, E4M3_MAX
from mla_var3.runtime.tensors import ALIGNMENT_BYTES, check_tensor, require_view

LatentTilingT = TypeVar("LatentTilingT", bound=LatentTiling)

PAGE_STEP = 16
"""Pages are multiples of this: the shortest KV tile that the tensor cores take."""
CACHES = (None, "fp8", "fp8_per_token", "fp8_ds_mla")
"""Formats of the cache, by the kernels' CACHE (`tile_ops.ONE_SCALE` and the others)."""


class LatentInputs(NamedTuple):
    """The tensors of a call, see the module."""

    q_latent: Tensor
    q_rope: Tensor
    c_kv: Tensor
    k_rope: Tensor
    lengths: Tensor
    block_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    tree: Tensor | None = None
    scales: Tensor | None = None

    @classmethod
    def of(cls, inputs: tuple[Any, ...]) -> LatentInputs:
        """The arguments of `KernelPlan.plan`, by name."""
        return cls(*inputs)


@dataclass(frozen=True)
class LatentOperands:
    """The first arguments of a latent kernel and its options.

    Attributes:
        tensors: queries as rows, cache, lengths, table, bounds and tree, in the order of the
            kernel's arguments. What a call lacks is replaced by something that is not read.
        lead: leading sizes of the outputs, (b, s), or (1, tokens) for packed queries.
        scales: of an 8-bit cache, [.., .., g], or [1, 1, 1] for one scale; the kernel's argument
            after its numbers.
        packed: whether the queries are packed.
        options: the compile-time arguments PAGE, PACKED, TREE, WINDOW and CACHE.
    """

    tensors: tuple[Tensor, ...]
    scales: Tensor
    lead: tuple[int, int]
    packed: bool
    options: tuple[int, ...]

    def results(self, *sizes: int, dtype: torch.dtype, empty: float = 0.0) -> Tensor:
        """A tensor for results; rows of no request, which no kernel writes, are `empty`."""
        like = self.tensors[0]
        if self.packed:
            return like.new_full(sizes, empty, dtype=dtype)
        return like.new_empty(sizes, dtype=dtype)

    def as_given(self, *results: Tensor) -> list[Tensor]:
        """Results [lead, ...] with the leading sizes of the queries."""
        return [result[0] if self.packed else result for result in results]


@dataclass
class LatentPlan(CutilePlan):
    """Plan of a latent kernel."""

    page: int = field(
        default=0,
        metadata={"help": "tokens of a cache page, a multiple of 16; 0 for a dense cache"},
    )
    sliding_window: int = sliding_window_field()
    cache_dtype: str | None = field(
        default=None,
        metadata={"help": "8-bit cache: fp8_per_token, fp8_ds_mla or fp8; none for one in dtype"},
    )

    needs_v: ClassVar[bool] = False
    needs_rope: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page < 0 or self.page % PAGE_STEP:
            raise InvalidArgumentError("page", f"a multiple of {PAGE_STEP}, or 0", self.page)
        require_int("sliding_window", self.sliding_window, minimum=0)
        if self.format is not None:
            self.format.require_widths(self.k, self.p)
            row = self.format.row_bytes(self.k, self.p)
            if not self.format.by_page and row % ALIGNMENT_BYTES:
                expected = f"rows of a multiple of {ALIGNMENT_BYTES} bytes ({self.cache_dtype})"
                raise InvalidArgumentError("k, p", expected, f"{self.k}, {self.p}: {row} bytes")

    @property
    def format(self) -> CacheFormat | None:
        """The format of an 8-bit cache; None for one in the dtype of the queries."""
        return None if self.cache_dtype is None else cache_format(self.cache_dtype)

    @property
    def token_bytes(self) -> int | None:
        """Bytes of a token of an 8-bit cache."""
        return None if self.format is None else self.format.row_bytes(self.k, self.p)

    def candidates(self, tiling: type[LatentTilingT]) -> list[LatentTilingT]:
        """Tilings to choose from, the default first."""
        eight_bit, columns = self.format is not None, scale_columns(self)
        return tiling.candidates(
            self.target.code, self.k, self.page, p=self.p, eight_bit=eight_bit, columns=columns
        )

    def prepare_inputs(self, device: torch.device | str) -> tuple[Any, ...]:
        inputs = self.latent_inputs(device)
        if self.page:
            inputs = paged_inputs(inputs, self.page, self.seed)
        if self.format is None:
            return inputs
        given = LatentInputs(*inputs)
        parts = stored_in_8_bits(given.c_kv, given.k_rope, self.format)
        return given._replace(c_kv=parts.latent, k_rope=parts.rope, scales=parts.scales)

    def reference_inputs(self, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The inputs of a dense cache, an 8-bit one dequantised in float32, for the reference."""
        given = LatentInputs(*inputs)
        for name in ("cu_seqlens_q", "tree"):
            if getattr(given, name) is not None:
                raise InvalidArgumentError(name, "none, which the reference does not know", "one")
        if given.scales is not None:
            latent, rope = dequantise(QuantisedCache(given.c_kv, given.k_rope, given.scales))
            given = given._replace(c_kv=latent, k_rope=rope)
        tensors = tuple(tensor for tensor in given[:6] if tensor is not None)
        return dense_inputs(tensors, self.t) if self.page else tensors

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        return self.latent_reference(
            *self.reference_inputs(inputs),
            compute_dtype=compute_dtype,
            sliding_window=self.sliding_window,
        )

    def operands(self, given: LatentInputs) -> LatentOperands:
        """Check the inputs and bring them into the form that the kernels take."""
        q_latent, q_rope, c_kv, k_rope, lengths, table, bounds, tree, scales = given
        device, packed = q_latent.device, bounds is not None
        rows = [("b", self.b), ("s", self.s)]
        if packed:
            rows = [("tokens", q_latent.shape[0])]
        heads = [*rows, ("h", self.h)]
        check_tensor("q_latent", q_latent, [*heads, ("k", self.k)], self.torch_dtype, device)
        check_tensor("q_rope", q_rope, [*heads, ("p", self.p)], self.torch_dtype, device)
        check_tensor("lengths", lengths, [("b", self.b)], torch.int32, device)
        dtype, rope_dtype = self.torch_dtype, self.torch_dtype
        if self.format is not None:
            dtype, rope_dtype = E4M3, self.format.rope_dtype
        slots = [("b", self.b), ("t", self.t)]
        if self.page:
            check_pages(self, self.page, c_kv, k_rope, table, device, (dtype, rope_dtype))
            slots = [("pages", c_kv.shape[0]), ("page", self.page)]
        else:
            check_tensor("c_kv", c_kv, [*slots, ("k", self.k)], dtype, device)
            check_tensor("k_rope", k_rope, [*slots, ("p", self.p)], rope_dtype, device)
        scales = self._checked_scales(scales, slots, device)
        if self.format is not None and self.target.code.startswith("sm_8"):
            # cuTile has no float8 before sm_90: the kernel decodes bytes.
            c_kv = c_kv.view(torch.int8)
            k_rope = k_rope.view(torch.int8) if rope_dtype is E4M3 else k_rope
        if bounds is not None:
            check_tensor("cu_seqlens_q", bounds, [("b+1", self.b + 1)], torch.int32, device)
        if tree is not None:
            size = [("b", self.b), ("s", tree.shape[-1]), ("s", tree.shape[-1])]
            check_tensor("tree", tree, size, torch.bool, device)
            if not self.causal:
                raise InvalidArgumentError("tree", "none with causal=False", "a tree")
        lead = (1, q_latent.shape[0]) if packed else (self.b, self.s)
        count = lead[1] * self.h
        latent_rows = require_view("q_latent", q_latent, lead[0], count, self.k)
        if self.p:
            rope_rows = require_view("q_rope", q_rope, lead[0], count, self.p)
        else:
            rope_rows, k_rope = latent_rows, c_kv
        tensors = (
            latent_rows,
            rope_rows,
            c_kv,
            k_rope,
            lengths,
            lengths[None] if table is None else table,
            lengths if bounds is None else bounds,
            lengths[None] if tree is None else tree.view(torch.int8).flatten(0, 1),
        )
        cache = CACHES.index(self.cache_dtype)
        options = self.page, int(packed), int(tree is not None), self.sliding_window, cache
        scales = lengths[None, None] if scales is None else scales
        return LatentOperands(tensors, scales, lead, packed, options)

    def _checked_scales(
        self, scales: Tensor | None, slots: list[tuple[str, int]], device: torch.device
    ) -> Tensor | None:
        """The scales of the cache as the kernels take them, [.., .., g]."""
        if self.format is None or scales is None:
            if self.format is not None or scales is not None:
                expected = "none" if self.format is None else f"those of {self.cache_dtype}"
                raise InvalidArgumentError("scales", expected, "none" if scales is None else "some")
            return None
        if self.format is PER_TENSOR:
            check_tensor("scales", scales, [("one", 1)], torch.float32, device)
            return scales.view(1, 1, 1)
        count = self.format.scales(self.k)
        check_tensor("scales", scales, [*slots, ("g", count)], torch.float32, device)
        return scales


def stored_in_8_bits(latent: Tensor, rope: Tensor, fmt: CacheFormat) -> QuantisedCache:
    """Rows [n, m, k] and [n, m, p] in a buffer of the format; NaN stays NaN.

    The scale of "fp8" lets the largest value be the largest e4m3 number.
    """
    n, m, k = latent.shape
    slots = -(-m // 4) * 4  # what the format with scales per token asks for
    buffer = latent.new_full((n, slots, fmt.row_bytes(k, rope.shape[-1])), 255, dtype=torch.uint8)
    scale = None
    if fmt is PER_TENSOR:
        scale = (latent.float().nan_to_num(0.0).abs().amax() / E4M3_MAX).reshape(1)
    parts = fmt.parts(buffer, k, rope.shape[-1], scale)
    found = QuantisedCache(
        parts.latent[:, :m], parts.rope[:, :m], parts.scales[:, :m] if scale is None else scale
    )
    if not latent.is_meta:
        values = quantise(latent, rope, fmt, scale)
        found.latent.view(torch.uint8).copy_(values.latent.view(torch.uint8))
        found.rope.copy_(values.rope)
        found.scales.copy_(values.scales)
    return found
