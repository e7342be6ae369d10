"""A trace of requests through an engine: random lengths, bursts, aborts, preemptions."""

from __future__ import annotations

import json
import random
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .one_engine import logprobs_of, metrics_of

VOCABULARY = 4096
SHARED_TOKENS = 300
"""Length of the prompt prefix that a part of the requests share."""
MOST_NEW_TOKENS = 96
LONGEST = 2048
"""Most tokens of a request."""
FLAT_BYTES = 64 * 2**20
"""Growth of the reserved GPU memory after the first quarter that counts as flat."""


@dataclass(frozen=True)
class Request:
    """One request of the trace.

    Attributes:
        arrival: Engine step before which it arrives.
        prompt: Its tokens.
        new_tokens: Tokens to generate.
        abort_after: It is aborted once it has so many tokens; 0: before it runs. None: never.
    """

    arrival: int
    prompt: list[int]
    new_tokens: int
    abort_after: int | None


def trace(count: int, seed: int = 5) -> list[Request]:
    """The same requests in every process, ordered by their arrival."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(2, VOCABULARY) for _ in range(n)]

    shared, step, requests = tokens(SHARED_TOKENS), 0, []
    for _ in range(count):
        if rng.random() < 0.1:  # a burst ends
            step += rng.randint(1, 8)
        kind, new_tokens = rng.random(), rng.randint(2, MOST_NEW_TOKENS)
        if kind < 0.1:
            prompt = tokens(rng.randint(1, 8))
        elif kind < 0.3:
            prompt = shared + tokens(rng.randint(1, 200))
        elif kind < 0.95:
            prompt = tokens(rng.randint(9, 600))
        else:
            prompt = tokens(rng.randint(600, LONGEST - 2 * MOST_NEW_TOKENS))
        abort = rng.randrange(new_tokens) if rng.random() < 0.07 else None
        requests.append(Request(step, prompt, new_tokens, abort))
    return requests


def serve_trace(llm: Any, options: dict, path: Path) -> dict:
    """Serve the trace until it is done or the time is up.

    Args:
        llm: The engine.
        options: `soak`, the number of requests, and `until`, the time to stop.
        path: Where the tokens and logprobs of the finished requests go.

    Returns:
        Counts, and the memory after each tenth of the requests.
    """
    import torch
    from vllm import SamplingParams

    engine, requests = llm.llm_engine, trace(options["soak"])
    started, step, added, aborted = time.time(), 0, 0, 0
    alive: dict[str, Any] = {}
    done: dict[str, Any] = {}
    memory: list[dict[str, float]] = []
    while len(done) < len(requests) and time.time() < options["until"]:
        if not alive and added < len(requests):
            step = max(step, requests[added].arrival)
        while added < len(requests) and requests[added].arrival <= step:
            request, name = requests[added], str(added)
            engine.add_request(
                name, {"prompt_token_ids": request.prompt},
                SamplingParams(
                    temperature=0, max_tokens=request.new_tokens, detokenize=False,
                    ignore_eos=True, logprobs=5,
                ),
            )  # fmt: skip
            alive[name], added = None, added + 1
        for output in engine.step():
            if output.request_id not in alive:  # of a request that was aborted meanwhile
                continue
            alive[output.request_id] = output.outputs[0]
            if output.finished:
                done[output.request_id] = alive.pop(output.request_id)
        for name, output in list(alive.items()):
            limit = requests[int(name)].abort_after
            if limit is not None and (0 if output is None else len(output.token_ids)) >= limit:
                engine.abort_request([name])
                done[name] = alive.pop(name)
                aborted += 1
        step += 1
        if len(done) * 10 // len(requests) > len(memory):
            memory.append(
                {
                    "done": len(done),
                    "reserved": torch.cuda.memory_reserved(),
                    "host_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                }
            )
    results = {}
    for name, output in done.items():
        limit = requests[int(name)].abort_after
        if output is not None:
            results[name] = {
                "tokens": list(output.token_ids)[:limit], "logprobs": logprobs_of(output)[:limit]
            }  # fmt: skip
    path.write_text(json.dumps(results))
    metrics = metrics_of(llm)
    return {
        "requests": len(done), "asked": len(requests), "steps": step, "aborted": aborted,
        "seconds": time.time() - started, "memory": memory,
        "preemptions": metrics.get("vllm:num_preemptions"),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
    }  # fmt: skip


def memory_is_flat(memory: list[dict[str, float]]) -> bool:
    """Whether the reserved GPU memory stays within bounds after the first quarter."""
    later = [at["reserved"] for at in memory[2:]]
    return not later or max(later) - later[0] <= FLAT_BYTES
