"""What decides which kernel serves a call: sizes and options, without tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.cache_formats import cache_format
from mla_var3.op.mla.model.times import Workload
from mla_var3.op.mla.problem import (
    DTYPES,
    MOST,
    SIZE_NAMES,
    MlaProblem,
    require_int,
    require_scale,
    require_size,
    require_sizes,
)
from mla_var3.op.mla.window.formats import FP8

_FLAGS = (
    "causal", "ragged", "tree", "partial", "batch_invariant", "latent_only", "aligned",
    "whole_copy", "rows_in_32_bits",
)  # fmt: skip
CALL_DTYPES = (*DTYPES, "float32")
PARTIAL = "a cache that holds a part of each request (total_lengths)"
BATCH_INVARIANT = "a result that does not depend on the batch (batch_invariant)"
FLOAT32 = "float32; it takes bfloat16 and float16"
UNALIGNED = "cache rows that are not 16-byte aligned"
"""What kernels refuse, as their reason says it."""


@dataclass(frozen=True)
class CallShape:
    """The call shape: sizes and options of a call; hashable, and valid once constructed.

    Attributes:
        b, s, t, h, d, p, k, v: sizes as everywhere; s is the most queries of any request, and a v
            of 0 becomes d.
        dtype: bfloat16, float16 or float32.
        causal, batch_invariant, sliding_window, scale: as for `mla_attention`.
        page_size: tokens per page; None for a dense cache.
        window: slots of the ring of decompressed tokens.
        prefix: tokens of the decompressed shared prefix.
        shared: first tokens that the requests of a group share, about.
        groups: groups, each with first tokens of its own.
        prefix_copies: decompressed tokens of each group's prefix, the most of any.
        cache_dtype: format of an 8-bit cache, such as "fp8_per_token"; None for one in `dtype`.
        window_dtype: "fp8" for a ring in 8 bits; None for one in `dtype`.
        ragged: whether requests have different numbers of queries.
        tree: whether the newest tokens form a tree.
        partial: whether the cache holds a part of each request only.
        latent_only: whether the caller does the projections.
        aligned: whether the cache's rows are whole and start at multiples of 16 bytes.
        whole_copy: whether a ring as long as the cache is known to hold every token; otherwise
            kernels that read all tokens decompressed decompress them in every call.
        rows_in_32_bits: whether packed queries and outputs have fewer than 2**31 elements each.
    """

    b: int
    s: int
    t: int
    h: int
    d: int = 128
    p: int = 64
    k: int = 512
    v: int = 0
    dtype: str = "bfloat16"
    causal: bool = True
    page_size: int | None = None
    window: int = 0
    prefix: int = 0
    ragged: bool = False
    tree: bool = False
    partial: bool = False
    batch_invariant: bool = False
    latent_only: bool = False
    scale: float | None = None
    aligned: bool = True
    shared: int = 0
    groups: int = 1
    prefix_copies: int = 0
    cache_dtype: str | None = None
    sliding_window: int | None = None
    window_dtype: str | None = None
    whole_copy: bool = True
    rows_in_32_bits: bool = True

    def __post_init__(self) -> None:
        require_sizes(self)
        for name in ("window", "prefix", "shared", "prefix_copies"):
            require_int(name, getattr(self, name), minimum=0, maximum=MOST)
        require_size("groups", self.groups)
        for name in ("page_size", "sliding_window"):
            if getattr(self, name) is not None:
                require_size(name, getattr(self, name))
        for name in _FLAGS:
            flag = getattr(self, name)
            if flag is not True and flag is not False:
                raise InvalidArgumentError(name, "True or False", repr(flag))
        if self.scale is not None:
            require_scale(self.scale)
        if self.dtype not in CALL_DTYPES:
            expected = " or ".join(map(repr, CALL_DTYPES))
            raise InvalidArgumentError("dtype", expected, repr(self.dtype))
        if self.cache_dtype is not None:
            cache_format(self.cache_dtype).require_widths(self.k, self.p)
        if self.window_dtype not in (None, FP8.name):
            expected = f"{FP8.name!r} or None"
            raise InvalidArgumentError("window_dtype", expected, repr(self.window_dtype))
        if self.window_dtype is not None and not self.window:
            raise InvalidArgumentError("window_dtype", "none without a window", FP8.name)

    def refused_cache(self, formats: Sequence[str] = ()) -> str | None:
        """Why a kernel that reads these 8-bit formats refuses the cache; None if it does not."""
        if self.cache_dtype is None or self.cache_dtype in formats:
            return None
        read = ", ".join(("16-bit ones", *formats))
        return f"an 8-bit cache ({self.cache_dtype}); it reads {read}"

    @property
    def default_scale(self) -> bool:
        """Whether the scale is the one that follows from the sizes."""
        usual = float((self.d + self.p) ** -0.5)
        return self.scale is None or abs(self.scale - usual) <= 1e-6 * usual

    def problem(self) -> MlaProblem:
        """The problem for the cost model: all tokens of a full request that its queries see."""
        return MlaProblem(
            **{name: getattr(self, name) for name in SIZE_NAMES},
            dtype=self.dtype if self.dtype in DTYPES else DTYPES[0],
            causal=self.causal,
        ).within(self.sliding_window)

    def workload(self) -> Workload:
        """The call as the model of time sees it."""
        token_bytes = None
        if self.cache_dtype is not None:
            token_bytes = cache_format(self.cache_dtype).row_bytes(self.k, self.p)
        return Workload(
            self.problem(), self.window, self.prefix or self.prefix_copies, self.latent_only, None,
            self.shared, self.groups, self.cache_dtype, token_bytes, self.window_dtype,
            self.whole_copy,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def refusal_of(reasons: Mapping[str, object]) -> str | None:
    """The first reason that holds; None where none does."""
    return next((reason for reason, holds in reasons.items() if holds), None)
