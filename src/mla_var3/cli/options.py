"""The options of a kernel's command line, made from the fields of its plan and tilings."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_var3.cli.arguments import (
    MODEL_SIZES,
    SIZE_TEXTS,
    Parser,
    ValueType,
    read_lengths,
    read_model,
    value_type,
)
from mla_var3.cli.console import UsageError
from mla_var3.errors import HyperMlaError, UnknownNameError
from mla_var3.runtime.paths import DEFAULT_LANGUAGE, LANGUAGES, TARGETS
from mla_var3.runtime.plan import KernelPlan, option_fields, plan_targets
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


_FLAG: dict[str, Any] = {"action": "store_true"}
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
    "check": ("run", "compare with the fp32 reference; the exit code tells", _FLAG),
    "no_autotune": (
        "run",
        "use the tiling as given or by default; needed on a GPU to set tiling options",
        _FLAG,
    ),
    "retune": ("run", "search tilings again although a result is cached", _FLAG),
    "tune_max_iters": (
        "run",
        "time at most N tilings per stage (default: all that compile well)",
        {"type": ValueType(int), "metavar": "N"},
    ),
    "tune_seconds": (
        "run",
        "stop the search after so many seconds (default: none)",
        {"type": ValueType(float), "metavar": "SECONDS"},
    ),
    "refine": (
        "run",
        "choose between neighbours of the cost model's choice, such as n, by timing (default: off)",
        _FLAG,
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
"""Run options: name -> (group, help, argparse settings)."""


@dataclass
class Request:
    """What a command line asks for.

    Attributes:
        plan: the plan with the given fields.
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


class PlanParser(Parser):
    """The command line of a plan, its options in groups.

    A tiling field is an option by its own name; where several tilings have the name, by
    `--<tiling>.<name>`.

    Attributes:
        plan: the plan whose values are the defaults.
        flags: option without dashes -> (tiling field of the plan or "", field).
    """

    def __init__(self, plan: KernelPlan, prog: str, description: str = "") -> None:
        super().__init__(prog=prog, usage=f"{prog} [options]", description=description)
        self.plan = plan
        self.flags: dict[str, tuple[str, str]] = {}
        problem = self.add_argument_group("problem", "what to compute; fields of the plan")
        tilings: dict[str, Tiling] = {}
        for name, kind in _field_types(plan).items():
            value = getattr(plan, name)
            if isinstance(value, Tiling):
                tilings[name] = value
            elif isinstance(value, KernelPlan):
                continue
            elif kind is None or name in RUN_OPTIONS:
                raise _unreadable(plan, name)
            else:
                self._add_field(problem, name, plan, kind, "", name)
        if set(MODEL_SIZES) - {"v"} <= set(self.flags):
            problem.add_model()
        for owner, tiling in tilings.items():
            others = [_field_types(each) for key, each in tilings.items() if key != owner]
            self._add_tiling(owner, tiling, {name for each in others for name in each})
        groups = {title: self.add_argument_group(title) for title in ("run", "profiling")}
        for name, (title, text, settings) in RUN_OPTIONS.items():
            groups[title].add_argument(
                f"--{name}", dest=name, default=argparse.SUPPRESS, help=_escaped(text), **settings
            )

    def _add_tiling(self, owner: str, tiling: Tiling, shared: set[str]) -> None:
        """Add the fields of one tiling; `shared` are the names that other tilings have too."""
        title = "tiling" if owner == "tiling" else f"tiling: {owner}"
        meaning = (inspect.getdoc(type(tiling)) or type(tiling).__name__).split("\n\n")[0]
        group = self.add_argument_group(
            title, f"{_escaped(meaning)} On a GPU only together with --no_autotune."
        )
        for name, kind in _field_types(tiling).items():
            if kind is None:
                raise _unreadable(tiling, name)
            dotted = f"{owner}.{name}"
            taken = name in RUN_OPTIONS or self.flags.get(name) == ("", name)
            if not taken and name not in shared:
                self.aliases[dotted] = name
            elif not taken:
                self.ambiguous.setdefault(name, []).append(dotted)
            self._add_field(group, self.aliases.get(dotted, dotted), tiling, kind, owner, name)

    def _add_field(
        self, group: Any, flag: str, owner: Any, kind: ValueType, tiling: str, name: str
    ) -> None:
        self.flags[flag] = (tiling, name)
        metadata = {f.name: f.metadata for f in dataclasses.fields(owner)}[name]
        fallback = "tile size" if tiling and name[:1].isupper() else name
        text = str(metadata.get("help") or HELP_TEXTS.get(name, fallback)).strip()
        default = getattr(owner, name)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        if default is not None or "default" not in text:
            text += f" (default: {shown if isinstance(default, str) else shown.lower()})"
        common: dict[str, Any] = {"dest": flag, "default": argparse.SUPPRESS}
        settings = {"type": kind, "metavar": kind.metavar, "help": _escaped(text), **common}
        if kind.scalar is not bool or kind.sequence:
            group.add_argument(f"--{flag}", **settings)
            return
        group.add_argument(f"--{flag}", nargs="?", const=True, **settings)
        before, dot, last = flag.rpartition(".")
        same = f"the same as --{flag}=false"
        group.add_argument(
            f"--{before}{dot}no_{last}", action="store_const", const=False, help=same, **common
        )

    def request(self, values: dict[str, Any]) -> Request:
        """Apply parsed options to the plan; the plan itself rejects what it cannot compute."""
        plan = self.plan
        values = {**values, **_of_model(plan, values)}
        changes: dict[str, Any] = {}
        tilings: dict[str, dict[str, Any]] = {}
        for flag, (tiling, name) in self.flags.items():
            if flag in values:
                (tilings.setdefault(tiling, {}) if tiling else changes)[name] = values[flag]
        if "lengths" in changes:
            sizes = {key: changes.get(key, getattr(plan, key, 0)) for key in ("b", "t")}
            changes["lengths"] = read_lengths(changes["lengths"], **sizes)
        for tiling, replaced in tilings.items():
            changes[tiling] = dataclasses.replace(getattr(plan, tiling), **replaced)
        if changes:
            plan = plan.copy(**changes).pin(*tilings)
        return Request(
            plan,
            _run_options(plan, values),
            parse_mode(values["prof_type"]) if "prof_type" in values else None,
            frozenset(values),
            tuple(flag for flag, (tiling, _) in self.flags.items() if tiling and flag in values),
            tuple(tilings),
        )


def _of_model(plan: KernelPlan, values: dict[str, Any]) -> dict[str, int]:
    """The sizes that `--model` or `--config` gives a plan."""
    sizes = read_model(values)
    if not sizes or hasattr(plan, "v"):
        return sizes
    if (v := sizes.pop("v")) != sizes["d"] and getattr(plan, "needs_v", True):
        raise UsageError(f"--model: {plan.name} needs v=d={sizes['d']}, the model has v={v}")
    return sizes


def _field_types(owner: Any) -> dict[str, ValueType | None]:
    """The value type of every init field of a plan or tiling; None for one that text cannot set."""
    try:
        hints = typing.get_type_hints(type(owner))
    except NameError:  # a name that only a type checker imports
        hints = {}
    return {
        field.name: value_type(hints.get(field.name, type(getattr(owner, field.name))), field.name)
        for field in option_fields(owner)
        if field.init
    }


def _unreadable(owner: Any, name: str) -> HyperMlaError:
    return HyperMlaError(
        f"{type(owner).__name__}.{name}: expected a field that the command line can set (int, "
        f"float, bool, str, any of them | None, or a tuple of them), got {getattr(owner, name)!r}"
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _run_options(plan: KernelPlan, values: dict[str, Any]) -> RunOptions:
    names = ("device", "retune", "tune_max_iters", "tune_seconds", "refine", "check", "bench_runs")
    run = RunOptions(
        autotune=not values.get("no_autotune", False),
        targets=tuple(code for code in plan_targets(plan) if code in TARGETS),
        **{name: values[name] for name in (*names, "out_dir", "label") if name in values},
    )
    if "target" in values:
        run.targets = _read_targets(values["target"], plan_targets(plan))
    return run


def _read_targets(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """A comma list of GPU codes."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UnknownNameError("target", name, known)
    if not names:
        raise UsageError(f"--target: expected GPU codes such as {known[0]}, got {text!r}")
    return tuple(dict.fromkeys(names))
