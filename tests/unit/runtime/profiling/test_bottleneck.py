"""Bottleneck rules, at their thresholds."""

import pytest

from mla_var3.runtime.profiling.bottleneck import (
    Bound,
    StageMeasurement,
    find_opportunities,
    root_cause,
)

HEALTHY = {
    **{"time_us": 100.0, "tensor_pct": 80.0, "dram_pct": 20.0, "occupancy_pct": 50.0},
    **{"l2_hit_pct": 90.0, "local_bytes": 0.0, "waves_per_sm": 4.0},
}


def stage(name: str = "k", **changes: float) -> StageMeasurement:
    return StageMeasurement(name, {**HEALTHY, **changes})


@pytest.mark.parametrize(
    ("tensor", "dram", "expected"),
    [
        *((60.1, 70.0, Bound.COMPUTE), (60.0, 70.1, Bound.MEMORY), (60.0, 70.0, Bound.LATENCY)),
        *((90.0, 75.0, Bound.COMPUTE), (65.0, 95.0, Bound.MEMORY)),
    ],
)
def test_two_utilisations_decide_the_class(tensor, dram, expected):
    assert stage(tensor_pct=tensor, dram_pct=dram).bound is expected


@pytest.mark.parametrize(
    ("key", "healthy", "unhealthy"),
    [
        *(("occupancy_pct", 25.1, 25.0), ("l2_hit_pct", 80.0, 79.9)),
        *(("local_bytes", 0.0, 32.0), ("waves_per_sm", 1.01, 1.0)),
    ],
)
def test_each_figure_has_its_threshold(key, healthy, unhealthy):
    assert stage(**{key: healthy}).issues == ()
    (issue,) = stage(**{key: unhealthy}).issues
    assert issue.key == key
    assert issue.hint


def test_the_key_issue_names_metric_and_value():
    found = stage(local_bytes=2048.0, occupancy_pct=10.0)
    assert found.key_issue == "register overflow (local spilling=2.00 KiB)"
    assert stage().key_issue == "none"


def test_opportunities_are_weighted_by_the_share_of_time_and_ranked():
    long, short = stage("long", time_us=90.0), stage("short", time_us=10.0)
    short.figures |= {"tensor_pct": 5.0, "dram_pct": 5.0}
    long.roofline_us, short.roofline_us = 45.0, 1.0
    first, second = find_opportunities([long, short])
    # 20 % of the tensor cores' time is left, in nine tenths of the run.
    assert (first.stage, round(first.gain_pct, 6)) == ("long", 18.0)
    assert first.trigger == "TC util=80.0%"
    assert (second.stage, round(second.gain_pct, 6)) == ("short", 9.0)


def test_at_most_three_opportunities_are_named():
    bad = {"tensor_pct": 5.0, "dram_pct": 50.0, "waves_per_sm": 1.1, "local_bytes": 1e6}
    measured = StageMeasurement(
        "k",
        {**HEALTHY, **bad, "l2_bytes": 2e6, "dram_bytes": 4e6},
        roofline_us=10.0,
        algorithm_bytes=1e6,
        stalls={"barrier": 3.0, "wait": 1.0, "not_selected": 9.0},
    )
    found = find_opportunities([measured])
    assert len(found) == 3
    assert [o.gain_pct for o in found] == sorted((o.gain_pct for o in found), reverse=True)
    triggers = {o.trigger for o in find_opportunities([measured], limit=9)}
    assert triggers == {
        "stall barrier=75%",
        "DRAM traffic=4.00x of what the algorithm needs",
        "local spilling=977 KiB",
        "waves/SM=1.10",
    }


def test_the_root_cause_takes_two_sentences_at_most():
    measured = stage(tensor_pct=10.0, occupancy_pct=5.0)
    measured.stalls = {"long_scoreboard": 5.0}
    text = root_cause(measured)
    for words in ("tensor cores busy 10 %", "long_scoreboard", "occupancy=5.0%"):
        assert words in text
    assert text.count(". ") <= 1
