"""What a plan is made for, resolved once: the compile target and the device behind it."""

from __future__ import annotations

from dataclasses import dataclass

from mla_var3.conf.devices import DeviceSpec, load_devices
from mla_var3.errors import InvalidArgumentError

TARGETS = ("sm_90", "sm_100", "sm_120")
"""Compile targets of a static report: Hopper, data-centre Blackwell, consumer Blackwell."""

ASSUMED_DEVICE = "NVIDIA H200"
"""The device that plans are made for on a machine without a known GPU."""


@dataclass(frozen=True)
class Target:
    """The hardware that a plan is made for.

    Attributes:
        code: compile target, for example "sm_90".
        device: table entry whose SM count and rates the plan's choices follow; None where only the
            compile target is known.
    """

    code: str = TARGETS[0]
    device: DeviceSpec | None = None

    @classmethod
    def of(cls, device: DeviceSpec) -> Target:
        """The target of a device: its portable compile target and its table entry."""
        return cls(device.target, device)

    @classmethod
    def of_code(cls, code: str, here: DeviceSpec) -> Target:
        """A compile target with a device that has it."""
        known = (here, *load_devices().values())
        return cls(code, next((spec for spec in known if spec.target == code), here))

    def sm_count(self, default: int) -> int:
        """SMs of the device, or `default` where none is known."""
        return default if self.device is None else self.device.sm_count

    def require_device(self) -> DeviceSpec:
        """The table entry."""
        if self.device is None:
            raise InvalidArgumentError("target", "a device of the table", f"{self.code} alone")
        return self.device

    def rates(self, dtype: str) -> tuple[float, float]:
        """Burst rates of the device, TFLOP/s and GB/s, which the plan's own choices follow."""
        return self.require_device().burst_rates(dtype)
