"""The mix and decompressed attention in CuTe DSL on a Hopper GPU, against float32 references.

Caches hold NaN in every slot without a token, outputs are poisoned before each run. Lengths, mask
and dtype change at different paces, so that they meet in many ways; programs are few, because one
serves all shapes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.kernel.cute_python.mla.decompressed.kernel import HEADS, TILES
from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedTiling
from mla_var3.kernel.cute_python.mla.flash_attention.flash_attention.flash_attention import (
    CuteFlashAttention,
)
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLATiling
from mla_var3.kernel.cute_python.mla.mla_var6_plus.mla_var6_plus.mla_var6_plus import (
    CuteMlaVar6Plus,
)
from mla_var3.kernel.cute_python.mla.mla_var6_plus.mla_var6_plus_v5.mla_var6_plus_v5 import (
    CuteMlaVar6PlusV5,
)
from mla_var3.kernel.cute_python.mla.mla_var6_plus.mla_var6_plus_v6.mla_var6_plus_v6 import (
    CuteMlaVar6PlusV6,
)
from mla_var3.op.mla.inputs import decompress_newest
from mla_var3.runtime.check import check_stage, poison_outputs
from mla_var3.runtime.workflow import current_device_spec

from .gpu_support import (
    LSE_RELATIVE,
    RELATIVE,
    captured,
    outputs_of,
    relaunched,
    require_close,
    require_equal,
)

pytestmark = pytest.mark.usefixtures("hopper")

DEVICE = "cuda"
RELATIVE_8 = 0.04
"""Against the reference on the same 8-bit window: queries and weights are rounded to the 4 bits of
e4m3, and with them all the kernel's scores and products."""
LSE_RELATIVE_8 = 0.01
"""Rounded queries move the scores of all tokens."""


@dataclass(frozen=True)
class Case:
    """One problem; `new` is how many tokens are decompressed, also as "t" or "t-1"."""

    new: int | str
    s: int
    h: int
    causal: bool = True
    dtype: str = "bfloat16"
    splits: int = 1
    pairing: str = ""
    t: int = 200
    b: int = 3
    pattern: str = "mixed"
    kv_block: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that are decompressed."""
        return self.new if isinstance(self.new, int) else self.t - self.new.count("-1")

    @property
    def lengths(self) -> tuple[int, ...]:
        t, s = self.t, self.s
        patterns = {
            "mixed": (t, 0, max(min(s - 1, t), 1)),
            "edges": (128, 64, 65),
            "short": (1, t - 1, t // 2 + 1),
        }
        return tuple(itertools.islice(itertools.cycle(patterns[self.pattern]), self.b))

    @property
    def sizes(self) -> dict[str, Any]:
        names = ("b", "s", "t", "h", "lengths", "causal", "dtype")
        return {"seed": 0, **{name: getattr(self, name) for name in names}}

    @property
    def decompressed_tiling(self) -> DecompressedTiling:
        """A request has no more splits than KV blocks."""
        most = -(-min(self.tokens, max(self.lengths)) // 64)
        return DecompressedTiling(
            splits=max(1, min(self.splits, most)), pairing=self.pairing, kv_block=self.kv_block
        )


NEW: tuple[int | str, ...] = (0, 1, 63, 64, 100, "t-1", "t")
QUERIES = (1, 5, 16, 33, 64, 65, 128, 130)


def mix_cases() -> list[Case]:
    """Every number of new tokens with every number of queries, then large and cut ones."""
    heads = itertools.cycle((1, 3, 8, 16, 128))
    masks = itertools.cycle((True, False, True))
    patterns = itertools.cycle(("mixed", "edges", "short", "mixed"))
    # Few kinds of programs: float16 is never cut.
    kinds = itertools.cycle(
        (("bfloat16", 1), ("bfloat16", 3), ("float16", 1), ("bfloat16", 3), ("bfloat16", 1))
    )
    found = []
    for new, s in itertools.product(NEW, QUERIES):
        dtype, parts = next(kinds)
        found.append(Case(new, s, next(heads), next(masks), dtype, parts, pattern=next(patterns)))
    return [
        *found,
        Case(512, 4, 128, t=2000, b=5, pattern="short"),
        Case(1000, 16, 16, t=2000, b=2, pattern="short"),
        Case(100, 16, 128, b=40, pattern="edges"),
        Case(190, 130, 16, splits=3, causal=False),
        Case("t", 5, 3, splits=3, t=700, b=1),
        Case("t", 130, 3, splits=3, t=700, b=2),
        Case("t", 16, 8, pairing=TILES),
        Case("t", 130, 8, pairing=HEADS),
    ]


MIX_CASES = mix_cases()
PREFIX_CASES = [
    Case(0, 5, 8), Case(1, 1, 3), Case(63, 16, 16, dtype="float16"), Case(64, 33, 8, causal=False),
    Case(100, 5, 128, pattern="edges"), Case(100, 65, 3, splits=2), Case(128, 16, 16, b=9),
    Case(150, 130, 1, pattern="short"), Case("t-1", 16, 8, causal=False, dtype="float16"),
    Case("t", 5, 16), Case("t", 64, 8, splits=3, pattern="short"), Case(190, 7, 128, b=20),
]  # fmt: skip
EIGHT_CASES = [
    Case(1, 5, 8), Case(63, 16, 3), Case(64, 1, 128, pattern="short"), Case(100, 33, 16, b=5),
    Case(100, 65, 8, causal=False), Case("t-1", 16, 8, pattern="edges"), Case("t", 16, 16),
    Case("t", 130, 3, splits=3, pattern="short"), Case(192, 5, 16, splits=3, causal=False),
    Case("t", 64, 8, dtype="float16"), Case(0, 5, 8),
]  # fmt: skip
ATTENTION_CASES = [
    Case("t", 1, 128), Case("t", 5, 3, causal=False), Case("t", 64, 16, pattern="edges"),
    Case("t", 65, 8, dtype="float16"), Case("t", 128, 1, pattern="short"), Case("t", 130, 16, b=1),
    Case("t", 1, 1, splits=3, b=1), Case("t", 33, 8, splits=2, t=1), Case("t", 130, 3, splits=3),
    Case("t", 16, 8, t=3000, b=1, splits=3), Case("t", 130, 3, pairing=HEADS, causal=False),
    Case("t", 5, 8, pairing=TILES),
    Case("t", 65, 8, kv_block=128), Case("t", 130, 16, kv_block=128, causal=False),
    Case("t", 128, 3, kv_block=128, pattern="edges"), Case("t", 100, 1, kv_block=128, splits=3),
    Case("t", 130, 8, kv_block=128, splits=3, t=700, pattern="short"),
    Case("t", 65, 3, kv_block=128, dtype="float16", t=449, pattern="short"),
    Case("t", 5, 8, kv_block=128, pairing=TILES, t=1), Case("t", 100, 2, t=9000, pattern="short"),
]  # fmt: skip


def mix_of(case: Case, cls: type = CuteMlaVar6Plus) -> Any:
    return cls(**case.sizes, n=case.tokens, decompressed_tiling=case.decompressed_tiling)


def eight_bits_of(case: Case) -> Any:
    return mix_of(case, CuteMlaVar6PlusV5)


def prefix_of(case: Case) -> Any:
    # The prefix has its length whatever those of the requests are.
    tiling = DecompressedTiling(
        splits=max(1, min(case.splits, -(-case.tokens // 64))), pairing=case.pairing
    )
    return CuteMlaVar6PlusV6(**case.sizes, prefix=case.tokens, decompressed_tiling=tiling)


def attention_of(case: Case) -> Any:
    return CuteFlashAttention(**case.sizes, tiling=case.decompressed_tiling)


def planned(plan: Any) -> tuple[Any, tuple[Tensor, ...], Any]:
    plan = plan.on_device(current_device_spec())
    inputs = plan.prepare_inputs(DEVICE)
    return plan, inputs, plan.plan(*inputs)


# --- shapes ---------------------------------------------------------------------------------------


KINDS = {
    "mix": (mix_of, MIX_CASES), "attention": (attention_of, ATTENTION_CASES),
    "prefix": (prefix_of, PREFIX_CASES), "8 bits": (eight_bits_of, EIGHT_CASES),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, (_, cases) in KINDS.items() for case in cases]
)
def test_every_case(kind: str, case: Case) -> None:
    """Twice on poisoned outputs: what is left in the buffers of the first run must not matter."""
    make, _ = KINDS[kind]
    bounds = (RELATIVE_8, LSE_RELATIVE_8) if kind == "8 bits" else (RELATIVE[case.dtype],)
    plan, inputs, stage = planned(make(case))
    check_stage(plan, inputs, stage).require()
    first = outputs_of(stage)
    require_close(first, plan.reference_fn(*inputs), *bounds)
    require_equal(relaunched(stage), first)


@pytest.mark.gpu
def test_what_eight_bits_cost_is_mostly_their_form() -> None:
    """Against keys and values before they were rounded: the form's error, and the kernel's."""
    plan, inputs, stage = planned(eight_bits_of(Case(190, 16, 16, pattern="short")))
    check_stage(plan, inputs, stage).require()
    window = decompress_newest(plan.make_inputs(DEVICE), plan.n)
    found = plan.errors(stage.output_tensors[0], inputs, window)
    assert found.kernel.relative_frobenius < RELATIVE_8
    assert 0.005 < found.form.relative_frobenius < 0.1
    joint = math.hypot(found.kernel.relative_frobenius, found.form.relative_frobenius)
    assert found.total.relative_frobenius < 1.3 * joint


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_small_query_beside_a_large_rope_part(dtype: str) -> None:
    """One scale per row for both: the rope part must not leave the range of 16 bits."""
    plan, inputs, stage = planned(eight_bits_of(Case("t", 16, 8, dtype=dtype)))
    inputs[0].mul_(1e-4)  # q_nope; the window holds every token, so nothing else reads it
    require_close(relaunched(stage), plan.reference_fn(*inputs), RELATIVE_8, LSE_RELATIVE_8)


def test_the_cases_are_many_and_varied() -> None:
    """Needs no GPU."""
    assert len(set(MIX_CASES)) == len(MIX_CASES) >= 60
    assert len({(case.dtype, case.causal) for case in MIX_CASES}) == 4
    lengths = [(length, case.s) for case in MIX_CASES for length in case.lengths]
    assert any(length == 0 for length, _ in lengths)
    assert sum(0 < length < s for length, s in lengths) >= 20
    splits = [case.decompressed_tiling.splits for case in MIX_CASES if case.tokens]
    assert {1, 3} <= set(splits) and splits.count(3) >= 5


def test_every_case_can_be_planned() -> None:
    """Needs no GPU: the plan takes the inputs and the tiling."""
    for make, cases in KINDS.values():
        for case in cases:
            plan = make(case)
            for kernel in plan.plan(*plan.prepare_inputs("meta")).kernels():
                assert not kernel.tiling.validate(plan).failures, (case, kernel.name)
                assert kernel.args_fn(kernel.tiling)  # type: ignore[attr-defined]


# --- SMs, values, graphs --------------------------------------------------------------------------


@pytest.mark.gpu
def test_other_splits_of_the_sms() -> None:
    plan, inputs, stage = planned(mix_of(Case(150, 16, 16)))
    latent, window, _ = stage.kernels()
    most = plan.sm_count
    for sms in ((1, 1), (most - 1, 1), (1, most - 1), (most // 2, most // 2), (7, 13)):
        latent.tiling = FlashMLATiling(sms=sms[0])
        window.tiling = DecompressedTiling(sms=sms[1], splits=1)
        check_stage(plan, inputs, stage).require()


@pytest.mark.gpu
def test_views_of_larger_windows() -> None:
    """Strides that are not those of the sizes, as a ring that is longer than n has."""
    plan, inputs, _ = planned(mix_of(Case(100, 5, 8)))
    wider = [*inputs]
    for index in (5, 6):
        rows = torch.full((3, 9, 140, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        rows[:, :8, :100] = inputs[index]
        wider[index] = rows[:, :8, :100]
    rope = torch.full((3, 140, 96), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    rope[:, :100, :64] = inputs[7]
    wider[7] = rope[:, :100, :64]
    check_stage(plan, tuple(wider), plan.plan(*wider)).require()


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [100.0, -100.0])
def test_huge_scores(factor: float) -> None:
    """Hundreds of powers of two apart: a row is nearly one token, and nothing overflows."""
    plan, inputs, stage = planned(mix_of(Case(100, 5, 16)))
    for queries in inputs[:3]:
        queries.mul_(factor)
    got = relaunched(stage)
    wanted = plan.reference_fn(*inputs, compute_dtype=torch.float64)
    require_close(got, wanted, RELATIVE["bfloat16"], LSE_RELATIVE)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_lengths() -> None:
    """Lengths and caches are rewritten in place; both kernels find their work anew."""
    plan, inputs, stage = planned(mix_of(Case(100, 5, 8)))
    graph = captured(stage.launch)
    for lengths in ((200, 200, 200), (0, 0, 0), (1, 100, 101), (99, 3, 0)):
        fresh = plan.copy(lengths=lengths).prepare_inputs(DEVICE)
        for tensor, values in zip(inputs, fresh, strict=True):
            tensor.copy_(values)
        poison_outputs(stage)
        graph.replay()
        require_close(
            outputs_of(stage), plan.reference_fn(*inputs), RELATIVE["bfloat16"], LSE_RELATIVE
        )
