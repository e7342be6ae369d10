"""Every cuTile stage with its default tiling for every target: `python -m tests.compile_matrix`.

Prints a line per stage and target as it compiles: shared memory and its limit, spills, the matrix
instruction, CTAs per SM. Ends with 1 if one does not compile, does not fit or spills more than
`ALLOWED_SPILLS`. No GPU is needed.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from mla_var3.conf.devices import shared_memory_limit
from mla_var3.kernel.cutile.mla.latent_plan import LatentInputs
from mla_var3.op.mla.cache_formats import FORMATS
from mla_var3.runtime.compile import SYSTEM_SHARED_BYTES, CompileReport, compile_report
from mla_var3.runtime.environment import find_tool
from mla_var3.runtime.paths import find_kernel, plan_class

TARGETS = (
    "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121",
)  # fmt: skip
SIZES: dict[str, Any] = {"b": 32, "s": 16, "t": 4096, "h": 128}
DESIGNS: dict[str, dict[str, Any]] = {
    "flash_mla": {},
    "flash_mla_split_kv": {"splits": 4},
    "flash_attention": {},
    "flash_attention:1024 queries": {"s": 1024},
    **{f"mla_var6_plus{version}": {"n": 1024} for version in ("", "_v2", "_v3", "_v4")},
    **{f"flash_mla:{name}": {"cache_dtype": name} for name in FORMATS},
    **{f"flash_mla:{name}, pages of 64": {"cache_dtype": name, "page": 64} for name in FORMATS},
    "flash_mla_split_kv:fp8_ds_mla": {"splits": 4, "cache_dtype": "fp8_ds_mla"},
    **{f"flash_mla:pages of {page}": {"page": page} for page in (64, 32, 16)},
    **{f"flash_mla:pages of {page}, trees": {"page": page} for page in (64, 32, 16)},
    "flash_mla_split_kv:pages of 64": {"splits": 4, "page": 64},
    "flash_mla_split_kv:pages of 64, trees": {"splits": 4, "page": 64},
    "flash_mla:sliding window": {"sliding_window": 1000, "page": 64},
    "flash_mla:k=512, p=0": {"p": 0, "page": 64},
    "flash_mla:k=512, p=0, trees": {"p": 0, "page": 32},
    "flash_mla:k=256, p=64": {"k": 256, "page": 64},
    "flash_mla:k=256, p=64, trees": {"k": 256},
    "flash_mla:k=256, p=32": {"k": 256, "p": 32, "page": 64},
}
"""Designs and further fields of their plans; after a colon, what they are compiled for beside few
queries and dense caches in 16 bits. "trees" stands for packed queries and trees."""
SHARED = {"decompress_combine": "mla_var6_plus", "split_kv_reduce": "flash_mla_split_kv"}
"""Stages that several designs have alike -> the design that they are compiled with."""
ALLOWED_SPILLS = {"sm_100": 8, "sm_103": 8}
"""Bytes of stack, not used in the loops over tokens: the compiler's own flag, whether tensor memory
was allocated, with the tiles of 64 x 64 that use tcgen05 best."""
ALLOWED_IN_LOOPS = {"attention_block_specialized_v3": 2}
"""Loads and stores of that word in a loop: over work tiles, outside of the loops over tokens."""
REGISTERS, THREADS = 65536, 2048
"""Per SM, the largest number of any target."""


@cache
def accepted_targets() -> tuple[str, ...]:
    """The targets that the installed cuTile compiler makes code for."""
    tool = find_tool("tileiras")
    if tool is None:
        return ()
    text = subprocess.run([tool, "--help"], capture_output=True, text=True, check=True).stdout
    return tuple(target for target in TARGETS if f"={target} " in text)


def stages(design: str, target: str, **fields: Any) -> Iterator[Any]:
    """The stages of an entry of `DESIGNS` with their default tilings, on meta tensors."""
    plan: Any = plan_class(find_kernel(design.partition(":")[0]))
    plan = plan(**{**SIZES, **DESIGNS[design], **fields}).for_target(target)
    inputs = plan.prepare_inputs("meta")
    if design.endswith("trees"):
        given = LatentInputs(*inputs)
        inputs = given._replace(
            q_latent=given.q_latent.flatten(0, 1),
            q_rope=given.q_rope.flatten(0, 1),
            cu_seqlens_q=given.lengths.new_empty(plan.b + 1),
            tree=given.lengths.new_empty((plan.b, plan.s, plan.s), dtype=torch.bool),
        )
    yield from plan.plan(*inputs).kernels()


def reports(design: str, target: str, stage: str = "") -> Iterator[CompileReport]:
    """Compile the stages of a design, or one of them, with their default tilings."""
    for kernel in stages(design, target):
        if stage in ("", kernel.name) and SHARED.get(kernel.name, design) == design:
            yield compile_report(kernel, target)


def spare_bytes(report: CompileReport) -> int:
    """Shared memory of a CTA that the kernel leaves; negative where it does not fit."""
    limit = shared_memory_limit(report.target)
    assert limit is not None, f"{report.target} is in no table"
    return limit - (report.shared_bytes or 0)


def spills_too_much(report: CompileReport) -> bool:
    """Whether registers are spilled beyond what is known."""
    allowed = ALLOWED_SPILLS.get(report.target, 0)
    known = ALLOWED_IN_LOOPS.get(report.kernel, 0) if allowed else 0
    local = known + 1 if report.loop_local is None else report.loop_local
    return report.spills and ((report.stack_bytes or 0) > allowed or local > known)


def ctas_per_sm(report: CompileReport) -> int:
    """CTAs that an SM holds by registers, shared memory and threads."""
    limit = (shared_memory_limit(report.target) or 0) + SYSTEM_SHARED_BYTES
    threads = report.threads or 1
    return min(
        REGISTERS // max(1, (report.registers or 1) * threads),
        limit // ((report.shared_bytes or 0) + SYSTEM_SHARED_BYTES),
        THREADS // threads,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the matrix; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.compile_matrix", description=__doc__)
    parser.add_argument("--targets", nargs="+", default=accepted_targets(), help="GPU codes")
    parser.add_argument("--designs", nargs="+", default=[*DESIGNS], choices=DESIGNS, metavar="NAME")
    options = parser.parse_args(argv)
    bad = 0
    for target in options.targets:
        for design in options.designs:
            for report in reports(design, target):
                fits = report.error is None and spare_bytes(report) >= 0
                bad += not fits or spills_too_much(report)
                verdict = "fits" if fits else "DOES NOT FIT"
                print(
                    f"{target:7} {design:30} {report.kernel:28} {verdict}"
                    f" {report.shared_bytes} B shared, {report.stack_bytes} B stack,"
                    f" {ctas_per_sm(report)} CTA per SM, {report.verdict}",
                    flush=True,
                )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
