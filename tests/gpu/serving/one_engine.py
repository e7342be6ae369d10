"""One vLLM engine on a GPU, in a process of its own: tokens, logprobs and times.

    python -m tests.gpu.serving.one_engine FOLDER NAME OPTIONS

`tests.gpu.vllm_engine` starts it. Weights are random and the same in every process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import time
import traceback
from pathlib import Path

from ...engines.tiny_deepseek import CONFIG, draw_weights

OURS, PEERS = "HYPER_MLA", ("FLASH_ATTN_MLA", "FLASHMLA")
CONTEXT, STEPS, PROFILED = 4096, 60, 8
BATCHES = (64, 32)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo", "VLLM_USE_FLASHINFER_SAMPLER": "0", "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
}  # fmt: skip


def model_config(options: dict) -> dict:
    """DeepSeek-V3's attention; dense layers everywhere, in the MTP layer too."""
    return CONFIG | {
        "vocab_size": 4096, "hidden_size": options["hidden"], "intermediate_size": options["mlp"],
        "moe_intermediate_size": 256, "num_hidden_layers": options["layers"],
        "num_attention_heads": options["heads"], "num_key_value_heads": options["heads"],
        "n_routed_experts": 8, "q_lora_rank": options["lora"],
        "first_k_dense_replace": options["layers"], "moe_layer_freq": 1000,
        "max_position_embeddings": 8192,
    }  # fmt: skip


def run_engine(name: str, folder: Path, options: dict) -> None:
    """Start an engine and generate; then serve a trace, or time decode steps in its turn."""
    started = time.time()
    result = {"name": name, "options": options}
    llm = start_engine(name, options)
    result["ready_s"] = time.time() - started
    with contextlib.suppress(AttributeError):  # not a public interface
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        groups = [group for groups in runner.attn_groups for group in groups]
        result["backends"] = sorted({group.backend.get_name() for group in groups})
    if "soak" in options:
        from .soak import serve_trace

        result |= serve_trace(llm, options, scratch() / f"{name}.requests.json")
    else:
        result |= generated(llm, options)
    write(folder, name, result)
    if options.get("timed"):
        (scratch() / f"{name}.ready").touch()
        while not (scratch() / f"{name}.go").exists():
            time.sleep(0.05)
        result["timing"] = timing(llm, options)
        write(folder, name, result)


def start_engine(name: str, options: dict):
    """An engine with the backend and the sizes of a job."""
    from vllm import LLM
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
    if options.get("prefill"):
        settings["attention_config"] = {"mla_prefill_backend": "CUSTOM"}
    if options["graphs"]:
        sizes = sorted({(1 + drafts) * b for b in (1, 2, 4, 8, *BATCHES)})
        settings["compilation_config"] = {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes
        }  # fmt: skip
    return LLM(
        str(model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        enforce_eager=not options["graphs"], attention_backend=backend, block_size=64,
        max_model_len=options.get("longest", CONTEXT + 1280), max_num_seqs=max(BATCHES),
        max_num_batched_tokens=8192, kv_cache_dtype=options.get("cache", "auto"),
        enable_prefix_caching=not options.get("timed"), disable_log_stats=False,
        gpu_memory_utilization=0.05, kv_cache_memory_bytes=int(options["kv_gib"] * 2**30),
        **settings,
    )  # fmt: skip


def generated(llm, options: dict) -> dict:
    """Tokens and logprobs of a few prompts."""
    from vllm import SamplingParams

    rng = random.Random(1)
    lengths = [200 + 257 * i for i in range(8)]
    prompts = [{"prompt_token_ids": [rng.randrange(2, 4096) for _ in range(n)]} for n in lengths]
    sampling = SamplingParams(
        temperature=0, max_tokens=32, detokenize=False, ignore_eos=True, logprobs=5
    )
    outputs = [done.outputs[0] for done in llm.generate(prompts, sampling, use_tqdm=False)]
    result = {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [logprobs_of(output) for output in outputs],
    }
    if options["drafts"]:
        result["accepted"] = metrics_of(llm).get("vllm:spec_decode_num_accepted_tokens")
    return result


def logprobs_of(output) -> list[dict[str, float]]:
    """The best tokens of each position with their logprobs."""
    return [
        {str(token): round(value.logprob, 5) for token, value in at.items()}
        for at in output.logprobs
    ]


def metrics_of(llm) -> dict[str, float | None]:
    """vLLM's counters."""
    return {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}


def timing(llm, options: dict) -> dict[str, dict]:
    """Decode steps of full batches: wall time (median of the steps), and GPU time by kernel."""
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
        before, ends = sum(tokens[r] for r in alive), [time.perf_counter()]
        for _ in range(STEPS):
            step()
            ends.append(time.perf_counter())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - ends[0]
        steps = sorted(1e3 * (end - start) for start, end in itertools.pairwise(ends))
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
            "step_ms": statistics.median(steps),
            "step_quartiles_ms": [steps[STEPS // 4], steps[-1 - STEPS // 4]],
            "mean_step_ms": 1e3 * seconds / STEPS,
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


def main() -> None:
    folder, name, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    code = 1
    try:
        run_engine(name, folder, options)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main()
