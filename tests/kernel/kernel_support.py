"""Helpers of the kernel tests: plans by name, the check, and ways to spoil a kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.tile")

from mla_var3.kernel.cutile.mla.decompress_combine import CtDecompressCombine
from mla_var3.kernel.cutile.mla.flash_mla_split_kv.flash_mla_split_kv.split_kv_partial import (
    CtSplitKVPartial,
)
from mla_var3.kernel.cutile.mla.flash_mla_split_kv.flash_mla_split_kv.split_kv_reduce import (
    CtSplitKVReduce,
)
from mla_var3.kernel.cutile.mla.mla_var6_plus.mla_var6_plus.attention_block_specialized import (
    CtAttentionBlockSpecialized,
)
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.compare import compare
from mla_var3.op.mla.inputs import up_project
from mla_var3.op.mla.reference import reference_from_latent
from mla_var3.runtime.check import CheckResult, check_stage
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.stage import Stage

DESIGNS = ("flash_attention", "flash_mla", "flash_mla_split_kv", "mla_var6_plus")

STAGES: dict[str, type[MlaPlan]] = {
    "split_kv_partial": CtSplitKVPartial,
    "split_kv_reduce": CtSplitKVReduce,
    "attention_block_specialized": CtAttentionBlockSpecialized,
    "decompress_combine": CtDecompressCombine,
}

_LATENT = "q_latent q_rope c_kv k_rope"
_MIX = f"q_nope {_LATENT} k_new v_new k_rope_new"
INPUT_NAMES = {
    "flash_attention": ["q_nope", "q_rope", "k", "v", "k_rope", "lengths"],
    "flash_mla": f"{_LATENT} lengths".split(),
    "flash_mla_split_kv": f"{_LATENT} lengths".split(),
    "mla_var6_plus": f"{_MIX} w_uv lengths".split(),
    "split_kv_partial": f"{_LATENT} lengths".split(),
    "split_kv_reduce": ["o_partial", "lse_partial"],
    "attention_block_specialized": f"{_MIX} lengths".split(),
    "decompress_combine": ["o_latent", "lse_latent", "o_new", "lse_new", "w_uv"],
}
"""The inputs of every plan in the order of `prepare_inputs`, by the names that errors use."""

LSE_RELATIVE = 1e-6
"""The LSE is float32 throughout, so its error is far below the 16-bit bound of the check."""


@dataclass(frozen=True)
class Case:
    """One problem; `n` and `splits` reach the designs that have them."""

    s: int
    t: int
    h: int
    lengths: tuple[int, ...]
    n: int
    splits: int = 2
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        lengths = "-".join(map(str, self.lengths))
        return f"s{self.s}-t{self.t}-h{self.h}-len{lengths}-n{self.n}-{self.dtype}"


def make_plan(name: str, **fields: Any) -> MlaPlan:
    """The plan of a design or a stage, with fixed values for its inputs."""
    cls = STAGES[name] if name in STAGES else plan_class(find_kernel(name))
    plan: MlaPlan = cls(**{"seed": 0, **fields})
    return plan


def plan_of(name: str, case: Case, *, causal: bool = True, **fields: Any) -> MlaPlan:
    """The plan of a design or a stage for a case."""
    own: dict[str, Any] = {}
    if name in ("mla_var6_plus", "attention_block_specialized"):
        own["n"] = case.n
    if name in ("flash_mla_split_kv", "split_kv_partial", "split_kv_reduce"):
        own["splits"] = min(case.splits, case.t)
    sizes = {"b": len(case.lengths), "s": case.s, "t": case.t, "h": case.h}
    common = {"lengths": case.lengths, "dtype": case.dtype, "causal": causal}
    return make_plan(name, **{**sizes, **common, **own, **fields})


def named_inputs(plan: MlaPlan, name: str) -> dict[str, Tensor]:
    """The inputs of a plan on the CPU, by the names that errors use."""
    return dict(zip(INPUT_NAMES[name], plan.prepare_inputs("cpu"), strict=True))


def check(plan: MlaPlan, inputs: tuple[Tensor, ...] | None = None) -> CheckResult:
    """The outcome of the check of a plan on the CPU."""
    inputs = plan.prepare_inputs("cpu") if inputs is None else inputs
    return check_stage(plan, inputs, plan.plan(*inputs))


def require(plan: MlaPlan, inputs: tuple[Tensor, ...] | None = None) -> Stage:
    """Checks a plan, its LSE more strictly; returns what ran.

    Rows that see no key, whose LSE is -inf, are exactly 0.
    """
    inputs = plan.prepare_inputs("cpu") if inputs is None else inputs
    stage = plan.plan(*inputs)
    result = check_stage(plan, inputs, stage)
    result.require()
    for output in result.outputs:
        if len(output.shape) == len(result.outputs[0].shape) - 1:
            assert output.error.relative_frobenius <= LSE_RELATIVE, f"LSE: {output.error}"
    for out, lse in zip(stage.output_tensors[::2], stage.output_tensors[1::2], strict=True):
        assert not out[lse == -torch.inf].any()
    return stage


def require_end_to_end(plan: MlaPlan, stage: Stage) -> None:
    """Compares what a design computed with the operation itself, from the raw latent cache.

    The kernel's inputs are themselves projections rounded to 16 bits, so the bound is twice the
    error of the whole operation in that dtype.
    """
    raw = plan.make_inputs("cpu")
    output, lse = stage.output_tensors
    if output.shape[-1] == plan.k:
        output = up_project(output, raw.w_uv)
    wanted, wanted_lse = reference_from_latent(raw, plan.problem())
    rounded, rounded_lse = reference_from_latent(
        raw, plan.problem(), compute_dtype=plan.torch_dtype
    )
    for got, exact, baseline in ((output, wanted, rounded), (lse, wanted_lse, rounded_lse)):
        error, allowed = compare(got, exact), compare(baseline, exact)
        assert error.mismatched_inf == 0
        assert error.relative_frobenius <= 2 * allowed.relative_frobenius + 1e-5, (error, allowed)
        assert error.max_abs <= 2 * allowed.max_abs + 1e-5, (error, allowed)


@contextmanager
def tampered(stage: Stage, kernel: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Passes every argument of one kernel through `change` while the context lasts."""
    [target] = [k for k in stage.kernels() if k.name == kernel]
    original = target.args_fn
    target.args_fn = lambda tiling: tuple(map(change, original(tiling)))
    target._prepared = None
    try:
        yield
    finally:
        target.args_fn = original
        target._prepared = None


def transposed_storage(tensor: Tensor, first: int, second: int) -> Tensor:
    """The same values and shape, with two dimensions swapped in memory."""
    return tensor.transpose(first, second).contiguous().transpose(first, second)
