"""Groups of requests that share their first tokens.

Level 0 is the start of a request, level 1 continues where level 0 ends: a system prompt, then a
document. The requests of a group hold the same tokens, in a paged cache as the same pages. Which
requests those are lives on the device, so a CUDA graph can be replayed with other groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from mla_var3.attention.request.checks import INDEX_DTYPES, Shape, require_tensor
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import require_int

LEVELS = 2
"""Most levels of prefixes: what the merge kernel takes."""


def about_tokens(tokens: int) -> int:
    """A number by its three leading bits: call shapes and keys do not change with every step."""
    step = max(tokens.bit_length() - 3, 0)
    return max(tokens >> step << step, 1)


@dataclass(frozen=True, eq=False)
class PrefixGroups:
    """Which requests share their first tokens, and how many.

    Groups say where tokens are the same and never change a result: a kernel may read them once for
    the whole group. It does so for whole pages (64 tokens of a dense cache), and not for a request
    that is too short for the prefix of its group.

    Attributes:
        prefix_of: int `[levels, b]`, group of each request; -1 for none. One or two levels, or none
            where nothing is shared.
        prefix_length: int `[levels, groups]`, tokens of each group's prefix at that level alone; 0
            for a group that is not in use.
        ordered: whether at every level the requests of a group are neighbours, groups come in
            ascending order, and requests without a group come last. Queries are then not copied.
        tokens: host-side estimate of the shared tokens per request, for the choice of a kernel;
            None assumes that sharing pays.
        own: the same of each request's own tokens. Where both are given, short passes over prefixes
            and own tokens run at the same time, each on its share of the SMs.
        most: host-side bound on the requests of a group, which balances the work better; None for
            all of them.

    Example:
        >>> groups = PrefixGroups(torch.tensor([[0, 0, -1]]), torch.tensor([[128]]))
        >>> output, lse = mla_var3.mla_latent_attention(q, q_rope, cache, prefix=groups)
    """

    prefix_of: Tensor
    prefix_length: Tensor
    ordered: bool = False
    tokens: int | None = None
    most: int | None = None
    own: int | None = None

    def __post_init__(self) -> None:
        shape: Shape = [("levels", None), ("b", None)]
        of = require_tensor("prefix_of", self.prefix_of, shape, INDEX_DTYPES, None)
        if len(of) > LEVELS:
            raise InvalidArgumentError("prefix_of", f"at most {LEVELS} levels", len(of))
        shape = [("levels", len(of)), ("groups", None)]
        require_tensor("prefix_length", self.prefix_length, shape, INDEX_DTYPES, of.device)
        if len(of) and not self.groups:
            raise InvalidArgumentError("prefix_length", "at least one group", 0)
        for name, least in (("tokens", 0), ("own", 0), ("most", 1)):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), minimum=least)
        if not isinstance(self.ordered, bool):
            raise InvalidArgumentError("ordered", "True or False", repr(self.ordered))

    @property
    def levels(self) -> int:
        """Levels; 0 where nothing is shared."""
        return self.prefix_of.shape[0]

    @property
    def groups(self) -> int:
        """Bound on the groups of a level."""
        return self.prefix_length.shape[1]

    @cached_property
    def about(self) -> int | None:
        return None if self.tokens is None else about_tokens(self.tokens)

    @cached_property
    def about_own(self) -> int | None:
        return None if self.own is None else about_tokens(self.own)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Plain values that a call key holds."""
        return ("groups", self.ordered, self.about, self.most, self.about_own)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a call key looks at, by the names that launches know."""
        return {"prefix_of": self.prefix_of, "prefix_length": self.prefix_length}


@dataclass(frozen=True)
class PrefixCopy:
    """The decompressed prefix of the neighbouring requests `first..last-1`.

    Keys are `[h, tokens, d]`, values `[h, tokens, v]`, rope keys `[tokens, p]`.
    """

    first: int
    last: int
    keys: Tensor
    values: Tensor
    rope: Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, eq=False)
class DecompressedPrefixes:
    """Groups of one level with decompressed prefixes; `decompress_prefixes` makes them.

    There is one copy per group, in the order of the requests.
    """

    groups: PrefixGroups
    copies: tuple[PrefixCopy, ...]

    @property
    def copy_bytes(self) -> int:
        parts = (part for copy in self.copies for part in (copy.keys, copy.values, copy.rope))
        return sum(part.numel() * part.element_size() for part in parts)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        spans = tuple((copy.first, copy.last, copy.tokens) for copy in self.copies)
        return ("decompressed", *self.groups.key, *spans)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a call key looks at: those of the groups."""
        return self.groups.tensors
