"""Every stage compiles for every target without a GPU; on sm_90 it becomes what it should."""

from typing import Any

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.runtime.compile import compile_report, fits_shared_memory
from tests.compile_matrix import spills_too_much

from .kernel_support import make_plan

pytestmark = pytest.mark.slow

SIZES = {"b": 32, "s": 16, "t": 4096, "h": 128}
STAGES = {
    "flash_attention": ("flash_attention", {}),
    "flash_attention-s1024": ("flash_attention", {"s": 1024}),
    "flash_mla": ("flash_mla", {}),
    "split_kv_partial": ("flash_mla_split_kv", {"splits": 4}),
    "split_kv_reduce": ("flash_mla_split_kv", {"splits": 4}),
    "attention_block_specialized": ("mla_var6_plus", {"n": 1024}),
    "decompress_combine": ("mla_var6_plus", {"n": 1024}),
    "attention_block_specialized_v2": ("mla_var6_plus_v2", {"n": 1024}),
    "attention_block_specialized_v3": ("mla_var6_plus_v3", {"n": 1024}),
    "latent_old_v4": ("mla_var6_plus_v4", {"n": 1024}),
    "window_new_v4": ("mla_var6_plus_v4", {"n": 1024}),
}
"""Id -> design that has the stage, and further fields of its plan."""
DEVICES = {"sm_90": "NVIDIA H200", "sm_100": "NVIDIA B200", "sm_120": "NVIDIA GeForce RTX 5090"}
HOPPER_SHARED_BYTES = 227 * 1024


def compiled(stage_id: str, target: str) -> Any:
    design, fields = STAGES[stage_id]
    plan = make_plan(design, **{**SIZES, **fields}).for_target(target)
    kernels = {k.name: k for k in plan.plan(*plan.prepare_inputs("meta")).kernels()}
    return compile_report(kernels[stage_id.partition("-")[0]], target)


@pytest.mark.parametrize("stage_id", STAGES)
def test_hopper(stage_id):
    """Tensor cores by wgmma, tiles by the bulk copy engine, registers without spills."""
    report = compiled(stage_id, "sm_90")
    assert report.error is None
    assert not report.spills, report.verdict
    assert report.instructions.get("UTMALDG", 0) > 0, report.instructions
    assert report.shared_bytes <= HOPPER_SHARED_BYTES
    assert fits_shared_memory(report, device_spec(DEVICES["sm_90"]))
    if stage_id != "split_kv_reduce":  # computes no matrix product
        assert report.mma.get("HGMMA", 0) > 0, report.mma
        assert set(report.mma) == {"HGMMA"}, report.mma


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_long_queries_on_blackwell(target):
    """All other stages for all families of targets: `tests/meta/test_targets.py`."""
    report = compiled("flash_attention-s1024", target)
    assert report.error is None
    assert fits_shared_memory(report, device_spec(DEVICES[target])), report.shared_bytes
    assert not spills_too_much(report), report.verdict
