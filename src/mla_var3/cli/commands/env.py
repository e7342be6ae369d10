"""`hyper-mla env`: what this machine offers, and how to get what is missing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mla_var3.cli.arguments import Parser
from mla_var3.cli.console import print_json, print_table, say
from mla_var3.conf.devices import DeviceSpec, device_spec, load_devices
from mla_var3.errors import UnknownNameError
from mla_var3.runtime.environment import environment, find_tool, installed, version_numbers
from mla_var3.runtime.paths import cache_root, output_root

CUTILE_DRIVER = "580.126.09"
"""Oldest Linux driver with which the profilers see cuTile kernels."""

_CUTILE = 'pip install "hyper-mla[cutile]"'
_NSIGHT = "install it from https://developer.nvidia.com/nsight-tools or with the CUDA toolkit"

TOOLS = {
    "tileiras": ("compiles cuTile kernels", _CUTILE),
    "ptxas": ("compiles cuTile kernels", _CUTILE),
    "cuobjdump": ("registers and shared memory in compile reports", _CUTILE),
    "nvdisasm": ("instruction mix in compile reports", _CUTILE),
    "nvidia-smi": ("clocks and driver in records", "comes with the NVIDIA driver"),
    "ncu": ("profiling modes annotation and ncu", _NSIGHT),
    "nsys": ("profiling mode nsys", _NSIGHT),
}
"""Program -> (what it is for, how to get it)."""

PACKAGES = {
    "torch": ("tensors, reference, launching", "pip install torch"),
    "cuda-tile": ("kernels in cutile-dsl, and the CPU interpreter", _CUTILE),
    "nvidia-cutlass-dsl": ("kernels in cute-dsl", 'pip install "hyper-mla[cute]"'),
    "matplotlib": ("plots in reports", "pip install matplotlib"),
    "ncu-report": ("profiling modes annotation and ncu", 'pip install "hyper-mla[profiling]"'),
    "nsight-python": ("annotation mode's first choice", 'pip install "hyper-mla[profiling]"'),
    "nvtx": ("needed by nsight-python", 'pip install "hyper-mla[profiling]"'),
}
"""Distribution -> (what it is for, how to get it)."""


def env_facts() -> dict[str, Any]:
    """What the command prints, JSON-ready."""
    here, tools, packages = environment(), {}, {}
    for name, (purpose, hint) in TOOLS.items():
        path = find_tool(name) or shutil.which(name)
        tools[name] = {"path": path, "for": purpose, "install": hint}
    for name, (purpose, hint) in PACKAGES.items():
        packages[name] = {"version": installed(name), "for": purpose, "install": hint}
    return {
        **here,
        "tools": tools,
        "packages": packages,
        "folders": {"out": str(output_root().resolve()), "cache": str(cache_root().resolve())},
        "devices": {spec.name: _device_facts(spec) for spec in load_devices().values()},
        "this_device_known": _known(here["gpu"]),
        "driver_requirement": _driver_requirement(here["gpu"]),
    }


def _driver_requirement(gpu: dict[str, Any] | None) -> dict[str, Any]:
    """The driver with which cuTile kernels can be profiled, and whether this machine has it."""
    found = (gpu or {}).get("driver")
    fits = version_numbers(found) >= version_numbers(CUTILE_DRIVER) if found else None
    needed = f"profiling of cuTile kernels needs r{CUTILE_DRIVER} or newer"
    remark = f"new enough to profile cuTile kernels (r{CUTILE_DRIVER})" if fits else needed
    return {"cutile": CUTILE_DRIVER, "found": found, "sufficient": fits, "remark": remark}


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    parser.add_json()


def env_command(parser: Parser, argv: Sequence[str]) -> int:
    """Print what this machine offers."""
    as_json = parser.parse(argv)["json"]
    facts = env_facts()
    if as_json:
        print_json(facts)
        return 0
    _print_gpu(facts)
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v is not None)
    say(f"versions: {versions}")
    say(f"machine:  {facts['platform']}")
    if facts["git"]:
        dirty = " with local changes" if facts["git"]["dirty"] else ""
        say(f"commit:   {facts['git']['commit'] or 'none yet'}{dirty}")
    for kind, folder in facts["folders"].items():
        say(f"{kind + ':':<9} {folder}")
    found = [
        (name, entry["for"], entry[key] or f"missing: {entry['install']}")
        for kind, key in (("tools", "path"), ("packages", "version"))
        for name, entry in facts[kind].items()
    ]
    print_table("programs and packages", ("needed", "for", "found"), found)
    devices = []
    for name, device in facts["devices"].items():
        rates = f"{device['tflops']:g}", f"{device['gbps']:g}"
        kind = "burst, measured" if device["burst"] else "vendor peaks"
        devices.append((name, device["target"], *rates, device["sm_count"], kind))
    headers = ("device", "target", "bf16 TFLOP/s", "GB/s", "SMs", "rates")
    print_table("devices in the table", headers, devices)
    return 0


def _print_gpu(facts: dict[str, Any]) -> None:
    gpu, remark = facts["gpu"], facts["driver_requirement"]["remark"]
    if gpu is None:
        say("GPU:      none usable; kernels run in the CPU interpreter and compile for all targets")
        say(f"driver:   none; {remark}")
        return
    say(f"GPU:      {gpu['name']}, compute capability {gpu['compute_capability']}")
    say(f"driver:   {gpu.get('driver') or 'unknown'}, {remark}")
    if facts["this_device_known"] is not True:
        say(f"warning:  {facts['this_device_known']}", "yellow")


def _known(gpu: dict[str, Any] | None) -> bool | str | None:
    """Whether this machine's GPU is in the table; None without a GPU, else why not."""
    if gpu is None:
        return None
    try:
        device_spec(gpu["name"])
    except UnknownNameError as error:
        return str(error)
    return True


def _device_facts(spec: DeviceSpec) -> dict[str, Any]:
    tflops, gbps = spec.burst_rates("bfloat16")
    rates = {"tflops": tflops, "gbps": gbps, "burst": spec.has_burst}
    values = {key: asdict(value) for key, value in spec.values.items()}
    what = {"target": spec.target, "sm_count": spec.sm_count, "origin": spec.origin}
    return {**what, **rates, "values": values}
