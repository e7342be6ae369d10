"""The mix in which the n newest tokens of every request are decompressed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.mix_plan import CuteMixPlan
from mla_var3.kernel.cute_python.mla.window_stage import WindowShape
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.mla.cost import best_n
from mla_var3.op.mla.problem import require_int

WINDOW_STEP = 128
"""The model's n is rounded to whole blocks of the decompressed kernel, two at a time."""
REFINE_STEPS = (-4, -2, -1, 1, 2, 4)
"""Neighbours of the model's n that `refinements` offers, in eighths of it."""


@dataclass
class NewestMixPlan(CuteMixPlan):
    """Plan of a mix with a window of the newest tokens."""

    n: int | None = field(
        default=None, metadata={"help": "newest tokens kept decompressed; default by the model"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n is not None:
            require_int("n", self.n, minimum=0, maximum=self.t, maximum_name="t")

    def resolve(self, peak_tflops: float, peak_gbps: float) -> Self:
        if self.n is not None:
            return self
        n = best_n(self.problem(), peak_tflops, peak_gbps, multiple=WINDOW_STEP)
        return self.copy(n=min(n, self.t))

    def refinements(self) -> list[Self]:
        center = self.chosen_n
        step = max(WINDOW_STEP, center // 8 // WINDOW_STEP * WINDOW_STEP)
        wanted = {min(max(center + k * step, 0), self.t) for k in REFINE_STEPS} | {0, self.t}
        return [self.copy(n=n) for n in sorted(wanted - {center})]

    def cpu_check_plan(self) -> Self:
        # Without n first: a window chosen for the large problem may not fit the small one.
        small = MlaPlan.cpu_check_plan(self.copy(n=None))
        share = self.n / self.t if self.n is not None else 0.5
        return small.copy(n=round(share * small.t))

    @property
    def chosen_n(self) -> int:
        """Newest tokens that are decompressed."""
        if self.n is None:
            raise InvalidArgumentError("n", "a number; resolve or on_device chooses one", "None")
        return self.n

    def latent_lengths(self) -> list[int]:
        return [old for old, _ in self.problem().window(self.chosen_n)]

    def new_lengths(self) -> list[int]:
        """Decompressed tokens per request."""
        return [new for _, new in self.problem().window(self.chosen_n)]

    def decompressed_slots(self) -> int:
        return self.chosen_n

    @property
    def window_shape(self) -> WindowShape:
        return WindowShape(self.b, self.s, self.h, max(self.new_lengths()))
