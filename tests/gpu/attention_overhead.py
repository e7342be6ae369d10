"""What a call of the attention costs the host outside of CUDA graphs, and the GPU inside of one.

    .venv/bin/python -m tests.gpu.attention_overhead --json overhead.json
    .venv/bin/python -m tests.gpu.attention_overhead --b 32 --s 4 --t 4096 --h 128 --windows 20

Whole calls are measured on caches in 16 bits, `fp8` and `fp8_per_token`; their call time on the GPU
is that of a CUDA graph of one call with a cold L2 cache. The host:

Calls of one key on other tensors every time are enqueued without waiting; a figure is the median
over windows of the time per call. What is measured takes turns window by window, so that all of it
meets the host in the same states: one that shares its cores with others can be half as fast for
seconds. How fast it was tells an empty tensor that torch makes and frees. The problem is so small
that the GPU is not behind the host: with a queue of waiting work the enqueueing itself gets slower,
and the figure would be the GPU's. What the GPU still has to do when the last call of a window has
returned is in the record (`behind_us`, per call). Beside the calls, the launch of
`mla_latent_attention` alone, and what the two products around it cost by torch: `mla_attention`
launches its own, and an engine that calls `mla_latent_attention` does those.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mla_var3.attention.backends.latent import project_heads
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.view import CacheView, paged_view
from mla_var3.attention.call import HEAD_WIDTH, mla_attention, mla_latent_attention
from mla_var3.attention.prefix.groups import PrefixGroups
from mla_var3.attention.prefix.layout import prefix_layout
from mla_var3.attention.replay.key import find_replay, latent_key
from mla_var3.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS
from mla_var3.runtime.measure import percentile, time_gpu

from .attention_record import cuda_is_missing, write_record

K, P, D, PAGE = 512, 64, HEAD_WIDTH, 64
KERNEL, PREFIX_KERNEL = "flash_mla:cute-dsl", "flash_mla_prefix:cute-dsl"
VARIANTS = 8
"""Sets of tensors that take turns, so that no call meets the tensors of the one before."""
LIMIT_US = 15.0
"""What a call may cost the host; one with products so much more than these."""

WHOLE = {"": "mla_attention", **{fmt: f"mla_attention, {fmt}" for fmt in FP8_FORMATS}}
"""Whole calls by the 8-bit format of their cache, if any."""
CALLS = ("mla_latent_attention", "flash_mla_with_kvcache", *WHOLE.values())

Call = Callable[[int], object]


def window_us(call: Call, calls: int) -> tuple[float, float]:
    """Host time per call of one window, and how far the GPU is behind at its end, per call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for turn in range(calls):
        call(turn % VARIANTS)
    returned = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    return (returned - start) / calls * 1e6, (done - returned) / calls * 1e6


def figures(calls: dict[str, Call], count: int, windows: int) -> dict[str, dict[str, float]]:
    """Median and spread over windows, after a first call of every variant and one window."""
    for call in calls.values():
        for turn in range(VARIANTS):
            call(turn)
        window_us(call, count)
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(windows):
        for name, call in calls.items():
            pairs[name].append(window_us(call, count))
    return {name: _spread(*zip(*found, strict=True)) for name, found in pairs.items()}


def _spread(host: Sequence[float], behind: Sequence[float]) -> dict[str, float]:
    return {
        "median_us": percentile(host, 50),
        "p10_us": percentile(host, 10),
        "p90_us": percentile(host, 90),
        "min_us": min(host),
        "behind_us": percentile(behind, 50),
    }


class Operands:
    """Tensors of a decoding step, in several variants."""

    def __init__(self, b: int, s: int, t: int, h: int, dtype: torch.dtype) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)

        turns, pages = range(VARIANTS), t // PAGE
        self.q = [random(b, s, h, K + P) for _ in turns]
        self.q_latent = [random(b, s, h, K) for _ in turns]
        self.q_nope = [random(b, s, h, D) for _ in turns]
        self.q_rope = [random(b, s, h, P) for _ in turns]
        self.pages = random(b * pages, PAGE, 1, K + P)
        self.tables = [torch.randperm(b * pages, device="cuda").view(b, pages).int() for _ in turns]
        self.lengths = [torch.randint(s, t + 1, (b,), device="cuda").int() for _ in turns]
        self.views = self.views_of(paged_view(self.pages[:, :, 0], self.tables[0], self.lengths[0]))
        self.whole_views = {"": self.views}
        for fmt in FP8_FORMATS:
            cache = LatentCache.allocate(b, t, dtype=fmt, device="cuda", page_size=PAGE)
            cache.append(random(b, t, K), random(b, t, P))
            self.whole_views[fmt] = self.views_of(cache.view())
        self.w_uk = random(h, D, K) * (D * K) ** -0.25
        self.w_uv = random(h, K, D) * K**-0.5

    def views_of(self, view: CacheView) -> list[CacheView]:
        """A cache with the tables and lengths of every variant."""
        return [
            replace(view, block_table=table, lengths=lengths)
            for table, lengths in zip(self.tables, self.lengths, strict=True)
        ]


def launch_alone(operands: Operands) -> Call:
    """The launch of `mla_latent_attention` on prepared pointers, with outputs of its own.

    Stream and memory of the launch are known before, as they are to repeated calls.
    """
    q, q_rope, views = operands.q_latent, operands.q_rope, operands.views
    mla_latent_attention(q[0], q_rope[0], views[0], kernel=KERNEL)
    keys = [latent_key(q[i], q_rope[i], views[i], HEAD_WIDTH, KERNEL, {}) for i in range(VARIANTS)]
    replay = find_replay(keys[0])
    if replay is None:
        raise RuntimeError(f"{KERNEL}: expected a launch that can be repeated, got none")
    out = torch.empty_like(q[0])
    lse = torch.empty(q[0].shape[:-1], device="cuda")
    written = out.data_ptr(), lse.data_ptr()
    pointers = [replay.pointers(key[1], *written) for key in keys if key is not None]
    launch, kept = replay.launch.bind([*replay.names, *replay.outputs], {})

    def call(turn: int) -> Any:
        return launch(pointers[turn]), kept

    return call


def products_alone(operands: Operands) -> Call:
    """The two products around the attention by torch, into memory that is there."""
    q_nope, latent = operands.q_nope, operands.q_latent[0]
    by_head = [(q.flatten(0, 1).transpose(0, 1)) for q in q_nope]
    first = torch.empty_like(latent).flatten(0, 1).transpose(0, 1)
    second = project_heads(latent, operands.w_uv).flatten(0, 1).transpose(0, 1)
    rows = latent.flatten(0, 1).transpose(0, 1)

    def call(turn: int) -> None:
        torch.bmm(by_head[turn], operands.w_uk, out=first)
        torch.bmm(rows, operands.w_uv, out=second)

    return call


def contenders(operands: Operands) -> dict[str, Call]:
    """What is measured, by name."""
    metadata, _ = get_mla_metadata()
    q, views = operands.q_latent, operands.views
    weights = operands.w_uk, operands.w_uv

    def latent(turn: int) -> Any:
        return mla_latent_attention(q[turn], operands.q_rope[turn], views[turn], kernel=KERNEL)

    def whole(fmt: str, turn: int) -> Any:
        cache = operands.whole_views[fmt][turn]
        return mla_attention(
            operands.q_nope[turn], operands.q_rope[turn], cache, *weights, kernel=KERNEL
        )

    def flash(turn: int) -> Any:
        return flash_mla_with_kvcache(
            operands.q[turn], operands.pages, operands.tables[turn], operands.lengths[turn], K,
            metadata, causal=True,
        )  # fmt: skip

    b = operands.q_latent[0].shape[0]
    of = torch.zeros((1, b), dtype=torch.int32, device="cuda")
    groups = PrefixGroups(of, torch.full_like(of[:, :1], PAGE))
    layouts = [prefix_layout(groups, q[turn], views[turn]) for turn in range(VARIANTS)]

    def shared(turn: int, prefix: Any) -> Any:
        return mla_latent_attention(
            q[turn], operands.q_rope[turn], views[turn], kernel=PREFIX_KERNEL, prefix=prefix
        )

    return {
        "shared prefix, layout": lambda turn: shared(turn, layouts[turn]),
        "shared prefix, groups": lambda turn: shared(turn, groups),
        "mla_latent_attention": latent,
        "flash_mla_with_kvcache": flash,
        **{name: partial(whole, fmt) for fmt, name in WHOLE.items()},
        "launch alone": launch_alone(operands),
        "products alone": products_alone(operands),
        "an empty tensor": lambda turn: torch.empty(64, device="cuda"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 where a call costs the host more than it may."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--b", type=int, default=2)
    parser.add_argument("--s", type=int, default=2)
    parser.add_argument("--t", type=int, default=128)
    parser.add_argument("--h", type=int, default=16)
    parser.add_argument("--calls", type=int, default=200, help="calls of a window")
    parser.add_argument("--windows", type=int, default=200)
    given = parser.parse_args(arguments)
    if cuda_is_missing():
        return 1
    sizes = {name: getattr(given, name) for name in ("b", "s", "t", "h")}
    with torch.inference_mode():
        operands = Operands(**sizes, dtype=torch.bfloat16)
        calls = contenders(operands)
        results = figures(calls, given.calls, given.windows)
        on_gpu = {
            name: time_gpu(partial(calls[name], 0), graph=True).to_dict() for name in WHOLE.values()
        }
    for name, values in results.items():
        line = ", ".join(f"{key} {value:.2f}" for key, value in values.items())
        print(f"{name}: {line}")
    for name, timing in on_gpu.items():
        print(f"{name}, on the GPU: median_us {timing['median_us']:.2f}")
    judged = {name: results[name]["median_us"] for name in CALLS}
    for name in WHOLE.values():
        judged[name] -= results["products alone"]["median_us"]
    above = {name: value for name, value in judged.items() if value >= LIMIT_US}
    for name, value in above.items():
        print(f"{name}: expected less than {LIMIT_US} us, got {value:.2f}", file=sys.stderr)
    write_record(
        given.json,
        "attention_overhead",
        {
            "sizes": sizes,
            "kernel": KERNEL,
            "calls": given.calls,
            "windows": given.windows,
            "timer": "time.perf_counter around a window of calls, median over windows",
            "limit_us": LIMIT_US,
            "judged_us": judged,
            "host_us_per_call": results,
            "gpu_us_per_call": on_gpu,
            "passed": not above,
        },
    )
    return 1 if above else 0


if __name__ == "__main__":
    raise SystemExit(main())
