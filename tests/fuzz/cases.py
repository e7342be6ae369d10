"""Cases of the fuzzer: drawn, run and shrunk. A case is JSON: the cache and a list of steps."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import mla_var3
from mla_var3.errors import HyperMlaError
from mla_var3.op.mla.cache_formats import DS_MLA, FORMATS

from .mirror import Mirror

Case = dict[str, Any]
MODEL_WIDTHS = {"d": 128, "k": 512, "p": 64}
INTERPRETED_SHARE = 0.01
"""Of the cases on a CPU: a kernel takes the interpreter a second and more."""
EIGHT_BIT_SHARE = 0.2
"""Of the bfloat16 caches of the package."""
NAMED_SHARE = 0.35
"""Of the calls on a GPU that name their kernel."""


def kernel_names() -> list[str]:
    """All kernels that a call may name."""
    found = mla_var3.explain(b=1, s=1, t=64, h=16).candidates
    return sorted({f"{candidate.kernel}:{candidate.language}" for candidate in found})


def draw(seed: str, device: str, kernels: list[str]) -> Case:
    """A random case; the same for the same seed."""
    rng = random.Random(seed)
    on_gpu = device != "cpu"
    interpreted = not on_gpu and rng.random() < INTERPRETED_SHARE
    if on_gpu:
        sizes = {**MODEL_WIDTHS, "h": rng.choice([1, 5, 8, 16, 16, 32, 64, 128, 128])}
        dtype = rng.choice(["bfloat16"] * 4 + ["float16"] * 2 + ["float32"])
        t, b = int(2 ** rng.uniform(0, 12.3)), int(2 ** rng.uniform(0, 4))
    elif interpreted:
        sizes = {"d": 16, "k": 128, "p": 16, "h": rng.randint(1, 4)}
        dtype, t, b = rng.choice(["bfloat16", "float16"]), rng.randint(1, 150), rng.randint(1, 2)
    else:
        sizes = {"d": rng.randint(1, 9), "k": rng.randint(1, 9), "p": rng.randint(1, 5)}
        sizes["h"] = rng.randint(1, 3)
        dtype = rng.choice(["float32", "float32", "bfloat16", "float16"])
        t, b = rng.choice([rng.randint(1, 300), rng.randint(1, 2000)]), rng.randint(1, 4)
    kind = rng.choice(["dense", "dense", "paged", "paged", "pair", "view"])
    page_size = rng.choice([64, 64, 128, 256])
    case: Case = {"seed": rng.randrange(2**31), "dtype": dtype, "b": b, "t": t, **sizes}
    case.update(kind=kind, page_size=page_size)
    capacity = -(-t // page_size) * page_size if kind in ("paged", "view") else t
    # A draw of its own, so that the other draws of a seed stay what they were.
    own = random.Random(f"{seed} cache")
    if dtype == "bfloat16" and kind in ("dense", "paged") and own.random() < EIGHT_BIT_SHARE:
        case["cache_dtype"] = own.choice(sorted(FORMATS))
        if not on_gpu:
            case.update(k=128 * own.randint(1, 2), p=2 * own.randint(1, 3))
            if case["cache_dtype"] == DS_MLA.name:  # at least two groups of columns
                case["k"] = 256
    elif kind in ("dense", "paged"):
        case["window"] = rng.choice([0, 0, 1, min(7, t), min(64, t), min(128, t), t])
        if case["window"] and case["window"] % 64 == 0 and own.random() < 0.5:
            case["window_dtype"] = "fp8"
        if rng.random() < 0.25:
            limit = capacity - capacity % page_size if kind == "paged" else t
            step = page_size if kind == "paged" else 1
            case["prefix"] = min(step * rng.randint(0, max(1, limit // step // 2)), limit, t)
            case["prefix"] -= case["prefix"] % step
        if kind == "paged" and rng.random() < 0.3:
            needed = b * capacity // page_size
            shared = case.get("prefix", 0) // page_size
            case["num_pages"] = rng.randint(max(1, shared), max(1, shared, needed))
    case["steps"] = list(_steps(rng, case, device, kernels if on_gpu or interpreted else []))
    return case


def _steps(rng: random.Random, case: Case, device: str, kernels: list[str]) -> Iterator[Case]:
    b, t, prefix = case["b"], case["t"], case.get("prefix", 0)
    room = t - prefix
    empty = [0 if rng.random() < 0.15 else 1 for _ in range(b)]
    for _ in range(rng.randint(1, 2)):
        counts = [own * rng.randint(0, max(1, room * 3 // 4)) for own in empty]
        yield {
            "op": "append", "counts": counts, "packed": rng.random() < 0.3,
            "given": rng.random() < 0.2,
        }  # fmt: skip
    attention = _attention(rng, case, device, kernels)
    yield attention
    for _ in range(rng.randint(0, 4)):
        match rng.choice(["again", "again", "append", "truncate", "evict", "attend"]):
            case "again":
                yield attention
            case "append":
                yield {"op": "append", "counts": [rng.randint(0, 5) for _ in range(b)]}
                yield attention
            case "truncate":
                dropped = [rng.choice([0, rng.randint(0, 5), rng.randint(0, t)]) for _ in range(b)]
                yield {"op": "truncate", "counts": dropped, "refill": rng.random() < 0.3}
                yield attention
            case "evict":
                yield {"op": "evict", "requests": rng.sample(range(b), rng.randint(0, b))}
                yield attention
                own = random.Random(str(case))  # see `draw`
                if own.random() < 0.5:
                    into = own.sample(range(b), own.randint(0, b))
                    yield {"op": "fork", "source": own.randrange(b), "into": into}
                    yield attention
            case "attend":
                yield _attention(rng, case, device, kernels)


def _attention(rng: random.Random, case: Case, device: str, kernels: list[str]) -> Case:
    b = case["b"]
    most = rng.choice(
        [1, 1, 2, 4, rng.randint(1, 16), rng.randint(1, 130 if device != "cpu" else 40)]
    )
    most = min(most, case["t"])  # more queries than slots are refused
    packed = rng.random() < 0.25
    step: Case = {
        "op": "attend",
        "counts": [rng.randint(0, most) if packed else most for _ in range(b)],
        "packed": packed,
        "mask": rng.choice(["causal", "causal", "causal", "full", "tree", "parents"]),
        "per_request": rng.random() < 0.5,
        "scale": rng.choice([None, None, 0.3 if device == "cpu" else 0.1]),
        "latent": rng.random() < 0.2,
        "strided": rng.random() < 0.15,
        "out": rng.random() < 0.2,
        "bound": rng.random() < 0.2,
    }
    share = NAMED_SHARE if device != "cpu" else 1.0
    if kernels and rng.random() < share:
        step.update(packed=False, counts=[most] * b, kernel=rng.choice(kernels))
        step["mask"] = rng.choice(["causal", "causal", "full"])
    elif device == "cpu":  # on a GPU the PyTorch path needs the bound, and packed requests one too
        own = random.Random(str(step))  # see `draw`
        window = own.choice([None, None, 1, 3, 60])
        step.update(sliding_window=window, batch_invariant=own.random() < 0.5)
        step.update(wide=own.random() < 0.5, unbounded=own.random() < 0.5)
    return step


def run(case: Case, device: str) -> tuple[str, str]:
    """Run a case.

    Returns:
        ("ok", ""), ("refused", why) when a named kernel does not serve a call, or the kind of
        failure and what happened.
    """
    fields = {key: value for key, value in case.items() if key != "steps"}
    status, detail = "ok", ""
    step: Case = {"op": "allocate"}
    try:
        mirror = Mirror(device=device, **fields)
        for step in case["steps"]:
            options = {key: value for key, value in step.items() if key != "op"}
            try:
                getattr(mirror, step["op"])(**options)
            except HyperMlaError as error:
                if options.get("kernel", "auto") == "auto":
                    raise
                status, detail = "refused", f"{options['kernel']}: {error}"
    except AssertionError as error:
        return "wrong", f"{step}: {error}"
    except Exception as error:  # whatever it is, it is a finding
        return "error", f"{step}: {type(error).__name__}: {error}"
    return status, detail


def smaller(case: Case) -> Iterator[Case]:
    """Simpler variants of a case, the boldest first."""
    steps = case["steps"]
    for first in range(len(steps)):
        yield {**case, "steps": steps[:first] + steps[first + 1 :]}
    for request in range(case["b"] if case["b"] > 1 else 0):
        yield _without_request(case, request)
    for gone in (("window", "window_dtype"), ("window_dtype",), ("prefix",), ("num_pages",)):
        if case.get(gone[0]):
            yield {key: value for key, value in case.items() if key not in gone}
    for name in ("h", "d", "k", "p", "t"):
        for value in {1, case[name] // 2, case[name] - 1}:
            if 0 < value < case[name]:
                yield {**case, name: value}
    if case["kind"] != "dense":
        yield {**case, "kind": "dense"}
    for index, step in enumerate(steps):
        for variant in _simpler_steps(step):
            yield {**case, "steps": [*steps[:index], variant, *steps[index + 1 :]]}


def _without_request(case: Case, request: int) -> Case:
    found = copy.deepcopy(case)
    found["b"] -= 1
    for step in found["steps"]:
        if "counts" in step:
            del step["counts"][request]
        for name in {"requests", "into"} & step.keys():
            kept = [each for each in step[name] if each != request]
            step[name] = [each - (each > request) for each in kept]
        if "source" in step:
            step["source"] -= step["source"] > request or step["source"] == found["b"]
    return found


def _simpler_steps(step: Case) -> Iterator[Case]:
    for name in (
        "packed", "given", "refill", "per_request", "scale", "latent", "strided", "out", "bound",
        "sliding_window", "batch_invariant", "wide", "unbounded",
    ):  # fmt: skip
        if step.get(name):
            if name == "packed" and len(set(step["counts"])) > 1 and step["op"] == "attend":
                continue
            yield {key: value for key, value in step.items() if key != name}
    if step.get("mask", "causal") != "causal":
        yield {**step, "mask": "causal"}
    if step.get("kernel", "auto") != "auto":
        yield {**step, "kernel": "auto"}
    counts = step.get("counts", [])
    for value in {1, max(counts) // 2, max(counts) - 1} if counts else ():
        if 0 < value < max(counts):
            yield {**step, "counts": [min(count, value) for count in counts]}
