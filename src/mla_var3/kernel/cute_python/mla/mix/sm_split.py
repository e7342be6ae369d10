"""How the latent and the decompressed kernel, which run at the same time, share the SMs."""

from __future__ import annotations

from dataclasses import dataclass

from mla_var3.op.cost import Cost
from mla_var3.runtime.plan import Constraints

LATENT_TFLOPS_PER_SM = 5.2
WINDOW_GBPS_PER_SM = 60.0
"""What one SM is taken to do with either kernel. Only the first guess depends on them: tuning times
its neighbours."""
SPLIT_STEPS = (-2, -1, 1, 2)
"""Neighbours of the first guess that tuning tries, in sixteenths of the device."""


@dataclass(frozen=True)
class SmSplit:
    """SMs of each kernel."""

    latent: int
    window: int


def balanced_split(latent: Cost, window: Cost, sm_count: int, jobs: int = 0) -> SmSplit:
    """The split at which both kernels are expected to end together.

    Args:
        latent: work of the latent kernel, which the tensor cores bound with many rows.
        window: work of the decompressed kernel, which the memory bounds unless many rows share it.
        sm_count: SMs of the device, at least two.
        jobs: equal pieces of the window's work, of which an SM takes whole ones; 0 for so many
            that it does not matter.
    """

    def last_us(sms: int) -> float:
        latent_us, window_us = (
            max(work.time_us(LATENT_TFLOPS_PER_SM, WINDOW_GBPS_PER_SM), 1e-9)
            for work in (latent, window)
        )
        rest = sm_count - sms
        turns = -(-jobs // rest) / jobs if jobs else 1.0 / rest
        return max(latent_us / sms, window_us * turns)

    # Of equally good splits the one with most SMs for the latent kernel, which starves first.
    chosen = min(range(sm_count - 1, 0, -1), key=last_us)
    return SmSplit(chosen, sm_count - chosen)


def neighbours(split: SmSplit) -> list[SmSplit]:
    """Other splits of the same SMs that tuning tries, each once."""
    total = split.latent + split.window
    step = max(1, total // 16)
    wanted = (split.latent + k * step for k in SPLIT_STEPS)
    chosen = sorted({min(max(latent, 1), total - 1) for latent in wanted} - {split.latent})
    return [SmSplit(latent, total - latent) for latent in chosen]


def joint_constraints(latent_sms: int, window_sms: int, sm_count: int) -> Constraints:
    """That every persistent block of both kernels has an SM of its own from the start.

    A block of either fills the shared memory of an SM. Blocks without one wait until the other
    kernel has ended, and the two run one after the other.
    """
    needed = latent_sms + window_sms
    return Constraints(
        (
            needed <= sm_count,
            f"sms: expected at most {sm_count} SMs for both kernels, got "
            f"{latent_sms} + {window_sms} = {needed}",
        )
    )
