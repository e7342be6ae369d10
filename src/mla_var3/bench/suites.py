"""The benchmark suites: shapes, our kernels, and the peers to run beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from mla_var3.bench.record import EIGHT_BIT
from mla_var3.conf.models import models
from mla_var3.errors import UnknownNameError
from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS
from mla_var3.op.mla.problem import MlaProblem, require_int
from mla_var3.runtime import paths
from mla_var3.runtime.paths import LANGUAGES, KernelId, current_name, split_full_name

SUITES = {
    "figures": "the headline figures, ours and the peers', at fixed shapes",
    "engine": "the latent kernel as engines call it: scattered pages, 8 to 128 heads, few drafts",
    "models": "the latent kernel at the widths and heads of every published model, on 1 or 8 cards",
    "latent": "kernels on the latent cache: decoding, verifying, long and mixed contexts",
    "all": "all kernels and versions in both languages at one shape",
    "sweep": "the newest versions and the peers over b, s, t and h",
    "var6_plus": "one version of mla_var6_plus over s and n, beside the pure paths",
    "prefix": "requests that share first tokens: read once, latent or decompressed, or copied",
    "mix": "the mix on Hopper: 16 bits, 8 bits and a shared prefix, beside the pure paths",
}

LATENT_PEERS = ("flashmla", "fa3_qv", "flashinfer", "triton")
DECOMPRESSED_PEERS = ("fa3", "fa3_one_split", "sdpa")
EIGHT_BIT_PEERS = ("flashmla_fp8",)
"""Peers on an 8-bit cache with one scale; they take part where that format does."""
PEERS = (*LATENT_PEERS, *DECOMPRESSED_PEERS, *EIGHT_BIT_PEERS)

COMMON = MlaProblem(b=32, s=16, t=4096, h=128)
"""The shape of the public comparison."""
SWEEP = {
    "b": (32,),
    "s": (1, 2, 4, 8, 16, 32, 64, 128),
    "t": (1024, 2048, 4096, 8192),
    "h": (128,),
}
QUICK_SWEEP = {**SWEEP, "s": (1, 4, 16, 64), "t": (1024, 4096)}
ENGINE = {"b": (16, 64, 256), "h": (8, 16, 32, 128), "t": (1024, 4096, 16384), "s": (1, 2, 4, 8)}
QUICK_ENGINE = {**ENGINE, "b": (16, 64), "h": (16, 128), "t": (4096,), "s": (1, 4)}
"""A decode step with 0, 1, 3 and 7 draft tokens, and the heads that tensor parallelism leaves."""
ENGINE_PAGE = 64
MODEL_TP, MODEL_S, MODEL_T = (1, 8), (1, 4, 8), 4096
"""Ranks and query tokens of the models suite; a model with fewer heads runs on as many ranks as it
can, up to 8."""
QUICK_MODEL_S = (4,)
PEER_WIDTHS = (512, 64)
"""k and p that the latent peers serve."""
WINDOW_S = (16, 32, 64)
WINDOW_STEPS, QUICK_WINDOW_STEPS = 8, 4
"""The window of mla_var6_plus is measured at every eighth of t, in a quick run at every quarter."""

LATENT_SHAPES = (
    *((128, s, 4096, 128) for s in (1, 2)),
    *((32, s, 4096, 128) for s in (4, 8, 16, 32, 64)),
    *((1, s, 65536, h) for h in (128, 16) for s in (1, 4)),
)
"""(b, s, t, h) of decoding and verifying, and of single requests with a long context."""
MIXED_SHAPES = ((64, 4, 16384, 16), (64, 1, 16384, 16))
"""(b, s, t, h) with lengths from MIXED_SHORTEST to t, as after tensor parallelism."""
MIXED_SHORTEST = 256
MIX_SHAPES = (
    *((32, s, 4096, 128) for s in (8, 16, 32, 43, 64, 128)),
    (8, 32, 16384, 128),
    *((32, 32, 4096, h) for h in (64, 16)),
)
"""(b, s, t, h) around the crossover of the two pure paths, and its neighbours in t and h."""
MIX_8_BIT_S = (32, 43, 64)
PREFIX_SHAPE, PREFIX = (64, 4, 4608, 128), 4096
"""(b, s, t, h) whose requests share their first PREFIX tokens."""
PREFIX_SHAPES = (
    *((256, 1, h, 26472, 256) for h in (128, 64)),
    *((b, 1, 128, prefix, 256) for prefix in (7069, 4759) for b in (64, 256, 1024)),
    (16, 1, 12, 63911, 4089),
    (16, 8, 96, 63911, 4089),
    (64, 4, 128, 4096, 512),
    (64, 1, 128, 0, 4096),
)
"""(b, s, h, shared, own) of one group: three published system prompts, an agent on one card and on
eight, the prefix of the mix suite, and nothing shared."""
GROUP_PREFIXES, GROUP_MEMBERS, GROUP_OWN = tuple(range(2048, 16385, 2048)), 8, (100, 4000)
"""Groups with prefixes and own tokens of different lengths."""
FIXED_SUITES = ("figures", "latent", "mix", "models", "prefix")
"""Suites whose shapes cannot be changed."""

PER_TENSOR_NAME = "fp8"
"""The 8-bit format with one scale."""
EIGHT_BIT_CACHES = {"cute-dsl": FP8_FORMATS, "cutile-dsl": (*FP8_FORMATS, "fp8_ds_mla")}
"""Formats that the latent kernel reads, by language."""
DESIGN = "mla_var6_plus"
PURE_PATHS = ("flash_mla", "flash_attention")
LAYER = "mla"


@dataclass(frozen=True)
class SharedTokens:
    """First tokens that groups of `members` neighbouring requests share, `tokens` per group."""

    members: int
    tokens: tuple[int, ...]

    @property
    def mean(self) -> int:
        """Shared tokens per request."""
        return sum(self.tokens) // len(self.tokens)


@dataclass(frozen=True)
class KernelChoice:
    """One of our kernels, with plan fields that the suite pins."""

    kernel: KernelId
    fields: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One shape and its contenders, `call` with the kernel that the public call chooses.

    Peers hold a copy of the `shared` tokens per request. `cache_dtypes` are 8-bit caches that the
    latent kernel reads as well, (format, language) each.
    """

    problem: MlaProblem
    kernels: tuple[KernelChoice, ...]
    peers: tuple[str, ...] = ()
    call: bool = False
    shared: SharedTokens | None = None
    cache_dtypes: tuple[tuple[str, str], ...] = ()


def with_8_bit_caches(
    cases: Iterable[Case], formats: Sequence[str], languages: Sequence[str], peers: Sequence[str]
) -> list[Case]:
    """The 16-bit cases with the latent kernel on 8-bit caches, too, and peers that read those."""
    pairs = product(formats, languages)
    ours = tuple(pair for pair in pairs if pair[0] in EIGHT_BIT_CACHES[pair[1]])
    theirs = _among(peers, *EIGHT_BIT_PEERS) if PER_TENSOR_NAME in formats else ()
    return [replace(case, cache_dtypes=ours, peers=(*case.peers, *theirs)) for case in cases]


SPECIAL = {*EIGHT_BIT, ("mla_var6_plus_v6", "cute-dsl")}
"""Versions that solve another problem than the others, so they run only when named: an 8-bit window
has a larger error, and requests that share a prefix are less work."""


def comparable(kernels: Iterable[KernelId]) -> list[KernelId]:
    """The kernels that compute the same from the same tokens."""
    return [k for k in kernels if (k.full_name, k.language) not in SPECIAL]


def mla_kernels() -> list[KernelId]:
    """All kernels of the MLA layer, in both languages."""
    return [kernel for kernel in paths.discover_kernels() if kernel.layer == LAYER]


def newest(kernels: Iterable[KernelId]) -> list[KernelId]:
    """The newest version of each design in each language."""
    return sorted({(k.design, k.language): k for k in sorted(comparable(kernels))}.values())


def select_kernels(words: Sequence[str], kernels: Sequence[KernelId]) -> list[KernelId]:
    """The kernels that a user named.

    A word is "all", "latest", a design (all its versions) or a full name; `_v0` is the base.
    """
    chosen: set[KernelId] = set()
    for word in words:
        if word in ("all", "latest"):
            found = set((comparable if word == "all" else newest)(kernels))
        else:
            base = word.removesuffix("_v0")
            found = {k for k in kernels if k.full_name == base}
            found = found or {k for k in kernels if k.full_name == current_name(base, k.language)}
            if base == word and not split_full_name(word)[1]:
                found = {k for k in comparable(kernels) if k.design == word}
        if not found:
            known = {k.full_name for k in kernels} | {"all", "latest"}
            raise UnknownNameError("kernel", word, known)
        chosen |= found
    return sorted(chosen)


def select_backends(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Languages and peers among the named backends; without names all of them."""
    if not words:
        return tuple(LANGUAGES), PEERS
    known = (*LANGUAGES, *PEERS, "peers")
    for word in words:
        if word not in known:
            raise UnknownNameError("backend", word, known)
    return _among(words, *LANGUAGES), PEERS if "peers" in words else _among(words, *PEERS)


def _among(peers: Sequence[str], *names: str) -> tuple[str, ...]:
    """Those of the names that are among the peers."""
    return tuple(name for name in names if name in peers)


def _on_hopper(kernels: Sequence[KernelId], name: str, **fields: int) -> tuple[KernelChoice, ...]:
    """The kernel of a full name in CuTe DSL with some fields; nothing where it is not there."""
    found = [k for k in kernels if (k.full_name, k.language) == (name, "cute-dsl")]
    return tuple(KernelChoice(kernel, fields) for kernel in found)


def figures_cases(kernels: Sequence[KernelId], peers: Sequence[str]) -> list[Case]:
    """The headline figures: base and newest versions at the shapes of each regime."""
    shown = sorted({kernel for kernel in kernels if not kernel.number} | set(newest(kernels)))

    def of(*designs: str) -> tuple[KernelChoice, ...]:
        return tuple(KernelChoice(kernel) for kernel in shown if kernel.design in designs)

    few, many = replace(COMMON, b=8), replace(COMMON, b=2, s=1024)
    latent, decompressed = _among(peers, *LATENT_PEERS), _among(peers, *DECOMPRESSED_PEERS)
    cases = [
        Case(problem, of("flash_attention"), decompressed)
        for problem in (few, replace(many, causal=False), many)
    ]
    long = replace(COMMON, b=4, s=1, t=32768)
    cases.append(Case(long, of("flash_mla", "flash_mla_split_kv"), latent))
    without_window = tuple(replace(choice, fields={"n": 0}) for choice in of(DESIGN))
    ours = (*of(*PURE_PATHS, DESIGN), *without_window)
    theirs = (*latent, *_among(peers, "fa3", "fa3_one_split"))
    return cases + [Case(replace(COMMON, s=s), ours, theirs) for s in WINDOW_S]


def latent_cases(kernels: Sequence[KernelId], peers: Sequence[str]) -> list[Case]:
    """The newest latent kernels of both languages beside the latent peers."""
    ours = tuple(KernelChoice(k) for k in newest(kernels) if k.design == PURE_PATHS[0])
    theirs = _among(peers, *LATENT_PEERS)
    problems = [MlaProblem(b=b, s=s, t=t, h=h) for b, s, t, h in LATENT_SHAPES]
    for b, s, t, h in MIXED_SHAPES:
        # Evenly spread, shuffled by a stride coprime to b.
        lengths = [MIXED_SHORTEST + (t - MIXED_SHORTEST) * i // (b - 1) for i in range(b)]
        mixed = tuple(lengths[i * 37 % b] for i in range(b))
        problems.append(MlaProblem(b=b, s=s, t=t, h=h, lengths=mixed))
    return [Case(problem, ours, theirs) for problem in problems]


def engine_cases(
    base: MlaProblem,
    sizes: Mapping[str, Sequence[int]],
    kernels: Sequence[KernelId],
    peers: Sequence[str],
) -> list[Case]:
    """The latent kernel in CuTe DSL on scattered pages; the latent peers have theirs in order."""
    ours = _on_hopper(kernels, PURE_PATHS[0], page=ENGINE_PAGE)
    theirs = _among(peers, "flashmla", "fa3_qv", "flashinfer")
    return [replace(case, kernels=ours) for case in sweep_cases(base, sizes, (), theirs)]


def model_cases(
    kernels: Sequence[KernelId], peers: Sequence[str], s_values: Sequence[int] = MODEL_S
) -> list[Case]:
    """The latent kernel in CuTe DSL on scattered pages for every model, each shape once."""
    ours = _on_hopper(kernels, PURE_PATHS[0], page=ENGINE_PAGE)
    theirs = _among(peers, "flashmla", "fa3_qv")
    cases: dict[MlaProblem, Case] = {}
    for model in models().values():
        for tp in MODEL_TP:
            sizes: dict[str, Any] = dict(model.sizes(math.gcd(tp, model.heads)))
            # Requests that keep all SMs of a Hopper card busy.
            b = min(128, max(32, 2048 // sizes["h"]))
            served = (sizes["k"], sizes["p"]) == PEER_WIDTHS
            for s in s_values:
                problem = MlaProblem(b=b, s=s, t=MODEL_T, **sizes)
                cases.setdefault(problem, Case(problem, ours, theirs if served else ()))
    return list(cases.values())


def mix_cases(kernels: Sequence[KernelId], peers: Sequence[str]) -> list[Case]:
    """The mix in CuTe DSL at the model's n, its special versions, the pure paths and the peers."""
    choice = partial(_on_hopper, kernels)
    cases = []
    for b, s, t, h in MIX_SHAPES:
        chosen = (*choice(DESIGN), *choice("flash_mla"), *choice("flash_attention"))
        if s in MIX_8_BIT_S and h == COMMON.h and t == COMMON.t:
            chosen += choice(f"{DESIGN}_v5", n=t)
        theirs = _among(peers, *LATENT_PEERS, "fa3")
        cases.append(Case(MlaProblem(b=b, s=s, t=t, h=h), chosen, theirs))
    b, s, t, h = PREFIX_SHAPE
    chosen = (*choice(f"{DESIGN}_v6", prefix=PREFIX), *choice("flash_mla"))
    shared = MlaProblem(b=b, s=s, t=t, h=h)
    return [*cases, Case(shared, chosen, _among(peers, *LATENT_PEERS))]


def prefix_cases(kernels: Sequence[KernelId], peers: Sequence[str]) -> list[Case]:
    """Shared prefixes: read once in latent form or decompressed, beside copies and the peers."""
    theirs = _among(peers, *LATENT_PEERS)

    def case(problem: MlaProblem, shared: SharedTokens) -> Case:
        ours, (tokens, *others) = _on_hopper(kernels, "flash_mla"), shared.tokens
        if tokens and not others:
            ours = (*_on_hopper(kernels, f"{DESIGN}_v6", prefix=tokens), *ours)
        return Case(problem, ours, theirs, shared=shared if ours else None)

    cases = [
        case(MlaProblem(b=b, s=s, t=prefix + own, h=h), SharedTokens(b, (prefix,)))
        for b, s, h, prefix, own in PREFIX_SHAPES
    ]
    groups, members = len(GROUP_PREFIXES), GROUP_MEMBERS
    first, last = GROUP_OWN
    own = [first + (last - first) * i // (members - 1) for i in range(members)]
    lengths = tuple(prefix + tokens for prefix in GROUP_PREFIXES for tokens in own)
    problem = MlaProblem(b=groups * members, s=4, t=max(lengths), h=128, lengths=lengths)
    return [*cases, case(problem, SharedTokens(members, GROUP_PREFIXES))]


def main_job_case(problem: MlaProblem, kernels: Sequence[KernelId], peers: Sequence[str]) -> Case:
    """The public call, the mix and the pure paths in both languages, and the peers at one shape."""
    designs = (DESIGN, *PURE_PATHS)
    ours = [KernelChoice(k) for k in sorted(kernels) if not k.number and k.design in designs]
    return Case(problem, tuple(ours), tuple(peers), call=True)


def sweep_cases(
    base: MlaProblem,
    sizes: Mapping[str, Sequence[int]],
    kernels: Sequence[KernelId],
    peers: Sequence[str],
) -> list[Case]:
    """The grid over the sizes; a size that is not given keeps that of `base`."""
    choices = tuple(KernelChoice(kernel) for kernel in kernels)
    names = [name for name in ("b", "h", "t", "s") if name in sizes]
    grid: list[dict[str, Any]] = [
        dict(zip(names, values, strict=True)) for values in product(*(sizes[n] for n in names))
    ]
    return [Case(replace(base, **changes), choices, tuple(peers)) for changes in grid]


def window_cases(
    base: MlaProblem,
    s_values: Sequence[int],
    n_values: Sequence[int] | None,
    versions: Sequence[KernelId],
    kernels: Sequence[KernelId],
    peers: Sequence[str],
    steps: int = WINDOW_STEPS,
) -> list[Case]:
    """mla_var6_plus over s and n, beside the newest pure paths.

    `versions` is the version in every language that has it; the pure paths come from `kernels`.
    The windows are `n_values`, by default `steps` equal steps, and the one that the model chooses.
    """
    if n_values is None:
        n_values = sorted({base.t * i // steps for i in range(steps + 1)})
    for n in n_values:
        require_int("n", n, minimum=0, maximum=base.t, maximum_name="t")
    pure = [KernelChoice(k) for k in newest(kernels) if k.design in PURE_PATHS]
    windows = [KernelChoice(v, {"n": n}) for v in versions for n in n_values]
    chosen = tuple([KernelChoice(v) for v in versions] + windows + pure)
    return [Case(replace(base, s=s), chosen, tuple(peers)) for s in s_values]
