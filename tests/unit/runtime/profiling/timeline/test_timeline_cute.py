"""Timelines with CuTe DSL kernels: which stage a compiled kernel is."""

from __future__ import annotations

from mla_var3.runtime.profiling.timeline.model import GpuActivity
from mla_var3.runtime.profiling.timeline.outline import Outline, assign

# As CuTe DSL names them: the function, then class and module, then the arguments.
MERGE = (
    "kernel_cutlass_merge_mla_var3kernelcute_pythonmlaflash_mlaflash_mlaflash_mlaFlashMLA_object_"
    "at__tensorptrf32gmemalign16o1_0"
)
FLASH = (
    "kernel_cutlass_flash_mla_mla_var3kernelcute_pythonmlaflash_mlaflash_mlaflash_mlaFlashMLA_"
    "object_at__TiledMMA_ThrLayoutVMNK11110000_0"
)


def kernel(name: str) -> GpuActivity:
    return GpuActivity("kernel", name, 0, 1, 7, 1)


def outline(*names: str) -> Outline:
    return Outline("x", names, names, ())


def test_the_name_behind_the_prefix_decides_not_that_of_the_module() -> None:
    shape = outline("flash_mla", "merge")
    assert assign(shape, [kernel(FLASH), kernel(MERGE)]) == [0, 1]
    assert assign(shape, [kernel(MERGE), kernel(FLASH)]) == [1, 0]


def test_a_name_that_begins_another_one() -> None:
    names = ("flash_mla", "flash_mla_v5")
    other = FLASH.replace("kernel_cutlass_flash_mla_", "kernel_cutlass_flash_mla_v5_")
    assert assign(outline(*names), [kernel(other), kernel(FLASH)]) == [1, 0]
    assert assign(outline("flash"), [kernel("kernel_cutlass_flashing_0"), kernel("x")]) == [
        None,
        None,
    ]
