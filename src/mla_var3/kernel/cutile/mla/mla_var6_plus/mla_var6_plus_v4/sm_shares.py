"""How two persistent kernels that run at the same time share the SMs of a device."""

from mla_var3.runtime.plan import Constraints

PERCENT = 100
DEFAULT_SHARE = 50
SHARES = (DEFAULT_SHARE, 25, 75)
"""Percentages that tuning tries for each kernel; the joint constraint drops pairs that need more
SMs than the device has."""
FEWEST_SMS = 2
"""One SM per kernel: assumed where neither a GPU nor a known target tells the number of SMs."""


def shared_sms(share: int, sm_count: int) -> int:
    """SMs of a percentage, rounded down, at least one."""
    return max(1, sm_count * share // PERCENT)


def share_constraint(share: int) -> tuple[bool, str]:
    """Constraint for `Tiling.validate`: some SMs, and no more than there are."""
    holds = 0 < share <= PERCENT
    return holds, f"Share: expected a percentage from 1 to {PERCENT}, got {share}"


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
