"""How two persistent kernels that run at the same time share the SMs of a device."""

from dataclasses import dataclass, field
from typing import Any

import torch

from mla_var3.kernel.cutile.mla.mix_stages import MixAttentionPlan
from mla_var3.kernel.cutile.mla.tilings import PERCENT, multiprocessors
from mla_var3.runtime.plan import Constraints

DEFAULT_SHARE = 50
SHARES = (DEFAULT_SHARE, 25, 75)
"""Percentages that tuning tries for each kernel; the joint constraint drops pairs that need more
SMs than the device has."""
FEWEST_SMS = 2
"""One SM per kernel: assumed where neither a GPU nor a known target tells the number of SMs."""


@dataclass
class SharingPlan(MixAttentionPlan):
    """Plan of one of the kernels; its tiling has a `Share`."""

    alone: bool = field(default=False, metadata={"help": "take all SMs, whatever Share says"})

    def sm_share(self, tiling: Any, sm_count: int) -> int:
        """SMs that the persistent CTAs take: the percentage rounded down, at least one."""
        return sm_count if self.alone else max(1, sm_count * tiling.Share // PERCENT)

    def persistent_ctas(self, tiling: Any, device: torch.device, tiles: int) -> tuple[int]:
        """The grid: as many CTAs as these SMs hold, and no more than there are work tiles."""
        sm_count = multiprocessors(device, self.target.code, FEWEST_SMS)
        return (min(self.sm_share(tiling, sm_count) * (tiling.occupancy or 1), tiles),)


def joint_constraints(latent_sms: int, window_sms: int, sm_count: int) -> Constraints:
    """Every persistent CTA of both kernels must have its SM from the start.

    A latent CTA fills the shared memory of an SM. If the two shares overlap, CTAs of one kernel
    wait until the other kernel has finished, and the two run one after the other.
    """
    needed = latent_sms + window_sms
    return Constraints(
        (
            needed <= sm_count,
            f"Share: expected at most {sm_count} SMs for both kernels, got "
            f"{latent_sms} + {window_sms} = {needed}",
        )
    )
