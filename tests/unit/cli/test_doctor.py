"""`hyper-mla doctor`, with engines and GPUs that are not here."""

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mla_var3.cli.commands import doctor
from mla_var3.cli.main import main

H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "driver": "580.95"}
MODEL = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
MODEL["num_attention_heads"] = 128
VLLM = {"nvidia-cutlass-dsl": "4.8.0", "vllm": "0.32.0"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets what is installed and which GPU there is."""

    def install(packages: dict[str, str], gpu: dict | None = H200, plugin: bool = True) -> None:
        def version(name: str) -> str:
            if name not in packages:
                raise importlib.metadata.PackageNotFoundError(name)
            return packages[name]

        entries = [SimpleNamespace(name="hyper_mla")] if plugin else []
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
        monkeypatch.setattr(doctor, "environment", lambda: {"gpu": gpu})
        for engine in doctor.ENGINES.values():
            monkeypatch.delenv(engine.variable, raising=False)

    return install


def write_model(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    return folder


def report(capsys, *arguments: str) -> tuple[int, dict]:
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def verdicts(found: dict) -> dict[str, str]:
    return {finding["subject"]: finding["verdict"] for finding in found["findings"]}


@pytest.mark.parametrize(("version", "name"), [("0.26.0", "CUSTOM"), ("0.33.1", "HYPER_MLA")])
def test_ready_with_the_exact_flag(machine, capsys, tmp_path, version, name):
    machine(VLLM | {"vllm": version})
    code, found = report(capsys, "--model", str(write_model(tmp_path)), "--tp=8")
    assert code == 0 and found["ready"]
    expected = f"vllm serve {tmp_path} --attention-backend {name} --tensor-parallel-size 8"
    assert found["commands"] == [expected]
    assert set(verdicts(found).values()) == {"ok"}
    assert "16 heads per GPU" in found["findings"][-1]["found"]


def test_sglang_and_nothing(machine, capsys):
    machine({"nvidia-cutlass-dsl": "4.6.2", "sglang": "0.5.18.post1"})
    code, found = report(capsys)
    [command] = found["commands"]
    assert code == 0 and command.endswith("--model-path MODEL --attention-backend hyper_mla")
    machine({}, gpu=None)
    code, found = report(capsys)
    assert code == 1 and not found["ready"]
    assert verdicts(found) == dict.fromkeys(("GPU", "nvidia-cutlass-dsl", "engine"), "missing")


def test_what_does_not_fit_is_refused_with_advice(machine, capsys):
    for packages, gpu, subject in (
        ({"nvidia-cutlass-dsl": "4.4.2"}, H200, "nvidia-cutlass-dsl"),
        ({"nvidia-cutlass-dsl": "4.9.0"}, H200, "nvidia-cutlass-dsl"),
        ({"vllm": "0.25.1"}, H200, "vllm"),
        ({"sglang": "0.5.15"}, H200, "sglang"),
        ({}, H200 | {"name": "NVIDIA B200", "compute_capability": "10.0"}, "GPU"),
    ):
        machine(VLLM | packages, gpu=gpu)
        code, found = report(capsys)
        assert code == 1
        (finding,) = [f for f in found["findings"] if f["verdict"] == "refused"]
        assert finding["subject"] == subject and finding["advice"]


def test_a_newer_engine_and_a_plugin_that_it_will_not_load(machine, capsys, monkeypatch):
    machine(VLLM | {"vllm": "0.34.0"})
    code, found = report(capsys)
    assert code == 0 and verdicts(found)["vllm"] == "note"
    machine(VLLM, plugin=False)
    assert verdicts(report(capsys)[1])["vllm plug-in"] == "missing"
    machine(VLLM)
    for plugins, verdict in (("other, more", "refused"), ("other, hyper_mla", "ok")):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        assert verdicts(report(capsys)[1])["vllm plug-in"] == verdict


OPENPANGU = {"kv_lora_rank": None, "attention_kv_lora_dim": 512}
OPENPANGU |= {"qk_rope_head_dim": None, "attention_qk_rope_dim": 64}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": None}, "no latent attention"),
        ({"index_topk": 2048}, "sparse"),
        ({"qk_rope_head_dim": 32}, "(512, 64) or (512, 0)"),
        (OPENPANGU, ""),
        ({"text_config": ["of something else"]}, ""),
        ({"text_config": {"num_attention_heads": 7}}, ""),
    ],
)
def test_models_that_are_not_served_and_configs_of_all_kinds(
    machine, capsys, tmp_path, changes, reason
):
    machine(VLLM)
    code, found = report(capsys, "--model", str(write_model(tmp_path, **changes)))
    last = found["findings"][-1]
    assert code == bool(reason) and reason in last["advice"]
    assert reason or last["found"] == "deepseek_v3, cache rows of 512+64, 128 heads per GPU"


def test_a_model_whose_class_in_vllm_has_no_latent_attention(machine, capsys, tmp_path):
    widths = {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "num_attention_heads": 40}
    model = write_model(tmp_path, model_type="minicpm3", **widths)
    engines = {"vllm": "0.32.0", "sglang": "0.5.23"}
    for installed, code in ((["vllm"], 1), (["sglang"], 0), (["vllm", "sglang"], 0)):
        machine({"nvidia-cutlass-dsl": "4.8.0"} | {name: engines[name] for name in installed})
        found_code, found = report(capsys, "--model", str(model))
        assert found_code == code and found["ready"] is (code == 0)
        assert ["sglang" in command for command in found["commands"]] == [True] * (1 - code)
        assert ("model in vllm" in verdicts(found)) is ("vllm" in installed)


def test_bad_options_name_themselves(machine, capsys, tmp_path):
    machine(VLLM)
    model = write_model(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    headless = write_model(tmp_path / "headless", num_attention_heads=None)
    many = write_model(tmp_path / "many", qk_rope_head_dim="many")
    for options, name in (
        ("--model nowhere", "--model: nowhere"),
        (f"--model {tmp_path}/list.json", f"--model: {tmp_path}/list.json"),
        (f"--model {headless}", f"--model: {headless}/config.json: num_attention_heads"),
        (f"--model {many}", f"--model: {many}/config.json: qk_rope_head_dim"),
        (f"--model {model} --tp=3", "--tp"),
        ("--tp=0", "--tp"),
    ):
        assert main(["doctor", *options.split()]) == 2
        shown = capsys.readouterr().err
        assert f"error: {name}: expected" in shown and "Errno" not in shown
