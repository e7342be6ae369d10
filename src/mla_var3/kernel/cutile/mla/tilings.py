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
        fitting = replace(each, Kp=min(each.Kp, k)) if hasattr(each, "Kp") else each
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


def head_tiles(plan: MlaPlan, Bm: int, Bn: int) -> tuple[tuple[int, int], ...]:
    """Queries, keys and values of the decompressed loop."""
    return (Bm, plan.d + plan.p), (Bn, plan.d + plan.p), (Bn, plan.d)


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
