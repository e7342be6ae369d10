"""Time our MLA prefill backend beside vLLM's, on packed requests of new tokens and of context.

    python -m tests.gpu.serving.prefill OUT.json [--heads=16,128]

Builds both backends as vLLM does and compares their outputs before it times them, in turns. The
time includes the copies that a backend needs. Exit code 1: outputs differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..attention_record import cuda_is_missing, write_record
from .layers import NOPE, OURS, ROPE, numbers, vllm_config

import torch  # isort: skip

PEER = "FLASH_ATTN"
SHAPES = (
    ([512], None), ([2048], None), ([8192], None), ([1024] * 8, None),
    ([300, 700, 3000, 4000], None), ([512], [16384]), ([2048], [8192]), ([512] * 8, [4096] * 8),
    ([100, 500, 900], [0, 3000, 9000]),
)  # fmt: skip
"""Query tokens and context tokens of the requests. None: the new tokens among themselves."""
TOLERANCE = 2e-2
SECONDS = 0.15


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()


def median_us(functions: dict[str, Any]) -> dict[str, float]:
    """Medians of functions that take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    until = time.time() + SECONDS * len(functions)
    while time.time() < until or min(map(len, times.values())) < 4:
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)
            begin.record()
            function()
            end.record()
            end.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end))
    return {name: statistics.median(found) for name, found in times.items()}


def measure(heads: int, counts: list[int], context: list[int] | None, backends: dict) -> dict:
    """One shape with all backends."""
    lengths = context or counts
    q = torch.randn(sum(counts), heads, NOPE + ROPE, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(sum(lengths), heads, NOPE + ROPE, dtype=torch.bfloat16, device="cuda")
    k[..., NOPE:] = k[:, :1, NOPE:]
    v = torch.randn(sum(lengths), heads, 2 * NOPE, dtype=torch.bfloat16, device="cuda")[..., NOPE:]
    offsets = starts(lengths)
    chunks = SimpleNamespace(cu_seq_lens=[offsets], max_seq_lens=[max(lengths)])
    metadata = SimpleNamespace(
        query_start_loc=starts(counts), max_query_len=max(counts), chunked_context=chunks
    )
    chunk = {"chunk_idx": 0}
    functions = {}
    for name, backend in backends.items():
        backend.prepare_metadata(metadata)
        if context is None:
            functions[name] = lambda b=backend: b.run_prefill_new_tokens(q, k, v, True)
        else:
            functions[name] = lambda b=backend: b.run_prefill_context_chunk(**chunk, q=q, k=k, v=v)
    (mine, my_lse), (theirs, their_lse) = (functions[name]() for name in (OURS, PEER))
    seen = torch.isfinite(their_lse)
    difference = (mine[..., :NOPE].float() - theirs[..., :NOPE].float()).abs()
    difference[~seen.transpose(0, 1)] = 0  # vLLM masks rows without context itself
    lse_difference = (my_lse - their_lse)[seen].abs().max()
    row = {"heads": heads, "counts": counts, "context": context}
    row |= {"difference": float(difference.max()), "lse_difference": float(lse_difference)}
    return row | {"us": median_us(functions)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="where the JSON goes")
    parser.add_argument("--heads", type=numbers, default=[16, 128])
    given = parser.parse_args()
    if cuda_is_missing():
        return 1
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.mla.prefill import MLAPrefillBackendEnum

    from mla_var3.integrations.vllm import flag, register

    register()
    rows, folder = [], Path(tempfile.mkdtemp(prefix="vllm-prefill-"))
    for heads in given.heads:
        config = vllm_config(heads, folder, 512, 16384, 64)
        with set_current_vllm_config(config):
            backends = {
                name: MLAPrefillBackendEnum[flag() if name == OURS else name].get_class()(
                    num_heads=heads, scale=(NOPE + ROPE) ** -0.5, kv_lora_rank=512,
                    qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=NOPE,
                    vllm_config=config,
                )
                for name in (OURS, PEER)
            }  # fmt: skip
        for counts, context in SHAPES:
            row = measure(heads, counts, context, backends)
            rows.append(row)
            mine, theirs = row["us"][OURS], row["us"][PEER]
            wrong = max(row["difference"], row["lse_difference"]) > TOLERANCE
            print(
                f"h={heads:<4} new {counts!s:<26.26} context {context!s:<26.26}{mine:>9.0f} us, "
                f"{PEER} {theirs:>7.0f}, ratio {theirs / mine:.2f}{'  DIFFERS' if wrong else ''}",
                flush=True,
            )
    write_record(given.out, "serving.prefill", {"rows": rows})
    worst = max(max(row["difference"], row["lse_difference"]) for row in rows)
    print(json.dumps({"rows": len(rows), "largest difference": worst}))
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
