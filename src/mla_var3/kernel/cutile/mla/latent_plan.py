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

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from mla_var3.conf.devices import shared_memory_limit
from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cutile.mla.plan import CutilePlan
from mla_var3.kernel.cutile.mla.tilings import (
    MMA_LARGE_BYTES,
    divides,
    fits_shared_memory,
    latent_tiles,
    tile_sides,
    tiling_target,
    with_parts_of,
)
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
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import ALIGNMENT_BYTES, check_tensor, require_view

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
class LatentTiling(Tiling):
    """Bm query rows against Bn latent tokens, the latent dimension in parts of Kp columns.

    On sm_90 a 64 x 512 float32 accumulator needs two consumer warpgroups (num_worker_warps=8) to
    stay in registers; with one, the default, it spills 2.7 KB per thread.
    """

    Bm: int = 64
    Bn: int = 64
    Kp: int = 128
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = 8

    def validate(self, pd: LatentPlan) -> Constraints:
        return Constraints(
            *tile_sides(Bm=self.Bm, Bn=self.Bn, Kp=self.Kp, **({"p": pd.p} if pd.p else {})),
            divides("Kp", self.Kp, "k", pd.k),
            divides("Bn", self.Bn, "page", pd.page),
            divides("columns of a scale", pd.scale_columns, "Kp", self.Kp),
            fits_shared_memory(pd, *latent_tiles(pd, self.Bm, self.Bn)),
        )

    def sides(self, k: int) -> tuple[int, int, int, int]:
        """The compile-time arguments BM, BN, KP and PARTS."""
        return self.Bm, self.Bn, self.Kp, k // self.Kp

    @classmethod
    def candidates(cls, plan: LatentPlan) -> list[Self]:
        """Candidates per target, the default first.

        sm_90: at k=512 only 64 rows stay on wgmma without spilling. Pages of 32 and 16 tokens: two
        parts (on an H200 at b=32 s=16 t=4096 h=128 2690 and 4526 us; four parts spill, 3509 and
        4978; one 2908 and 4900). sm_100: only one part of 512 columns stays on tcgen05; one word
        spills there, outside of the loops (8 B of stack). sm_8x and sm_12x: see `_for_mma`.

        8-bit caches: a tile is in shared memory as it was loaded and as it was converted. On sm_90
        64 tokens leave wgmma and spill 1.5 KB, 32 do not spill; on sm_100 64 spill 48 B.
        """
        # A KV tile lies in one page: page & -page is the largest power of two that divides it.
        longest, k, eight_bit = plan.page & -plan.page or 64, plan.k, plan.format is not None
        family = tiling_target(plan.target.code)
        if family == "sm_120":
            made = cls._for_mma(plan, longest)
        elif family == "sm_100":
            made = [cls(64, Bn, 512) for Bn in ((32, 64) if eight_bit else (64, 32))]
        elif eight_bit:
            made = [cls(64, 32, Kp) for Kp in (256, 512, 128)]
        elif longest < 64:
            made = [cls(64, longest, Kp) for Kp in (k // 2, k)]
        else:
            made = [cls(64, 64, Kp) for Kp in (128, 256, 512)]
        found = with_parts_of((replace(each, Bn=min(each.Bn, longest)) for each in made), k)
        return [each for each in found if each.Kp % plan.scale_columns == 0]

    @classmethod
    def _for_mma(cls, plan: LatentPlan, longest: int) -> list[Self]:
        """For targets with mma, the default first.

        32 rows and 32 tokens read half as many bytes of the cache per product as 16 rows and 64
        tokens, and as many from shared memory (284 KB for 2.2 MFLOP). Where 163 KB fit (sm_80,
        sm_87), 64 tokens to 32 rows need a quarter less of the latter. The width of a part decides
        how the compiler buffers loads, and with that the registers; it was chosen by compiling.
        8-bit caches on pages of 16 tokens spill with every tiling tried: about 1 KB on sm_80, 0.5
        KB on sm_86 and sm_89, up to 168 B on sm_12x.
        """
        target, page, p, eight_bit = plan.target.code, plan.page, plan.p, plan.format is not None
        ampere = target.startswith("sm_8")
        small = (shared_memory_limit(target) or 0) < MMA_LARGE_BYTES
        if longest == 16:
            wide = cls(32, 16, 512 if eight_bit else 256, num_worker_warps=None)
            narrow = cls(16, 16, 64 if (plan.k, p) == (256, 64) and not eight_bit else 128)
            return [narrow, wide] if ampere and not eight_bit else [wide, narrow]
        default = cls(32, 32, 128)
        if ampere and eight_bit and plan.scale_columns == 1:
            default = cls(32, 32, 64)
        elif ampere and eight_bit and small and not page:
            default = cls(32, 32, 512)
        elif ampere and not eight_bit and not small and not page:
            default = cls(32, 64, 128)
        elif ampere and not eight_bit and page and not p:
            default = cls(32, 32, 512)
        elif page and not eight_bit and small:
            # On sm_12x parts of 128 columns spill 184 B without rope.
            default = cls(16, 64, 128) if ampere and longest >= 64 else cls(32, 32, 64)
        others = [cls(32, 32, Kp) for Kp in (128, 512)] + [cls(16, 64, Kp) for Kp in (128, 512)]
        return [default, *(each for each in others if each != default)]


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

    @property
    def scale_columns(self) -> int:
        """Latent columns of a scale of an 8-bit cache; 1 where a scale holds for whole rows."""
        return 1 if self.format is None else self.format.scale_columns or 1

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
