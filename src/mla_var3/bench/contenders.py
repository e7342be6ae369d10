"""Who takes part in a benchmark: our kernels, the public call, the peers and the projections.

A contender is built anew for every round, so only one of them holds memory at a time, and always
from the same numbers. Building never times and timing never builds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mla_var3.bench.record import (
    CALL,
    DECOMPRESSED,
    LATENT,
    MIX,
    OURS,
    OUTPUT_PROJECTION,
    PEER,
    PROJECTION,
    QUERY_PROJECTION,
)
from mla_var3.bench.suites import Case, KernelChoice, SharedTokens
from mla_var3.errors import CheckFailedError, UnsupportedError
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import (
    flash_attention_cost,
    flash_mla_cost,
    mla_var6_plus_cost,
    output_up_projection_cost,
    q_absorption_cost,
)
from mla_var3.op.mla.prefix.problem import SharedPrefixProblem, latent_shared_cost
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime.markdown import byte_count
from mla_var3.runtime.paths import KernelId, plan_class, split_full_name
from mla_var3.runtime.plan import KernelPlan, plan_dtype
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.workflow import (
    Progress,
    RunOptions,
    current_device_spec,
    no_progress,
    prepare,
)

if TYPE_CHECKING:
    from torch import Tensor

    from mla_var3.bench.peers import PeerLibraries

PEER_ERROR_LIMIT = 0.01
"""A 16-bit peer above this relative error computes something else."""
SEED = 1
PREFIX_KERNEL = "flash_mla_prefix"
MEMORY_FACTOR = 3.0
"""Inputs, outputs and the float32 reference of the check, relative to the bytes a kernel moves."""
MISSING_PROJECTIONS: dict[str, tuple[str, ...]] = {
    LATENT: (QUERY_PROJECTION, OUTPUT_PROJECTION),
    MIX: (QUERY_PROJECTION,),
    DECOMPRESSED: (),
    CALL: (),
}
"""Path -> the projections that its kernels do not do."""


@dataclass(frozen=True)
class Ready:
    """A contender that can be timed.

    Attributes:
        run: enqueues the work once.
        check: compares with the float32 reference; returns the relative error, or raises.
        cost: FLOPs and bytes.
        path: "latent", "decompressed", "mix" or "call".
        choices: what it chose, such as n.
        note: what to know about it.
    """

    run: Callable[[], Any]
    check: Callable[[], float]
    cost: Cost
    path: str
    choices: dict[str, int] = field(default_factory=dict)
    note: str = ""


class Contender(Protocol):
    """One row of the comparison before it is measured."""

    @property
    def kernel(self) -> str:
        """Kernel id or name."""

    @property
    def source(self) -> str:
        """Whose it is: "ours", "peer" or "projection"."""

    @property
    def language(self) -> str:
        """Language key of our kernels."""
        return ""

    @property
    def asked(self) -> dict[str, int]:
        """Choices that the suite pinned."""
        return {}

    @property
    def versions(self) -> dict[str, str]:
        """Versions of its own, beside those of the environment."""
        return {}

    def build(self) -> Ready:
        """Allocate and lay out; raises UnsupportedError where it cannot take part."""


@dataclass(frozen=True)
class KernelContender(Contender):
    """One of our kernels."""

    choice: KernelChoice
    problem: MlaProblem
    target: str
    device: str = "cuda"
    tune: bool = False
    progress: Progress = no_progress

    source = OURS

    @property
    def kernel(self) -> str:
        return self.choice.kernel.full_name

    @property
    def language(self) -> str:
        return self.choice.kernel.language

    @property
    def asked(self) -> dict[str, int]:
        return dict(self.choice.fields)

    def build(self) -> Ready:
        from mla_var3.runtime.check import check_stage

        plan = make_plan(self.choice, self.problem, self.target)
        if self.device == "cuda":
            require_memory(plan)
        options = RunOptions(device=self.device, autotune=self.tune, progress=self.progress)
        prepared = prepare(plan, options)
        stage = prepared.stage

        def check() -> float:
            outcome = check_stage(prepared.plan, prepared.inputs, stage)
            outcome.require()
            return outcome.outputs[0].error.relative_frobenius

        return Ready(
            stage.launch,
            check,
            stage.cost(),
            path_of(prepared.plan, stage),
            choices_of(prepared.plan),
        )


@dataclass(frozen=True)
class PeerContender(Contender):
    """A peer's kernel.

    Attributes:
        name: its short name, see `mla_var3.bench.peers.KERNELS`.
        problem: the problem.
        libraries: what is installed.
        references: float32 outputs by path, shared by the peers of a case.
        device: where it runs.
    """

    name: str
    problem: MlaProblem
    libraries: PeerLibraries
    references: dict[str, Tensor] = field(default_factory=dict, compare=False)
    device: str = "cuda"

    source = PEER

    @property
    def kernel(self) -> str:
        from mla_var3.bench.peers import peer_kernel

        return peer_kernel(self.name).title

    @property
    def versions(self) -> dict[str, str]:
        from mla_var3.bench.peers import peer_kernel

        library = peer_kernel(self.name).library
        known = self.libraries.versions
        return {library: known[library]} if library in known else {}

    def build(self) -> Ready:
        from mla_var3.bench.peers import PeerInputs, peer_kernel, reference
        from mla_var3.op.compare import compare

        kernel = peer_kernel(self.name)
        self.libraries.require(kernel.library)
        if kernel.path == DECOMPRESSED and self.problem.lengths is not None:
            raise UnsupportedError(
                f"{kernel.title}: expected t={self.problem.t} tokens in every request, got lengths"
            )
        inputs = PeerInputs.make(self.problem, self.device)
        run = kernel.build(self.libraries, inputs)

        def check() -> float:
            if kernel.path not in self.references:
                self.references[kernel.path] = reference(kernel.path, inputs)
            error = compare(run(), self.references[kernel.path]).relative_frobenius
            if not error <= PEER_ERROR_LIMIT:  # NaN fails too
                raise CheckFailedError(
                    f"{kernel.title}: relative error {error:.3g} (bound {PEER_ERROR_LIMIT:g})"
                )
            return error

        return Ready(run, check, kernel.cost(self.problem), kernel.path)


@dataclass(frozen=True)
class CallContender(Contender):
    """The public call `mla_attention` with the kernel it chooses, projections included."""

    problem: MlaProblem
    device: str = "cuda"

    source = OURS
    kernel = "mla_attention"

    def build(self) -> Ready:
        from mla_var3.attention.call import explain, mla_attention
        from mla_var3.op.compare import compare
        from mla_var3.op.mla.inputs import make_inputs
        from mla_var3.op.mla.reference import reference_from_latent

        raw = make_inputs(self.problem, self.device, seed=SEED)
        operands = (raw.q_nope, raw.q_rope, (raw.c_kv, raw.k_rope), raw.w_uk, raw.w_uv)
        options: dict[str, Any] = {"lengths": raw.lengths, "causal": self.problem.causal}
        chosen = explain(*operands, **options)

        def run() -> Tensor:
            out = mla_attention(*operands, **options)
            return out if not isinstance(out, tuple) else out[0]

        def check() -> float:
            exact, _ = reference_from_latent(raw, self.problem)
            error = compare(run(), exact).relative_frobenius
            if not error <= PEER_ERROR_LIMIT:  # NaN fails too
                raise CheckFailedError(
                    f"{self.kernel} ({chosen.kernel}, {chosen.language}): relative error "
                    f"{error:.3g} (bound {PEER_ERROR_LIMIT:g})"
                )
            return error

        choices = chosen.candidates[0].choice
        cost = call_cost(chosen.kernel, self.problem, choices.get("n", 0))
        return Ready(run, check, cost, CALL, dict(choices), str(chosen))


@dataclass(frozen=True)
class PrefixContender(Contender):
    """Latent attention that reads shared first tokens once, on pages that the requests share.

    The layout of the groups is made before: a model makes it once per step for all its layers.
    """

    problem: MlaProblem
    shared: SharedTokens
    device: str = "cuda"

    source = OURS
    kernel = PREFIX_KERNEL
    language = "cute-dsl"

    @property
    def asked(self) -> dict[str, int]:
        return {"prefix": self.shared.mean}

    def build(self) -> Ready:
        from mla_var3.attention.cache.view import CacheView
        from mla_var3.attention.call import mla_latent_attention
        from mla_var3.attention.prefix.find import find_shared_prefixes
        from mla_var3.attention.prefix.layout import prefix_layout
        from mla_var3.bench.peers import PAGE, PeerInputs, reference
        from mla_var3.op.compare import compare

        inputs = PeerInputs.make(self.problem, self.device)
        problem, raw, table = self.problem, inputs.raw, inputs.page_table()
        for group, tokens in enumerate(self.shared.tokens):
            first = group * self.shared.members
            members = slice(first, first + self.shared.members)
            for rows in (raw.c_kv, raw.k_rope):
                rows[members, :tokens] = rows[first, :tokens].clone()
            table[members, : tokens // PAGE] = table[first, : tokens // PAGE].clone()
        pages = inputs.latent_cache().view(-1, PAGE, problem.k + problem.p)
        view = CacheView(pages[..., : problem.k], pages[..., problem.k :], raw.lengths, table)
        groups = find_shared_prefixes(
            table.cpu(), raw.lengths.cpu(), page_size=PAGE, queries=problem.s, device=self.device
        )
        q, q_rope = inputs.latent_queries().split([problem.k, problem.p], dim=-1)
        q, q_rope = q.contiguous(), q_rope.contiguous()
        options: dict[str, Any] = {"causal": problem.causal, "d": problem.d}
        if groups.levels:
            layout = prefix_layout(groups, q, view, causal=problem.causal)
            options |= {"prefix": layout, "kernel": self.kernel}

        def run() -> Tensor:
            return mla_latent_attention(q, q_rope, view, **options)[0]

        def check() -> float:
            error = compare(run(), reference(LATENT, inputs)).relative_frobenius
            if not error <= PEER_ERROR_LIMIT:  # NaN fails too
                raise CheckFailedError(f"{self.kernel}: relative error {error:.3g}")
            return error

        cost = latent_shared_cost(shared_problem(problem, self.shared))
        return Ready(run, check, cost, LATENT, self.asked)


def shared_problem(problem: MlaProblem, shared: SharedTokens) -> SharedPrefixProblem:
    """A problem with its shared tokens, for the cost model: groups of the same mean prefix."""
    return SharedPrefixProblem(problem, shared.mean, len(shared.tokens))


def call_cost(kernel: str, problem: MlaProblem, n: int = 0) -> Cost:
    """FLOPs and bytes of a whole call: the kernel's path and its projections."""
    design, _ = split_full_name(kernel)
    if design == "flash_attention":
        return flash_attention_cost(problem)
    queries = q_absorption_cost(problem)
    if design == "mla_var6_plus":
        return mla_var6_plus_cost(problem, n) + queries
    return flash_mla_cost(problem) + queries + output_up_projection_cost(problem)


@dataclass(frozen=True)
class ProjectionContender(Contender):
    """A projection by PyTorch, for the call time of kernels that do not do it."""

    name: str
    problem: MlaProblem
    device: str = "cuda"

    source = PROJECTION

    @property
    def kernel(self) -> str:
        return self.name

    def build(self) -> Ready:
        import torch

        from mla_var3.op.compare import compare
        from mla_var3.op.mla.inputs import torch_dtype

        problem = self.problem
        of_queries = self.kernel == QUERY_PROJECTION
        width, to = (problem.d, problem.k) if of_queries else (problem.k, problem.d)
        rows, h, dtype = problem.b * problem.s, problem.h, torch_dtype(problem)
        generator = torch.Generator(device=self.device).manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, device=self.device)
            return values.mul_(float(width) ** -0.25).to(dtype)

        x, weight = normal(rows, h, width), normal(h, width, to)
        out = torch.empty((rows, h, to), dtype=dtype, device=self.device)
        # Straight into the layout that the next kernel reads, as an engine would do it.
        operands, result = (x.transpose(0, 1), weight), out.transpose(0, 1)

        def run() -> None:
            torch.bmm(*operands, out=result)

        def check() -> float:
            run()
            exact = torch.bmm(*(operand.float() for operand in operands))
            error = compare(result, exact).relative_frobenius
            if not error <= PEER_ERROR_LIMIT:
                raise CheckFailedError(f"{self.kernel}: relative error {error:.3g}")
            return error

        cost = q_absorption_cost(problem) if of_queries else output_up_projection_cost(problem)
        return Ready(run, check, cost, "")


def contenders(
    case: Case,
    libraries: PeerLibraries | None,
    target: str,
    *,
    device: str = "cuda",
    tune: bool = False,
    progress: Progress = no_progress,
) -> list[Contender]:
    """All contenders of a case, the projections last; peers only where there are libraries."""
    references: dict[str, Tensor] = {}
    found: list[Contender] = [CallContender(case.problem, device)] if case.call else []
    found += [
        KernelContender(choice, case.problem, target, device, tune, progress)
        for choice in case.kernels
    ]
    if case.shared is not None:
        found.append(PrefixContender(case.problem, case.shared, device))
    found += [
        PeerContender(name, case.problem, libraries, references, device)
        for name in case.peers
        if libraries is not None
    ]
    return found + [
        ProjectionContender(name, case.problem, device)
        for name in (QUERY_PROJECTION, OUTPUT_PROJECTION)
    ]


def make_plan(choice: KernelChoice, problem: MlaProblem, target: str) -> KernelPlan:
    """The plan of one of our kernels for a problem.

    Raises:
        UnsupportedError: the kernel cannot compute it, or not on this target.
    """
    cls = plan_class(choice.kernel)
    fields = {f.name for f in dataclasses.fields(cls)}
    sizes = {k: v for k, v in dataclasses.asdict(problem).items() if v is not None}
    wanted = {**sizes, **choice.fields}
    defaults = MlaProblem(b=1, s=1, t=1, h=1)
    missing = [
        f"{name}={value}"
        for name, value in wanted.items()
        if name not in fields and value != getattr(defaults, name, None)
    ]
    if missing:
        raise UnsupportedError(
            f"{_id(choice.kernel)}: expected a plan that takes {', '.join(missing)}, "
            f"got the fields {', '.join(sorted(fields))}"
        )
    targets = getattr(cls, "targets", None)
    if targets is not None and target not in targets:
        raise UnsupportedError(
            f"{_id(choice.kernel)}: expected one of its targets {', '.join(targets)}, got {target}"
        )
    if "seed" in fields:
        wanted["seed"] = SEED
    plan: KernelPlan = cls(**{name: value for name, value in wanted.items() if name in fields})
    return plan.for_target(target)


def require_memory(plan: KernelPlan) -> None:
    """Raise UnsupportedError where the GPU's free memory does not hold a plan and its check."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    spec = current_device_spec()
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
            return DECOMPRESSED if getattr(plan, name) == getattr(plan, "t", None) else MIX
    latent = getattr(plan, "k", None)
    return LATENT if stage.output_tensors[0].shape[-1] == latent else DECOMPRESSED


def choices_of(plan: KernelPlan) -> dict[str, int]:
    """The choices of a resolved plan that belong in its label."""
    found = {name: getattr(plan, name, None) for name in ("n", "prefix", "splits")}
    return {name: int(value) for name, value in found.items() if value is not None}


def _id(kernel: KernelId) -> str:
    return f"{kernel.full_name} ({kernel.language})"
