"""Compile reports: reading what the CUDA tools print, and real kernels for real targets."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mla_var3.conf.devices import device_spec
from mla_var3.errors import MissingToolError
from mla_var3.runtime import compile as compile_module
from mla_var3.runtime.compile import (
    CompileReport,
    Disassembly,
    compile_report,
    disassemble,
    fits_shared_memory,
    loop_local,
    parse_disassembly,
    quiet_compiler,
)
from mla_var3.runtime.stage import CompiledKernel, Tiling

ct = pytest.importorskip("cuda.tile")

from mla_var3.runtime.ct_kernel import CtKernel  # noqa: E402

Const = ct.Constant[int]


@ct.kernel
def tiny_matmul(A, B, Out, TM: Const, TN: Const, TK: Const):
    acc = ct.zeros((TM, TN), dtype=ct.float32)
    for k in range(ct.cdiv(A.shape[1], TK)):
        a = ct.load(A, (ct.bid(0), k), (TM, TK))
        b = ct.load(B, (k, ct.bid(1)), (TK, TN))
        acc = ct.mma(a, b, acc)
    ct.store(Out, (ct.bid(0), ct.bid(1)), acc.astype(Out.dtype))


@ct.kernel
def broken(A, B, Out, TM: Const, TN: Const, TK: Const):
    acc = ct.zeros((TM, TN), dtype=ct.float32)
    ct.store(Out, (0, 0), acc)  # float32 to bfloat16 needs an explicit cast


@dataclass
class TinyTiling(Tiling):
    tm: int = 64
    tn: int = 64
    tk: int = 64
    num_worker_warps: int | None = None


def make_kernel(function: Any, **tiling: int) -> CtKernel:
    matrix = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    return CtKernel(
        kernel_fn=function,
        tiling=TinyTiling(**tiling),
        input_tensors=[matrix, matrix],
        output_tensors=[matrix],
        algorithmic_flops_bytes_fn=lambda tiling: (1.0, 1.0),
        grid_fn=lambda tiling: (1, 1, 1),
        args_fn=lambda t: (matrix, matrix, matrix, t.tm, t.tn, t.tk),
    )


RESOURCES = """
Resource usage:
 Common:
  GLOBAL:64 CONSTANT[4]:8
 Function f:
  REG:168 STACK:{stack} SHARED:148680 LOCAL:0 CONSTANT[0]:1024 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
ELF = """
	Attribute:	EIATTR_CTA_PER_CLUSTER
	Format:	EIFMT_SVAL
	Value:	0x2 0x1 0x1 
	<0x20>
	Attribute:	EIATTR_REQNTID
	Format:	EIFMT_SVAL
	Value:	0x180 0x1 0x1 
	<0x31>
"""  # noqa: W291 (as cuobjdump prints it)
SASS = """
	.section	.text.f,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4].tnspB, RZ, !UPT ;
        /*0040*/               @P1 HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0050*/              @UP0 UTMALDG.2D [UR8], [UR6] ;
        /*0060*/                   USETMAXREG.DEALLOC.CTAPOOL 0x20 ;
        /*10000*/                  STL.64 [R1], R2 ;
	.section	.nv.info
        /*0000*/ 	.byte	0x04, 0x1c
"""


def report(target: str = "sm_90", **figures: Any) -> CompileReport:
    return CompileReport("f", target, {}, **figures)


def test_figures_are_read_from_the_tools():
    assert parse_disassembly(Disassembly(RESOURCES.format(stack=16), ELF, SASS)) == {
        **{"registers": 168, "stack_bytes": 16, "shared_bytes": 148680},
        **{"threads": 384, "cluster": 2, "loop_local": 0, "total_instructions": 8},
        "instructions": {"HGMMA": 2, "UTMALDG": 1, "STL": 1, "USETMAXREG": 2},
        "mma_shapes": {"HGMMA.64x64x16.F32.BF16": 2},
        "consumer_registers": 232,
    }


@pytest.mark.parametrize(
    ("target", "asked"), [("sm_80", 233472), ("sm_90", 232448), ("sm_120", 232448)]
)
def test_shared_memory_is_what_a_cta_asks_for(target, asked, monkeypatch):
    """From sm_90 on a cubin counts the kibibyte of the driver; 4096 bytes are 5120 in it."""
    printed = Disassembly(RESOURCES.format(stack=0).replace("148680", "233472"), ELF, SASS)
    monkeypatch.setattr(compile_module, "disassemble", lambda cubin: printed)
    kernel = make_kernel(tiny_matmul)
    compiled = CompiledKernel(target, cubin=b"", seconds=0.0)
    monkeypatch.setattr(kernel, "compile", lambda *given: compiled)
    found = compile_report(kernel, target)
    assert found.shared_bytes == asked
    assert fits_shared_memory(found, device_spec("H200")) == (target != "sm_80")


def test_local_memory_in_loops_is_told_apart():
    """The wait of .L_x_2 jumps back to .L_x_1, but only .L_x_0 is a loop with local memory."""
    lines = (
        "STL [R1], R0", ".L_x_0:", "LDL R2, [R1]", "@P0 BRA `(.L_x_0)", "@!P0 BRA `(.L_x_2)",
        ".L_x_1:", "LDL R3, [R1]", "EXIT", ".L_x_2:", "BRA.U UP0, `(.L_x_2)", "BRA `(.L_x_1)",
    )  # fmt: skip
    sass = "\n".join(
        line if line.endswith(":") else f"        /*{16 * i:04x}*/  {line} ;"
        for i, line in enumerate(lines)
    )
    assert loop_local(sass) == 1
    found = report(instructions={"LDL": 2, "STL": 1}, stack_bytes=8, loop_local=1)
    assert found.verdict == "spills (8 B of stack, 1 STL, 2 LDL, 1 in a loop)"
    assert "none in a loop" in report(stack_bytes=8, loop_local=0).verdict


@pytest.mark.parametrize(
    ("target", "opcodes", "misses"),
    [
        *(("sm_90", [opcode], False) for opcode in ("HGMMA", "QGMMA")),
        *((target, ["HMMA"], True) for target in ("sm_90a", "sm_100", "sm_103")),
        *(("sm_120", [opcode], False) for opcode in ("HMMA", "OMMA", "QMMA")),
        *(("sm_90", ["HGMMA", "HMMA"], False), ("sm_90", [], False)),
        *(("sm_100", ["UTCHMMA"], False), ("sm_80", ["HMMA"], False)),
    ],
)
def test_tensor_core_path_per_target(target, opcodes, misses):
    found = report(target, instructions=dict.fromkeys(opcodes, 4), stack_bytes=0)
    assert found.misses_tensor_core is misses
    assert ("misses the tensor-core path" in found.verdict) is misses
    assert found.tensor_core == (opcodes[0] if opcodes else None)


@pytest.mark.parametrize(("target", "opcode"), [("sm_90", "HGMMA"), ("sm_120", "HMMA")])
def test_matmul_reaches_the_tensor_cores(target, opcode, tmp_path):
    found = compile_report(make_kernel(tiny_matmul), target, artifacts_dir=tmp_path)
    assert (found.kernel, found.target, found.error) == ("tiny_matmul", target, None)
    assert found.tiling == {"tm": 64, "tn": 64, "tk": 64, "num_worker_warps": None}
    assert found.tensor_core == opcode
    assert found.instructions[opcode] == sum(found.mma_shapes.values()) > 0
    assert found.uses_tma and not found.spills and found.verdict.startswith("ok")
    assert found.threads and found.threads % 128 == 0 and found.cluster == 1
    assert 0 < found.registers <= 255 and 0 < found.shared_bytes <= 228 * 1024
    assert found.total_instructions > 100
    kinds = ("cubin", "sass", "resources.txt", "tileirbc", "mlir")
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(files) == {f"tiny_matmul.{target}.{kind}" for kind in kinds}
    assert files[f"tiny_matmul.{target}.cubin"] == found.cubin_bytes
    assert opcode in (tmp_path / f"tiny_matmul.{target}.sass").read_text()


def test_the_given_tiling_is_compiled_not_the_active_one():
    kernel = make_kernel(tiny_matmul)
    found = compile_report(kernel, "sm_90", TinyTiling(tm=16))
    assert found.tiling["tm"] == 16
    assert kernel.tiling.tm == 64
    # A 16-row tile is too low for the warpgroup instructions.
    assert found.misses_tensor_core
    assert found.verdict == "misses the tensor-core path (HMMA, not HGMMA)"


@pytest.mark.parametrize("missing", ["cuobjdump", "nvdisasm"])
def test_a_missing_tool_is_named(missing, monkeypatch):
    find = compile_module.find_tool
    monkeypatch.setattr(compile_module, "find_tool", lambda n: None if n == missing else find(n))
    with pytest.raises(MissingToolError, match=rf"{missing}.*hyper-mla\[cutile\]"):
        compile_report(make_kernel(tiny_matmul), "sm_90")


def test_a_tool_that_cannot_read_the_cubin_is_the_problem():
    with pytest.raises(MissingToolError, match="cuobjdump: expected a .*, got"):
        disassemble(b"no machine code")


def test_a_compile_error_is_a_report(tmp_path):
    found = compile_report(make_kernel(broken), "sm_90", artifacts_dir=tmp_path)
    assert "broken for sm_90" in (found.error or "")
    assert found.verdict.startswith("does not compile: ") and found.registers is None
    assert list(tmp_path.iterdir()) == []


def test_two_threads_that_compile_leave_the_error_output_as_it_was():
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with quiet_compiler():
            inside.set()
            leave.wait(0.2)

    def second() -> None:
        inside.wait()
        with quiet_compiler():
            leave.set()
            time.sleep(0.4)

    before = os.fstat(2)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda function: function(), (first, second)))
    assert os.path.samestat(os.fstat(2), before)
