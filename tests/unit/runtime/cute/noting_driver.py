"""Compiled host code on a driver that only notes what it is asked for, without a GPU.

A test names a module, which runs as

    CUTE_DSL_LIBS=libdriver.so python -m MODULE

It links programs of the cache and launches them, and the driver prints a line of JSON per launch.
They must have been compiled before: with another driver than the compiler's own that is impossible.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_var3.runtime import cute_kernel
from mla_var3.runtime.cute import launch as cute_launch
from mla_var3.runtime.cute.arguments import kinds_of
from mla_var3.runtime.cute.cache import read_entry
from mla_var3.runtime.cute.launch import CuteProgram, short_entry
from tests.programs import run_program

NO_GPU, STREAM = -1, 4711
OVERLAP = 6
"""The attribute of programmatic dependent launch."""
SOURCE = r"""
#include <stdint.h>
#include <stdio.h>
typedef struct {
    uint32_t grid[3], block[3]; uint64_t shared; void *stream; char *attributes; uint32_t count;
} Config;
int _cudaLaunchKernelEx(Config *c, void *kernel, void **args) {
    printf("{\"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %lu, \"stream\": %lu",
           c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2],
           (unsigned long)c->shared, (unsigned long)c->stream);
    printf(", \"attributes\": {");
    for (uint32_t i = 0; i < c->count; i++)  /* an attribute: its id, then 64 bytes of value */
        printf("%s\"%d\": %d", i ? ", " : "", *(int *)(c->attributes + 72 * i),
               *(int *)(c->attributes + 72 * i + 8));
    printf("}}\n");
    fflush(stdout);
    return 0;
}
int _cudaFuncSetAttribute(void *f, int a, int v) { return 0; }
int _cudaGetDevice(int *d) { *d = 0; return 0; }
int _cudaDeviceGetAttribute(int *v, int a, int d) { *v = 0; return 0; }
int _cudaKernelSetAttributeForDevice(void *k, int a, int v, int d) { return 0; }
int _cudaLibraryGetKernel(void **k, void *l, const char *n) { return 0; }
int _cudaLibraryLoadData(void **l, void *c) { return 0; }
int _cuKernelGetAttribute(int *v, int a, void *k, int d) { *v = 0; return 0; }
"""


def build_driver(folder: Path) -> Path:
    """The driver as a library; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to build a driver that notes launches")
    source, library = folder / "driver.c", folder / "libdriver.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def noted_launches(
    module: str, repo_root: Path, environment: dict[str, str], folder: Path, cache: Path
) -> list[dict[str, Any]]:
    """What a module launches, in order; the cache has its programs."""
    library = build_driver(folder)
    extra = {"HYPER_MLA_CACHE_DIR": str(cache), "CUTE_DSL_LIBS": str(library)}
    done = run_program([sys.executable, "-m", module], cwd=repo_root, env={**environment, **extra})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def linked_program(kernel_fn: Any, host: Any, args: tuple[Any, ...], tiling: Any) -> CuteProgram:
    """A program of such a module."""
    kinds = kinds_of(args)
    key = cute_kernel._key(kernel_fn, host, kinds, tiling, "sm_90a")
    compiled = read_entry(key)
    assert compiled is not None, f"{key.name}: no such program was compiled"
    cute_launch.current_device_index = lambda: NO_GPU
    cute_launch.raw_stream = lambda device: STREAM
    function = cute_kernel._link(key, compiled)
    return CuteProgram(key.name, kinds, NO_GPU, short_entry(function.capi_func), (function,))


def pointers_of(args: tuple[Any, ...]) -> dict[int, int]:
    """Pointers of the tensors by argument, 0 for absent ones."""
    return {
        place: 0 if arg is None else arg.data_ptr()
        for place, arg in enumerate(args)
        if arg is None or hasattr(arg, "data_ptr")
    }
