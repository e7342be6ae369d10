"""The regression check: three zones, and what is said instead of compared."""

from typing import Any

import pytest

from mla_var3.bench import regression
from mla_var3.bench.record import FAILED, PREDICTED, BenchRow
from mla_var3.bench.regression import BETTER, SAME, WORSE, compare_records, judge
from tests.unit.bench.bench_support import AROUND, peer, record, row


def compare(before: list[BenchRow], after: list[BenchRow], **options: Any) -> regression.Regression:
    return compare_records(record(*after), record(*before), **options)


@pytest.mark.parametrize(
    ("spread_us", "time_us", "verdict"),
    [(10.0, 971.0, BETTER), (10.0, 972.0, SAME), (10.0, 1028.0, SAME), (10.0, 1029.0, WORSE),
     (0.1, 989.0, BETTER), (0.1, 1010.0, SAME), (0.1, 1011.0, WORSE)],
)  # fmt: skip
def test_the_spread_sets_the_zones_and_a_share_the_least(spread_us, time_us, verdict):
    # Twice the root of 10² + 10²: 28.3 us on either side.
    found = judge(row(spread_us=spread_us), row(time_us=time_us, spread_us=spread_us))
    zone = max(regression.SPREADS * spread_us * 2**0.5, regression.LEAST_SHARE * 1000)
    assert found.zone_us == pytest.approx(zone) and found.verdict == verdict
    assert found.change == pytest.approx(time_us / 1000 - 1)


def test_only_a_comparison_without_a_worse_row_passes():
    before = [row(), peer(), row(s=32)]
    good = compare(before, [row(time_us=500.0), peer(), row(s=32)])
    assert good.passed and good.summary == "1 better, 2 same, 0 worse, 0 not compared"
    bad = compare(before, [row(time_us=500.0), peer(), row(s=32, time_us=2000.0)])
    assert not bad.passed and bad.to_dict()["verdicts"][2]["verdict"] == WORSE
    assert not compare([row()], [row("flash_attention")]).passed  # nothing was compared
    gone = compare([row(), peer()], [row()]).not_compared
    assert gone == [("FlashMLA, b=32 s=16 t=4096 h=128", "only in the earlier record")]
    old, new = (row(kind=PREDICTED, spread_us=0.0, time_us=t) for t in (100.0, 90.0))
    assert compare([old], [new]).count(BETTER) == 1
    # An earlier record that was read from several files may have rows of several devices.
    before = [row(time_us=1000.0), row(time_us=500.0, device="NVIDIA B200")]
    (found,) = compare(before, [row(time_us=1200.0)]).verdicts
    assert (found.before.device, found.verdict) == ("NVIDIA H200", WORSE)


def test_what_does_not_match_is_said_and_not_compared():
    for before, after, reason in (
        (row(device="NVIDIA B200"), row(), "device NVIDIA B200 against NVIDIA H200"),
        (row("flash_mla_v1"), row("flash_mla_v2"), "not in the earlier record"),
        (row(language="cute-dsl"), row(), "not in the earlier record"),
        (row(s=8), row(), "not in the earlier record"),
        (row(choices={"n": 1}), row(choices={"n": 2}), "not in the earlier record"),
        (row(kind=PREDICTED), row(), "measured here, predicted in the earlier record"),
        (row(timer="cuda-event"), row(), "timer cuda-event against cuda-graph"),
        (row(spread_us=None), row(), "no spread in the earlier record"),
        (row(), row(time_us=None, status=FAILED, reason="NaN"), "failed in the new record: NaN"),
    ):
        found = compare([before], [after])
        name, why = found.not_compared[0]
        assert found.verdicts == [] and reason in why and name.startswith(after.label)


def versions(**changes: str) -> dict[str, str]:
    return {**AROUND["versions"], **{k.replace("_", "-"): v for k, v in changes.items()}}


def test_another_compiler_is_compared_on_request_only():
    new = row(versions=versions(cuda_tile="1.8.0"))
    found = compare([row()], [new])
    assert "cuda-tile 1.7.0 against 1.8.0" in found.not_compared[0][1]
    forced = compare([row()], [new], across_versions=True)
    assert forced.count(SAME) == 1
    assert "cuda-tile 1.7.0 against 1.8.0" in forced.remarks[0]
    # These do not decide the machine code.
    new = row(versions={**versions(torch="2.10", driver="590"), "hyper-mla": "0.2.0"})
    found = compare([row()], [new])
    assert found.passed and found.remarks == ["drivers differ: 580, 590"]


def test_a_peer_is_tied_to_its_library_and_torch():
    def with_library(version: str, **changes: str) -> BenchRow:
        return peer(versions={**versions(**changes), "flashmla": version})

    assert compare([with_library("1")], [with_library("1", cuda_tile="2")]).passed
    other = compare([with_library("1")], [with_library("2")])
    assert "flashmla 1 against 2" in other.not_compared[0][1]
    assert "torch" in compare([peer()], [peer(versions=versions(torch="3"))]).not_compared[0][1]
    # The public call may choose a kernel of either language.
    call, new = (row("mla_attention", language="", versions=versions(cuda_tile=v)) for v in "12")
    assert "cuda-tile 1 against 2" in compare([call], [new]).not_compared[0][1]


def test_other_settings_and_clocks_are_remarks():
    before = record(row(), settings={"tilings": "default", "rounds": 3})
    after = record(row(), settings={"tilings": "tuned", "rounds": 3})
    for found, limited in ((before, True), (after, False)):
        found.environment = {"gpu": {"clocks_limited_by_setting": limited}}
    result = compare_records(after, before)
    differ, clocks = result.remarks
    assert result.passed and differ == "tilings differ: default against tuned"
    assert clocks == "clocks were locked before and are not locked now"
