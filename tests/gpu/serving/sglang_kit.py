"""SGLang's own attention test kit on a GPU, with our backend, eager and in CUDA graphs.

    python -m tests.gpu.serving.sglang_kit [--json=OUT.json]

Needs a Hopper GPU and SGLang 0.5.13 or newer on PYTHONPATH; its kernels (`sgl_kernel`) and
FlashInfer may be missing, because the cases run on Triton and our kernel only. Exit code 1: a case
failed.
"""

from __future__ import annotations

import argparse
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...engines.stand_in import offer
from ..attention_record import cuda_is_missing, write_record

NOT_NEEDED = "sgl_kernel", "flashinfer", "IPython", "PIL", "torchvision"
SIZES = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 512, "max_context_len": 1024,
    "device": "cuda", "dtype": torch.bfloat16,
}  # fmt: skip
EXTENSIONS = (
    ((0,), (64,)), ((0, 0, 0), (63, 64, 65)), ((63,), (2,)), ((0, 32, 64), (63, 32, 1)),
    ((700, 3), (5, 90)),
)  # fmt: skip
DECODES = (61, 62, 63), (31,), (127, 0, 64, 200), (900, 1, 512)
VERIFICATIONS = (1, (61, 7), 4), (1, (64, 0, 130), 8), (2, (61, 7, 64), 3), (2, (600, 64), 3)
"""Top k, prefixes and draft tokens; the kit has trees of 3 tokens only."""
GRAPH_PREFIX = 256
"""Longest prefix of a verification in a graph. For these the kit writes prefixes twice, the second
time in page order over pages that it has shuffled; a long prefix overwrites pages of its own."""


def cases(heads: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """The kit's cases: name and what runs it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention
    from sglang.test.kits.attention_unittest.runner_modes import (
        cuda_graph_decode_runner,
        speculative_target_verify_runner,
    )

    def case(mode: str, prefix: tuple[int, ...], extend: tuple[int, ...] = ()) -> Any:
        return mla_attention.MLAAttentionCase(
            name=f"{mode} {prefix}", backend="hyper_mla", forward_mode=ForwardMode[mode],
            num_heads=heads, page_size=64, prefix_lens=prefix, extend_lens=extend,
        )  # fmt: skip

    def run(function: Any, *arguments: Any, **options: Any) -> Callable[[], None]:
        return lambda: function(unittest.TestCase(), *arguments, **options, **SIZES)

    eager = mla_attention.run_mla_attention_case
    for prefix, extend in EXTENSIONS:
        yield f"extend {prefix} {extend}", run(eager, case("EXTEND", prefix, extend))
    graph = cuda_graph_decode_runner.run_mla_cuda_graph_decode_case
    for prefix in DECODES:
        yield f"decode {prefix}", run(eager, case("DECODE", prefix))
        yield f"decode graph {prefix}", run(graph, case("DECODE", prefix))
    verify = speculative_target_verify_runner.run_mla_eagle_verify_case
    verify_graph = speculative_target_verify_runner.run_mla_eagle_verify_cuda_graph_case
    for topk, prefix, drafts in VERIFICATIONS:
        which = case("TARGET_VERIFY", prefix, (drafts,) * len(prefix))
        name = f"{'chain' if topk == 1 else 'tree'} {prefix} {drafts}"
        yield f"verify {name}", run(verify, which, topk=topk)
        if max(prefix) <= GRAPH_PREFIX:
            yield f"verify graph {name}", run(verify_graph, which, topk=topk)


def accept_known_models() -> None:
    """SGLang registers model types that a newer transformers has by itself."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    register = CONFIG_MAPPING.register
    CONFIG_MAPPING.register = lambda key, value, exist_ok=False: register(key, value, exist_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--json", type=Path, help="where the record goes")
    given = parser.parse_args()
    if cuda_is_missing():
        return 1
    offer(NOT_NEEDED)
    accept_known_models()
    from mla_var3.integrations.sglang import register

    register()
    started, failures, count = time.perf_counter(), {}, 0
    for heads in given.heads:
        for name, run in cases(heads):
            count += 1
            try:
                run()
            except Exception as error:
                traceback.print_exc()
                failures[f"{heads} heads, {name}"] = f"{type(error).__name__}: {error}"[:500]
    for name, reason in failures.items():
        print(f"{name}: {reason[:200]}")
    import sglang

    seconds = time.perf_counter() - started
    passed = count - len(failures)
    print(f"SGLang {sglang.__version__}: {passed} of {count} cases passed, {seconds:.0f} s")
    values = {"sglang": sglang.__version__, "cases": count, "failures": failures}
    write_record(given.json, "serving.sglang_kit", values)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
