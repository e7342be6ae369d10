"""What all MLA kernel plans share, in every language: the problem's fields and its inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from mla_var3.op.mla.attend import AttendOptions
from mla_var3.op.mla.inputs import (
    MlaInputs,
    make_inputs,
    project_queries,
    random_numbers,
    torch_dtype,
)
from mla_var3.op.mla.problem import SIZE_NAMES, MlaProblem, require_size
from mla_var3.op.mla.reference import reference_latent
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.tensors import check_tensor, require_view


def sliding_window_field() -> int:
    """The field `sliding_window` of a latent plan."""
    text = "newest tokens, up to itself, that a query sees; 0 for all"
    found: int = field(default=0, metadata={"help": text})
    return found


@dataclass
class MlaPlan(KernelPlan):
    """The sizes of an MLA problem as plan fields (DeepSeek-V3 by default)."""

    b: int = field(default=64, metadata={"help": "requests in the batch"})
    s: int = field(default=1, metadata={"help": "query tokens per request"})
    t: int = field(default=4096, metadata={"help": "KV slots per request"})
    h: int = field(default=128, metadata={"help": "query heads"})
    d: int = field(default=128, metadata={"help": "head dimension without rope"})
    p: int = field(default=64, metadata={"help": "rope dimension"})
    k: int = field(default=512, metadata={"help": "latent dimension"})
    dtype: str = field(default="bfloat16", metadata={"help": "bfloat16 or float16"})
    causal: bool = field(default=True, metadata={"help": "mask later tokens (bottom-right)"})
    lengths: tuple[int, ...] | None = field(
        default=None, metadata={"help": "KV length per request: comma list or mixed; default all t"}
    )
    seed: int | None = field(default=None, metadata={"help": "seed of the inputs; default fresh"})
    scale: float | None = field(
        default=None,
        metadata={"help": "factor on the logits, for example with YaRN; none: (d+p)^-0.5"},
    )

    targets: ClassVar[tuple[str, ...]] = ("sm_90", "sm_100", "sm_120")
    needs_v: ClassVar[bool] = True
    """Whether the kernel reads values per head, whose width then has to be d."""
    needs_rope: ClassVar[bool] = True
    """Whether p has to be positive."""

    def __post_init__(self) -> None:
        require_size("p", self.p, minimum=1 if self.needs_rope else 0)
        # Building the problem validates every field and names the one that is wrong.
        self.problem()

    def problem(self) -> MlaProblem:
        """The problem that this plan computes."""
        return self._problem

    @functools.cached_property
    def _problem(self) -> MlaProblem:
        # Plans without a field `v` have values of width d, which is what 0 stands for.
        sizes = {name: getattr(self, name, 0) for name in SIZE_NAMES}
        return MlaProblem(
            **sizes, dtype=self.dtype, causal=self.causal, lengths=self.lengths, scale=self.scale
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of the tensors."""
        return torch_dtype(self.problem())

    @property
    def scale_log2e(self) -> float:
        """Softmax scale times log2 e: the kernels exponentiate in base 2."""
        return self.problem().softmax_scale / math.log(2.0)

    def make_inputs(self, device: torch.device | str) -> MlaInputs:
        """Raw inputs of the operation, from which each kernel derives its own."""
        return make_inputs(self.problem(), device, seed=self.seed)

    def random(self, device: torch.device | str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        """Normal float32 numbers, repeatable with `seed`, for stages whose inputs are partials."""
        if torch.device(device).type == "meta":
            return [torch.empty(shape, device=device) for shape in shapes]
        generator = random_numbers(self.seed, device)
        return [torch.randn(shape, generator=generator, device=device) for shape in shapes]

    def check_inputs(
        self, shapes: Mapping[str, str], inputs: Sequence[Tensor], **sizes: int
    ) -> None:
        """Check inputs: their sizes, dtypes and layouts, and that all are where the first one is.

        The shapes are sizes by letters, "bshd" for [b, s, h, d]; `sizes` are letters that the
        problem does not have. Lengths are int32, LSEs float32, the others of the plan's dtype.
        """
        problem = self.problem()
        for (name, letters), tensor in zip(shapes.items(), inputs, strict=True):
            dtype = self.torch_dtype
            if name.startswith(("lse", "lengths")):
                dtype = torch.float32 if name.startswith("lse") else torch.int32
            shape = [(x, sizes[x] if x in sizes else getattr(problem, x)) for x in letters]
            check_tensor(name, tensor, shape, dtype, inputs[0].device)

    def latent_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        """Inputs of a latent kernel: q_latent, q_rope, c_kv, k_rope, lengths."""
        raw = self.make_inputs(device)
        q_latent = project_queries(raw.q_nope, raw.w_uk)
        return q_latent, raw.q_rope, raw.c_kv, raw.k_rope, raw.lengths

    def latent_rows(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Check such inputs; returns the queries as rows, [b, s*h, k] and [b, s*h, p]."""
        shapes = {"q_latent": "bshk", "q_rope": "bshp", "c_kv": "btk", "k_rope": "btp"}
        self.check_inputs({**shapes, "lengths": "b"}, inputs)
        return self.query_rows(*inputs[:2])

    def query_rows(self, q_latent: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Queries as rows, without a copy."""
        count = self.s * self.h
        return (
            require_view("q_latent", q_latent, self.b, count, self.k),
            require_view("q_rope", q_rope, self.b, count, self.p),
        )

    def attend_options(
        self, compute_dtype: torch.dtype | None = None, sliding_window: int = 0
    ) -> AttendOptions:
        """Mask, scale and dtype of the reference; float32 by default."""
        return {
            "causal": self.causal,
            "scale": self.problem().softmax_scale,
            "compute_dtype": compute_dtype or torch.float32,
            "sliding_window": sliding_window,
        }

    def latent_reference(
        self,
        *inputs: Tensor,
        compute_dtype: torch.dtype | None = None,
        sliding_window: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Reference of a latent kernel: o_latent and lse."""
        return reference_latent(*inputs, **self.attend_options(compute_dtype, sliding_window))

    def cpu_check_plan(self) -> Self:
        """At most two requests of a few tiles each, one of them short."""
        b, t = min(self.b, 2), min(self.t, 150)
        lengths = (t, max(1, t // 3))[:b]
        return self.copy(b=b, s=min(self.s, 5), t=t, h=min(self.h, 24), lengths=lengths)
