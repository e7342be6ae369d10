"""vLLM's engine on a GPU with our backend beside its own: tokens, logprobs and times.

    python -m tests.gpu.vllm_engine FOLDER [--waves=tokens,h128,h16] [--seconds=450]

Needs vLLM 0.26 or newer and a Hopper GPU; this package on PYTHONPATH is enough. Each engine is a
process of its own; the engines of a wave start together and measure one at a time. Writes one JSON
file per engine and `summary.json` to FOLDER, and prints a table last. Exit code 1: an engine
failed, or tokens differ more than those of vLLM's own two backends do.

Waves:
    tokens: tokens and logprobs at DeepSeek-V3's width (4 layers with narrow dense MLPs), eager and
        with full CUDA graphs, without drafts and with MTP 1, 3 and 7, prompts of different lengths.
    h128, h16: times of decode steps of 20 layers with so many heads, full graphs, contexts around
        4k, batches of 64 and 32, without drafts and with MTP 3.
    fp8: as `tokens`, with the cache in e4m3 and in bfloat16, beside FLASHMLA.
    prefill: as `tokens` without drafts, with our prefill backend beside vLLM's.
    soak: 2,000 requests (`--requests`) of random length with bursts, aborts, a shared prefix and
        preemptions, MTP 3. Tokens and logprobs against vLLM's backends; GPU memory stays flat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .attention_record import cuda_is_missing
from .serving.one_engine import BATCHES, ENVIRONMENT, OURS, PEERS, scratch
from .serving.soak import LONGEST, memory_is_flat

ROOT = Path(__file__).resolve().parents[2]
TOKENS = {"heads": 128, "layers": 4, "hidden": 7168, "mlp": 4096, "lora": 1536, "kv_gib": 1.5}
TIMES = {"layers": 20, "hidden": 1024, "mlp": 2048, "lora": 512, "kv_gib": 6.8, "timed": True}
SOAK = {"heads": 16, "layers": 3, "hidden": 1024, "mlp": 2048, "lora": 512, "kv_gib": 0.075,
        "longest": LONGEST, "graphs": True, "drafts": 3}  # fmt: skip
LEAD = 0.2
"""How much more likely an engine may find its own token where two engines part."""


def jobs_of(wave: str, requests: int, until: float) -> dict[str, dict]:
    """The engines of a wave: name -> options."""
    if wave == "soak":
        kinds = {"soak": SOAK | {"soak": requests, "until": until - 10}}
    elif wave == "fp8":
        kinds = {
            f"fp8-{cache}-mtp{drafts}": TOKENS | {"graphs": True, "drafts": drafts, "cache": cache}
            for cache in ("auto", "fp8") for drafts in (0, 3)
        }  # fmt: skip
    elif wave == "prefill":
        options = TOKENS | {"graphs": True, "drafts": 0}
        kinds = {f"prefill-{x}": options | {"prefill": x == "ours"} for x in ("own", "ours")}
    elif wave == "tokens":
        kinds = {
            f"tokens-{'graph' if graphs else 'eager'}-mtp{drafts}": (
                TOKENS | {"graphs": graphs, "drafts": drafts}
            )
            for graphs, drafts in ((False, 3), (True, 0), (True, 1), (True, 3), (True, 7))
        }  # fmt: skip
    else:
        options = TIMES | {"graphs": True, "heads": int(wave.removeprefix("h"))}
        kinds = {f"{wave}-mtp{drafts}": options | {"drafts": drafts} for drafts in (0, 3)}
    left_out = {"fp8": {"FLASH_ATTN_MLA"}, "prefill-own": {*PEERS[1:]}, "prefill-ours": {*PEERS}}
    return {
        f"{kind}-{backend}": options | {"backend": backend}
        for backend in (*PEERS, OURS)
        for kind, options in kinds.items()
        if backend not in left_out.get(kind if wave == "prefill" else wave, ())
    }


def start(folder: Path, name: str, options: dict) -> subprocess.Popen:
    """Start an engine in the background; its output goes to FOLDER/NAME.log."""
    plugin = scratch() / "plugin" / "hyper_mla-0.dist-info"  # entry points without installing
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: hyper-mla\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nhyper_mla = mla_var3.integrations.vllm:register\n"
    (plugin / "entry_points.txt").write_text(entry)
    paths = [str(plugin.parent), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    caches = "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"
    own = {variable: str(scratch() / variable.lower()) for variable in caches}
    environment = os.environ | ENVIRONMENT | own | {"PYTHONPATH": ":".join(filter(None, paths))}
    environment.setdefault("HYPER_MLA_CACHE_DIR", str(scratch() / "cache"))
    environment.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    module = "tests.gpu.serving.one_engine"
    command = [sys.executable, "-m", module, str(folder), name, json.dumps(options)]
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def run_wave(folder: Path, jobs: dict[str, dict], until: float) -> dict[str, dict]:
    """Results of a wave's engines; an engine that failed has an `error`."""
    running = {name: start(folder, name, options) for name, options in jobs.items()}
    waiting = list(running)
    while waiting and time.time() < until:
        for name in list(waiting):
            if (scratch() / f"{name}.ready").exists() or running[name].poll() is not None:
                waiting.remove(name)
        time.sleep(0.2)
    for name, process in running.items():  # one at a time
        if (scratch() / f"{name}.ready").exists() and process.poll() is None:
            (scratch() / f"{name}.go").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, min(60.0, until - time.time())))
    results = {}
    for name, process in running.items():
        if process.poll() is None:
            process.kill()
        path = folder / f"{name}.json"
        found = json.loads(path.read_text()) if path.exists() else {"options": jobs[name]}
        if process.poll() != 0 and "error" not in found:
            lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
            found["error"] = next((x for x in reversed(lines) if "Error" in x), "did not finish")
        results[name] = found
        print(f"{name}: {found.get('error') or 'done'}"[:300], flush=True)
    return results


def agreement(one: dict, other: dict) -> dict | None:
    """How far two engines agree: tokens before the first difference, logprobs on that way."""
    if "tokens" not in one or "tokens" not in other:
        return None
    same = total = 0
    differences, leads = [0.0], [0.0]
    for p, (mine, theirs) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        pairs = list(zip(mine, theirs, strict=True))
        n = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same, total = same + n, total + len(pairs)
        for i in range(n):
            a, b = one["logprobs"][p][i], other["logprobs"][p][i]
            differences += [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
        if n < len(pairs):  # how sure the first engine was of its token
            at = one["logprobs"][p][n]
            leads.append(at[str(mine[n])] - at.get(str(theirs[n]), -99.0))
    differences.sort()
    return {
        "same": same, "total": total, "p99": differences[int(0.99 * (len(differences) - 1))],
        "max": differences[-1], "lead": max(leads),
    }  # fmt: skip


def compared(label: str, one: dict, other: dict, noise: dict | None) -> tuple[str, bool]:
    """A line about two engines, and whether they differ by no more than the noise.

    Args:
        label: What is compared.
        one: An engine's result.
        other: Another's.
        noise: Agreement of two engines that are known to be right; None: nothing is asked.
    """
    found = agreement(one, other)
    if found is None:
        return f"{label:<46} {one.get('error') or other.get('error') or 'no result'}"[:140], False
    text = f"{label:<46}{found['same']:>6}/{found['total']:<6}"
    text += f"{found['p99']:>8.4f}{found['max']:>8.4f}{found['lead']:>8.3f}"
    if noise is None:
        return text, True
    well = found["p99"] <= 2 * noise["p99"] + 0.02
    well = well and found["lead"] <= max(LEAD, 1.5 * noise["lead"] + 0.05)
    return text + ("" if well else "  CHECK"), well


def summarise(results: dict[str, dict]) -> tuple[list[str], bool]:
    """The tables, and whether all is well."""
    lines, well = [f"{'engines':<46}{'tokens':>13}{'p99':>8}{'max':>8}{'lead':>8}"], True
    labels = dict.fromkeys(name.rsplit("-", 1)[0] for name in results)

    def compare(label: str, one: str, other: str, noise: dict | None) -> None:
        nonlocal well
        text, agree = compared(label, results[one], results[other], noise)
        lines.append(text)
        well = well and agree

    def compare_fp8(label: str) -> None:
        """Each backend against itself with a cache in 16 bits; FLASHMLA sets the norm."""
        others = label.replace("fp8-fp8", "fp8-auto")
        mine, theirs = (f"{label}-{backend}" for backend in (OURS, PEERS[1]))
        norm = agreement(results[theirs], results[f"{others}-{PEERS[1]}"])
        if norm is None:
            lines.append(f"{theirs}: {results[theirs].get('error', 'no result')[:90]}")
        else:
            compare(f"{theirs}: cache in 16 bits", theirs, f"{others}-{PEERS[1]}", None)
            compare(f"{mine}: {PEERS[1]}", mine, theirs, norm)
        compare(f"{mine}: cache in 16 bits", mine, f"{others}-{OURS}", norm)

    for label in labels:
        if label.startswith("prefill-"):
            if label == "prefill-ours":
                own = f"prefill-own-{OURS}"
                noise = agreement(results[own], results[f"prefill-own-{PEERS[0]}"])
                compare(f"{own}: {PEERS[0]}", own, f"prefill-own-{PEERS[0]}", None)
                compare("our prefill: vLLM's", f"{label}-{OURS}", own, noise)
            continue
        engines = {backend: f"{label}-{backend}" for backend in (*PEERS, OURS)}
        if label.startswith("fp8-"):
            if label.startswith("fp8-fp8"):
                compare_fp8(label)
            continue
        noise = agreement(results[engines[PEERS[0]]], results[engines[PEERS[1]]])
        compare(f"{label} {PEERS[0]}: {PEERS[1]}", engines[PEERS[0]], engines[PEERS[1]], None)
        for peer in PEERS:
            compare(f"{label} {OURS}: {peer}", engines[OURS], engines[peer], noise)
    for name, result in results.items():
        if name.endswith(OURS) and result.get("backends") not in (None, [OURS]):
            lines.append(f"{name}: layers on {result['backends']}  CHECK")
            well = False
        if "soak" in result["options"]:
            text, sound = soak_line(name, result)
            lines.append(text)
            well = well and sound
    return lines + time_lines(results, list(labels)), well


def soak_line(name: str, result: dict) -> tuple[str, bool]:
    """Counts and memory of a served trace, and whether it is what was asked for."""
    if "requests" not in result:
        return f"{name}: {result.get('error', 'no result')}", False
    memory = result["memory"]
    flat, preempted = memory_is_flat(memory), bool(result["preemptions"])
    reserved = [round(at["reserved"] / 2**20) for at in memory[:: max(1, len(memory) // 4)]]
    text = f"{name}: {result['requests']} of {result['asked']} requests in "
    text += f"{result['seconds']:.0f} s, {result['steps']} steps, {result['aborted']} aborted, "
    text += f"{result['preemptions']:.0f} preemptions, {result['accepted']:.0f} drafts accepted, "
    text += f"GPU memory {reserved} MiB"
    sound = flat and preempted and result["requests"] == result["asked"]
    return text + ("" if sound else "  CHECK"), sound


def time_lines(results: dict[str, dict], labels: list[str]) -> list[str]:
    """The table of decode steps."""
    heading = f"{'':<12}{'batch':>6}"
    lines = [heading + "".join(f"{b:>34}" for b in (OURS, *PEERS))]
    lines.append(f"{'attention per layer: kernel + helpers = sum us; step (GPU) ms':>40}")
    for label in labels:
        for batch in map(str, BATCHES):
            cells = []
            for backend in (OURS, *PEERS):
                row = results.get(f"{label}-{backend}", {}).get("timing", {}).get(batch)
                if row is None:
                    cells.append(f"{'-':>34}")
                    continue
                kernel, helpers = row["kernel_us"], row["helpers_us"]
                both = f"{kernel:.1f}+{helpers:.1f}={kernel + helpers:.1f}"
                step = f"{row['step_ms']:.2f} ({row['gpu_ms']:.2f})"
                cells.append(f"{both}; {step}".rjust(34))
            if any("=" in cell for cell in cells):
                lines.append(f"{label:<12}{batch:>6}" + "".join(cells))
    return lines if len(lines) > 2 else []


def with_requests(results: dict[str, dict]) -> dict[str, dict]:
    """Results of soaks with the tokens and logprobs of the requests that all engines finished."""
    found = {name: scratch() / f"{name}.requests.json" for name in results}
    served = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
    if not served:
        return results
    common = sorted(set.intersection(*(set(requests) for requests in served.values())))
    return results | {
        name: results[name]
        | {key: [requests[at][key] for at in common] for key in ("tokens", "logprobs")}
        for name, requests in served.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--waves", default="tokens,h128,h16")
    parser.add_argument("--requests", type=int, default=2000, help="of the wave `soak`")
    parser.add_argument("--seconds", type=float, default=450.0)
    given = parser.parse_args()
    if cuda_is_missing():
        return 1
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_ENGINE_SCRATCH"] = tempfile.mkdtemp(prefix="vllm-engine-")
    started = time.time()
    until = started + given.seconds
    results: dict[str, dict] = {}
    for wave in given.waves.split(","):
        results |= run_wave(folder, jobs_of(wave, given.requests, until), until)
        print(f"{wave}: {time.time() - started:.0f} s since the start", flush=True)
    lines, well = summarise(with_requests(results))
    (folder / "summary.json").write_text(json.dumps({"well": well, "lines": lines, **results}))
    print("\n".join(lines))
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
