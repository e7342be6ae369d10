"""The mix in which the n newest tokens of every request are decompressed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from mla_var3.kernel.cute_python.mla.decompressed.stage import WindowShape
from mla_var3.kernel.cute_python.mla.mix.plan import CuteMixPlan
from mla_var3.kernel.cute_python.mla.mix.sm_split import SmSplit
from mla_var3.kernel.newest_window import WINDOW_STEP, NewestWindowPlan
from mla_var3.op.mla.model.mix import MixModel, MixWork
from mla_var3.op.mla.model.parameters import mix_parameters
from mla_var3.op.mla.window.formats import PLAIN, WindowForm


@dataclass
class NewestMixPlan(NewestWindowPlan, CuteMixPlan):
    """Plan of a mix with a window of the newest tokens.

    Attributes:
        window_form: how the window is stored.
    """

    window_form: ClassVar[WindowForm] = PLAIN

    @functools.cached_property
    def model(self) -> MixModel | None:
        """The model of the mix on the device that the plan is made for, if it was fitted there.

        It then chooses n and the SMs. Otherwise the roofline does, and rates that any SM has.
        """
        if self.target.device is None:
            return None
        parameters = mix_parameters(self.target.device, self.dtype)
        return MixModel(parameters, self.window_form) if parameters.fitted else None

    def model_n(self, peak_tflops: float, peak_gbps: float) -> int:
        if self.model is None:
            return super().model_n(peak_tflops, peak_gbps)
        return self.model.worthwhile_n(self.problem(), multiple=WINDOW_STEP)

    def balanced_split(self) -> SmSplit:
        if self.model is None:
            return super().balanced_split()
        wanted = self.model.split_of(MixWork(self.latent_cost(), self.window_cost(), ()))
        chosen = min(max(wanted, 1), self.sm_count - 1)
        return SmSplit(chosen, self.sm_count - chosen)

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
