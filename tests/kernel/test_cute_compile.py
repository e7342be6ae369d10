"""The machine code of the CuTe DSL kernels: registers, shared memory, instructions, remarks."""

import re

import pytest

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.cli.commands import kernel as kernel_command
from mla_var3.conf.devices import device_spec
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla.flash_mla import CuteFlashMLA
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    THREADS,
)
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLATiling
from mla_var3.kernel.cute_python.mla.latent_fp8 import kernel as fp8_kernel
from mla_var3.kernel.cute_python.mla.latent_fp8 import state as fp8_state
from mla_var3.kernel.cute_python.mla.projections import outputs, queries
from mla_var3.kernel.cute_python.mla.projections.outputs import DecompressCombineSm90
from mla_var3.runtime import workflow
from mla_var3.runtime.compile import CompileReport, fits_shared_memory

from .compile_once import (
    COMBINE,
    DECOMPRESSED,
    HOST,
    LATENT,
    LATENT_FP8,
    PROJECTION,
    SMALL,
    VARIANTS,
    Compiled,
)

HOPPER = device_spec("NVIDIA H200")
SM_REGISTERS, SM_SHARED_BYTES, RESERVED_BYTES = 64 * 1024, 228 * 1024, 1024
"""Of a Hopper SM; the last for every CTA."""
SPILLED_BYTES = 64
"""Stack that the latent kernel on 8-bit caches may use."""
SERIALISED = re.compile(r"C75\d\d\b|wgmma\S* instructions are serialized", re.IGNORECASE)
"""How the assembler says that matrix products wait for each other (C7510, C7512, C7515, C7520)."""


@pytest.mark.parametrize("code", ["C7510", "C7512", "C7515", "C7520"])
def test_the_warnings_would_be_seen(code):
    said = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are"
    assert SERIALISED.search(said)
    assert not SERIALISED.search("ptxas info    : Used 168 registers, used 6 barriers")


@pytest.fixture
def report(compiled: Compiled, variant: str) -> CompileReport:
    """The report of a variant without spills, stack and serialised products."""
    found, remarks = compiled.reports[variant], compiled.remarks[variant]
    assert found.error is None
    if variant.startswith("latent fp8"):
        assert found.stack_bytes is not None and found.stack_bytes <= SPILLED_BYTES, found.verdict
    else:
        assert not found.spills and found.stack_bytes == 0, found.verdict
    products = {"HGMMA"}
    if "8 bits" in variant or "fp8" in variant:  # a rope part in 16 bits stays so
        products = {"QGMMA"} if variant.startswith("latent fp8,") else {"HGMMA", "QGMMA"}
    assert set(found.mma) == products
    assert found.instructions["UTMALDG"] > 0
    assert found.registers is not None and found.shared_bytes is not None
    assert found.registers * (found.threads or THREADS) <= SM_REGISTERS
    assert fits_shared_memory(found, HOPPER)
    # Without the assembler's remarks an absent warning would mean nothing.
    assert re.search(rf"Compiling entry function\s+'\w*{found.kernel}", remarks)
    serialised = [line for line in remarks.splitlines() if SERIALISED.search(line)]
    assert not serialised, serialised
    return found


def kernels_of(variant: str) -> int:
    """Kernels of a latent program: without and with clusters, or one of them."""
    return 1 if variant in HOST else 2


def variants(kernel: str) -> list[str]:
    return [variant for variant, (wanted, *_) in VARIANTS.items() if wanted == kernel]


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants(LATENT))
def test_latent_attention(report, variant):
    kinds = {"F16", "F32"} if "float16" in variant else {"BF16"}
    assert all(kinds & set(shape.split(".")) for shape in report.mma_shapes), report.mma_shapes
    assert report.threads == THREADS and report.registers is not None
    if variant.startswith("few"):
        # All warps keep their registers, for the trial of the merge. Its code is there once, and
        # without a second way for warps that have diverged.
        assert report.consumer_registers is None and "USETMAXREG" not in report.instructions
        assert report.instructions.get("WARPSYNC", 0) <= 3 * kernels_of(variant)
        return
    # Registers suffice at the launch, and after the warpgroups have traded theirs.
    assert report.consumer_registers == CONSUMER_REGISTERS
    traded = CONSUMERS * CONSUMER_REGISTERS + (THREADS - CONSUMERS) * PRODUCER_REGISTERS
    assert traded <= report.registers * THREADS
    assert report.instructions["USETMAXREG"] == 2 * kernels_of(variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants(LATENT_FP8))
def test_latent_attention_on_8_bit_caches(report, compiled, variant):
    assert not compiled.stale[variant]
    columns = VARIANTS[variant][2]["columns"]
    assert any(f"64x{columns}x32" in shape for shape in report.mma_shapes), report.mma_shapes
    assert report.threads == fp8_state.THREADS
    assert report.instructions["USETMAXREG"] == 3 * kernels_of(variant)
    values, scores = fp8_kernel.registers(columns)
    assert report.registers == fp8_kernel.LAUNCH_REGISTERS
    assert report.consumer_registers == max(values, scores)
    # `setmaxnreg` takes multiples of 8, and there are no more than those of the launch.
    taken = 2 * values + scores + fp8_kernel.PRODUCER_REGISTERS
    assert taken <= 4 * report.registers and values % 8 == scores % 8 == 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants(DECOMPRESSED))
def test_decompressed_attention(report, compiled, variant):
    assert report.instructions["USETMAXREG"] == 2
    # The merge is in the programs that split, and in no other.
    assert ("merge_splits" in compiled.remarks[variant]) is ("split" in variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants(COMBINE))
def test_output_projection(report, variant):
    """Alone behind whole calls, with the other part of a mix."""
    assert report.instructions["USETMAXREG"] == 2
    assert report.threads == outputs.THREADS
    assert report.registers == 168
    assert report.consumer_registers == outputs.CONSUMER_REGISTERS
    # The other part is read only where there is one.
    assert bool(report.instructions.get("LDG")) is (variant == "mix")
    fields = VARIANTS[variant][2]
    columns = fields.get("columns", 128)
    assert any(f"64x{columns}x16" in shape for shape in report.mma_shapes)
    held = held_bytes(columns, fields.get("k", 512))
    assert report.shared_bytes is not None and held <= report.shared_bytes <= held + 2048


def held_bytes(columns: int, k: int = 512) -> int:
    """Shared memory of an output CTA: the weights of its columns and the pipeline."""
    stages = DecompressCombineSm90(None, True, columns, k).stages
    return 2 * (outputs.COMBINE_ROWS * stages * 64 + k * columns)


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants(PROJECTION))
def test_query_projection(report, variant):
    assert report.threads == queries.THREADS
    # One product of the whole depth; the copy engine moves everything from and to memory.
    d = VARIANTS[variant][2].get("d", 128)
    assert report.mma["HGMMA"] == d // queries.MMA_DEPTH
    assert report.instructions["UTMASTG"] == 1
    assert not report.instructions.get("LDG") and not report.instructions.get("STG")
    assert report.registers is not None and report.shared_bytes is not None
    ctas = queries.CTAS_PER_SM[d]
    assert ctas * report.registers * queries.THREADS <= SM_REGISTERS
    assert ctas * (report.shared_bytes + RESERVED_BYTES) <= SM_SHARED_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "most"), [("whole call", 0), ("whole call in 8 bits", SPILLED_BYTES)]
)
def test_whole_calls(compiled, whole, most):
    """The kernels of a program that launches them all: attention in both forms, projections."""
    remarks = compiled.remarks[whole]
    found = [int(stack) for stack in re.findall(r"(\d+) bytes stack frame", remarks)]
    assert len(found) == remarks.count("Compiling entry function") == 6
    assert max(found) <= most
    assert not SERIALISED.search(remarks)


@pytest.mark.slow
def test_shared_memory_is_as_documented(compiled, repo_root):
    [page] = (repo_root / "docs" / "knowledge").rglob("rope-tile-holds-p.md")
    stated = re.search(r"\| P in the rope tiles \| ([\d,]+) bytes", page.read_text())
    assert stated is not None
    assert int(stated[1].replace(",", "")) == compiled.reports["bfloat16"].shared_bytes


@pytest.mark.slow
def test_compiled_programs_are_found_again(cached, monkeypatch, capsys):
    """CTA groups and SM limits are arguments: neither tuning nor the command line compiles anew."""
    [kernel] = CuteFlashMLA(**{**SMALL, "s": 4}, page=64).plan_empty(1.0, 1.0).kernels()
    for tiling in (FlashMLATiling(group_ctas=1), FlashMLATiling(group_ctas=2, sms=7)):
        assert kernel.compile("sm_90", tiling).cubin
    for module in (kernel_command, workflow):
        monkeypatch.setattr(module, "cuda_available", lambda: False)
    sizes = ["--b=2", "--s=2", "--t=200", "--h=64", "--page=64"]
    assert kernel_command.main(["flash_mla", "--language=cute-dsl", *sizes]) == 0
    out = capsys.readouterr().out
    assert "no GPU here: static mode" in out
    assert "sm_90" in out and "sm_100" not in out
