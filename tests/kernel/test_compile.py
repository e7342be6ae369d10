"""Every stage compiles for every target without a GPU; on sm_90 it becomes what it should."""

from typing import Any

import pytest
import torch

from mla_var3.conf.devices import device_spec
from mla_var3.kernel.cutile.mla.latent_plan import LatentInputs
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
LATENT_FORMS = {
    "pages of 64": {"page": 64},
    "pages of 32": {"page": 32},
    "pages of 16": {"page": 16},
    "packed trees": {"page": 64},
    "k=512, p=0": {"page": 64, "p": 0},
    "k=256, p=64": {"page": 64, "k": 256},
    "k=256, p=32": {"page": 64, "k": 256, "p": 32},
    "fp8": {"page": 64, "cache_dtype": "fp8"},
    "fp8_per_token": {"page": 64, "cache_dtype": "fp8_per_token"},
    "fp8_ds_mla": {"page": 64, "cache_dtype": "fp8_ds_mla"},
}
"""What the latent kernels are compiled for beside dense caches."""
PORTABLE = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""Targets of the latent kernels, and KB of shared memory that a CTA may use there."""
SPILLED_BYTES = {
    ("sm_80", "pages of 16"): 712,
    ("sm_80", "k=512, p=0"): 120,
    ("sm_89", "pages of 16"): 440,
    ("sm_90", "pages of 32"): 128,
    ("sm_90", "packed trees"): 8,
    ("sm_100", "pages of 64"): 8,
    ("sm_100", "k=512, p=0"): 8,
    ("sm_100", "packed trees"): 8,
}
"""Stack that is known; on sm_100, and on sm_80 without rope, it is not used in a loop."""
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


@pytest.mark.parametrize("form", LATENT_FORMS)
@pytest.mark.parametrize("target", PORTABLE)
def test_latent_forms(form, target):
    """The portable kernel fits every target and reaches its tensor cores."""
    plan = make_plan("flash_mla", **SIZES, **LATENT_FORMS[form]).for_target(target)
    inputs = LatentInputs(*plan.prepare_inputs("meta"))
    if form == "packed trees":
        b, s = plan.b, plan.s
        inputs = inputs._replace(
            q_latent=inputs.q_latent.flatten(0, 1),
            q_rope=inputs.q_rope.flatten(0, 1),
            cu_seqlens_q=inputs.lengths.new_empty(b + 1),
            tree=inputs.lengths.new_empty((b, s, s), dtype=torch.bool),
        )
    [kernel] = plan.plan(*inputs).kernels()
    report = compile_report(kernel, target)
    assert report.error is None
    assert not report.misses_tensor_core, report.mma
    assert (report.shared_bytes or 0) <= PORTABLE[target] * 1024
    assert (report.stack_bytes or 0) <= SPILLED_BYTES.get((target, form), 0), report.verdict
    assert target != "sm_100" or not report.loop_local, report.verdict
