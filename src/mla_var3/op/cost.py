"""Work of a computation and the roofline time it implies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mla_var3.errors import InvalidArgumentError

Bound = Literal["compute", "memory"]


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes moved to and from device memory.

    Attributes:
        flops: Operations, a multiply-add counting as two.
        bytes: Bytes read plus bytes written, each operand once.
    """

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """Operations per byte; infinite for work that moves nothing."""
        if self.bytes == 0:
            return math.inf if self.flops else 0.0
        return self.flops / self.bytes

    def time_us(self, peak_tflops: float, peak_gbps: float) -> float:
        """Microseconds at the given peaks, with operations and transfers fully overlapped."""
        return max(self._times_us(peak_tflops, peak_gbps))

    def bound(self, peak_tflops: float, peak_gbps: float) -> Bound:
        """Which of the two peaks limits it; at the ridge point it is "compute"."""
        compute, memory = self._times_us(peak_tflops, peak_gbps)
        return "compute" if compute >= memory else "memory"

    def _times_us(self, peak_tflops: float, peak_gbps: float) -> tuple[float, float]:
        for argument, value in (("peak_tflops", peak_tflops), ("peak_gbps", peak_gbps)):
            if not value > 0:
                raise InvalidArgumentError(argument, "a positive number", value)
        return self.flops / (peak_tflops * 1e6), self.bytes / (peak_gbps * 1e3)


NOTHING = Cost(0, 0)
