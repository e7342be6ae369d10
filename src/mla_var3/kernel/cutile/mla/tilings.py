"""Tile shapes that several cuTile MLA kernels share, with the evidence behind the candidates."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch

from mla_var3.conf.devices import load_devices, shared_memory_limit
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.stage import is_power_of_two

TilingT = TypeVar("TilingT", bound=Any)

PERCENT = 100

FEW_QUERIES = 64
"""Up to here one 64-row tile holds all queries of a head, and reading K and V is what costs."""


MMA_LARGE_BYTES = 128 * 1024
"""Targets with mma have 99 KB of shared memory per CTA, or 163 KB (sm_80, sm_87)."""
_FAMILIES = {8: "sm_120", 9: "sm_90", 10: "sm_100", 11: "sm_100", 12: "sm_120"}
"""Major compute capability -> target with the same matrix instructions."""


def tiling_target(target: str) -> str:
    """The target whose tilings a target shares: sm_90, sm_100 or sm_120.

    Ampere, Ada and sm_12x have HMMA and at least 99 KB of shared memory per CTA, sm_10x and sm_11x
    have tcgen05 and 227 KB.
    """
    return _FAMILIES.get(int(target.removeprefix("sm_").rstrip("af")) // 10, target)


def tile_sides(**sides: int) -> list[tuple[bool, str]]:
    """Constraints for `Tiling.validate`: cuTile's tile sides are powers of two."""
    return [
        (is_power_of_two(size), f"{name}: expected a power of two (a tile side), got {size}")
        for name, size in sides.items()
    ]


def divides(name: str, value: int, whole_name: str, whole: int) -> tuple[bool, str]:
    """Constraint for `Tiling.validate`: a dimension divides into equal parts."""
    fits = value > 0 and whole % value == 0
    return fits, f"{name}: expected a divisor of {whole_name}={whole}, got {value}"


def percentage(name: str, value: int, least: int = 0) -> tuple[bool, str]:
    """Constraint for `Tiling.validate`: a share in percent."""
    expected = f"a percentage from {least} to {PERCENT}"
    return least <= value <= PERCENT, f"{name}: expected {expected}, got {value}"


def fits_shared_memory(plan: MlaPlan, *tiles: tuple[int, int]) -> tuple[bool, str]:
    """Constraint for `Tiling.validate`: the tiles fit the shared memory of a CTA at the same time.

    Larger tiles still compile, but the compiler then falls back to code without TMA and without the
    fast matrix instructions, and spills thousands of bytes per thread.

    Args:
        plan: gives the element size and the target.
        tiles: (rows, columns) of every tile that is live at once.
    """
    limit = shared_memory_limit(plan.target.code)
    need = sum(rows * columns for rows, columns in tiles) * plan.problem().element_size
    return (
        limit is None or need <= limit,
        f"tiles: expected at most {limit} bytes of shared memory on {plan.target.code}, got {need}",
    )


def multiprocessors(device: torch.device, target: str, fewest: int = 1) -> int:
    """SMs of a GPU; elsewhere those of the smallest known device of the target, or `fewest`."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    known = [spec.sm_count for spec in load_devices().values() if spec.target == target]
    return min(known, default=fewest)


def latent_tiles(plan: MlaPlan, Bm: int, Bn: int) -> tuple[tuple[int, int], ...]:
    """Queries, latent tokens and probabilities of the latent loop."""
    return (Bm, plan.k + plan.p), (Bn, plan.k + plan.p), (Bm, Bn)


def with_parts_of(made: Iterable[TilingT], k: int) -> list[TilingT]:
    """Tilings with parts of the latent dimension that are no wider than k columns, each once."""
    found: list[TilingT] = []
    for each in made:
        fitting = replace(each, Kp=min(each.Kp, k))
        if fitting not in found:
            found.append(fitting)
    return found


def mma_part(target: str) -> int:
    """Kp beside 32 x 32 latent tiles in the kernels of mla_var6_plus, on targets with mma.

    sm_86 and sm_89: parts of 128 and 64 columns spill up to 3 KB in one version or another, one
    part of 512 in none (at most 218 registers). sm_80, sm_87 and sm_12x: 128 columns spill in none.
    """
    small = (shared_memory_limit(target) or 0) < MMA_LARGE_BYTES
    return 512 if target.startswith("sm_8") and small else 128


def scale_columns(plan: MlaPlan) -> int:
    """Latent columns of a scale of an 8-bit cache; 1 where a scale holds for whole rows."""
    fmt = getattr(plan, "format", None)
    return 1 if fmt is None else fmt.scale_columns or 1


def head_tiles(plan: MlaPlan, Bm: int, Bn: int) -> tuple[tuple[int, int], ...]:
    """Queries, keys and values of the decompressed loop."""
    return (Bm, plan.d + plan.p), (Bn, plan.d + plan.p), (Bn, plan.d)


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

    def validate(self, pd: MlaPlan) -> Constraints:
        return Constraints(
            *tile_sides(Bm=self.Bm, Bn=self.Bn, Kp=self.Kp, **({"p": pd.p} if pd.p else {})),
            divides("Kp", self.Kp, "k", pd.k),
            divides("Bn", self.Bn, "page", getattr(pd, "page", 0)),
            divides("columns of a scale", scale_columns(pd), "Kp", self.Kp),
            fits_shared_memory(pd, *latent_tiles(pd, self.Bm, self.Bn)),
        )

    def sides(self, k: int) -> tuple[int, int, int, int]:
        """The compile-time arguments BM, BN, KP and PARTS."""
        return self.Bm, self.Bn, self.Kp, k // self.Kp

    @classmethod
    def candidates(
        cls,
        target: str,
        k: int = 512,
        page: int = 0,
        *,
        p: int = 64,
        eight_bit: bool = False,
        columns: int = 1,
    ) -> list[Self]:
        """Candidates per target, the default first.

        sm_90: at k=512 only 64 rows stay on wgmma without spilling. Pages of 32 and 16 tokens: two
        parts (on an H200 at b=32 s=16 t=4096 h=128 2690 and 4526 us; four parts spill, 3509 and
        4978; one 2908 and 4900). sm_100: only one part of 512 columns stays on tcgen05; one word
        spills there, outside of the loops (8 B of stack). sm_8x and sm_12x: see `_for_mma`.

        8-bit caches: a tile is in shared memory as it was loaded and as it was converted. On sm_90
        64 tokens leave wgmma and spill 1.5 KB, 32 do not spill; on sm_100 64 spill 48 B.

        Args:
            target: GPU code.
            k: Columns of a latent row.
            page: Tokens of a page; 0 for a dense cache.
            p: Columns of a rope key; 0 for none.
            eight_bit: Whether the cache is in 8 bits.
            columns: Latent columns of a scale of an 8-bit cache.
        """
        # A KV tile lies in one page: page & -page is the largest power of two that divides it.
        longest = page & -page or 64
        if tiling_target(target) == "sm_120":
            made = cls._for_mma(target, k, p, page, longest, eight_bit, columns > 1)
        elif tiling_target(target) == "sm_100":
            made = [cls(64, Bn, 512) for Bn in ((32, 64) if eight_bit else (64, 32))]
        elif eight_bit:
            made = [cls(64, 32, Kp) for Kp in (256, 512, 128)]
        elif longest < 64:
            made = [cls(64, longest, Kp) for Kp in (k // 2, k)]
        else:
            made = [cls(64, 64, Kp) for Kp in (128, 256, 512)]
        found = with_parts_of((replace(each, Bn=min(each.Bn, longest)) for each in made), k)
        return [each for each in found if each.Kp % columns == 0]

    @classmethod
    def _for_mma(
        cls, target: str, k: int, p: int, page: int, longest: int, eight_bit: bool, grouped: bool
    ) -> list[Self]:
        """For targets with mma, the default first.

        32 rows and 32 tokens read half as many bytes of the cache per product as 16 rows and 64
        tokens, and as many from shared memory (284 KB for 2.2 MFLOP). Where 163 KB fit (sm_80,
        sm_87), 64 tokens to 32 rows need a quarter less of the latter. The width of a part decides
        how the compiler buffers loads, and with that the registers; it was chosen by compiling.
        8-bit caches on pages of 16 tokens spill with every tiling tried: about 1 KB on sm_80, 0.5
        KB on sm_86 and sm_89, up to 168 B on sm_12x.
        """
        ampere = target.startswith("sm_8")
        small = (shared_memory_limit(target) or 0) < MMA_LARGE_BYTES
        if longest == 16:
            wide = cls(32, 16, 512 if eight_bit else 256, num_worker_warps=None)
            narrow = cls(16, 16, 64 if (k, p) == (256, 64) and not eight_bit else 128)
            return [narrow, wide] if ampere and not eight_bit else [wide, narrow]
        default = cls(32, 32, 128)
        if ampere and eight_bit and not grouped:
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
class HeadTiling(Tiling):
    """Bm queries of one head against Bn decompressed tokens.

    The default is for few queries on sm_90: two CTAs per SM keep enough bytes in flight to
    saturate the memory of an H200.
    """

    Bm: int = 64
    Bn: int = 128
    num_ctas: int | None = None
    occupancy: int | None = 2
    num_worker_warps: int | None = None

    def validate(self, pd: MlaPlan) -> Constraints:
        return Constraints(
            *tile_sides(Bm=self.Bm, Bn=self.Bn, d=pd.d, p=pd.p),
            fits_shared_memory(pd, *head_tiles(pd, self.Bm, self.Bn)),
        )

    @classmethod
    def candidates(cls, target: str, s: int) -> list[Self]:
        """Candidates per target and number of queries, the default first.

        Many queries are compute bound: 128 rows on two consumer warpgroups, and long KV tiles,
        which amortise the rescaling of the accumulator (Bn=256: 647 TFLOP/s, 128: 607 on an H200).
        """

        def plain(*sides: tuple[int, int]) -> list[Self]:
            return [cls(Bm, Bn, occupancy=None) for Bm, Bn in sides]

        few, target = s <= FEW_QUERIES, tiling_target(target)
        if target == "sm_120":
            return plain((64, 64), (64, 32), (32, 64)) if few else plain((64, 64), (128, 32))
        if target == "sm_100":
            return plain((64, 128), (128, 128)) if few else plain((128, 128), (256, 128), (128, 64))
        two_per_sm = [cls(64, 128), cls(64, 64)]
        if few:
            return two_per_sm + [
                cls(64, Bn, occupancy=None, num_worker_warps=8) for Bn in (128, 64)
            ]
        two_warpgroups = [cls(128, Bn, occupancy=None, num_worker_warps=8) for Bn in (256, 128, 64)]
        return two_warpgroups + two_per_sm[:1]
