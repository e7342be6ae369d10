"""A serving loop for as long as one likes: `python -m tests.soak --seconds=600 --device=cuda`.

Requests come, are prefilled, decode speculatively (drafts are appended, verified by one call, and
the rejected ones dropped), and go again. On a GPU several caches step on streams of their own at
the same time, and every other one replays its verifying call from a CUDA graph. Every few steps a
call is compared with float64. Ends with 1 at the first wrong result; a step that takes longer than
`--limit` ends the program with the place where it hangs.
"""

import argparse
import contextlib
import faulthandler
import logging
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import mla_var3

from .fuzz.mirror import Mirror, WrongResult

MODEL = {"h": 16, "d": 128, "k": 512, "p": 64}
SMALL = {"h": 2, "d": 6, "k": 8, "p": 4}
COMPARE_EVERY = 5
CACHES: tuple[dict[str, Any], ...] = (
    {"kind": "paged", "page_size": 64},
    {"kind": "dense", "window": 128},
    {"kind": "paged", "page_size": 64, "prefix": 64, "num_pages": 20},
    {"kind": "dense"},
    {"kind": "paged", "page_size": 64, "window": 128, "window_dtype": "fp8"},
)
"""The layers that step side by side; the third has too few pages for all its requests."""


class Server:
    """A batch of requests on one cache; `graphs` replays the verifying call from a CUDA graph."""

    def __init__(self, device: str, seed: int, fields: dict[str, Any], graphs: bool) -> None:
        on_gpu = device != "cpu"
        sizes = MODEL if on_gpu else SMALL
        self.rng = random.Random(seed)
        self.mirror = Mirror(
            device=device, seed=seed, dtype="bfloat16" if on_gpu else "float32",
            b=8, t=1500 if on_gpu else 300, **sizes, **fields,
        )  # fmt: skip
        self.s = self.rng.choice([1, 2, 4, 8])
        self.stream = torch.cuda.Stream() if on_gpu else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graphs = graphs and on_gpu
        self.steps = self.refusals = 0
        cache, q = self.mirror.cache, (self.mirror.b, self.s, self.mirror.h)
        assert cache is not None
        self.cache = cache
        self.q_nope, self.q_rope = (self.mirror.normal(*q, sizes[name]) for name in "dp")

    def step(self) -> None:
        """One step: drafts in, one call, rejected drafts out; now and then requests change."""
        rng, mirror = self.rng, self.mirror
        with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            if self.steps % 10 == 0:
                self._admit()
            before = mirror.lengths
            mirror.append([self.s] * mirror.b)
            self.refusals += any(a == b for a, b in zip(before, mirror.lengths, strict=True))
            self._verify()
            taken = [now - then for now, then in zip(mirror.lengths, before, strict=True)]
            rejected = [rng.randint(0, max(0, count - 1)) for count in taken]
            mirror.truncate(rejected, refill=rng.random() < 0.5)
            full = [r for r, length in enumerate(mirror.lengths) if length + self.s > mirror.t]
            mirror.evict(full or rng.sample(range(mirror.b), rng.random() < 0.1))
        self.steps += 1

    def _admit(self) -> None:
        """Prefill requests that have no tokens of their own."""
        mirror = self.mirror
        fresh = [length == mirror.prefix for length in mirror.lengths]
        most = (mirror.t - mirror.prefix) // 2
        mirror.append([self.rng.randint(1, most) if own else 0 for own in fresh])

    def _call(self) -> tuple[torch.Tensor, torch.Tensor]:
        given = self.q_nope, self.q_rope, self.cache, self.mirror.w_uk, self.mirror.w_uv
        output, lse = mla_var3.mla_attention(*given, return_lse=True)
        return output, lse

    def _verify(self) -> None:
        compare = self.steps % COMPARE_EVERY == 0
        if not self.graphs and compare:
            self.mirror.attend([self.s] * self.mirror.b, out=bool(self.steps % 2))
        elif not self.graphs:
            self._call()
        else:
            self._replay(compare)

    def _replay(self, compare: bool) -> None:
        self.q_nope.copy_(self.mirror.normal(*self.q_nope.shape))
        if self.graph is None:
            self._call()  # compiled outside of the capture
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.results = self._call()
        self.graph.replay()
        if not compare:
            return
        output, lse = (tensor.clone() for tensor in self.results)
        for request in range(self.mirror.b):
            expected = self.mirror.exact(
                request, self.q_nope[request], self.q_rope[request], True, None, None, False
            )
            self.mirror.compare(request, [output[request], lse[request]], expected)


def serve(seconds: float, seed: int, device: str, limit_s: float) -> Iterator[list[Server]]:
    """Step all servers in turn until the time is over, and give them every second or so."""
    servers = [Server(device, seed + i, each, i % 2 == 0) for i, each in enumerate(CACHES)]
    if device != "cpu":
        torch.cuda.synchronize()  # the values were made on the default stream
    started = shown = time.monotonic()
    while time.monotonic() - started < seconds:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
        for server in servers:
            server.step()
        if device != "cpu":
            torch.cuda.synchronize()
        faulthandler.cancel_dump_traceback_later()
        if time.monotonic() - shown > 1.0:
            shown = time.monotonic()
            yield servers
    yield servers


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="a fresh one when left out")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until a step hangs")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    sys.stdout.write(f"seed {seed}, {options.device}\n")
    steps = 0
    try:
        for servers in serve(options.seconds, seed, options.device, options.limit):
            steps = sum(server.steps for server in servers)
    except WrongResult as error:
        sys.stdout.write(f"WRONG after {steps} steps: {error}\n")
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    refusals = f"{sum(server.refusals for server in servers)} with requests that found no pages"
    sys.stdout.write(f"{steps} steps, {refusals}, no wrong result\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
