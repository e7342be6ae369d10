"""Options made from plan and tiling fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from mla_var3.cli.arguments import CALL_SIZES, SIZES, ValueType, parse, value_type
from mla_var3.cli.console import UsageError, usage_errors
from mla_var3.cli.options import (
    RUN_OPTIONS,
    PlanOptions,
    Request,
    build_parser,
    build_request,
    plan_options,
)
from mla_var3.errors import HyperMlaError, InvalidArgumentError
from mla_var3.report import overview
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import NsightProfType
from mla_var3.runtime.stage import Stage, Tiling


@dataclass
class FakeTiling(Tiling):
    Bm: int = 64
    Bn: int = 128
    occupancy: int | None = None


@dataclass
class OtherTiling(Tiling):
    Bm: int = 16
    stages: int = 3
    swizzle: bool = False


@dataclass
class FakePlan(KernelPlan):
    b: int = 64
    t: int = 4096
    scale: float = 1.0
    fraction: float | None = None
    dtype: str = "bfloat16"
    causal: bool = True
    lengths: tuple[int, ...] | None = None
    seed: int | None = field(default=None, metadata={"help": "a text of its own, 100% of it"})
    tiling: FakeTiling = field(default_factory=FakeTiling)

    targets: ClassVar[tuple[str, ...]] = ("sm_90", "sm_100")

    def __post_init__(self) -> None:
        if self.b < 1:
            raise InvalidArgumentError("b", "a positive integer", self.b)

    def prepare_inputs(self, device: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def reference_fn(self, *inputs: Any, compute_dtype: Any = None) -> tuple[Any, ...]:
        raise NotImplementedError

    def _autotune_configs(self) -> Sequence[Tiling]:
        return [FakeTiling()]

    def _algorithmic_flops_bytes(self, tiling: Any) -> tuple[float, float]:
        return 1.0, 1.0

    def plan(self, *inputs: Any) -> Stage:
        raise NotImplementedError


@dataclass
class TwoTilings(FakePlan):
    combine_tiling: OtherTiling = field(default_factory=OtherTiling)


@dataclass
class OddField(FakePlan):
    table: dict[str, int] = field(default_factory=dict)


def read(plan: KernelPlan, *argv: str) -> Request:
    options = plan_options(plan, RUN_OPTIONS)
    with usage_errors():
        values = parse(build_parser(options, "prog"), argv, options)
        return build_request(options, values)


def help_of(plan: KernelPlan) -> tuple[str, PlanOptions]:
    options = plan_options(plan, RUN_OPTIONS)
    return build_parser(options, "prog").format_help(), options


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--b=32", "b", 32),
        ("--scale=0.5", "scale", 0.5),
        ("--fraction=0.25", "fraction", 0.25),
        ("--fraction=none", "fraction", None),
        ("--dtype=float16", "dtype", "float16"),
        ("--causal", "causal", True),
        ("--no_causal", "causal", False),
        ("--no-causal", "causal", False),
        ("--causal=false", "causal", False),
        ("--causal=0", "causal", False),
        ("--causal=True", "causal", True),
        ("--seed=3", "seed", 3),
        ("--seed=none", "seed", None),
        ("--seed=auto", "seed", None),
        ("--lengths=5,10,4096", "lengths", (5, 10, 4096)),
        ("--lengths=(5,10,)", "lengths", (5, 10)),
        ("--lengths=none", "lengths", None),
    ],
)
def test_a_field_is_read_by_its_type(argument: str, name: str, value: object) -> None:
    assert getattr(read(FakePlan(), argument).plan, name) == value


def test_mixed_lengths_follow_b_and_t() -> None:
    plan = read(FakePlan(), "--lengths=mixed", "--b=4", "--t=100").plan
    assert plan.lengths == (1, 34, 67, 100)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--b=x", "--b: expected an integer, got 'x'"),
        ("--b=1.5", "--b: expected an integer, got '1.5'"),
        ("--scale=big", "--scale: expected a number, got 'big'"),
        ("--causal=maybe", "--causal: expected true or false, got 'maybe'"),
        ("--lengths=1,x", "--lengths: expected a comma list, each an integer or mixed or none"),
        ("--b", "--b: expected one argument"),
        ("--device=gpu", "device: expected auto, cuda or cpu, got 'gpu'"),
        ("--tune_max_iters=0", "tune_max_iters: expected a number of at least 1, got 0"),
        ("--target=sm_91", "unknown target 'sm_91'; did you mean 'sm_90'"),
        ("--target=,", "--target: expected GPU codes such as sm_90, got ','"),
        ("--prof_type=evnt", "unknown prof_type 'evnt'; did you mean 'event'"),
        ("--b=0", "b: expected a positive integer, got 0"),
    ],
)
def test_a_bad_value_names_the_option(argument: str, message: str) -> None:
    with pytest.raises(HyperMlaError) as error:
        read(FakePlan(), argument)
    assert message in str(error.value)
    assert isinstance(error.value, (UsageError, InvalidArgumentError))


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--bb=3", "did you mean --b?"),
        ("--tune_max_iter=3", "did you mean --tune_max_iters?"),
        ("--prof-typ=event", "did you mean --prof_type"),
        ("--BM=3", "did you mean --Bm"),
        ("--casual", "did you mean --causal"),
        ("--qwertyuiop", "--help lists the options"),
        ("-b=3", "did you mean --b?"),
        ("b=3", "did you mean --b=3?"),
        ("stray", "unexpected argument 'stray'"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(argument: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        read(FakePlan(), argument)
    assert hint in str(error.value)


def test_options_are_never_abbreviated() -> None:
    with pytest.raises(UsageError, match="unknown option"):
        read(FakePlan(), "--tune_max=3")


def test_both_spellings_of_run_options() -> None:
    for argv in (
        ["--tune_max_iters=3", "--no_autotune"],
        ["--tune-max-iters", "3", "--no-autotune"],
    ):
        run = read(FakePlan(), *argv).run
        assert run.tune_max_iters == 3 and not run.autotune


def test_all_run_options_arrive() -> None:
    request = read(
        FakePlan(),
        *("--device=cpu", "--target=sm_100,sm_90,sm_100", "--prof_type=static", "--retune"),
        *("--refine", "--check", "--bench_runs=5", "--out_dir=some/where", "--label=first try"),
    )
    run = request.run
    assert request.mode is NsightProfType.STATIC
    assert (run.device, run.targets) == ("cpu", ("sm_100", "sm_90"))
    assert run.retune and run.refine and run.check
    assert (run.bench_runs, str(run.out_dir), run.label) == (5, "some/where", "first try")


def test_tiling_fields_are_options() -> None:
    request = read(FakePlan(), "--Bm=32", "--occupancy=2", "--tiling.Bn=16")
    assert request.plan.tiling_fields() == {"tiling": FakeTiling(32, 16, 2)}
    assert set(request.tiling_given) == {"Bm", "occupancy", "Bn"}


def test_two_tilings_with_the_same_field_need_their_names() -> None:
    request = read(TwoTilings(), "--tiling.Bm=32", "--combine_tiling.Bm=8", "--stages=5", "--Bn=64")
    assert request.plan.tiling_fields() == {
        "tiling": FakeTiling(32, 64),
        "combine_tiling": OtherTiling(8, 5),
    }
    with pytest.raises(UsageError, match=r"use --tiling\.Bm or --combine_tiling\.Bm"):
        read(TwoTilings(), "--Bm=32")
    swizzled = read(TwoTilings(), "--swizzle").plan.tiling_fields()["combine_tiling"]
    assert swizzled == OtherTiling(swizzle=True)


@pytest.mark.parametrize("plan", [FakePlan(), TwoTilings()])
def test_help_is_complete_and_grouped(plan: KernelPlan) -> None:
    text, options = help_of(plan)
    for flag in [*options.flags, *RUN_OPTIONS]:
        assert f"--{flag}" in text
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert [title.split(":")[0] for title in titles][1:] == [
        "problem",
        *["tiling"] * len(options.tilings),
        "run",
        "profiling",
    ]
    joined = " ".join(text.split())
    assert "a text of its own, 100% of it (default: none)" in joined
    assert "requests in the batch (default: 64)" in joined
    assert "element type: bfloat16 or float16 (default: bfloat16)" in joined
    assert "--no_causal" in text


def test_a_field_that_no_option_can_set_is_an_error() -> None:
    with pytest.raises(HyperMlaError, match=r"OddField\.table"):
        plan_options(OddField())


def test_a_plan_field_must_not_take_the_name_of_a_run_option() -> None:
    with pytest.raises(HyperMlaError, match=r"FakePlan\.seed"):
        plan_options(FakePlan(), ["seed"])


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int, ValueType(int)),
        (int | None, ValueType(int, optional=True)),
        (tuple[float, ...], ValueType(float, sequence=True)),
        (list[str] | None, ValueType(str, optional=True, sequence=True)),
        (dict[str, int], None),
        (int | str, None),
        (tuple[int, str], None),
    ],
)
def test_value_types_of_annotations(annotation: Any, expected: ValueType | None) -> None:
    assert value_type(annotation) == expected


def test_the_help_of_run_states_the_sizes_of_the_main_job() -> None:
    assert {name: SIZES[name] for name in CALL_SIZES} == overview.SIZES
