"""Widths that the kernels for Hopper are compiled for, and the tiles they are made of."""

from __future__ import annotations

from dataclasses import dataclass

from mla_var3.kernel.cute_python.mla.hopper.constants import HEAD, LATENT, MMA_DEPTH, ROPE, TILE


@dataclass(frozen=True)
class LatentWidths:
    """Widths of latent rows; constants of a compiled program.

    In shared memory a row has `columns` columns: the latent part, then one tile of 64. The rope
    part is loaded into this tile. Where it is narrower, TMA fills the rest of the tile with zeros,
    and where there is none, nothing is loaded. In a KV block the tile holds P once the scores
    exist.

    Attributes:
        p: rope width; 0 for rows without a rope part.
    """

    k: int = LATENT
    p: int = ROPE

    @property
    def half(self) -> int:
        """Output columns that a consumer warpgroup accumulates."""
        return self.k // 2

    @property
    def tiles(self) -> int:
        """Column tiles of the latent part; also the index of the tile behind it."""
        return self.k // TILE

    @property
    def columns(self) -> int:
        """Columns of a row in shared memory."""
        return self.k + TILE

    def steps(self, tile: int) -> tuple[int, ...]:
        """The products' steps of 16 columns that cover a column tile."""
        used = TILE if tile < self.tiles else self.p
        first = tile * (TILE // MMA_DEPTH)
        return tuple(range(first, first + used // MMA_DEPTH))


LATENT_WIDTHS = tuple(LatentWidths(k, p) for k, p in ((512, 64), (512, 0), (256, 64), (256, 32)))
"""What the latent kernel is compiled for and tested with: the widths of published models."""


def served_widths() -> str:
    """The pairs of widths that the latent kernel serves, for messages."""
    return " or ".join(f"({widths.k}, {widths.p})" for widths in LATENT_WIDTHS)


@dataclass(frozen=True)
class HeadWidths:
    """Widths of a decompressed head; constants of a compiled program.

    Attributes:
        d: keys and queries without rope.
        p: their rope part, which all heads share; 0 for none.
        v: values.
    """

    d: int = HEAD
    p: int = ROPE
    v: int = HEAD

    @property
    def shared_queries(self) -> bool:
        """Whether queries lie in shared memory: beside the output they do not fit registers."""
        registers = (self.d + self.p) // 4 + self.v // 2  # of a thread, for queries and output
        return registers > MOST_REGISTERS


MOST_REGISTERS = 160
"""For queries and output of the decompressed kernel: of the 232 of a thread, scores and
probabilities take 48."""
HEAD_WIDTHS = tuple(
    HeadWidths(*widths)
    for widths in ((128, 64, 128), (192, 64, 256), (256, 0, 256), (64, 64, 128), (64, 32, 64))
)
"""What the decompressed kernel is compiled for and tested with: the widths of published models."""


def served_head_widths() -> str:
    """The widths that the decompressed kernel serves, for messages."""
    return " or ".join(f"({widths.d}, {widths.p}, {widths.v})" for widths in HEAD_WIDTHS)


def row_places(columns: int) -> list[tuple[int, int]]:
    """Where a thread has its numbers of an accumulator: each group of 8 columns, two of a group."""
    return [(j, e) for j in range(columns // 8) for e in range(2)]
