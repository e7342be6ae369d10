"""Widths of the rows that the latent kernel reads, and the tiles they are made of."""

from __future__ import annotations

from dataclasses import dataclass

from mla_var3.kernel.cute_python.mla.hopper.constants import LATENT, MMA_DEPTH, ROPE, TILE


@dataclass(frozen=True)
class LatentWidths:
    """Widths of latent rows; constants of a compiled program.

    In shared memory a row has `columns` columns: the latent part, then one tile of 64. The rope
    part is loaded into this tile. Where it is narrower, TMA fills the rest of the tile with zeros,
    and where there is none, nothing is loaded. In a KV block the tile holds P once the scores
    exist.

    Attributes:
        k: latent width.
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
