"""Commands on values that cannot be used: one line that says what is wrong, and no files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mla_var3.cli.main import main

HUGE = "99999999999999999999"
SMALL_RUN = (
    "run",
    "flash_mla",
    "--device=cpu",
    "--b=1",
    "--s=1",
    "--t=64",
    "--h=16",
    "--prof_type=disabled",
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that has one file and one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYPER_MLA_OUT_DIR", str(tmp_path / "out"))
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("predict", f"--b={HUGE}"), "b: expected an integer from 1 to 1048576, got 9999"),
        (("predict", f"--b={HUGE}", "--lengths=mixed"), "b: expected an integer from 1 to 1048576"),
        (("predict", "--for_device="), "unknown device ''"),
        (("predict", "--lengths="), "--lengths: expected a comma list, each an integer or mixed"),
        (("choose", f"--window={HUGE}"), "window: expected an integer from 0 to 2147483647, got"),
        (("choose", f"--page_size={HUGE}"), "page_size: expected an integer from 1 to 2147483647"),
        (("show", "flash_mla", "--language="), "unknown language ''"),
        ((*SMALL_RUN, f"--seed={HUGE}"), "seed: expected an integer from -9223372036854775808 to"),
        ((*SMALL_RUN, "--num_ctas=3"), "tiling: expected compiler hints of cuTile, got num_ctas"),
        (("bench", "all", "--kernels="), "--kernels: expected a comma list, each text, got ''"),
        (("bench", "var6_plus", "--n="), "--n: expected a comma list, each an integer, got ''"),
        (("bench", "all", "--max_seconds=inf"), "max_seconds: expected a positive number, got inf"),
        (("bench", "all", "--peer_libs=nowhere"), "peer_libs: expected a folder, got nowhere"),
        (("plan", "--budget=1GiB", "--out_dir=file"), "out_dir: expected a folder that can be wri"),
        (
            ("bench", "all", "--mode=predict", "--out_dir=file/below"),
            "out_dir: expected a folder that can be written to, got file/below (Not a directory)",
        ),
        (
            ("profile", "flash_mla", "--prof_type=static", "--out_dir=file"),
            "out_dir: expected a folder that can be written to, got file (File exists)",
        ),
        (("run", "--quick", "--device=cpu", "--out_dir=file"), "out_dir: expected a folder that"),
        (
            ("compare", "flash_mla", "flash_attention", "--static", "--out_dir=file"),
            "out_dir: expected a folder that can be written to, got file (File exists)",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_one_line_names_the_argument(
    argv: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert f"error: {message}" in captured.err
    assert "Traceback" not in captured.err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == [
        "file",
        "folder",
    ]
    assert (tmp_path / "file").read_text() == "kept"


def test_an_absent_version_is_not_the_base_version() -> None:
    assert main(["bench", "var6_plus", "--version=", "--mode=predict", "--quick"]) == 3


@pytest.mark.parametrize(
    "argv", [SMALL_RUN, ("run", "flash_mla", "--device=cpu", "--check")], ids=["run", "check"]
)
def test_more_than_the_memory_is_refused_at_once(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--b=4096", "--s=128", "--t=1000000"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: sizes: expected tensors that fit the ")
    assert "b=4096 s=128 t=1000000" in error and "which needs at least" in error


def test_a_file_that_cannot_take_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "flash_mla", "flash_attention", "--static", "--json=folder"]
    assert main(command) == 1
    assert "error: folder: expected a path that can be used here, got Is" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_folder_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Whoever is root may write anywhere, so the answer is planted.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(["plan", "--budget=1GiB", "--out_dir=folder"]) == 2
    captured = capsys.readouterr()
    assert "out_dir: expected a folder that can be written to, got folder (no pe" in captured.err
    assert not captured.out
    assert not list((tmp_path / "folder").iterdir())


def test_predictions_for_a_whole_prompt_come_soon(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--s=2000000000", "--for_device=NVIDIA H200", "--json"]) == 0
    assert '"heading": "steady call time by recorded rates"' in capsys.readouterr().out
