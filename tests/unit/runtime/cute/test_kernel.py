"""The CuTe DSL runtime without a GPU: compiling, caching, refusing."""

import dataclasses
import functools
import importlib
import os
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_var3.conf.devices import load_devices
from mla_var3.errors import InvalidArgumentError, KernelCompileError, UnsupportedError

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.runtime import cute_kernel
from mla_var3.runtime.compile import compile_report
from mla_var3.runtime.cute import cache as cute_cache
from mla_var3.runtime.cute import launch as cute_launch
from mla_var3.runtime.cute.arguments import kinds_of
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.paths import traced_source_files
from mla_var3.runtime.profiling.static import static_profile_plan
from mla_var3.runtime.workflow import RunOptions
from tests.unit.runtime.cute.cute_support import (
    OTHER_PROCESS,
    ScaleAdd,
    ScalePlan,
    ScaleTiling,
    empty,
    note_compilations,
    run_process,
)


def cache_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "cute-compile").rglob("*.zip"))


def test_a_kernel_compiles_for_its_architecture_without_a_gpu(compilations, capfd):
    compiled = empty(requires_arch="sm_90a").compile("sm_90")
    assert capfd.readouterr() == ("", "")
    assert compiled.target == "sm_90a"
    assert compiled.cubin.startswith(b"\x7fELF")
    ptx = compiled.artifacts["scale_add.ptx"].decode()
    assert ".target sm_90a" in ptx and "kernel_cutlass_scale_add_" in ptx
    assert compiled.seconds > 0 and len(compilations) == 1


def test_source_lines_are_there_for_profilers_only(compilations, monkeypatch):
    """A program with lines is another entry of the cache."""
    plain, *_ = (empty().compile("sm_90") for _ in range(2))
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    with_lines = empty().compile("sm_90")
    assert len(compilations) == 2
    assert b".debug_line" in with_lines.cubin and b".debug_line" not in plain.cubin


def test_shared_memory_that_the_launch_asks_for_is_known():
    assert empty().compile("sm_90").dynamic_shared_bytes == 0
    kernel = dataclasses.replace(empty(), host_fn=lambda tiling: ScaleAdd(128, shared=4096))
    assert kernel.compile("sm_90").dynamic_shared_bytes == 4096


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float16"}, {"with_bias": False}, {"offset": 1.0}, {"tiling": ScaleTiling(256)}],
)
def test_another_dtype_tiling_constant_or_absent_argument_is_another_program(changes, compilations):
    for kernel in (empty(), empty(**changes)):
        kernel.compile("sm_90")
    assert len(set(compilations)) == 2
    first, second = cute_kernel._compiled.values()
    assert first.object_code != second.object_code


def test_a_target_that_the_kernel_is_not_written_for_is_an_error_with_a_reason():
    report = compile_report(empty(requires_arch="sm_90a"), "sm_100")
    assert re.match(r"scale_add for sm_100: expected sm_90a.*sm_100a", report.error or "")


def test_a_kernel_that_does_not_compile_says_why_and_prints_nothing(capfd, tmp_path):
    with pytest.raises(KernelCompileError, match=r"scale_add for sm_90a: .*undefined_name") as info:
        empty(tiling=ScaleTiling(unknown=True)).compile("sm_90")
    assert "\n" not in str(info.value) and "\x1b" not in str(info.value)
    assert capfd.readouterr() == ("", "")
    assert cache_files(tmp_path) == []


def test_another_process_neither_traces_nor_compiles(compilations, repo_root, package_environment):
    size = len(empty().compile("sm_90").cubin)
    cache = {"HYPER_MLA_CACHE_DIR": os.environ["HYPER_MLA_CACHE_DIR"]}
    other = run_process(OTHER_PROCESS, repo_root, package_environment, **cache)
    assert len(compilations) == 1
    assert other == {"made": 0, "size": size, "linked": True}


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut short":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        with zipfile.ZipFile(path) as archive:
            middle = archive.getinfo("program.cubin").header_offset + 200
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])
    else:
        with zipfile.ZipFile(path) as old:
            parts = {name: old.read(name) for name in old.namelist()}
        parts["key.json"] = parts["key.json"].replace(b"sm_90a", b"sm_100a")
        with zipfile.ZipFile(path, "w") as new:
            for name, data in parts.items():
                new.writestr(name, data)


@pytest.mark.parametrize("how", ["cut short", "empty", "flipped", "of another key"])
def test_a_damaged_entry_is_ignored_and_made_again(how, compilations, tmp_path, caplog):
    kernel = empty()
    wanted = kernel.compile("sm_90").cubin
    (entry,) = cache_files(tmp_path)
    damaged(entry, how)
    cute_kernel._compiled.clear()
    assert kernel.compile("sm_90").cubin == wanted
    assert len(compilations) == 2
    assert "ignored and compiled again" in caplog.text
    cute_kernel._compiled.clear()
    kernel.compile("sm_90")
    assert len(compilations) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_a_warning(tmp_path, monkeypatch, caplog):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("HYPER_MLA_CACHE_DIR", str(blocked))
    monkeypatch.setattr(cute_kernel, "_compiled", {})
    assert empty().compile("sm_90").cubin
    assert "is not kept" in caplog.text


def key_of(host: Any, sources: list[Path] | None = None) -> str:
    return cute_cache.program_key(
        "kernel", host, kinds_of((1,)), None, "sm_90a", sources or [], "compiler 1"
    ).digest


def function_with(value: Any) -> Callable[[], Any]:
    return lambda: value


def recursive(value: Any) -> Callable[[], Any]:
    def host() -> Any:
        return host, value

    return host


def test_what_a_host_function_carries_is_part_of_the_key():
    values = [1, 1.0, "1", (1,), True, torch.float16, torch.bfloat16, int, ScaleTiling()]
    values += [ScaleTiling(64), {"a": 1}, function_with(1), function_with(2)]
    keys = [key_of(function_with(value)) for value in values]
    assert len(set(keys)) == len(keys)
    assert keys == [key_of(function_with(value)) for value in values]
    assert key_of(recursive(1)) != key_of(recursive(2))


class SlottedHost:
    __slots__ = ("width",)

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self) -> int:
        return self.width


@pytest.mark.parametrize(
    "make",
    [
        SlottedHost,
        lambda width: SlottedHost(width).__call__,
        lambda width: functools.partial(function_with(0), width),
        lambda width: functools.partial(function_with(0), width=width),
        lambda width: functools.partial(function_with(width)),
        lambda width: function_with(functools.partial(function_with(width))),
    ],
)
def test_a_host_function_of_any_form_carries_its_values_into_the_key(make):
    assert key_of(make(64)) != key_of(make(128))
    assert key_of(make(64)) == key_of(make(64))


def test_a_value_that_cannot_be_compared_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"host_fn, value 'value': .*Tensor"):
        key_of(function_with(torch.zeros(1)))


def test_the_compiler_does_not_see_the_arguments_of_the_program(monkeypatch):
    """On a GPU CuTe DSL parses `sys.argv`, takes `--h=128` for `--help` and ends the process."""
    from cutlass.base_dsl.dsl import _get_diagnostic_arg_parser

    original = cute_kernel.cute.compile

    def compile_as_on_a_gpu(*given: Any, **options: Any) -> Any:
        _get_diagnostic_arg_parser().parse_known_args()
        return original(*given, **options)

    monkeypatch.setattr(cute_kernel.cute, "compile", compile_as_on_a_gpu)
    note_compilations(monkeypatch)
    arguments = ["hyper-mla", "bench", "--h=128"]
    monkeypatch.setattr("sys.argv", arguments)
    assert ScalePlan().plan_empty(1.0, 1.0).compile("sm_90").cubin
    assert sys.argv == arguments


def test_a_launch_fn_is_not_called_on_the_wrong_gpu(monkeypatch):
    called: list[ScaleTiling] = []
    kernel = dataclasses.replace(
        empty(requires_arch="sm_90a"), host_fn=None, args_fn=None, launch_fn=called.append
    )
    monkeypatch.setattr(CuteKernel, "device_type", "cuda")
    monkeypatch.setattr(cute_launch, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(UnsupportedError, match="NVIDIA B200"):
        kernel.launch()
    assert called == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernel.launch()
    assert called == [kernel.tiling]


@dataclasses.dataclass
class HopperPlan(ScalePlan):
    targets = ("sm_90",)


def test_static_mode_keeps_to_the_targets_of_the_plan(tmp_path):
    plan = HopperPlan(requires_arch="sm_90a")
    result = static_profile_plan(plan, options=RunOptions(device="cpu", out_dir=tmp_path / "s"))
    assert [report["target"] for report in result.record["compile"]] == ["sm_90"]
    assert result.record["compile"][0]["error"] is None
    hopper = {spec.name for spec in load_devices().values() if spec.target == "sm_90"}
    assert set(result.record["predicted_us"]) == hopper != set()
    compiled = tmp_path / "s" / "compiled" / "scale_add"
    assert (compiled / "scale_add.sm_90a.ptx").is_file()


MODULES = {
    **dict.fromkeys(("__init__.py", "unused.py", "whole.py"), ""),
    "constants.py": "WIDTH = 4\n",
    "layouts.py": "from .constants import WIDTH\n\nclass Layout: ...\n",
    "plans.py": "from mla_var3.runtime.plan import KernelPlan\n\nclass Base(KernelPlan): ...\n",
    "kernel.py": "from . import whole\nfrom .layouts import Layout\nfrom .plans import Base\n\n"
    "class Host:\n    layout = Layout\n",
}


def test_every_import_of_a_traced_module_counts_except_plans(tmp_path, monkeypatch):
    """A constant, a class or a module can decide what a traced kernel does."""
    package = tmp_path / "traced_package"
    package.mkdir()
    for name, text in MODULES.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("kernel", "unused"):
        importlib.import_module(f"traced_package.{name}")
    host = sys.modules["traced_package.kernel"].Host
    found = [path.name for path in traced_source_files(host, host())]
    assert found == ["constants.py", "kernel.py", "layouts.py", "whole.py"]
    for name in [name for name in sys.modules if name.startswith("traced_package")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_constant_of_the_operation_in_device_code_counts():
    """The packed order of tokens and the largest 8-bit number are defined beside the reference."""
    from mla_var3.kernel.cute_python.mla.decompressed import fp8_few

    kernel = fp8_few.compute_few_fp8
    found = {path.name for path in traced_source_files(kernel)}
    assert found == {path.name for path in traced_source_files(functools.partial(kernel))}
    assert {"fp8_few.py", "packed.py", "quantise.py"} <= found
    assert not {"cost.py", "plan.py", "stage.py"} & found


def test_a_source_that_changed_since_it_was_imported_leaves_nothing_in_the_cache(
    compilations, tmp_path, monkeypatch, caplog
):
    """The key would name the new text, the program be made of the old one."""
    helper = tmp_path / "helper.py"
    helper.write_text("WIDTH = 4\n")
    os.utime(helper, (1.0, 1.0))
    monkeypatch.setattr(cute_kernel, "traced_source_files", lambda *roots: [helper])
    empty().compile("sm_90")
    assert len(cache_files(tmp_path)) == 1
    helper.write_text("WIDTH = 8\n")
    assert empty().compile("sm_90").cubin
    assert len(cache_files(tmp_path)) == 1 and len(compilations) == 2
    assert "not kept, helper.py changed after this process began" in caplog.text


def test_a_changed_helper_is_another_program(tmp_path):
    helper, keys = tmp_path / "helper.py", set()
    for text in ("WIDTH = 4\n", "WIDTH = 8\n"):
        helper.write_text(text)
        keys.add(key_of(function_with(1), [helper]))
    assert len(keys) == 2
