"""Compile reports: figures read from the machine code of a kernel, without a GPU.

It works on cubins of any language. The resource figures come from cuobjdump, the instruction mix
from nvdisasm.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import MissingToolError
from mla_var3.runtime.environment import find_tool
from mla_var3.runtime.paths import write_atomic
from mla_var3.runtime.stage import CompiledKernel, KernelStage

log = logging.getLogger(__name__)

_TOOL_TIMEOUT_S = 120
SYSTEM_SHARED_BYTES = 1024
"""Shared memory per CTA that the driver reserves, beside what the kernel may ask for. From sm_90 on
a cubin counts it as the kernel's where that has any, before it does not."""
_COUNTS_SYSTEM_SHARED = 9

_MMA = re.compile(r"[A-Z]G?MMA|UTC\w*MMA")
"""Opcodes of all tensor-core generations: HMMA, HGMMA, QGMMA, UTCHMMA, ..."""

_EXPECTED_MMA = {
    **dict.fromkeys((8, 12), ("HMMA", re.compile(r"[A-Z]MMA"))),
    9: ("HGMMA", re.compile(r"[A-Z]GMMA")),
    **dict.fromkeys((10, 11), ("UTCHMMA", re.compile(r"UTC\w*MMA"))),
}
"""Major compute capability -> the instructions that reach its full matrix rate. Hopper still runs
HMMA, at a fraction of the rate of HGMMA: that is what a kernel falls back to when its tiles do not
fit."""

_REPORTED = (
    *("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "LDGSTS", "LDG", "STG", "LDSM", "STSM"),
    *("LDS", "STS", "LDL", "STL", "LDTM", "STTM", "MUFU", "FMUL", "FFMA", "FADD", "SHFL"),
    *("ATOM", "ATOMG", "RED", "BAR", "SYNCS", "WARPSYNC", "WARPGROUP", "USETMAXREG"),
)
"""Opcodes that say how a kernel moves data and waits; matrix instructions are always reported."""

_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*([^;]*);"
)
_LABEL = re.compile(r"^(\.L_x_\d+):")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_THREADS = re.compile(r"EIATTR_REQNTID\s+Format:\s*\S+\s+Value:\s*([0-9a-fx ]+)")
_CLUSTER = re.compile(r"EIATTR_CTA_PER_CLUSTER\s+Format:\s*\S+\s+Value:\s*([0-9a-fx ]+)")


@dataclass(frozen=True)
class CompileReport:
    """The machine code of one kernel for one target, in figures.

    Attributes:
        registers, stack_bytes: per thread, at launch; a stack above zero means spills.
        shared_bytes: shared memory that a CTA asks for, without what the driver reserves.
        threads: threads per CTA.
        cluster: CTAs per cluster that the machine code requires; a launch may ask for more.
        instructions: how many instructions of each notable opcode the code holds.
        loop_local: how many of them are LDL and STL in a loop; None where it was not read.
        mma_shapes: the matrix instructions with their shape and types.
        consumer_registers: registers per thread that the consumer warps raise themselves to, None
            when they keep the launch value.
        error: why it did not compile; then the figures are None or empty.
    """

    kernel: str
    target: str
    tiling: dict[str, Any]
    registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    cluster: int | None = None
    instructions: dict[str, int] = field(default_factory=dict)
    loop_local: int | None = None
    total_instructions: int | None = None
    mma_shapes: dict[str, int] = field(default_factory=dict)
    consumer_registers: int | None = None
    cubin_bytes: int | None = None
    seconds: float | None = None
    error: str | None = None

    @property
    def spills(self) -> bool:
        return bool(self.stack_bytes) or any(map(self.instructions.get, ("LDL", "STL")))

    @property
    def mma(self) -> dict[str, int]:
        return {name: n for name, n in self.instructions.items() if _MMA.fullmatch(name)}

    @property
    def tensor_core(self) -> str | None:
        """The matrix opcode that the kernel uses most, one of the target's own if any; or None."""
        own = {name: n for name, n in self.mma.items() if _is_expected(self.target, name)}
        used = own or self.mma
        return max(used, key=used.__getitem__, default=None)

    @property
    def uses_tma(self) -> bool:
        return any(map(self.instructions.get, ("UTMALDG", "UTMASTG", "UTMAREDG")))

    @property
    def misses_tensor_core(self) -> bool:
        """Whether the kernel computes matrix products, but not at the target's full rate."""
        return bool(self.mma) and not any(_is_expected(self.target, name) for name in self.mma)

    @property
    def verdict(self) -> str:
        if self.error:
            return f"does not compile: {self.error}"
        problems = []
        if self.spills:
            local = f"{self.instructions.get('STL', 0)} STL, {self.instructions.get('LDL', 0)} LDL"
            if self.loop_local is not None:
                local += f", {self.loop_local or 'none'} in a loop"
            problems.append(f"spills ({self.stack_bytes} B of stack, {local})")
        if self.misses_tensor_core:
            wanted = _expected(self.target)[0]
            problems.append(
                f"misses the tensor-core path ({self.tensor_core or 'no mma'}, not {wanted})"
            )
        if problems:
            return ", ".join(problems)
        used = " + ".join(f"{n} {name}" for name, n in self.mma.items()) or "no mma"
        return f"ok, {used}, {'TMA' if self.uses_tma else 'no TMA'}, no spills"

    def to_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "spills": self.spills,
            "tensor_core": self.tensor_core,
            "uses_tma": self.uses_tma,
            "misses_tensor_core": self.misses_tensor_core,
            "verdict": self.verdict,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


class Disassembly(NamedTuple):
    """What the CUDA tools print about a cubin."""

    resources: str
    elf: str
    sass: str


def compile_report(
    kernel: KernelStage, target: str, tiling: Any = None, artifacts_dir: Path | None = None
) -> CompileReport:
    """Compile a kernel for a target, by default with its active tiling, and look at the result.

    Meta tensors are enough as its arguments. A kernel that does not compile has a report with
    `error` set. `artifacts_dir` gets the cubin, its disassembly and what the compiler left behind.

    Raises:
        MissingToolError: cuobjdump or nvdisasm is missing or cannot read this cubin.
    """
    chosen = kernel.tiling if tiling is None else tiling
    report = CompileReport(kernel.name, target, chosen.to_dict())
    for tool in ("cuobjdump", "nvdisasm"):
        _tool(tool)  # before minutes of compiling
    try:
        compiled = kernel.compile(target, tiling)
    except MissingToolError:
        raise
    except Exception as error:  # a compiler may fail in any way, and each is a result
        log.debug("%s for %s does not compile", kernel.name, target, exc_info=True)
        return dataclasses.replace(report, error=str(error) or type(error).__name__)
    printed = disassemble(compiled.cubin)
    if artifacts_dir is not None:
        _write_artifacts(artifacts_dir, kernel, compiled, printed)
    figures = parse_disassembly(printed)
    counted = SYSTEM_SHARED_BYTES if _major(target) >= _COUNTS_SYSTEM_SHARED else 0
    own = max(figures["shared_bytes"] - counted, 0)
    figures["shared_bytes"] = own + compiled.dynamic_shared_bytes
    return dataclasses.replace(
        report, **figures, cubin_bytes=len(compiled.cubin), seconds=round(compiled.seconds, 3)
    )


def fits_shared_memory(report: CompileReport, spec: DeviceSpec) -> bool:
    """Whether a CTA of the compiled kernel fits the device's shared memory."""
    used = report.shared_bytes
    return used is not None and used <= spec.shared_memory_per_block_bytes


def disassemble(cubin: bytes) -> Disassembly:
    """What cuobjdump and nvdisasm print about a cubin."""
    cuobjdump, nvdisasm = _tool("cuobjdump"), _tool("nvdisasm")
    with tempfile.TemporaryDirectory(prefix="hyper-mla-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        resources = _run(cuobjdump, "--dump-resource-usage", path)
        if not _RESOURCES.search(resources):
            raise MissingToolError(
                f"{cuobjdump}: expected a resource table, got {resources!r:.200}"
            )
        return Disassembly(
            resources=resources,
            elf=_run(cuobjdump, "--dump-elf", path),
            sass=_run(nvdisasm, "--print-code", path),
        )


def parse_disassembly(printed: Disassembly) -> dict[str, Any]:
    """The figures in what the tools printed, by field name of `CompileReport`."""
    counts: collections.Counter[str] = collections.Counter()
    shapes: collections.Counter[str] = collections.Counter()
    raised = []
    for line in printed.sass.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        opcode, modifiers, operands = match.groups()
        counts[opcode] += 1
        if _MMA.fullmatch(opcode):
            shapes[opcode + modifiers] += 1
        elif opcode == "USETMAXREG" and ".TRY_ALLOC" in modifiers:
            raised.append(int(operands.split(",")[-1].strip(), 16))
    matrix = sorted(name for name in counts if _MMA.fullmatch(name))
    # A cubin may hold several functions; the most demanding one decides.
    resources = [tuple(map(int, found)) for found in _RESOURCES.findall(printed.resources)]
    registers, stack, shared = (max(column) for column in zip(*resources, strict=True))
    return {
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": shared,
        "threads": _product(_THREADS, printed.elf),
        "cluster": _product(_CLUSTER, printed.elf) or 1,
        "instructions": {name: counts[name] for name in (*matrix, *_REPORTED) if counts[name]},
        "loop_local": loop_local(printed.sass),
        "total_instructions": counts.total(),
        "mma_shapes": dict(sorted(shapes.items())),
        "consumer_registers": max(raised, default=None),
    }


def loop_local(sass: str) -> int:
    """How many LDL and STL are in loops: in basic blocks from which a path leads back to them.

    A subroutine counts as a part of no loop.
    """
    blocks: list[list[str]] = [[]]  # opcodes of each block
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    falls: set[int] = set()  # blocks that go on with the next one
    for line in sass.splitlines():
        label, match = _LABEL.match(line), _INSTRUCTION.match(line)
        if label is not None:
            falls.add(len(blocks) - 1)
            blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif match is not None:
            opcode, _, operands = match.groups()
            blocks[-1].append(opcode)
            conditional = "@" in line
            if opcode in ("BRA", "JMP"):
                before, _, target = operands.partition("`(")
                conditional = conditional or bool(before.strip())
                jumps.append((len(blocks) - 1, target.partition(")")[0]))
            if opcode in ("BRA", "JMP", "EXIT", "RET"):
                if conditional:
                    falls.add(len(blocks) - 1)
                blocks.append([])
    after: dict[int, set[int]] = {i: {i + 1} if i in falls else set() for i in range(len(blocks))}
    for block, name in jumps:
        if name in labels:
            after[block].add(labels[name])
    count = 0
    for start, opcodes in enumerate(blocks):
        local = sum(opcode in ("LDL", "STL") for opcode in opcodes)
        seen: set[int] = set()
        todo = set(after[start]) if local else set()
        while todo:
            seen |= todo
            todo = {block for known in todo for block in after.get(known, ())} - seen
        count += local if start in seen else 0
    return count


def _product(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return math.prod(int(word, 16) for word in match[1].split()) if match else None


def _expected(target: str) -> tuple[str, re.Pattern[str]]:
    return _EXPECTED_MMA.get(_major(target), ("an mma instruction", _MMA))


def _major(target: str) -> int:
    """Major compute capability of a GPU code, 0 of anything else."""
    number = re.search(r"\d+", target)
    return int(number[0]) // 10 if number else 0


def _is_expected(target: str, opcode: str) -> bool:
    return _expected(target)[1].fullmatch(opcode) is not None


def _tool(name: str) -> Path:
    found = find_tool(name)
    if found is None:
        raise MissingToolError(
            f"{name}: expected the program in NVIDIA's wheels, on PATH, in $CUDA_HOME/bin or in "
            f'/usr/local/cuda/bin, got none; install it with pip install "hyper-mla[cutile]"'
        )
    return found


def _run(tool: Path, *arguments: str | Path) -> str:
    """Run a tool on a cubin that the compiler just made: if it fails, the tool is the problem."""
    try:
        done = subprocess.run(
            [tool, *arguments], capture_output=True, errors="replace", timeout=_TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingToolError(f"{tool}: expected a program that runs, got {error}") from error
    if done.returncode != 0:
        message = " ".join((done.stderr or done.stdout).split())
        raise MissingToolError(
            f"{tool}: expected a release that can read this cubin, got exit code "
            f"{done.returncode}: {message:.200}"
        )
    return done.stdout


def _write_artifacts(
    folder: Path, kernel: KernelStage, compiled: CompiledKernel, printed: Disassembly
) -> None:
    prefix = f"{kernel.name}.{compiled.target}"
    write_atomic(folder / f"{prefix}.cubin", compiled.cubin)
    write_atomic(folder / f"{prefix}.sass", printed.sass)
    write_atomic(folder / f"{prefix}.resources.txt", printed.resources)
    for name, content in compiled.artifacts.items():
        write_atomic(folder / f"{prefix}.{name.removeprefix(f'{kernel.name}.')}", content)
    text = kernel.mlir_text(compiled)
    if text is not None:
        write_atomic(folder / f"{prefix}.mlir", text)


def first_lines(error: BaseException) -> str:
    """The type and the first lines of an error, in one line and without terminal colours."""
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " ".join(lines[:3])


_stderr_lock = threading.RLock()


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep a compiler's own diagnostics off the screen; a failure arrives as an exception.

    Compilers write to file descriptor 2 directly, from native code or from a program that they
    start, so Python-level redirection would not reach them. The descriptor belongs to the whole
    process, so one thread at a time has it: a second one would save the sink of the first and put
    that back at the end.
    """
    with _stderr_lock:
        sys.stderr.flush()
        saved = os.dup(2)
        try:
            with tempfile.TemporaryFile() as sink:
                os.dup2(sink.fileno(), 2)
                try:
                    yield
                finally:
                    sys.stderr.flush()
                    os.dup2(saved, 2)
        finally:
            os.close(saved)
