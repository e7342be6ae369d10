"""Who takes part in a benchmark: our kernels, the public call, the peers and the projections.

A contender is built anew for every round, so only one of them holds memory at a time, and always
from the same numbers. Building never times and timing never builds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mla_var3.bench import record
from mla_var3.bench.suites import Case, KernelChoice, SharedTokens
from mla_var3.errors import CheckFailedError, InvalidArgumentError, UnsupportedError
from mla_var3.op.cost import Cost
from mla_var3.op.mla import cost as costs
from mla_var3.op.mla.prefix.problem import SharedPrefixProblem, latent_shared_cost
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime import workflow
from mla_var3.runtime.markdown import byte_count
from mla_var3.runtime.paths import plan_class, split_full_name
from mla_var3.runtime.plan import KernelPlan, plan_dtype
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.workflow import Progress, RunOptions, no_progress

if TYPE_CHECKING:
    from torch import Tensor

    from mla_var3.bench.peers import PeerLibraries
    from mla_var3.runtime.autotune.history import StageTuning

PEER_ERROR_LIMIT = 0.01
"""A 16-bit peer above this relative error computes something else."""
FP8_ERROR_LIMIT = 0.04
"""The same for 8-bit products (CuTe DSL), against float64 on what the cache is worth."""
LATENT_KERNEL = "flash_mla"
SEED = 1
PREFIX_KERNEL = "flash_mla_prefix"
MEMORY_FACTOR = 3.0
"""Inputs, outputs and the float32 reference of the check, relative to the bytes a kernel moves."""
MISSING_PROJECTIONS = {record.LATENT: 2, record.MIX: 1, record.DECOMPRESSED: 0, record.CALL: 0}
"""Path -> how many of the projections its kernels do not do, that of the queries first."""


@dataclass(frozen=True)
class Ready:
    """A contender that can be timed.

    `run` enqueues the work once; `check` compares with the reference and returns the relative
    error, or raises.
    """

    run: Callable[[], Any]
    check: Callable[[], float]
    cost: Cost
    path: str
    choices: dict[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Contender:
    """One row of the comparison before it is measured; fields as in `BenchRow`.

    Attributes:
        build: allocates and lays out; raises UnsupportedError where it cannot take part.
        versions: versions of its own, beside those of the environment.
    """

    kernel: str
    source: str
    build: Callable[[], Ready]
    language: str = ""
    asked: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    cache_dtype: str = ""


@dataclass
class TuneBudget:
    """Seconds, or None for no limit, that kernels share which have not searched their tilings."""

    kernels: int
    seconds: float | None = None

    @contextmanager
    def spend(self, options: RunOptions) -> Iterator[None]:
        """Give a kernel an equal part, and take what the body spent."""
        if self.seconds is None:
            yield
            return
        options.tune_seconds = self.seconds / self.kernels if self.kernels else 0.0
        self.kernels = max(self.kernels - 1, 0)
        start = time.monotonic()
        yield
        self.seconds = max(self.seconds - (time.monotonic() - start), 0.0)


def tuning_note(found: Iterable[StageTuning]) -> str:
    """What a search tried; empty where there was none, or nothing to choose."""
    stages = [stage for stage in found if stage.candidates > 1]
    if not stages:
        return ""
    tried, total = sum(stage.tried for stage in stages), sum(s.candidates for s in stages)
    cached = ", found before" if all(stage.from_cache for stage in stages) else ""
    rest = "" if all(stage.complete for stage in stages) else "; the time was up"
    return f"tuned: {tried} of {total} tilings timed{cached}{rest}"


def kernel_contender(
    choice: KernelChoice,
    problem: MlaProblem,
    target: str,
    device: str = "cuda",
    tune: TuneBudget | None = None,
    progress: Progress = no_progress,
) -> Contender:
    """One of our kernels; with a budget its tilings are searched."""
    kernel = choice.kernel

    def build() -> Ready:
        from mla_var3.runtime.check import check_stage

        plan = make_plan(choice, problem, target)
        if device == "cuda":
            require_memory(plan)
        options = RunOptions(device=device, autotune=tune is not None, progress=progress)
        with tune.spend(options) if tune else nullcontext():
            prepared = workflow.prepare(plan, options)
        stage = prepared.stage

        def check() -> float:
            outcome = check_stage(prepared.plan, prepared.inputs, stage)
            outcome.require()
            return outcome.outputs[0].error.relative_frobenius

        path, choices = path_of(prepared.plan, stage), choices_of(prepared.plan)
        note = tuning_note(prepared.tuning.values())
        return Ready(stage.launch, check, stage.cost(), path, choices, note)

    return Contender(kernel.full_name, record.OURS, build, kernel.language, dict(choice.fields))


def peer_contender(
    name: str,
    problem: MlaProblem,
    libraries: PeerLibraries,
    references: dict[str, Tensor] | None = None,
    device: str = "cuda",
) -> Contender:
    """A peer's kernel by its short name, see `mla_var3.bench.peers.KERNELS`.

    `references` holds exact outputs by path and cache format, shared by the peers of a case.
    """
    from mla_var3.bench.peers import PeerInputs, peer_kernel, reference

    kernel = peer_kernel(name)
    known = {} if references is None else references
    fmt, limit = kernel.cache_dtype, FP8_ERROR_LIMIT if kernel.cache_dtype else PEER_ERROR_LIMIT

    def build() -> Ready:
        libraries.require(kernel.library)
        if kernel.path == record.DECOMPRESSED and problem.lengths is not None:
            raise UnsupportedError(
                f"{kernel.title}: expected t={problem.t} tokens in every request, got lengths"
            )
        inputs = PeerInputs.make(problem, device)
        run = kernel.build(libraries, inputs)

        def check() -> float:
            key = f"{kernel.path} {fmt}"
            if key not in known:
                known[key] = reference(kernel.path, inputs, fmt)
            return checked_error(kernel.title, run(), known[key], limit)

        return Ready(run, check, kernel.cost(problem), kernel.path)

    versions = {k: v for k, v in libraries.versions.items() if k == kernel.library}
    return Contender(kernel.title, record.PEER, build, versions=versions, cache_dtype=fmt)


def fp8_contender(fmt: str, language: str, problem: MlaProblem, device: str = "cuda") -> Contender:
    """Our latent kernel on an 8-bit cache in pages, as the call of an engine runs it."""
    kernel = f"{LATENT_KERNEL}:{language}"
    limit = FP8_ERROR_LIMIT if language == "cute-dsl" else PEER_ERROR_LIMIT

    def build() -> Ready:
        from mla_var3.attention.cache.view import paged_view
        from mla_var3.attention.call import mla_latent_attention
        from mla_var3.bench.peers import PeerInputs, reference
        from mla_var3.op.mla.cache_formats import cache_format

        inputs = PeerInputs.make(problem, device)
        pages, scale = inputs.quantised_cache(fmt)
        view = paged_view(
            pages, inputs.page_table(), inputs.raw.lengths, k=problem.k, format=fmt, scale=scale
        )
        q, q_rope = inputs.separate_queries()

        options: dict[str, Any] = {"causal": problem.causal, "d": problem.d, "kernel": kernel}

        def run() -> Tensor:
            return mla_latent_attention(q, q_rope, view, **options)[0]

        def check() -> float:
            exact = reference(record.LATENT, inputs, fmt)
            return checked_error(f"{kernel}, {fmt}", run(), exact, limit)

        token_bytes = cache_format(fmt).row_bytes(problem.k, problem.p)
        return Ready(run, check, costs.flash_mla_cost(problem, token_bytes), record.LATENT)

    return Contender(LATENT_KERNEL, record.OURS, build, language, cache_dtype=fmt)


def checked_error(
    name: str, found: Tensor, exact: Tensor, limit: float = PEER_ERROR_LIMIT
) -> float:
    """The relative error of a result; CheckFailedError where it is above the limit, or NaN."""
    from mla_var3.op.compare import compare

    error = compare(found, exact).relative_frobenius
    if not error <= limit:  # NaN fails too
        raise CheckFailedError(f"{name}: relative error {error:.3g} (bound {limit:g})")
    return error


def call_contender(problem: MlaProblem, device: str = "cuda") -> Contender:
    """The public call `mla_attention` with the kernel it chooses, projections included."""

    def build() -> Ready:
        from mla_var3.attention.call import explain, mla_attention
        from mla_var3.op.mla.inputs import make_inputs
        from mla_var3.op.mla.reference import reference_from_latent

        raw = make_inputs(problem, device, seed=SEED)
        operands = (raw.q_nope, raw.q_rope, (raw.c_kv, raw.k_rope), raw.w_uk, raw.w_uv)
        options: dict[str, Any] = {"lengths": raw.lengths, "causal": problem.causal}
        chosen = explain(*operands, **options)

        def run() -> Tensor:
            out = mla_attention(*operands, **options)
            return out if not isinstance(out, tuple) else out[0]

        def check() -> float:
            name = f"mla_attention ({chosen.kernel}, {chosen.language})"
            return checked_error(name, run(), reference_from_latent(raw, problem)[0])

        choices = chosen.candidates[0].choice
        cost = call_cost(chosen.kernel, problem, choices.get("n", 0))
        return Ready(run, check, cost, record.CALL, dict(choices), str(chosen))

    return Contender("mla_attention", record.OURS, build)


def prefix_contender(problem: MlaProblem, shared: SharedTokens, device: str = "cuda") -> Contender:
    """Latent attention that reads shared first tokens once, on pages that the requests share.

    The layout of the groups is made before: a model makes it once per step for all its layers.
    Where nothing is shared it is the latent kernel itself.
    """
    asked, kernel = {"prefix": shared.mean}, prefix_kernel(shared)

    def build() -> Ready:
        from mla_var3.attention.cache.view import CacheView
        from mla_var3.attention.call import mla_latent_attention
        from mla_var3.attention.prefix.find import find_shared_prefixes
        from mla_var3.attention.prefix.layout import prefix_layout
        from mla_var3.bench.peers import PAGE, PeerInputs, reference

        inputs = PeerInputs.make(problem, device)
        raw, table = inputs.raw, inputs.page_table()
        for group, tokens in enumerate(shared.tokens):
            first = group * shared.members
            members = slice(first, first + shared.members)
            for rows in (raw.c_kv, raw.k_rope):
                rows[members, :tokens] = rows[first, :tokens].clone()
            table[members, : tokens // PAGE] = table[first, : tokens // PAGE].clone()
        pages = inputs.latent_cache().view(-1, PAGE, problem.k + problem.p)
        view = CacheView(pages[..., : problem.k], pages[..., problem.k :], raw.lengths, table)
        groups = find_shared_prefixes(
            table.cpu(), raw.lengths.cpu(), page_size=PAGE, queries=problem.s, device=device
        )
        q, q_rope = inputs.separate_queries()
        name = f"{kernel}:cute-dsl"
        options: dict[str, Any] = {"causal": problem.causal, "d": problem.d, "kernel": name}
        if kernel == PREFIX_KERNEL:
            if not groups.levels:
                raise UnsupportedError(f"{kernel}: expected whole pages that are shared, got none")
            options["prefix"] = prefix_layout(groups, q, view, causal=problem.causal)

        def run() -> Tensor:
            return mla_latent_attention(q, q_rope, view, **options)[0]

        def check() -> float:
            return checked_error(kernel, run(), reference(record.LATENT, inputs))

        return Ready(run, check, shared_cost(problem, shared), record.LATENT, asked)

    return Contender(kernel, record.OURS, build, language="cute-dsl", asked=asked)


def prefix_kernel(shared: SharedTokens) -> str:
    """The kernel that runs: without shared tokens it is the latent one."""
    return PREFIX_KERNEL if any(shared.tokens) else LATENT_KERNEL


def shared_cost(problem: MlaProblem, shared: SharedTokens) -> Cost:
    """The cost of reading shared tokens once, as of groups with the same mean prefix."""
    return latent_shared_cost(SharedPrefixProblem(problem, shared.mean, len(shared.tokens)))


def call_cost(kernel: str, problem: MlaProblem, n: int = 0) -> Cost:
    """FLOPs and bytes of a whole call: the kernel's path and its projections."""
    design, _ = split_full_name(kernel)
    if design == "flash_attention":
        return costs.flash_attention_cost(problem)
    queries = costs.query_projection_cost(problem)
    if design == "mla_var6_plus":
        return costs.attention_block_specialized_cost(problem, n) + queries
    return costs.flash_mla_cost(problem) + queries + costs.output_up_projection_cost(problem)


def projection_contender(name: str, problem: MlaProblem, device: str = "cuda") -> Contender:
    """A projection by PyTorch, for the call time of kernels that do not do it."""

    def build() -> Ready:
        import torch

        from mla_var3.op.mla.inputs import torch_dtype

        width, to, cost = problem.d, problem.k, costs.query_projection_cost(problem)
        if name == record.OUTPUT_PROJECTION:
            width, to, cost = problem.k, problem.v, costs.output_up_projection_cost(problem)
        rows, h, dtype = problem.b * problem.s, problem.h, torch_dtype(problem)
        generator = torch.Generator(device=device).manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, device=device)
            return values.mul_(float(width) ** -0.25).to(dtype)

        x, weight = normal(rows, h, width), normal(h, width, to)
        out = torch.empty((rows, h, to), dtype=dtype, device=device)
        # Straight into the layout that the next kernel reads, as an engine would do it.
        operands, result = (x.transpose(0, 1), weight), out.transpose(0, 1)

        def run() -> None:
            torch.bmm(*operands, out=result)

        def check() -> float:
            run()
            return checked_error(name, result, torch.bmm(*(each.float() for each in operands)))

        return Ready(run, check, cost, "")

    return Contender(name, record.PROJECTION, build)


def contenders(
    case: Case,
    libraries: PeerLibraries | None,
    target: str,
    *,
    tune: TuneBudget | None = None,
    progress: Progress = no_progress,
) -> list[Contender]:
    """All contenders of a case, the projections last; peers only where there are libraries."""
    problem = case.problem
    references: dict[str, Tensor] = {}
    found = [call_contender(problem)] if case.call else []
    options: dict[str, Any] = {"tune": tune, "progress": progress}
    found += [kernel_contender(kernel, problem, target, **options) for kernel in case.kernels]
    found += [fp8_contender(*choice, problem) for choice in case.cache_dtypes]
    if case.shared is not None:
        found.append(prefix_contender(problem, case.shared))
    if libraries is not None:
        found += [peer_contender(name, problem, libraries, references) for name in case.peers]
    return found + [projection_contender(name, problem) for name in record.PROJECTIONS]


def make_plan(choice: KernelChoice, problem: MlaProblem, target: str) -> KernelPlan:
    """The plan of one of our kernels; UnsupportedError where it cannot compute the problem."""
    cls = plan_class(choice.kernel)
    name = f"{choice.kernel.full_name} ({choice.kernel.language})"
    fields = {f.name for f in dataclasses.fields(cls)}
    sizes = {k: v for k, v in dataclasses.asdict(problem).items() if v is not None}
    if "v" not in fields and (sizes["v"] == sizes["d"] or not getattr(cls, "needs_v", True)):
        del sizes["v"]
    wanted = {**sizes, **choice.fields}
    defaults = MlaProblem(b=1, s=1, t=1, h=1)
    extra = {key: value for key, value in wanted.items() if key not in fields}
    odd = [f"{k}={value}" for k, value in extra.items() if value != getattr(defaults, k, None)]
    if odd:
        got = f"got the fields {', '.join(sorted(fields))}"
        raise UnsupportedError(f"{name}: expected a plan that takes {', '.join(odd)}, {got}")
    targets = getattr(cls, "targets", None)
    if targets is not None and target not in targets:
        known = ", ".join(targets)
        raise UnsupportedError(f"{name}: expected one of its targets {known}, got {target}")
    if "seed" in fields:
        wanted["seed"] = SEED
    try:
        plan: KernelPlan = cls(**{key: value for key, value in wanted.items() if key in fields})
    except InvalidArgumentError as error:
        if error.argument not in ("d", "p", "k", "(k, p)", "(d, p, v)"):
            raise
        raise UnsupportedError(f"{name}: {error}") from error  # made for other models
    return plan.for_target(target)


def require_memory(plan: KernelPlan) -> None:
    """Raise UnsupportedError where the GPU's free memory does not hold a plan and its check."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    spec = workflow.current_device_spec()
    rates = spec.burst_rates(plan_dtype(plan))
    need = MEMORY_FACTOR * plan.on_device(spec).plan_empty(*rates).cost().bytes
    if need > free:
        raise UnsupportedError(
            f"{plan.name}: expected {byte_count(need)} of free GPU memory, got {byte_count(free)}"
        )


def path_of(plan: KernelPlan, stage: Stage) -> str:
    """Which path a kernel takes: a window or prefix makes it a mix, a latent output the latent one.

    A mix that decompresses every token counts as decompressed: it needs no projection.
    """
    for name in ("n", "prefix"):
        if hasattr(plan, name):
            everything = getattr(plan, name) == getattr(plan, "t", None)
            return record.DECOMPRESSED if everything else record.MIX
    is_latent = stage.output_tensors[0].shape[-1] == getattr(plan, "k", None)
    return record.LATENT if is_latent else record.DECOMPRESSED


def choices_of(plan: KernelPlan) -> dict[str, int]:
    """The choices of a resolved plan that belong in its label."""
    found = {name: getattr(plan, name, None) for name in ("n", "prefix", "splits")}
    return {name: int(value) for name, value in found.items() if value is not None}
