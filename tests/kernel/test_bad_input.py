"""Bad input: every error names the argument, what was expected and what came."""

import re

import pytest
import torch

from mla_var3.errors import InvalidArgumentError

from .kernel_support import DESIGNS, STAGES, Case, make_plan, named_inputs, plan_of

PLANS = (*DESIGNS, *STAGES)
CASE = Case(s=3, t=20, h=2, lengths=(20, 7), n=5)
SIZES = {"b": 2, "s": 3, "t": 20, "h": 2}


WINDOWED = ("mla_var6_plus", "attention_block_specialized")
SPLIT = ("flash_mla_split_kv", "split_kv_partial", "split_kv_reduce")
WRONG_FIELDS: dict[str, tuple[tuple[str, ...], str, tuple[object, ...]]] = {
    # The problem itself is checked in `tests/unit/op/test_problem.py`; here that plans ask it.
    "b: expected a positive integer, got {}": (PLANS, "b", (0,)),
    "k: expected a positive integer, got {}": (PLANS, "k", (2.0,)),
    "dtype: expected 'bfloat16' or 'float16', got {}.*": (PLANS, "dtype", ("float32",)),
    "lengths: expected b=2 entries, got 1": (PLANS, "lengths", ((20,),)),
    r"lengths\[1\]: expected an integer from 0 to t=20, got 21": (PLANS, "lengths", ((20, 21),)),
    "n: expected .*20.*, got {}": (WINDOWED, "n", (-1, 21, 2.5, "5", True)),
    "splits: expected .*, got {}": (SPLIT, "splits", (0, -1, 2.5, "2", True)),
    "splits: expected .*20.*, got {}": (SPLIT[:1], "splits", (21,)),
    "parts: expected both or latent or new, got {}": (("decompress_combine",), "parts", ("old",)),
}
"""Message, with `{}` for the value: the plans, the field and its values."""


@pytest.mark.parametrize("message", WRONG_FIELDS)
def test_wrong_fields(message):
    names, field, values = WRONG_FIELDS[message]
    for name in names:
        for value in values:
            expected = message.replace("{}", re.escape(repr(value)))
            with pytest.raises(InvalidArgumentError, match=f"^{expected}$"):
                make_plan(name, **{**SIZES, field: value})


TOO_LARGE = "tiles: expected at most 232448 bytes of shared memory on sm_90"
BAD_TILINGS = [
    ("flash_attention", {"Bm": 48}, "Bm: expected a power of two (a tile side), got 48"),
    ("flash_attention", {"Bn": 0}, "Bn: expected a power of two (a tile side), got 0"),
    ("flash_mla", {"Bm": -64}, "Bm: expected a power of two (a tile side), got -64"),
    ("flash_mla", {"Kp": 1024}, "Kp: expected a divisor of k=512, got 1024"),
    ("flash_mla", {"Kp": 96}, "Kp: expected a divisor of k=512, got 96"),
    ("split_kv_partial", {"Bn": 100}, "Bn: expected a power of two (a tile side), got 100"),
    ("split_kv_reduce", {"Kc": 1024}, "Kc: expected a divisor of k=512, got 1024"),
    ("split_kv_reduce", {"Sp": 3}, "Sp: expected a power of two (a tile side), got 3"),
    ("attention_block_specialized", {"Hn": 3}, "Hn: expected a power of two (a tile side), got 3"),
    ("attention_block_specialized", {"Kp": 0}, "Kp: expected a divisor of k=512, got 0"),
    ("flash_attention", {"Bm": 256, "Bn": 512}, f"{TOO_LARGE}, got 425984"),
    ("flash_mla", {"Bm": 128, "Bn": 128}, f"{TOO_LARGE}, got 327680"),
    ("attention_block_specialized", {"Hm": 64, "Hn": 512}, f"{TOO_LARGE}, got 352256"),
    ("decompress_combine", {"Ck": 384}, "Ck: expected a divisor of k=512, got 384"),
]


@pytest.mark.parametrize(("name", "sides", "message"), BAD_TILINGS)
def test_illegal_tilings_are_refused_before_anything_runs(name, sides, message):
    plan = plan_of(name, CASE)
    tiling = type(plan.tiling)(**sides)
    pattern = "^tiling: expected a legal tiling, got .*" + re.escape(message)
    stage = plan.copy(tiling=tiling).plan(*plan.prepare_inputs("cpu"))
    [kernel] = stage.kernels()
    with pytest.raises(InvalidArgumentError, match=pattern):
        stage.launch()
    with pytest.raises(InvalidArgumentError, match=pattern):
        kernel.compile("sm_90")


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        *(
            (name, {width: size}, f"{width}: expected a power of two (a tile side), got {size}")
            for name, width, size in (
                ("flash_attention", "d", 96), ("flash_attention", "p", 48), ("flash_mla", "p", 48),
                ("mla_var6_plus", "d", 96),
            )
        ),
        ("flash_mla", {"k": 576}, "Kp: expected a divisor of k=576, got 128"),
    ],
)  # fmt: skip
def test_widths_that_no_tile_has(name, sizes, message):
    plan = plan_of(name, CASE, **sizes)
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        plan.plan(*plan.prepare_inputs("cpu")).launch()


@pytest.mark.parametrize(("field", "side"), [("tiling", "Kp"), ("reduce_tiling", "Kc")])
def test_every_tiling_of_a_pipeline_counts(field, side):
    plan = plan_of("flash_mla_split_kv", CASE)
    tiling = type(getattr(plan, field))(**{side: 96})
    stage = plan.copy(**{field: tiling}).plan(*plan.prepare_inputs("cpu"))
    with pytest.raises(InvalidArgumentError, match="expected a divisor of k=512, got 96"):
        stage.launch()


def test_what_fits_depends_on_the_target():
    """The default of Hopper is too large for the shared memory of consumer Blackwell."""
    tiling = type(plan_of("flash_mla", CASE).tiling)()
    plan = plan_of("flash_mla", CASE, tiling=tiling).pin("tiling")
    inputs = plan.prepare_inputs("cpu")
    plan.for_target("sm_90").plan(*inputs).launch()
    message = "expected at most 101376 bytes of shared memory on sm_120, got 155648"
    with pytest.raises(InvalidArgumentError, match=message):
        plan.for_target("sm_120").plan(*inputs).launch()


@pytest.mark.parametrize("name", PLANS)
def test_wrong_tensors(name):
    """Of each input: every dimension one too large, one too many, another dtype or device."""
    plan = plan_of(name, CASE)
    inputs = named_inputs(plan, name)

    def refusal(argument: str, wrong: torch.Tensor) -> str:
        with pytest.raises(InvalidArgumentError) as caught:
            plan.plan(*{**inputs, argument: wrong}.values())
        return str(caught.value)

    for argument, right in inputs.items():
        wrong_shapes = [
            [size + (axis == wrong) for axis, size in enumerate(right.shape)]
            for wrong in range(right.ndim)
        ]
        for shape in (*wrong_shapes, [1, *right.shape], []):
            said = refusal(argument, torch.zeros(shape, dtype=right.dtype))
            labelled = re.fullmatch(rf"{argument}: expected \[(.*)\], got (\[.*\])", said)
            assert labelled, said
            sizes = [int(part.split("=")[1]) for part in labelled[1].split(", ")]
            assert (sizes, labelled[2]) == (list(right.shape), str(shape))
        for dtype in {torch.float64, torch.float16, torch.int64} - {right.dtype}:
            said = refusal(argument, torch.zeros(right.shape, dtype=dtype))
            assert said == f"{argument}: expected dtype {right.dtype}, got {dtype}"
        # All inputs share the device of the first one.
        first, second, *_ = inputs
        named, here, there = (
            (second, "meta", "cpu") if argument == first else (argument, "cpu", "meta")
        )
        said = refusal(argument, right.to("meta"))
        assert said == f"{named}: expected a tensor on {here}, got one on {there}"
