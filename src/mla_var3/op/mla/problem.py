"""The sizes that define one Multi-head Latent Attention call.

Symbols, used with these meanings everywhere in the project: `b` requests, `s` query tokens per
request, `t` KV slots per request, `h` heads, `d` head width without rope, `p` rope width, `k`
latent width, `v` value width.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mla_var3.errors import InvalidArgumentError

DTYPES = ("bfloat16", "float16")

SIZE_NAMES = ("b", "s", "t", "h", "d", "p", "k", "v")

# Kernels count with 32-bit integers. Requests are also walked through one by one on the host.
MOST = 2**31 - 1
MOST_REQUESTS = 2**20


@dataclass(frozen=True)
class MlaProblem:
    """Sizes, dtype and masking of one attention call; hashable, and valid once constructed.

    Attributes:
        b: Requests in the batch.
        s: Query tokens per request.
        t: KV slots per request, the largest length a request may have.
        h: Heads.
        d: Width of a head without the rope part.
        p: Width of the rope part, shared by all heads on the key side; 0 for a model without.
        k: Width of the latent cache.
        v: Width of a head's values and output; 0 stands for `d`, and becomes it.
        dtype: Name of the element type of queries, cache and weights.
        causal: Whether query `i` of a request with `len` tokens sees positions
            `< len - s + i + 1` only (bottom-right aligned).
        lengths: KV tokens of each request, `0..t`; None means that all have `t`.
        scale: Softmax scale; None means `(d + p) ** -0.5`.
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
    lengths: tuple[int, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        require_sizes(self)
        _require_dtype(self.dtype)
        if not isinstance(self.causal, bool):
            raise InvalidArgumentError("causal", "True or False", repr(self.causal))
        if self.lengths is not None:
            # A list is accepted and stored as a tuple, so that the problem stays hashable.
            object.__setattr__(self, "lengths", self._checked_lengths(self.lengths))
        if self.scale is not None:
            require_scale(self.scale)

    @property
    def softmax_scale(self) -> float:
        """The factor on the logits: `scale`, or `(d + p) ** -0.5` when it is None."""
        return float((self.d + self.p) ** -0.5) if self.scale is None else float(self.scale)

    @property
    def kv_lengths(self) -> tuple[int, ...]:
        """KV tokens of each request, with `t` for all when no lengths were given."""
        return (self.t,) * self.b if self.lengths is None else self.lengths

    @property
    def total_tokens(self) -> int:
        """KV tokens of the whole batch."""
        return sum(length * requests for length, requests in self.length_counts)

    @property
    def length_counts(self) -> tuple[tuple[int, int], ...]:
        """Each KV length that occurs, with how many requests have it."""
        return ((self.t, self.b),) if self.lengths is None else tuple(Counter(self.lengths).items())

    @property
    def longest(self) -> int:
        """KV tokens of the longest request."""
        return self.t if self.lengths is None else max(self.lengths)

    @property
    def element_size(self) -> int:
        """Bytes of one element; both dtypes are 16 bits wide."""
        return 2

    def window(self, n: int) -> list[tuple[int, int]]:
        """Per request `(old, new)` with `new = min(n, len)` and `old = len - new`; n is `0..t`."""
        self.require_window(n)
        return [(length - min(n, length), min(n, length)) for length in self.kv_lengths]

    def tokens_up_to(self, n: int) -> int:
        """Tokens of the whole batch when each request counts at most `n`, `0..t`."""
        self.require_window(n)
        return sum(min(n, length) * requests for length, requests in self.length_counts)

    def require_window(self, n: int) -> None:
        """Require a number of newest tokens that a request may have."""
        require_int("n", n, minimum=0, maximum=self.t, maximum_name="t")

    def within(self, sliding_window: int | None) -> MlaProblem:
        """The problem with only the tokens that some query of a request sees, for its cost.

        Args:
            sliding_window: newest tokens, up to itself, that a query sees; None or 0 for all.
        """
        if not sliding_window:
            return self
        most = sliding_window + self.s - 1
        lengths = self.lengths and tuple(min(length, most) for length in self.lengths)
        return dataclasses.replace(self, t=min(self.t, most), lengths=lengths)

    def _checked_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        if isinstance(lengths, str) or not isinstance(lengths, Sequence):
            raise InvalidArgumentError(
                "lengths", f"a sequence of b={self.b} integers", repr(lengths)
            )
        if len(lengths) != self.b:
            raise InvalidArgumentError("lengths", f"b={self.b} entries", f"{len(lengths)}")
        for index, length in enumerate(lengths):
            require_int(f"lengths[{index}]", length, minimum=0, maximum=self.t, maximum_name="t")
        return tuple(lengths)


def require_sizes(owner: object) -> None:
    """Check the sizes, attributes of `owner`; a `v` of 0 becomes `d`, and `p` may be 0."""
    if (value := getattr(owner, "v", None)) == 0 and value.__class__ is int:
        object.__setattr__(owner, "v", getattr(owner, "d", 0))
    for name in SIZE_NAMES:
        most = MOST_REQUESTS if name == "b" else MOST
        require_size(name, getattr(owner, name), most, minimum=0 if name == "p" else 1)


def require_size(argument: str, value: object, most: int = MOST, minimum: int = 1) -> None:
    """Require an integer from `minimum` to `most`, which only the message about too much names."""
    if value.__class__ is int and minimum <= value <= most:  # type: ignore[operator]
        return  # calls come here for every size, nearly always with good ones
    require_int(argument, value, minimum=minimum)
    require_int(argument, value, minimum=minimum, maximum=most)


def require_int(
    argument: str,
    value: object,
    *,
    minimum: int,
    maximum: int | None = None,
    maximum_name: str = "",
) -> None:
    """Require an integer within bounds; `maximum_name` is what the largest value is called."""
    # bool is a subclass of int, and `--b=True` is never what was meant.
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if number is not None and minimum <= number and (maximum is None or number <= maximum):
        return
    if maximum is not None:
        most = f"{maximum_name}={maximum}" if maximum_name else f"{maximum}"
        expected = f"an integer from {minimum} to {most}"
    else:
        expected = "a positive integer" if minimum == 1 else f"an integer >= {minimum}"
    raise InvalidArgumentError(argument, expected, repr(value) if number is None else number)


def _require_dtype(dtype: object) -> None:
    if isinstance(dtype, str) and dtype in DTYPES:
        return
    got = repr(dtype)
    aliases = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}
    name = str(dtype).lower().removeprefix("torch.")
    nearest = difflib.get_close_matches(aliases.get(name, name), DTYPES, n=1, cutoff=0.5)
    if nearest:
        got += f"; did you mean {nearest[0]!r}?"
    raise InvalidArgumentError("dtype", " or ".join(repr(known) for known in DTYPES), got)


def require_scale(scale: object) -> None:
    """Require a softmax scale that can be computed with."""
    expected = "a positive finite number or None"
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise InvalidArgumentError("scale", expected, repr(scale))
    if not 0 < scale < math.inf:  # no call of `math`: a traced program may bring any scale
        raise InvalidArgumentError("scale", expected, scale)
    if scale >= 2.0**128:
        raise InvalidArgumentError("scale", expected, f"{scale}, which float32 cannot hold")
