"""Code for every card: default tilings compile and fit the shared memory of every target."""

import pytest

from mla_var3.conf.devices import load_devices, shared_memory_limit
from mla_var3.kernel.cutile.mla.tilings import tiling_target
from mla_var3.runtime.stage import constraint_failures
from tests.compile_matrix import (
    DESIGNS,
    TARGETS,
    accepted_targets,
    reports,
    spare_bytes,
    spills_too_much,
    stages,
)

FAMILIES = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""Targets that differ in matrix instruction or shared memory; the others compile alike."""


def test_every_target_is_known_to_the_table_and_the_compiler():
    assert set(accepted_targets()) == set(TARGETS)
    assert {spec.target for spec in load_devices().values()} <= set(TARGETS)
    small = {target for target in TARGETS if shared_memory_limit(target) == 99 * 1024}
    assert small == {"sm_86", "sm_89", "sm_120", "sm_121"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("design", DESIGNS)
def test_default_tilings_fit_by_their_own_constraints(design, target):
    for kernel in stages(design, target):
        assert not constraint_failures(kernel.tiling, kernel.plan)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("design", ["flash_mla", "flash_mla_split_kv", "flash_mla:fp8"])
def test_latent_tilings_fit_narrow_latents_too(design, target):
    for kernel in stages(design, target, h=32, d=64, k=256):
        assert not constraint_failures(kernel.tiling, kernel.plan)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_small_kernel_compiles_for_every_target(target):
    """The whole matrix is `python -m tests.compile_matrix`."""
    (report,) = reports("mla_var6_plus", target, "decompress_combine")
    assert report.error is None
    assert spare_bytes(report) >= 0, report.shared_bytes
    assert not report.misses_tensor_core, report.verdict


@pytest.mark.slow
@pytest.mark.parametrize("target", FAMILIES)
@pytest.mark.parametrize("design", DESIGNS)
def test_default_tilings_do_not_spill(design, target):
    for report in reports(design, target):
        assert report.error is None
        assert spare_bytes(report) >= 0, report.shared_bytes
        assert not report.misses_tensor_core, report.verdict
        assert not spills_too_much(report), report.verdict


def test_targets_share_the_tilings_of_their_matrix_instructions():
    shared = {target: tiling_target(target) for target in TARGETS}
    assert {target for target, found in shared.items() if found == "sm_90"} == {"sm_90"}
    assert {t for t, found in shared.items() if found == "sm_100"} == {"sm_100", "sm_103", "sm_110"}
    assert tiling_target("sm_90a") == "sm_90"
