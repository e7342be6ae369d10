"""Options made from plan and tiling fields."""

from dataclasses import dataclass, field, make_dataclass
from pathlib import Path

import pytest

from mla_var3.cli.arguments import ValueType, value_type
from mla_var3.cli.console import UsageError
from mla_var3.cli.options import RUN_OPTIONS, PlanParser
from mla_var3.errors import HyperMlaError, InvalidArgumentError
from mla_var3.runtime.profiling import NsightProfType
from mla_var3.runtime.stage import Tiling
from mla_var3.runtime.workflow import RunOptions
from tests.unit.cli.cli_support import FakePlan, FakeTiling, read


@dataclass
class OtherTiling(Tiling):
    Bm: int = 16
    stages: int = 3
    swizzle: bool = False


@dataclass
class TwoTilings(FakePlan):
    combine_tiling: OtherTiling = field(default_factory=OtherTiling)


def test_a_field_is_read_by_its_type():
    for arguments, fields in {
        "--b=32 --scale=0.5 --fraction=none --dtype=float16 --causal --seed=3": {
            "b": 32, "scale": 0.5, "fraction": None, "dtype": "float16", "causal": True, "seed": 3,
        },
        "--no-causal --lengths=(5,10,)": {"causal": False, "lengths": (5, 10)},
        "--causal=0 --seed=auto --lengths=none": {"causal": False, "seed": None, "lengths": None},
    }.items():  # fmt: skip
        plan = read(FakePlan(), *arguments.split()).plan
        assert {name: getattr(plan, name) for name in fields} == fields


def test_a_bad_option_is_named_with_a_hint():
    for argument, message in (
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
        ("--bb=3", "did you mean --b?"),
        ("--tune_max=3", "unknown option '--tune_max'"),  # never abbreviated
        ("--prof-typ=event", "did you mean --prof_type"),
        ("--BM=3", "did you mean --Bm"),
        ("--qwertyuiop", "--help lists the options"),
        ("-b=3", "did you mean --b?"),
        ("b=3", "did you mean --b=3?"),
        ("stray", "unexpected argument 'stray'"),
    ):
        with pytest.raises((UsageError, InvalidArgumentError)) as error:
            read(FakePlan(), argument)
        assert message in str(error.value)


def test_all_run_options_arrive_in_both_spellings():
    request = read(
        FakePlan(),
        *("--device=cpu", "--target=sm_100,sm_90,sm_100", "--prof_type=static", "--retune"),
        *("--refine", "--check", "--bench-runs=5", "--out_dir=some/where", "--label=first try"),
        *("--tune-max-iters", "3", "--no-autotune"),
    )
    assert request.mode is NsightProfType.STATIC
    assert request.run == RunOptions(
        device="cpu", targets=("sm_100", "sm_90"), retune=True, refine=True, check=True,
        autotune=False, bench_runs=5, out_dir=Path("some/where"), label="first try",
        tune_max_iters=3,
    )  # fmt: skip


def test_tiling_fields_are_options_by_name_where_only_one_tiling_has_it():
    request = read(FakePlan(), "--Bm=32", "--occupancy=2", "--tiling.Bn=16")
    assert request.plan.tiling_fields() == {"tiling": FakeTiling(32, 16, 2)}
    assert set(request.tiling_given) == {"Bm", "occupancy", "Bn"}
    argv = ("--tiling.Bm=32", "--combine_tiling.Bm=8", "--stages=5", "--Bn=64", "--swizzle")
    both = read(TwoTilings(), *argv).plan.tiling_fields()
    assert both == {"tiling": FakeTiling(32, 64), "combine_tiling": OtherTiling(8, 5, True)}
    with pytest.raises(UsageError, match=r"use --tiling\.Bm or --combine_tiling\.Bm"):
        read(TwoTilings(), "--Bm=32")


@pytest.mark.parametrize("plan", [FakePlan(), TwoTilings()])
def test_help_is_complete(plan):
    parser = PlanParser(plan, "prog")
    joined = " ".join(parser.format_help().split())
    assert all(f"--{flag}" in joined for flag in [*parser.flags, *RUN_OPTIONS, "no_causal"])
    assert "a text of its own, 100% of it (default: none)" in joined
    assert "requests in the batch (default: 1)" in joined
    assert "element type: bfloat16 or float16 (default: bfloat16)" in joined


@pytest.mark.parametrize("spec", [("table", dict, field(default_factory=dict)), ("label", int, 3)])
def test_a_field_that_no_option_can_set_is_an_error(spec):
    plan = make_dataclass("Odd", [spec], bases=(FakePlan,))()
    with pytest.raises(HyperMlaError, match=rf"Odd\.{spec[0]}"):
        PlanParser(plan, "prog")


def test_value_types_of_annotations():
    assert value_type(int | None) == ValueType(int, optional=True)
    assert value_type(tuple[float, ...]) == ValueType(float, sequence=True)
    assert value_type(list[str] | None) == ValueType(str, optional=True, sequence=True)
    assert value_type(int | str) is value_type(tuple[int, str]) is None
