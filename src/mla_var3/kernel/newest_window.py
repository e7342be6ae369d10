"""What the plans of mla_var6_plus share in both languages: the n newest tokens decompressed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.mla.cost import best_n
from mla_var3.op.mla.inputs import decompress_newest, project_queries
from mla_var3.op.mla.problem import require_int
from mla_var3.op.mla.reference import reference_mix

WINDOW_STEP = 128
"""The model's n is rounded to whole tiles of the kernels that read the window."""
REFINE_STEPS = (-4, -2, -1, 1, 2, 4)
"""Neighbours of the model's n that `refinements` offers, in eighths of it."""


@dataclass
class NewestWindowPlan(MlaPlan):
    """Plan of a mix: old tokens latent, the n newest from decompressed keys and values."""

    n: int | None = field(
        default=None, metadata={"help": "newest tokens kept decompressed; default by the model"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n is not None:
            require_int("n", self.n, minimum=0, maximum=self.t, maximum_name="t")

    @property
    def chosen_n(self) -> int:
        """Newest tokens that are decompressed."""
        if self.n is None:
            raise InvalidArgumentError("n", "a number; `resolved` chooses one", "None")
        return self.n

    def model_n(self, peak_tflops: float, peak_gbps: float) -> int:
        """The n of the cost model at the rates of a device."""
        return best_n(self.problem(), peak_tflops, peak_gbps, multiple=WINDOW_STEP)

    def _model_fields(self, peak_tflops: float, peak_gbps: float) -> dict[str, Any]:
        if self.n is not None:
            return {}
        return {"n": min(self.model_n(peak_tflops, peak_gbps), self.t)}

    def refinements(self) -> list[Self]:
        center = self.chosen_n
        step = max(WINDOW_STEP, center // 8 // WINDOW_STEP * WINDOW_STEP)
        wanted = {min(max(center + k * step, 0), self.t) for k in REFINE_STEPS} | {0, self.t}
        return [self.copy(n=n) for n in sorted(wanted - {center})]

    def cpu_check_plan(self) -> Self:
        # Without n first: a window chosen for the large problem may not fit the small one.
        small = super(NewestWindowPlan, self.copy(n=None)).cpu_check_plan()
        share = self.n / self.t if self.n is not None else 0.5
        return small.copy(n=round(share * small.t))

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        raw = self.make_inputs(device)
        q_latent = project_queries(raw.q_nope, raw.w_uk)
        window = decompress_newest(raw, self.chosen_n)
        return (
            raw.q_nope, q_latent, raw.q_rope, raw.c_kv, raw.k_rope, *window, raw.w_uv, raw.lengths,
        )  # fmt: skip

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        return reference_mix(*inputs, **self.attend_options(compute_dtype))
