"""Commands on values that cannot be used: one line that says what is wrong, and no files."""

import os
from pathlib import Path

import pytest

from mla_var3.cli.main import main

HUGE = "99999999999999999999"
SMALL_RUN = "run flash_mla --device=cpu --b=1 --s=1 --t=64 --h=16 --prof_type=disabled"
FOLDER = "out_dir: expected a folder that can be written to, got file"
"""Of the file in the way."""

BAD = {
    "lisst": "unknown command 'lisst'; did you mean 'list'?",
    "list --jsn": "unknown option '--jsn'; did you mean --json?",
    "show": "kernel: expected the name of a kernel, got none",
    "show mla_var6": "did you mean 'mla_var6_plus'",
    "show flash_mla v5": "unknown version of flash_mla 'v5'",
    "show flash_mla --language=": "unknown language ''",
    "run flash_atention": "did you mean 'flash_attention'",
    "run --quik": "did you mean --quick?",
    "run --device=tpu": "device: expected auto, cuda or cpu, got 'tpu'",
    "run --language=cute-dsl": "--language: expected a kernel beside it, got none",
    "run --b=0": "b: expected a positive integer, got 0",
    "run --quick --device=cpu --out_dir=file": FOLDER,
    "run --device=cpu --tune_seconds=-1": "tune_seconds: expected a number of at least 0, got -1",
    "run --device=cpu --peer_libs=nowhere": "peer_libs: expected a folder, got nowhere",
    f"{SMALL_RUN} --seed={HUGE}": "seed: expected an integer from -9223372036854775808 to",
    f"{SMALL_RUN} --check=no": "--check: expected no value, got 'no'",
    f"{SMALL_RUN} --num_ctas=3": "tiling: expected compiler hints of cuTile, got num_ctas",
    "run --model=glm-4.7-flash": "--model: expected one with v=d and p > 0",
    "predict extra": "unexpected argument 'extra'",
    "predict --model=kimi-k2 --h=16": "--h: expected none beside --model, which gives h=64; got 16",
    "predict --tp=8": "--tp: expected --model or --config beside it, got neither",
    "predict --model=kimi-k2 --config=x": "--config: expected none beside --model",
    "predict --model=kimi": "unknown model 'kimi'; did you mean",
    "predict --model=minicpm3 --tp=16": "tp: expected a divisor of the 40",
    f"predict --b={HUGE}": "b: expected an integer from 1 to 1048576, got 9999",
    f"predict --b={HUGE} --lengths=mixed": "b: expected an integer from 1 to 1048576",
    "predict --for_device=": "unknown device ''",
    "predict --for_device=H205": "unknown device 'H205'",
    "predict --lengths=": "--lengths: expected a comma list, each an integer or mixed",
    "choose --kernel=flash": "unknown kernel 'flash'",
    "choose --s=5 --t=2": "s: expected at most t=2 (causal), got 5",
    "choose --t=100 --prefix=200": "prefix: expected an integer from 0 to t=100, got 200",
    "choose --t=100 --window=200": "window: expected an integer from 0 to t=100, got 200",
    "choose --b=4 --prefix=9 --groups=5": "groups: expected an integer from 1 to b=4",
    "choose --groups=3": "groups: expected 1 without a shared prefix, got 3",
    "choose --dtype=int8": "dtype: expected 'bfloat16' or 'float16' or 'float32', got 'int8'",
    "choose --cache_dtype=fp4": "unknown cache format 'fp4'",
    f"choose --window={HUGE}": "window: expected an integer from 0 to 2147483647, got",
    f"choose --page_size={HUGE}": "page_size: expected an integer from 1 to 2147483647",
    "plan": "the following arguments are required: --budget",
    "plan --for_device=H200 --budget=4": "budget: expected at least",
    "plan --for_device=H200 --budget=0": "budget: expected a positive amount of memory",
    "plan --for_device=H200 --budget=lots": "budget: expected a number of bytes",
    "plan --for_device=H200 --budget=9TiB": "budget: expected at most",
    "plan --for_device=H200 --prefix=512 --budget=9TiB": "budget: expected at most",
    "plan --budget=1GiB --groups=2": "groups: expected 1 without --prefix, got 2",
    "plan --budget=1GiB --window_dtype=fp4": "window_dtype: expected fp8, got 'fp4'",
    "plan --budget=1GiB --prefix=9 --dtype=fp8": "dtype: expected none of a window with --prefix",
    "plan --budget=1GiB --prefix=9 --window_dtype=fp8": "window_dtype: expected none of a window",
    "plan --budget=1GiB --for_device=B200 --prefix=9": "device: expected a GPU of compute cap",
    "plan --budget=1GiB --layers=0": "layers: expected a positive integer, got 0",
    "plan --budget=1GiB --dtype=fp4": "dtype: expected bfloat16 or float16 or fp8",
    "plan --budget=1GiB --for_device=H9": "unknown device 'H9'",
    "plan --budget=1GiB --parameters=gone.json": "gone.json: expected a readable file",
    "plan --budget=1GiB --out_dir=file": FOLDER,
    "bench figurs": "did you mean 'figures'",
    "bench all --b=1,2": "b: expected one value for the suite all",
    "bench figures --s=1": "the suite figures has fixed shapes",
    "bench all --n=1": "only the suite var6_plus has it",
    "bench engine --kernels=flash_mla": "only the suite all or sweep has it",
    "bench var6_plus --n=": "--n: expected a comma list, each an integer, got ''",
    "bench var6_plus --n=0,-1": "n: expected an integer from 0 to t=4096, got -1",
    "bench var6_plus --t=64 --n=65": "n: expected an integer from 0 to t=64, got 65",
    "bench sweep --kernels=flash_mlb": "did you mean 'flash_mla'",
    "bench all --kernels=": "--kernels: expected a comma list, each text, got ''",
    "bench all --for_device=H999": "unknown device 'H999'",
    "bench all --mode=guess": "mode: expected auto, measure or predict",
    "bench all --mode=measure --for_device=H200": "mode: expected auto with --for_device",
    "bench all --mode=predict --contribute": "contribute: expected a GPU to measure on, or --rec",
    "bench all --rounds=0": "rounds: expected a number of at least 1",
    "bench all --max_seconds=inf": "max_seconds: expected a positive number, got inf",
    "bench all --peer_libs=nowhere": "peer_libs: expected a folder, got nowhere",
    "bench all --resume=x.json": "resume: expected a GPU to continue on",
    "bench all --resume=x.json --mode=predict": "resume: expected none with predictions",
    "bench --against=gone.json": "gone.json: expected a readable record",
    "bench --records gone.json --s=4": "s: expected none with --records",
    "bench --records gone.json --quick": "quick: expected none with --records, got True",
    "bench --records gone.json --rounds=2": "rounds: expected none with --records, got 2",
    "bench --records gone.json --n=8": "n: expected none with --records",
    "bench sweep --records gone.json": "suite: expected none with --records, got sweep",
    "bench --records gone.json --for_device=H200": "for_device: expected none with --records",
    "bench all --mode=predict --rounds=5": "rounds: expected none with --mode=predict, got 5",
    "bench all --for_device=H200 --quick --tune": "tune: expected none with --for_device",
    "bench all --across_versions": "across_versions: expected --against beside it, got none",
    "bench --records gone.json": "gone.json: expected a readable record",
    "bench all --mode=predict --out_dir=file/below": f"{FOLDER}/below (Not a directory)",
    "compare flash_mla": "expected at least two",
    "compare flash_mla flash_mlo": "did you mean 'flash_mla'",
    "compare flash_mla no/such --static": "a profile output folder",
    "compare flash_mla flash_mla --for_device=H200": "only together with --static",
    "compare flash_mla flash_mla --static --for_device=H2O": "H2O",
    "compare flash_mla flash_mla --static --check": "--check: not together with --static",
    "compare flash_mla flash_mla --static --b=0": "b: expected",
    "compare flash_mla flash_attention --static --out_dir=file": f"{FOLDER} (File exists)",
    f"accuracy --quick --seed={HUGE}": "seed: expected an integer from -2147483647 to 2147483647",
    "profile": "expected the name of a kernel",
    "profile mla_var6_plus v99": "v99",
    "profile flash_mla --prof_type=static --out_dir=file": f"{FOLDER} (File exists)",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work without a GPU, in a folder that has one file and one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYPER_MLA_OUT_DIR", str(tmp_path / "out"))
    for module in ("runtime.workflow", "bench.run"):
        monkeypatch.setattr(f"mla_var3.{module}.cuda_available", lambda: False)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()


IMPOSSIBLE = {
    "compare flash_mla flash_attention": "--static compares predictions",
    "bench all --mode=measure": "expected a usable CUDA GPU",
    "choose --cache_dtype=fp8 --kernel=mla_var6_plus": "does not support an 8-bit cache (fp8)",
    "choose --kernel=mla_var6_plus --tree": "it does not support a tree of tokens",
}


@pytest.mark.parametrize("command", [*BAD, *IMPOSSIBLE])
def test_one_line_names_the_argument_or_what_is_not_possible(command, tmp_path, capsys):
    assert main(command.split()) == (2 if command in BAD else 1)
    err = capsys.readouterr().err
    error = err.splitlines()[-1]
    assert error.startswith("error: ") and "Traceback" not in err
    assert (BAD | IMPOSSIBLE)[command] in error
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != "cache")
    assert names == ["file", "folder"] and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "command", [SMALL_RUN, "run flash_mla --device=cpu --check"], ids=["run", "check"]
)
def test_more_than_the_memory_is_refused_at_once(command, capsys):
    assert main([*command.split(), "--b=4096", "--s=128", "--t=1000000"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: sizes: expected tensors that fit the ")
    assert "b=4096 s=128 t=1000000" in error and "which needs at least" in error


def test_a_file_that_cannot_take_its_name(tmp_path, capsys):
    command = ["compare", "flash_mla", "flash_attention", "--static", "--json=folder"]
    assert main(command) == 1
    assert "error: folder: expected a path that can be used here, got Is" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_folder_without_permission(tmp_path, monkeypatch, capsys):
    # Whoever is root may write anywhere, so the answer is planted.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(["plan", "--budget=1GiB", "--out_dir=folder"]) == 2
    captured = capsys.readouterr()
    assert "out_dir: expected a folder that can be written to, got folder (no pe" in captured.err
    assert not captured.out
    assert not list((tmp_path / "folder").iterdir())


def test_accuracy_makes_its_folder_before_it_measures(monkeypatch, capsys):
    monkeypatch.setattr(
        "mla_var3.report.accuracy.measure", lambda *_, **__: pytest.fail("measured")
    )
    assert main(["accuracy", "--quick", "--json", "--out_dir=file"]) == 2
    captured = capsys.readouterr()
    assert FOLDER in captured.err and not captured.out
