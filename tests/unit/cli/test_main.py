"""The console script: commands and JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from mla_var3.cli import console
from mla_var3.cli.commands import env
from mla_var3.cli.commands import list as inventory
from mla_var3.cli.main import COMMANDS, command_module, main
from mla_var3.conf.devices import device_spec
from mla_var3.runtime import paths
from mla_var3.runtime.plan import Target


def printed(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """What a command prints that succeeds."""
    assert main(command.split()) == 0
    return capsys.readouterr().out


def test_help_lists_the_commands_and_each_has_its_own(capsys):
    out = printed(capsys, "")
    for command in COMMANDS:
        assert f"    {command}" in out
        assert f"usage: hyper-mla {command}" in printed(capsys, f"{command} --help")
    assert printed(capsys, "--version").startswith("hyper-mla ")


@pytest.mark.parametrize(
    "line",
    ["choose --b=32 --s=4 --t=4096 --h=128", "choose --b=32 --s=4 --for_device=B200",
     "choose --s=4 --window=1024 --for_device=RTX5090", "list", "doctor",
     "plan --budget=2GiB --for_device=H200"],
)  # fmt: skip
def test_tables_fit_80_columns_without_broken_words(line, monkeypatch, capsys):
    """Words such as "decompressed" were cut in two."""
    tables: list[tuple[str, ...]] = []
    show = console.print_table

    def noted(title: str, headers: Any, rows: Any, best: int | None = None) -> None:
        capsys.readouterr()
        show(title, headers, rows, best)
        out = capsys.readouterr().out
        assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
        words = {word for row in rows for cell in row for word in f"{cell}".split()}
        assert not {word for word in words - set(out.split()) if len(word) <= 32} - {"None", "-"}
        tables.append(tuple(headers))

    monkeypatch.setattr(command_module(line.split()[0]), "print_table", noted)
    monkeypatch.setattr("mla_var3.bench.plots.line_plot", lambda *_, **options: [])
    monkeypatch.setenv("COLUMNS", "80")
    main(line.split())
    assert tables


def test_choose_says_whose_times_are_estimates(capsys, monkeypatch):
    """Its title speaks of the chosen kernel; other kernels' times have a line of their own."""
    monkeypatch.setenv("COLUMNS", "400")
    title, *rest = printed(capsys, "choose --cache_dtype=fp8_per_token --for_device=H200").split(
        "\n"
    )
    assert "estimate" not in title
    [estimated] = [line for line in rest if line.startswith("times") and "16-bit cache" in line]
    assert "flash_mla:cutile-dsl" in estimated and "flash_mla:cute-dsl" not in estimated


def test_list(capsys):
    names = [kernel.full_name for kernel in paths.discover_kernels()]
    for kernel in paths.discover_kernels():
        if kernel.language == "cutile-dsl":
            assert paths.declared_targets(kernel) == paths.plan_class(kernel).targets
    out = printed(capsys, "list")
    assert all(name in out for name in names)
    rows = json.loads(printed(capsys, "list --json"))
    assert [row["full_name"] for row in rows] == names
    for row in rows:
        assert row["targets"] and row["module"].startswith("mla_var3.kernel.")
        assert all(row[place]["runs"] or row[place]["reason"] for place in ("gpu", "cpu"))


@pytest.mark.parametrize(
    ("target", "installed", "reason"),
    [("sm_90", True, None), ("sm_80", True, "made for sm_90"), ("sm_90", False, "pip install"),
     (None, True, "why not")],
)  # fmt: skip
def test_list_says_why_a_kernel_does_not_run(target, installed, reason, monkeypatch):
    gpu = target and inventory.Gpu("some card", target)
    monkeypatch.setattr(inventory, "find_gpu", lambda: (gpu, "why not"))
    monkeypatch.setattr(inventory, "installed", lambda name: "1.0" if installed else None)
    row = next(row for row in inventory.inventory() if row["language"] == "cutile-dsl")
    assert row["gpu"]["runs"] == (reason is None)
    if reason is not None:
        assert reason in row["gpu"]["reason"]
    assert row["cpu"]["runs"] == row["compiles"] == installed


def test_show(capsys):
    out = printed(capsys, "show mla_var6_plus --b=3")
    for words in ("decompress_combine", "ideal on", "sm_120", "tiling candidates", "tunings: none"):
        assert words in out
    folder = paths.cache_root() / "kernel-autotune" / "some-gpu" / "cutile-dsl" / "flash_mla"
    folder.mkdir(parents=True)
    (folder / "flash_mla-abc.json").write_text("{}")
    facts = json.loads(printed(capsys, "show flash_mla v0 --b=3 --lengths=mixed --json"))
    assert facts["fields"]["b"] == 3 and facts["fields"]["lengths"] == [1, 2048, 4096]
    assert facts["contract"].startswith("flash_mla") and facts["stages"][0]["flops"] > 0
    assert set(facts["candidates"]) == set(facts["targets"])
    assert [Path(path).name for path in facts["tunings"]] == ["flash_mla-abc.json"]
    # The choice is that of a run on the device.
    pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")
    plan = paths.plan_class(paths.find_kernel("mla_var6_plus", language="cute-dsl"))
    facts = json.loads(printed(capsys, "show mla_var6_plus:cute-dsl --b=4 --s=64 --t=4096 --json"))
    target = Target.of(device_spec(facts["predicted_on"]))
    expected = plan(b=4, s=64, t=4096).resolved(target)
    assert facts["resolved"]["n"] == expected.params()["n"]


def test_env(capsys):
    drivers = {"580.126.09": True, "610.1": True, "580.126.8": False, "570.200": False, None: None}
    for driver, sufficient in drivers.items():
        found = env._driver_requirement({"driver": driver})
        assert found["sufficient"] is sufficient and "r580.126.09" in found["remark"]
    out = printed(capsys, "env")
    for words in ("GPU:", "versions:", "tileiras", "NVIDIA H200", "torch", "r580.126.09"):
        assert words in out
    facts = json.loads(printed(capsys, "env --json"))
    assert facts["versions"]["torch"]
    assert facts["packages"]["nvtx"]["install"] == 'pip install "hyper-mla[profiling]"'
    assert facts["devices"]["NVIDIA H200"]["values"]["peak_dram_bw_GBps"]["source"]


def test_predict(capsys):
    out = printed(capsys, "predict --for_device=H200 --s=16")
    for words in ("flash_mla:cute-dsl *", "n=0", "Predictions, not measurements", "power limit"):
        assert words in out
    assert "B200" not in out and "hyper-mla choose counts" not in out
    out = printed(capsys, "predict --for_device=B200 --b=2 --lengths=9,4096")
    assert "lengths=9,4096" in out and "hyper-mla choose counts" in out
    out = printed(capsys, "predict --s=2000000000 --for_device=H200 --json")  # a whole prompt
    assert '"heading": "steady call time by recorded rates"' in out
    entries = json.loads(printed(capsys, "predict --b=4 --t=100 --lengths=mixed --json"))
    assert len(entries) >= 5
    assert entries[0]["problem"]["lengths"] == [1, 34, 67, 100]
    assert set(entries[0]["predicted"]) >= {"flash_mla", "mla_var6_plus"}


@pytest.mark.parametrize("command", ["run", "profile"])
def test_a_kernel_is_handed_to_its_own_command_line(command, monkeypatch):
    seen: list[Any] = []
    note = lambda kernel, argv, prog: seen.append((kernel.full_name, argv)) or 0  # noqa: E731
    monkeypatch.setattr("mla_var3.cli.commands.kernel.run_kernel", note)
    assert main([command, "flash_mla", "v0", "--b=2", "--tune-max-iters=3"]) == 0
    assert seen == [("flash_mla", ["--b=2", "--tune-max-iters=3"])]


def test_a_clone_under_an_id_of_another_language_says_so(capsys):
    said = "mla_var6_plus_v5 exists in cute-dsl: an id means one idea in every language"
    for version, words in (("v5", said), ("v990", "")):
        assert main(["clone", "mla_var6_plus_v2", version, "--dry_run"]) == 0
        err = capsys.readouterr().err
        assert words in err and ("exists" in err) is bool(words)
