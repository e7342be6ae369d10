"""Whether `kernel="auto"` picks the fastest kernel: on many forms of call, all candidates timed.

    .venv/bin/python -m tests.gpu.attention_grid --json grid.json

The forms are drawn with a seed from b 1 to 128, s 1 to 128, t 256 to 65536, h 8 to 128, dense and
paged caches, with and without a decompressed window, with and without the projections. For each
every kernel that serves it is timed in a CUDA graph, unless its prediction is far behind the best
one, and the time of the chosen kernel is compared with the best. Forms that share compiled code
stand together. Ends with 1 where fewer than the wanted share are close to the best.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.call import explain, mla_attention, mla_latent_attention
from mla_var3.attention.select.choice import Candidate, Explanation
from mla_var3.errors import HyperMlaError
from mla_var3.runtime.measure import time_gpu

from .attention_record import cuda_is_missing, write_record

K, P, D, PAGE = 512, 64, 128, 64
CLOSE = 1.05
"""The chosen kernel may take so much of the best one's time."""
WANTED_SHARE = 0.95
KERNELS = (
    "flash_mla:cute-dsl",
    "flash_attention:cute-dsl",
    "mla_var6_plus:cute-dsl",
    "flash_mla:cutile-dsl",
    "flash_mla_split_kv:cutile-dsl",
    "flash_attention:cutile-dsl",
    "mla_var6_plus:cutile-dsl",
)
"""Base versions: a later one stands for an experiment."""
CACHE_BYTES = 12 << 30
COPY_BYTES = 16 << 30
"""Decompressed keys and values, held by the cache or made by a call."""
TORCH_PATH = "torch_tiled:torch"
TINY = 1 << 20
"""Scores of a call up to which the PyTorch path is timed beside the kernels."""
LONGEST_US = 4000.0
"""Longer calls are left out; the best prediction counts."""

GROUPS = ((128, "bfloat16"), (64, "bfloat16"), (16, "bfloat16"), (8, "float16"), (32, "float16"))
SHARES = (0.40, 0.20, 0.20, 0.10, 0.10)
"""Heads and dtype are compiled in, and compiling takes longer than measuring: few groups."""
KINDS = ("dense", "latent", "window", "paged", "latent paged")


@dataclass(frozen=True)
class Form:
    """One form of call.

    Attributes:
        b, s, t, h, dtype: as everywhere.
        kind: dense, window or paged cache; "latent" without the projections.
        n: slots of the decompressed window.
    """

    b: int
    s: int
    t: int
    h: int
    dtype: str
    kind: str
    n: int = 0

    @property
    def latent(self) -> bool:
        """Whether the caller does the projections."""
        return self.kind.startswith("latent")

    @property
    def paged(self) -> bool:
        """Whether the cache is paged."""
        return self.kind.endswith("paged")

    def sizes(self) -> dict[str, Any]:
        """The form for `explain`."""
        return {
            "b": self.b, "s": self.s, "t": self.t, "h": self.h, "dtype": self.dtype,
            "page_size": PAGE if self.paged else None, "window": self.n,
            "latent_only": self.latent, "d": K if self.latent else D,
            "scale": (D + P) ** -0.5 if self.latent else None,
        }  # fmt: skip


def fits(form: Form) -> bool:
    """Whether memory and time allow it."""
    cache = form.b * form.t * (K + P) * 2
    window = form.b * form.h * form.n * 2 * D * 2
    if form.s > form.t or cache > CACHE_BYTES or window > COPY_BYTES:
        return False
    best = min(candidate.predicted_us or 0.0 for candidate in able(explain(**form.sizes())))
    return best <= LONGEST_US


def able(choice: Explanation) -> list[Candidate]:
    """The base kernels that serve a form."""
    return [
        candidate
        for candidate in choice.candidates
        if name(candidate) in KERNELS and candidate.refusal is None
    ]


def name(candidate: Candidate | Explanation) -> str:
    """A kernel as the argument `kernel` takes it."""
    return f"{candidate.kernel}:{candidate.language}"


def draw(count: int, seed: int) -> list[Form]:
    """Different forms, in groups that share compiled code."""
    generator = random.Random(seed)
    powers = partial(_power_of_two, generator)
    forms: dict[Form, None] = {}
    for (h, dtype), share in zip(GROUPS, SHARES, strict=True):
        wanted = len(forms) + max(1, round(share * count))
        for _ in range(100 * count):
            if len(forms) == wanted:
                break
            kind = generator.choice(KINDS)
            t = powers(256, 65536)
            n = min(t, powers(256, 4096)) if kind == "window" else 0
            form = Form(powers(1, 128), powers(1, 128), t, h, dtype, kind, n)
            if form not in forms and fits(form):
                forms[form] = None
    return sorted(forms, key=lambda form: (GROUPS.index((form.h, form.dtype)), form.kind))


def _power_of_two(generator: random.Random, least: int, most: int) -> int:
    return 1 << generator.randint(least.bit_length() - 1, most.bit_length() - 1)


class Operands:
    """The tensors of one form: a full cache, lengths between half and all of it."""

    def __init__(self, form: Form, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        dtype = getattr(torch, form.dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

        options: dict[str, Any] = {"page_size": PAGE} if form.paged else {}
        if form.n:
            options |= {"window": form.n, "heads": form.h, "head_dim": D}
        self.cache = LatentCache.allocate(
            form.b, form.t, dtype=dtype, device="cuda", k=K, p=P, **options
        )
        self.cache.buffer.normal_(generator=generator)
        if self.cache.pages is not None:
            pages = torch.randperm(form.b * form.t // PAGE, generator=generator, device="cuda")
            self.cache.pages.block_table.copy_(pages.view(form.b, -1))
        self.cache.lengths.fill_(form.t)
        if self.cache.window is not None:
            self.cache.window.k_new.normal_(generator=generator)
            self.cache.window.v_new.normal_(generator=generator)
            self.cache.window.k_rope_new.normal_(generator=generator)
            self.cache.window.start.fill_(form.t - form.n)
        rows = form.b, form.s, form.h
        self.q_rope = normal(*rows, P)
        if form.latent:
            self.operands: tuple[Any, ...] = (normal(*rows, K), self.q_rope, self.cache)
            return
        weights = normal(form.h, D, K) * (D * K) ** -0.25, normal(form.h, K, D) * K**-0.5
        self.operands = (normal(*rows, D), self.q_rope, self.cache, *weights)

    def call(self, kernel: str) -> Any:
        """One call with a kernel."""
        call: Any = mla_latent_attention if len(self.operands) == 3 else mla_attention
        return call(*self.operands, kernel=kernel)


def needs_copy(form: Form, kernel: str) -> bool:
    """Whether a call would decompress more of the cache than memory should hold."""
    if not kernel.startswith("flash_attention") or form.n >= form.t:
        return False
    return form.b * form.h * form.t * 2 * D * 2 > COPY_BYTES


def measure(form: Form, ratio: float, runs: int, seed: int) -> dict[str, Any]:
    """Time every candidate of a form."""
    operands = Operands(form, seed)
    choice = explain(*operands.operands)
    candidates = able(choice)
    best = min(candidate.predicted_us or 0.0 for candidate in candidates)
    times: dict[str, Any] = {}
    for candidate in candidates:
        kernel, predicted = name(candidate), candidate.predicted_us or 0.0
        entry: dict[str, Any] = {"predicted_us": predicted}
        times[kernel] = entry
        if kernel != name(choice) and predicted > ratio * best:
            entry["skipped"] = f"predicted {predicted / best:.1f} times the best"
        elif kernel != name(choice) and needs_copy(form, kernel):
            entry["skipped"] = "its decompressed keys and values need too much memory"
        else:
            try:
                timing = time_gpu(partial(operands.call, kernel), runs=runs, warmup=1, graph=True)
            except HyperMlaError as error:
                entry["error"] = str(error)
            else:
                entry["measured"] = timing.to_dict()
        torch.cuda.empty_cache()
    if form.b * form.s * form.h * form.t <= TINY:
        timing = time_gpu(partial(operands.call, TORCH_PATH), runs=runs, warmup=1, graph=True)
        times[TORCH_PATH] = {"measured": timing.to_dict()}
    measured = {k: v["measured"]["median_us"] for k, v in times.items() if "measured" in v}
    chosen_us = measured.get(name(choice))
    fastest = min(measured, key=lambda kernel: measured[kernel], default=None)
    return {
        **asdict(form),
        "chosen": name(choice),
        "reason": choice.reason,
        "fastest": fastest,
        "ratio": None if fastest is None or chosen_us is None else chosen_us / measured[fastest],
        "candidates": times,
    }


def rows(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line per form, the worst first."""
    yield f"{'ratio':>6}  {'b':>3} {'s':>3} {'t':>5} {'h':>3} {'dtype':8} {'kind':12} chosen, times"
    for result in sorted(results, key=lambda one: -(one["ratio"] or float("inf"))):
        ratio = "none" if result["ratio"] is None else f"{result['ratio']:.3f}"
        times = ", ".join(
            f"{kernel} {entry['measured']['median_us']:.1f} us"
            for kernel, entry in result["candidates"].items()
            if "measured" in entry
        )
        yield (
            f"{ratio:>6}  {result['b']:>3} {result['s']:>3} {result['t']:>5} {result['h']:>3} "
            f"{result['dtype']:8} {result['kind']:12} {result['chosen']}; {times}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 where too few choices are close to the best."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--forms", type=int, default=110, help="forms to draw")
    parser.add_argument("--limit", type=int, help="measure only so many of them, spread evenly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5, help="timed replays of a candidate")
    parser.add_argument("--ratio", type=float, default=2.0, help="leave out worse predictions")
    parser.add_argument("--seconds", type=float, help="start no form after so long")
    given = parser.parse_args(arguments)
    if cuda_is_missing():
        return 1
    forms = draw(given.forms, given.seed)
    if given.limit is not None:
        step = max(1, len(forms) // given.limit)
        forms = forms[::step][: given.limit]
    start = time.perf_counter()
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        for index, form in enumerate(forms):
            if given.seconds is not None and time.perf_counter() - start > given.seconds:
                print(f"out of time: {len(forms) - index} forms are not measured", file=sys.stderr)
                break
            results.append(measure(form, given.ratio, given.runs, given.seed + index))
            print(f"{index + 1}/{len(forms)} {form}: {results[-1]['ratio']}", flush=True)
    print("\n".join(rows(results)))
    ratios = [result["ratio"] for result in results if result["ratio"] is not None]
    close = sum(ratio <= CLOSE for ratio in ratios)
    share = close / len(results) if results else 0.0
    worst = max(ratios, default=float("nan"))
    took = time.perf_counter() - start
    print(
        f"{close} of {len(results)} forms within {CLOSE - 1:.0%} of the best ({share:.1%}), "
        f"worst {worst:.3f}, {took:.0f} s"
    )
    write_record(
        given.json,
        "attention_grid",
        {
            "forms_drawn": len(forms),
            "forms_measured": len(results),
            "within": CLOSE,
            "share": share,
            "worst_ratio": worst,
            "seconds": took,
            "results": results,
        },
    )
    return 0 if share >= WANTED_SHARE else 1


if __name__ == "__main__":
    raise SystemExit(main())
