"""How a latent and a decompressed kernel that run at the same time share the SMs."""

from __future__ import annotations

from dataclasses import dataclass

from mla_var3.op.cost import Cost
from mla_var3.runtime.plan import Constraints

LATENT_TFLOPS_PER_SM = 5.2
"""What an SM is taken to do with the latent kernel where no model was fitted: cautious beside the
5.9 of the kernel alone on an H200 (774 TFLOP/s at b=32 s=16, docs/kernels/flash-mla.md)."""
DECOMPRESSED_GBPS_PER_SM = 60.0
"""What an SM is taken to read with the decompressed kernel: 57 to 62 GB/s on 44 and 66 SMs of an
H200 (docs/kernels/flash-attention.md). Only the first guess depends on both numbers: tuning times
its neighbours."""
SPLIT_STEPS = (-2, -1, 1, 2)
"""Neighbours of the first guess that tuning tries, in sixteenths of the device. Not measured."""


@dataclass(frozen=True)
class SmSplit:
    """SMs of each kernel."""

    latent: int
    decompressed: int


def balanced_split(latent: Cost, decompressed: Cost, sm_count: int) -> SmSplit:
    """The split at which both kernels are expected to end together."""

    def last_us(sms: int) -> float:
        latent_us, decompressed_us = (
            max(work.time_us(LATENT_TFLOPS_PER_SM, DECOMPRESSED_GBPS_PER_SM), 1e-9)
            for work in (latent, decompressed)
        )
        return max(latent_us / sms, decompressed_us / (sm_count - sms))

    # Of equally good splits the one with most SMs for the latent kernel, which starves first.
    chosen = min(range(sm_count - 1, 0, -1), key=last_us)
    return SmSplit(chosen, sm_count - chosen)


def neighbours(split: SmSplit) -> list[SmSplit]:
    """Other splits of the same SMs that tuning tries, each once."""
    total = split.latent + split.decompressed
    step = max(1, total // 16)
    wanted = (split.latent + k * step for k in SPLIT_STEPS)
    chosen = sorted({min(max(latent, 1), total - 1) for latent in wanted} - {split.latent})
    return [SmSplit(latent, total - latent) for latent in chosen]


def joint_constraints(latent_sms: int, decompressed_sms: int, sm_count: int) -> Constraints:
    """That every persistent CTA of both kernels has an SM of its own from the start.

    A CTA of either fills the shared memory of an SM. CTAs without one wait until the other kernel
    has ended, and the two run one after the other.
    """
    needed = latent_sms + decompressed_sms
    return Constraints(
        (
            needed <= sm_count,
            f"sms: expected at most {sm_count} SMs for both kernels, got "
            f"{latent_sms} + {decompressed_sms} = {needed}",
        )
    )
