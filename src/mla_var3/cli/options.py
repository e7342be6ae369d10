"""The options of a kernel's command line, made from the fields of its plan and tilings."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.cli.arguments import (
    MIXED,
    SIZE_TEXTS,
    Parser,
    ValueType,
    field_types,
    mixed_lengths,
    unreadable,
)
from mla_var3.cli.console import UsageError
from mla_var3.errors import UnknownNameError
from mla_var3.runtime.paths import DEFAULT_LANGUAGE, LANGUAGES, TARGETS
from mla_var3.runtime.plan import KernelPlan, plan_targets
from mla_var3.runtime.profiling import NsightProfType, parse_mode
from mla_var3.runtime.stage import Tiling
from mla_var3.runtime.workflow import RunOptions

HELP_TEXTS = {
    **SIZE_TEXTS,
    "dtype": "element type: bfloat16 or float16",
    "causal": "mask later tokens, aligned bottom-right",
    "lengths": "KV length per request: comma list, or mixed (spread from 1 to t); none: all t",
    "seed": "seed of the inputs; none: fresh ones",
    "n": "newest tokens attended decompressed; none: chosen by the cost model",
    "num_ctas": "compiler hint: CTAs per cluster",
    "occupancy": "compiler hint: CTAs per SM",
    "num_worker_warps": "compiler hint: worker warps per CTA",
    "opt_level": "compiler hint: optimisation level",
}
"""Help for well-known fields that carry no text of their own."""


@dataclass
class PlanOptions:
    """Which option sets which field of a plan.

    Attributes:
        plan: the plan whose values are the defaults.
        fields: plan field -> value type.
        tilings: tiling field of the plan -> tiling field -> value type.
        flags: option without dashes -> (tiling field of the plan or "", field).
        aliases: other spelling of an option -> the option.
        ambiguous: name shared by several tilings -> the options to use instead.
    """

    plan: KernelPlan
    fields: dict[str, ValueType] = field(default_factory=dict)
    tilings: dict[str, dict[str, ValueType]] = field(default_factory=dict)
    flags: dict[str, tuple[str, str]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    ambiguous: dict[str, list[str]] = field(default_factory=dict)


def plan_options(plan: KernelPlan, reserved: Iterable[str] = ()) -> PlanOptions:
    """The options of a plan.

    Args:
        plan: the plan.
        reserved: names of the run options, which a plan field must not take.
    """
    options = PlanOptions(plan)
    taken = set(reserved)
    for name, kind in field_types(plan).items():
        value = getattr(plan, name)
        if isinstance(value, Tiling):
            options.tilings[name] = _tiling_types(value)
        elif isinstance(value, KernelPlan):
            continue
        elif kind is None or name in taken:
            raise unreadable(plan, name)
        else:
            options.fields[name] = kind
            options.flags[name] = ("", name)
    taken |= set(options.fields)
    owners: dict[str, list[str]] = {}
    for tiling, kinds in options.tilings.items():
        for name in kinds:
            owners.setdefault(name, []).append(tiling)
    for name, tilings in owners.items():
        dotted = [f"{tiling}.{name}" for tiling in tilings]
        if len(tilings) == 1 and name not in taken:
            options.flags[name] = (tilings[0], name)
            options.aliases[dotted[0]] = name
        else:
            options.flags.update({d: (t, name) for d, t in zip(dotted, tilings, strict=True)})
            if name not in taken:
                options.ambiguous[name] = dotted
    return options


def _tiling_types(tiling: Tiling) -> dict[str, ValueType]:
    kinds = {}
    for name, kind in field_types(tiling).items():
        if kind is None:
            raise unreadable(tiling, name)
        kinds[name] = kind
    return kinds


RUN_OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "language": (
        "run",
        f"kernel language: {' or '.join(LANGUAGES)} (default: {DEFAULT_LANGUAGE}, or the only one)",
        {"metavar": "NAME"},
    ),
    "device": (
        "run",
        "auto, cuda or cpu; cpu runs the kernel's own code in the tile interpreter (default: auto)",
        {"metavar": "NAME"},
    ),
    "target": (
        "run",
        f"only compile and predict, for these GPU codes (default: {','.join(TARGETS)})",
        {"metavar": "SM,SM,..."},
    ),
    "check": ("run", "compare with the fp32 reference; the exit code tells", {"flag": True}),
    "no_autotune": (
        "run",
        "use the tiling as given or by default; needed on a GPU to set tiling options",
        {"flag": True},
    ),
    "retune": ("run", "search tilings again although a result is cached", {"flag": True}),
    "tune_max_iters": (
        "run",
        "time at most N tilings per stage (default: all that compile well)",
        {"type": ValueType(int), "metavar": "N"},
    ),
    "refine": (
        "run",
        "choose between neighbours of the cost model's choice, such as n, by timing (default: off)",
        {"flag": True},
    ),
    "prof_type": (
        "profiling",
        f"{', '.join(m.value for m in NsightProfType)} (default: the richest one that runs here)",
        {"metavar": "MODE"},
    ),
    "bench_runs": (
        "profiling",
        "timed runs (default: enough for a steady median)",
        {"type": ValueType(int), "metavar": "N"},
    ),
    "out_dir": (
        "profiling",
        "folder of the artifacts (default: out/profiles/<mode>/<kernel>/<params>/<timestamp>)",
        {"type": Path, "metavar": "FOLDER"},
    ),
    "label": ("profiling", "suffix of that folder's name (default: none)", {"metavar": "TEXT"}),
}
"""Run options: name -> (group, help, argparse settings; "flag" marks one without a value)."""


def build_parser(options: PlanOptions, prog: str, description: str = "") -> Parser:
    """The parser of a plan's command line, its options in groups."""
    parser = Parser(prog=prog, usage=f"{prog} [options]", description=description)
    problem = parser.add_argument_group("problem", "what to compute; fields of the plan")
    for name, kind in options.fields.items():
        _add_field(problem, name, name, kind, options.plan)
    for tiling_name, kinds in options.tilings.items():
        tiling = getattr(options.plan, tiling_name)
        title = "tiling" if tiling_name == "tiling" else f"tiling: {tiling_name}"
        meaning = (inspect.getdoc(type(tiling)) or type(tiling).__name__).split("\n\n")[0]
        group = parser.add_argument_group(
            title, f"{_escaped(meaning)} On a GPU only together with --no_autotune."
        )
        for name, kind in kinds.items():
            flag = name if options.flags.get(name) == (tiling_name, name) else ""
            _add_field(group, flag or f"{tiling_name}.{name}", name, kind, tiling)
    add_run_options(parser)
    return parser


def add_run_options(parser: argparse.ArgumentParser, names: Iterable[str] = RUN_OPTIONS) -> None:
    """Add run options, each to its group."""
    groups: dict[str, Any] = {}
    for name in names:
        title, text, settings = RUN_OPTIONS[name]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        settings = dict(settings)
        if settings.pop("flag", False):
            settings["action"] = "store_true"
        groups[title].add_argument(
            f"--{name}", dest=name, default=argparse.SUPPRESS, help=_escaped(text), **settings
        )


def _add_field(group: Any, flag: str, name: str, kind: ValueType, owner: Any) -> None:
    metadata = {f.name: f.metadata for f in dataclasses.fields(owner)}[name]
    fallback = "tile size" if isinstance(owner, Tiling) and name[:1].isupper() else f"{name}"
    text = str(metadata.get("help") or HELP_TEXTS.get(name, fallback)).strip()
    default = getattr(owner, name)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()
    if isinstance(default, str):
        shown = default
    if default is not None or "default" not in text:
        text += f" (default: {shown})"
    text = _escaped(text)
    common: dict[str, Any] = {"dest": flag, "default": argparse.SUPPRESS}
    if kind.scalar is bool and not kind.sequence:
        group.add_argument(
            f"--{flag}", nargs="?", const=True, type=kind, help=text, **common, metavar="true|false"
        )
        group.add_argument(
            f"--{_negated(flag)}",
            action="store_const",
            const=False,
            help=f"the same as --{flag}=false",
            **common,
        )
    else:
        group.add_argument(f"--{flag}", type=kind, metavar=kind.metavar, help=text, **common)


def _negated(flag: str) -> str:
    owner, dot, name = flag.rpartition(".")
    return f"{owner}{dot}no_{name}"


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


@dataclass
class Request:
    """What a command line asks for.

    Attributes:
        plan: the plan with the given fields.
        run: how to run it.
        mode: the profiling mode that was asked for, None to choose.
        given: names of the options that were given.
        tiling_given: the tiling options among them.
        tilings_chosen: fields of the plan whose tilings they set.
    """

    plan: KernelPlan
    run: RunOptions
    mode: NsightProfType | None
    given: frozenset[str]
    tiling_given: tuple[str, ...]
    tilings_chosen: tuple[str, ...] = ()


def build_request(options: PlanOptions, values: dict[str, Any]) -> Request:
    """Apply parsed options to the plan; the plan itself rejects what it cannot compute."""
    plan = options.plan
    changes: dict[str, Any] = {}
    tiling_changes: dict[str, dict[str, Any]] = {}
    tiling_given = []
    for flag, (tiling, name) in options.flags.items():
        if flag not in values:
            continue
        if tiling:
            tiling_changes.setdefault(tiling, {})[name] = values[flag]
            tiling_given.append(flag)
        else:
            changes[name] = values[flag]
    if changes.get("lengths") == MIXED:
        sizes = {key: changes.get(key, getattr(plan, key, 0)) for key in ("b", "t")}
        changes["lengths"] = mixed_lengths(**sizes)
    for tiling, replaced in tiling_changes.items():
        changes[tiling] = dataclasses.replace(getattr(plan, tiling), **replaced)
    if changes:
        plan = plan.copy(**changes).pin(*tiling_changes)
    mode = parse_mode(values["prof_type"]) if "prof_type" in values else None
    return Request(
        plan,
        run_options(plan, values),
        mode,
        frozenset(values),
        tuple(tiling_given),
        tuple(tiling_changes),
    )


def run_options(plan: KernelPlan, values: dict[str, Any]) -> RunOptions:
    """The run options among parsed values."""
    run = RunOptions(
        device=values.get("device", "auto"),
        autotune=not values.get("no_autotune", False),
        **{
            name: values[name]
            for name in ("retune", "tune_max_iters", "refine", "check", "bench_runs", "out_dir")
            if name in values
        },
        label=values.get("label"),
    )
    run.targets = plan_targets(plan)
    if "target" in values:
        run.targets = parse_targets(values["target"], run.targets)
    return run


def parse_targets(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """A comma list of GPU codes."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UnknownNameError("target", name, known)
    if not names:
        raise UsageError(f"--target: expected GPU codes such as {known[0]}, got {text!r}")
    return tuple(dict.fromkeys(names))
