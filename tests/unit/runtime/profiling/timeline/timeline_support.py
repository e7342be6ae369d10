"""Timelines for tests: the recorded one, and synthetic ones."""

from pathlib import Path

from mla_var3.runtime.profiling.timeline.analysis import Group, Member, Outline
from mla_var3.runtime.profiling.timeline.model import ApiCall, GpuActivity, HostRange, Timeline

TRACE = Path(__file__).resolve().parents[4] / "data" / "nsys" / "h200_pipeline_trace.json"
"""Four runs of KernelPipeline[ConcurrentKernels[flash_mla, flash_attention], mla_var6_plus],
recorded by torch.profiler on an H200 in 2026-11, at the pace of the host."""
NAMES = ("flash_mla", "flash_attention", "attention_block_specialized", "decompress_combine")
OVERLAP = Group("overlap", (Member("flash_mla", (0,)), Member("flash_attention", (1,))))
PIPE = Outline("pipe", NAMES, NAMES, (OVERLAP,))
PAIR = Outline("pair", ("left", "right"), ("left", "right"),
               (Group("pair", (Member("left", (0,)), Member("right", (1,)))),))  # fmt: skip


def pair_timeline(
    left: tuple[int, int],
    right: tuple[int, int],
    *,
    launches: tuple[int, int] = (0, 1_000),
    streams: tuple[int, int] = (13, 17),
    ctas: int = 8,
    name: str = "hyper_mla@pair",
) -> Timeline:
    """One run of two kernels, given as (start, end) in nanoseconds, launched at the given times."""
    gpu, api = [], []
    for index, (kernel, (start, end)) in enumerate((("left", left), ("right", right))):
        gpu.append(
            GpuActivity(
                f"{kernel}_Kt1_A3", start, end - start, streams[index], index + 1,
                grid=(ctas, 1, 1), block=(256, 1, 1), registers=128, shared_bytes=200_000,
            )
        )  # fmt: skip
        api.append(ApiCall("cuLaunchKernelEx", launches[index], 500, 7, index + 1))
    return Timeline(gpu, api, [HostRange(name, 0, 10_000_000, 7)], "NVIDIA H200")
