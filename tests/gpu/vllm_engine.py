"""vLLM's engine on a GPU with our backend beside its own: tokens, logprobs and times.

    python -m tests.gpu.vllm_engine FOLDER [--waves=tokens,h128,h16] [--seconds=450]

Needs vLLM 0.26 or newer and a Hopper GPU; this package on PYTHONPATH is enough. Each engine is a
process of its own; the engines of a wave start together and measure one at a time. Weights are
random and the same in every process. Writes one JSON file per engine and `summary.json` to FOLDER,
and prints a table last. Exit code 1: an engine failed, or tokens differ more than those of vLLM's
own two backends do.

Waves: `tokens` compares at DeepSeek-V3's width (4 layers with narrow dense MLPs), eager and with
full CUDA graphs, without drafts and with MTP 1 and 3, prompts of different lengths. `h128` and
`h16` time decode steps of 20 layers with so many heads, with full graphs, contexts around 4k,
batches of 64 and 32, without drafts and with MTP 3.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS, PEERS = "HYPER_MLA", ("FLASH_ATTN_MLA", "FLASHMLA")
CONTEXT, STEPS, PROFILED = 4096, 60, 8
BATCHES = (64, 32)
TOKENS = {"heads": 128, "layers": 4, "hidden": 7168, "mlp": 4096, "lora": 1536, "kv_gib": 1.5}
TIMES = {"layers": 20, "hidden": 1024, "mlp": 2048, "lora": 512, "kv_gib": 6.8, "timed": True}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo", "VLLM_USE_FLASHINFER_SAMPLER": "0", "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
}  # fmt: skip


def jobs_of(wave: str) -> dict[str, dict]:
    """The engines of a wave: name -> options."""
    jobs = {}
    for backend in (*PEERS, OURS):
        if wave == "tokens":
            for graphs, drafts in ((False, 3), (True, 0), (True, 1), (True, 3)):
                name = f"tokens-{'graph' if graphs else 'eager'}-mtp{drafts}-{backend}"
                jobs[name] = TOKENS | {"backend": backend, "graphs": graphs, "drafts": drafts}
        else:
            for drafts in (0, 3):
                options = {"backend": backend, "graphs": True, "drafts": drafts}
                heads = int(wave.removeprefix("h"))
                jobs[f"{wave}-mtp{drafts}-{backend}"] = TIMES | options | {"heads": heads}
    return jobs


# One engine, in a process of its own


def draw_weights(self, model, model_config) -> None:
    """Random weights with which attention matters and drafts are often right.

    The head leans to a fixed successor of each token, which the MTP layer sees through the
    embedding too. vLLM's own dummy weights lie within 0.001.
    """
    import torch

    def draw(name: str, shape, device):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        generator = torch.Generator(device=device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=device)

    layers = model_config.hf_text_config.num_hidden_layers
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            continue
        short, width = name.rsplit(".", 1)[0].split(".")[-1], p.shape[-1]
        if p.dim() == 1:
            p.data.fill_(1.0 if "norm" in name else 0.0)
        elif short == "embed_tokens":
            p.data.copy_(draw("embed", p.shape, p.device))
        elif short in ("lm_head", "head"):
            order = torch.randperm(p.shape[0], generator=torch.Generator().manual_seed(7))
            leaning = draw("embed", p.shape, p.device)[order.to(p.device)] * 12 / width
            p.data.copy_(leaning + draw("head", p.shape, p.device) * 1.5 / width**0.5)
        elif short == "eh_proj":
            rows = p.shape[0]
            value = draw(name, p.shape, p.device) * 0.2 / rows**0.5
            value[:, :rows] += torch.eye(rows, device=p.device)
            p.data.copy_(value)
        else:
            gains = {"q_b_proj": 2.5, "o_proj": 2 / layers**0.5, "down_proj": 1 / layers**0.5}
            p.data.copy_(draw(name, p.shape, p.device) * gains.get(short, 1.0) / width**0.5)


def model_config(options: dict) -> dict:
    """DeepSeek-V3's attention; dense layers everywhere, in the MTP layer too."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "vocab_size": 4096, "hidden_size": options["hidden"], "intermediate_size": options["mlp"],
        "moe_intermediate_size": 256, "num_hidden_layers": options["layers"],
        "num_attention_heads": options["heads"], "num_key_value_heads": options["heads"],
        "n_shared_experts": 1, "n_routed_experts": 8, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512, "q_lora_rank": options["lora"], "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": options["layers"],
        "moe_layer_freq": 1000, "norm_topk_prob": True, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "hidden_act": "silu", "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 1, "bos_token_id": 0,
        "eos_token_id": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip


def run_engine(name: str, folder: Path, options: dict) -> None:
    """Start an engine, generate, and (when it is this engine's turn) time decode steps."""
    started = time.time()
    result = {"name": name, "options": options}
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = draw_weights
    try:  # where CuTe DSL can be imported, vLLM compiles router products of other models at start
        from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16

        ll_bf16._cutedsl_available = False
    except ImportError:
        pass
    backend = options["backend"]
    if backend == OURS:
        from mla_var3.integrations.vllm import flag

        backend = flag()
    model = scratch() / f"model-{name}"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(model_config(options)))
    drafts = options["drafts"]
    settings = {}
    if drafts:
        settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
        if options["backend"] != OURS:  # our plug-in sees to it by itself
            settings["speculative_config"]["attention_backend"] = backend
    if options["graphs"]:
        sizes = sorted({(1 + drafts) * b for b in (1, 2, 4, 8, *BATCHES)})
        settings["compilation_config"] = {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes
        }  # fmt: skip
    llm = LLM(
        str(model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        enforce_eager=not options["graphs"], attention_backend=backend, block_size=64,
        max_model_len=CONTEXT + 1280, max_num_seqs=max(BATCHES), max_num_batched_tokens=8192,
        enable_prefix_caching=not options.get("timed"), disable_log_stats=False,
        gpu_memory_utilization=0.05, kv_cache_memory_bytes=int(options["kv_gib"] * 2**30),
        **settings,
    )  # fmt: skip
    result["ready_s"] = time.time() - started
    with contextlib.suppress(AttributeError):  # not a public interface
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        groups = [group for groups in runner.attn_groups for group in groups]
        result["backends"] = sorted({group.backend.get_name() for group in groups})
    rng = random.Random(1)
    lengths = [200 + 257 * i for i in range(8)]
    prompts = [{"prompt_token_ids": [rng.randrange(2, 4096) for _ in range(n)]} for n in lengths]
    sampling = SamplingParams(
        temperature=0, max_tokens=32, detokenize=False, ignore_eos=True, logprobs=5
    )
    outputs = [done.outputs[0] for done in llm.generate(prompts, sampling, use_tqdm=False)]
    result["tokens"] = [list(output.token_ids) for output in outputs]
    result["logprobs"] = [
        [{str(token): value.logprob for token, value in at.items()} for at in output.logprobs]
        for output in outputs
    ]
    if drafts:
        metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
        result["accepted"] = metrics.get("vllm:spec_decode_num_accepted_tokens")
    write(folder, name, result)
    if options.get("timed"):
        (scratch() / f"{name}.ready").touch()
        while not (scratch() / f"{name}.go").exists():
            time.sleep(0.05)
        result["timing"] = timing(llm, options)
        write(folder, name, result)


def timing(llm, options: dict) -> dict[str, dict]:
    """Decode steps of full batches: wall time, and GPU time by kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    engine, rng = llm.llm_engine, random.Random(2)
    sampling = SamplingParams(temperature=0, max_tokens=1200, detokenize=False, ignore_eos=True)
    alive, tokens = [str(10000 + i) for i in range(max(BATCHES))], {}
    for request in alive:
        prompt = {"prompt_token_ids": [rng.randrange(2, 4096) for _ in range(CONTEXT)]}
        engine.add_request(request, prompt, sampling)

    def step() -> None:
        for output in engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)

    while len(tokens) < len(alive):
        step()
    rows = {}
    for batch in sorted(BATCHES, reverse=True):
        engine.abort_request(alive[batch:])
        alive = alive[:batch]
        for _ in range(6):
            step()
        torch.cuda.synchronize()
        before, started = sum(tokens[r] for r in alive), time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(PROFILED):
                step()
            torch.cuda.synchronize()
        kernels = [
            (event.self_device_time_total / PROFILED, event.count / PROFILED, event.key)
            for event in recorded.key_averages()
        ]
        after = sum(tokens[r] for r in alive)
        rows[str(batch)] = {
            "step_ms": 1e3 * seconds / STEPS,
            "tokens_per_s": (after - before) / seconds,
            "context": CONTEXT + after / batch,
            "gpu_ms": sum(us for us, _, _ in kernels) / 1e3,
            "kernels": sorted(kernels, reverse=True)[:30],
        } | dict(zip(("kernel_us", "helpers_us"), attention_us(kernels, options), strict=True))
    return rows


def attention_us(kernels: list[tuple[float, float, str]], options: dict) -> tuple[float, float]:
    """Attention per layer: the kernel, and what it needs around it (copies, merges, schedules)."""
    layers, backend = options["layers"], options["backend"]
    names = {
        OURS: (("cutlass", "flash_mla"), ("direct_copy_kernel",)),
        "FLASHMLA": (("flash_fwd_splitkv_mla",), ("CatArray", "mla_combine", "mla_metadata")),
        "FLASH_ATTN_MLA": (("FlashAttnFwdSm90",), ("FlashAttnFwdCombine", "prepare_varlen")),
    }
    main, helping = names[backend]
    kernel = helpers = 0.0
    for us, count, name in kernels:
        # With drafts the MTP layer adds its own launches: count the share of the layers.
        share = min(1.0, layers / count) if count else 0.0
        if all(part in name for part in main):
            kernel += us * share
        elif any(part in name for part in helping) and count >= layers:
            helpers += us * share
        elif any(part in name for part in helping) and backend != OURS:
            helpers += us / max(count, 1.0)
    return kernel / layers, helpers / layers


def scratch() -> Path:
    """Where models, caches and signals between the processes lie."""
    return Path(os.environ["VLLM_ENGINE_SCRATCH"])


def write(folder: Path, name: str, result: dict) -> None:
    (folder / f"{name}.json").write_text(json.dumps(result))


# All engines


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
    command = [sys.executable, "-m", "tests.gpu.vllm_engine", str(folder), f"--engine={name}",
               f"--options={json.dumps(options)}"]  # fmt: skip
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def run_wave(folder: Path, wave: str, until: float) -> dict[str, dict]:
    """Results of a wave's engines; an engine that failed has an `error`."""
    jobs = jobs_of(wave)
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


def summarise(results: dict[str, dict]) -> tuple[list[str], bool]:
    """The table, and whether all is well."""
    lines, well = [], True
    labels = dict.fromkeys(name.rsplit("-", 1)[0] for name in results)
    lines.append(
        f"{'engine':<22}{'compared with':<16}{'tokens':>10}{'p99':>8}{'max':>8}{'lead':>8}"
    )
    for label in labels:
        engines = {b: results[f"{label}-{b}"] for b in (*PEERS, OURS)}
        noise = agreement(engines[PEERS[0]], engines[PEERS[1]])
        for peer, one in ((PEERS[1], PEERS[0]), (PEERS[0], OURS), (PEERS[1], OURS)):
            found = agreement(engines[one], engines[peer])
            if found is None:
                lines.append(f"{label:<22}{peer:<16} {engines[one].get('error', 'no result')[:60]}")
                well = False
                continue
            text = f"{label:<22}{('own: ' if one != OURS else '') + peer:<16}"
            text += f"{found['same']:>5}/{found['total']:<4}"
            text += f"{found['p99']:>8.4f}{found['max']:>8.4f}{found['lead']:>8.3f}"
            bound = 2 * noise["p99"] + 0.02 if noise else 0.1
            if one == OURS and (found["p99"] > bound or found["lead"] > 0.2):
                text, well = text + "  CHECK", False
            lines.append(text)
        if engines[OURS].get("backends") not in (None, [OURS]):
            lines.append(f"{label}: layers on {engines[OURS]['backends']}  CHECK")
            well = False
    heading = f"{'':<12}{'batch':>6}"
    lines.append(heading + "".join(f"{b:>34}" for b in (OURS, *PEERS)))
    lines.append(f"{'attention per layer: kernel + helpers = sum us; step ms':>40}")
    for label in labels:
        for batch in map(str, BATCHES):
            cells = []
            for backend in (OURS, *PEERS):
                row = results[f"{label}-{backend}"].get("timing", {}).get(batch)
                if row is None:
                    cells.append(f"{'-':>34}")
                    continue
                kernel, helpers = row["kernel_us"], row["helpers_us"]
                both = f"{kernel:.1f}+{helpers:.1f}={kernel + helpers:.1f}"
                cells.append(f"{both}; {row['step_ms']:.2f}".rjust(34))
            if any("=" in cell for cell in cells):
                lines.append(f"{label:<12}{batch:>6}" + "".join(cells))
    return lines, well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--waves", default="tokens,h128,h16")
    parser.add_argument("--seconds", type=float, default=450.0)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if given.engine:
        try:
            run_engine(given.engine, folder, given.options)
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)  # vLLM's threads would keep the process
    os.environ["VLLM_ENGINE_SCRATCH"] = tempfile.mkdtemp(prefix="vllm-engine-")
    until = time.time() + given.seconds
    results: dict[str, dict] = {}
    for wave in given.waves.split(","):
        results |= run_wave(folder, wave, until)
    lines, well = summarise(results)
    (folder / "summary.json").write_text(json.dumps({"well": well, "lines": lines, **results}))
    print("\n".join(lines))
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
