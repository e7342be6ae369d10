"""Code for every card: default tilings compile and fit the shared memory of every target."""

import re

import pytest

from mla_var3.conf.devices import load_devices, shared_memory_limit
from mla_var3.kernel.cutile.mla.tilings import tiling_target
from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.stage import constraint_failures
from tests import compile_matrix
from tests.compile_matrix import DESIGNS, TARGETS, main, reports, spare_bytes, stages

FAMILIES = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""Targets that differ in matrix instruction or shared memory; the others compile alike."""
COMPILED = [
    (design, target)
    for number, design in enumerate(DESIGNS)
    for target in (FAMILIES[number % 5 :][:1] if re.search(r":|_v\d+$", design) else FAMILIES)
]
"""Every design for every family, each of its versions and forms for one: so every family has a form
with pages, with an 8-bit cache and with other widths. The whole matrix takes more than three times
as long (`python -m tests.compile_matrix`)."""


def test_every_target_is_known_to_the_table_and_the_compiler():
    assert set(compile_matrix.accepted_targets()) == set(TARGETS)
    assert {spec.target for spec in load_devices().values()} <= set(TARGETS)
    small = {target for target in TARGETS if shared_memory_limit(target) == 99 * 1024}
    assert small == {"sm_86", "sm_89", "sm_120", "sm_121"}


NARROW = ("flash_mla", "flash_mla_split_kv", "flash_mla:fp8", "mla_var6_plus", "mla_var6_plus_v2",
          "mla_var6_plus_v3", "mla_var6_plus_v4")  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("design", DESIGNS)
def test_default_tilings_fit_by_their_own_constraints_and_narrow_latents(design, target):
    narrow = stages(design, target, h=32, d=64, k=256) if design in NARROW else []
    for kernel in (*stages(design, target), *narrow):
        assert not constraint_failures(kernel.tiling, kernel.plan)
    for kernel in narrow:
        for tiling in kernel.autotune_configs:
            assert "k=256" not in str(constraint_failures(tiling, kernel.plan))


def test_the_program_goes_through_the_whole_matrix(monkeypatch, capsys):
    """Also designs whose names have a comma."""
    seen = []
    monkeypatch.setattr(compile_matrix, "reports", lambda *asked: seen.append(asked) or ())
    assert main([]) == 0
    assert seen == [(design, target) for target in TARGETS for design in DESIGNS]
    seen.clear()
    design = "flash_mla:k=256, p=32"
    assert main(["--targets", "sm_80", "sm_90", "--designs", design]) == 0
    assert seen == [(design, "sm_80"), (design, "sm_90")]
    with pytest.raises(SystemExit):
        main(["--designs", "flush_mla"])
    assert "invalid choice: 'flush_mla'" in capsys.readouterr().err


def require_fit(report: CompileReport) -> None:
    assert report.error is None
    assert spare_bytes(report) >= 0, report.shared_bytes
    assert not report.misses_tensor_core, report.verdict


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(set(TARGETS) - set(FAMILIES)))
def test_a_small_kernel_compiles_for_the_other_targets(target):
    """The whole matrix is `python -m tests.compile_matrix`."""
    (report,) = reports("mla_var6_plus", target, "decompress_combine")
    require_fit(report)


@pytest.mark.slow
@pytest.mark.parametrize(("design", "target"), COMPILED)
def test_default_tilings_do_not_spill(design, target):
    for report in reports(design, target):
        require_fit(report)
        assert not compile_matrix.spills_too_much(report), report.verdict
        if target == "sm_90":  # products by wgmma, tiles by the bulk copy engine
            assert report.instructions.get("UTMALDG", 0) > 0, report.instructions
            assert set(report.mma) == (set() if report.kernel == "split_kv_reduce" else {"HGMMA"})


def test_targets_share_the_tilings_of_their_matrix_instructions():
    # An SM of sm_90 has 228 KiB: two CTAs of 113 KiB with the driver's part, one that asks for 114.
    for kib, ctas in ((113, 2), (114, 1), (227, 1)):
        report = CompileReport("f", "sm_90", {}, shared_bytes=kib * 1024)
        assert compile_matrix.ctas_per_sm(report) == ctas
    shared = {target: tiling_target(target) for target in TARGETS}
    assert {target for target, found in shared.items() if found == "sm_90"} == {"sm_90"}
    assert {t for t, found in shared.items() if found == "sm_100"} == {"sm_100", "sm_103", "sm_110"}
    assert tiling_target("sm_90a") == "sm_90"
