"""One vLLM engine on the CPU, in a process of its own: tokens and logprobs of a few prompts.

python tests/engines/vllm_tiny.py FOLDER {own,hyper_mla} DRAFT_TOKENS

`own` is vLLM's CPU backends. `hyper_mla` puts this package's backends for decode and prefill in
their place, because the CPU platform takes no other names; the engine around them is the same.
Writes FOLDER/result.json.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",
    GLOO_SOCKET_IFNAME="lo",
    # One thread, on any core: two engines run at once, and threads that spin would fight.
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
)

import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.models import registry
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    register_backend,
)

from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.request.task import AttentionTask
from tests.engines.tiny_deepseek import draw_weights, write_config

PROMPT_LENGTHS = (38, 200, 5, 129)
NEW_TOKENS = 16


def stand_in() -> Counter[str]:
    """Put the backend in the place of vLLM's CPU backends; counts its calls."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    from mla_var3.integrations.vllm.backend import HyperMLABackend, HyperMLAImpl
    from mla_var3.integrations.vllm.prefill import HyperMLAPrefillBackend

    calls: Counter[str] = Counter()

    class CpuImpl(HyperMLAImpl):
        # The base class writes the cache with a CUDA operator.
        do_kv_cache_update = CPUMLAImpl.do_kv_cache_update

        def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
            decode = attn_metadata.decode
            several = "several" if decode.max_query_len > 1 else "one"
            calls[f"{layer.layer_name.split('.')[-3]} {several}"] += 1
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)

    class CpuBackend(HyperMLABackend):
        @staticmethod
        def get_impl_cls():
            return CpuImpl

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec=None):
            return [MultipleOf(16)]  # what the CPU platform sets; PyTorch takes any

    class CpuPrefill(HyperMLAPrefillBackend):
        @classmethod
        def is_available(cls):
            return True  # PyTorch computes it here

        def run_prefill_new_tokens(self, *args, **options):
            calls["prefill"] += 1
            return super().run_prefill_new_tokens(*args, **options)

    globals().update(CpuBackend=CpuBackend, CpuPrefill=CpuPrefill)
    for member in (MLAPrefillBackendEnum.ZEN_CPU, MLAPrefillBackendEnum.CPU):
        register_mla_prefill_backend(member, f"{__name__}.CpuPrefill")
    for name in ("CPU_MLA", "AMX_MLA"):
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], f"{__name__}.CpuBackend")
    return calls


def follow_schedules(calls: Counter[str]) -> None:
    """Let PyTorch keep schedules as the kernel does, and refuse those of other lengths."""
    run = TorchTiled.run

    def followed(self: TorchTiled, task: AttentionTask) -> tuple[torch.Tensor, torch.Tensor]:
        if task.schedule is not None:
            parts = [torch.tensor(task.q.shape), task.cache.lengths, task.cu_seqlens_q]
            facts = torch.cat([part.int() for part in parts if part is not None])
            kept = task.schedule[: len(facts)]
            if task.scheduled:
                assert torch.equal(kept, facts), f"the schedule of {kept.tolist()}, not {facts}"
            kept.copy_(facts)
            calls["schedule read" if task.scheduled else "schedule found"] += 1
        return run(self, task)

    TorchTiled.run = followed


def main(folder: Path, backend: str, drafts: int) -> None:
    DummyModelLoader.load_weights = draw_weights
    # vLLM looks at each model class in a process of its own, which imports everything once more.
    registry._run_in_subprocess = lambda look: look()
    # With AMX vLLM takes a CPU backend that refuses float32.
    torch.cpu._is_amx_tile_supported = lambda: False
    calls = stand_in() if backend == "hyper_mla" else Counter()
    follow_schedules(calls)
    options = {}
    if drafts:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    llm = LLM(
        str(write_config(folder / "model")), load_format="dummy", skip_tokenizer_init=True,
        enforce_eager=True, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=512,
        dtype="float32", disable_log_stats=False, seed=0, **options,
    )  # fmt: skip
    rng = random.Random(1)
    prompts = [
        {"prompt_token_ids": [rng.randrange(2, 1024) for _ in range(n)]} for n in PROMPT_LENGTHS
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True, logprobs=3
    )
    outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
    accepted = 0
    if drafts:
        metrics = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
        accepted = metrics.get("vllm:spec_decode_num_accepted_tokens", 0)
    result = {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [{str(token): value.logprob for token, value in at.items()} for at in output.logprobs]
            for output in outputs
        ],
        "calls": dict(calls),
        "accepted": accepted,
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    sys.modules["vllm_tiny"] = sys.modules[__name__]
    __name__ = "vllm_tiny"  # so that vLLM finds the class by its path
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
