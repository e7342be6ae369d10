"""The options of a kernel's command line, made from the fields of its plan and tilings."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_var3.cli import arguments
from mla_var3.cli.arguments import Parser, ValueType, value_type
from mla_var3.cli.console import UsageError
from mla_var3.errors import HyperMlaError, UnknownNameError
from mla_var3.runtime.paths import DEFAULT_LANGUAGE, LANGUAGES, TARGETS
from mla_var3.runtime.plan import KernelPlan, option_fields, plan_targets
from mla_var3.runtime.profiling import NsightProfType, parse_mode
from mla_var3.runtime.stage import Tiling
from mla_var3.runtime.workflow import RunOptions

HELP_TEXTS = {
    **arguments.SIZE_TEXTS,
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
_MODES = ", ".join(mode.value for mode in NsightProfType)
OPTION_TEXTS = {
    "run": {
        "language": f"{' or '.join(LANGUAGES)} (default: {DEFAULT_LANGUAGE}, or the only one)",
        "device": "auto, cuda or cpu; cpu: the kernel's own code, interpreted (default: auto)",
        "target": f"only compile and predict, for these GPU codes (default: {','.join(TARGETS)})",
        "check": "compare with the fp32 reference; the exit code tells",
        "no_autotune": "use the tiling as given or by default; needed on a GPU to set one",
        "retune": "search tilings again although a result is cached",
        "tune_max_iters": "time at most N tilings per stage (default: all that compile well)",
        "tune_seconds": "stop the search after so many seconds (default: none)",
        "refine": "choose between neighbours of the model's choice, such as n, by timing",
    },
    "profiling": {
        "prof_type": f"{_MODES} (default: the richest one that runs here)",
        "bench_runs": "timed runs (default: enough for a steady median)",
        "out_dir": "folder (default: out/profiles/<mode>/<kernel>/<params>/<timestamp>)",
        "label": "suffix of that folder's name (default: none)",
    },
}
"""Help of the run options, by group."""
RUN_OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("check", "no_autotune", "retune", "refine"), _FLAG),
    "language": {"metavar": "NAME"},
    "device": {"metavar": "NAME"},
    "tune_max_iters": {"type": ValueType(int), "metavar": "N"},
    "bench_runs": {"type": ValueType(int), "metavar": "N"},
    "target": {"metavar": "SM,SM,..."},
    "tune_seconds": {"type": ValueType(float), "metavar": "SECONDS"},
    "prof_type": {"metavar": "MODE"},
    "out_dir": {"type": Path, "metavar": "FOLDER"},
    "label": {"metavar": "TEXT"},
}
"""Their argparse settings."""


@dataclass
class Request:
    """What a command line asks for; a mode of None is to be chosen.

    `given` are the options that were given, `tiling_given` the tiling options among them, and
    `tilings_chosen` the fields of the plan whose tilings they set.
    """

    plan: KernelPlan
    run: RunOptions
    mode: NsightProfType | None
    given: frozenset[str]
    tiling_given: tuple[str, ...]
    tilings_chosen: tuple[str, ...] = ()


class PlanParser(Parser):
    """The command line of a plan, whose values are the defaults, its options in groups.

    A tiling field is an option by its own name; where several tilings have the name, by
    `--<tiling>.<name>`. `flags` maps options to (tiling field of the plan or "", field).
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
        if set(arguments.MODEL_SIZES) - {"v"} <= set(self.flags):
            problem.add_model()
        for owner, tiling in tilings.items():
            others = [_field_types(each) for key, each in tilings.items() if key != owner]
            self._add_tiling(owner, tiling, {name for each in others for name in each})
        for title, texts in OPTION_TEXTS.items():
            self.add_run_options(self.add_argument_group(title), texts)

    @staticmethod
    def add_run_options(group: Any, names: Iterable[str]) -> None:
        """Add those run options to a group."""
        texts = {name: text for part in OPTION_TEXTS.values() for name, text in part.items()}
        for name in names:
            settings = {"help": _escaped(texts[name]), "default": argparse.SUPPRESS}
            group.add_argument(f"--{name}", **settings, **RUN_OPTIONS[name])

    def _add_tiling(self, owner: str, tiling: Tiling, shared: set[str]) -> None:
        """Add the fields of one tiling; `shared` are the names that other tilings have too."""
        title = "tiling" if owner == "tiling" else f"tiling: {owner}"
        meaning = (inspect.getdoc(type(tiling)) or type(tiling).__name__).split("\n\n")[0]
        meaning = f"{_escaped(meaning)} On a GPU only together with --no_autotune."
        group = self.add_argument_group(title, meaning)
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
        off = {"const": False, "help": f"the same as --{flag}=false", **common}
        group.add_argument(f"--{before}{dot}no_{last}", action="store_const", **off)

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
            changes["lengths"] = arguments.read_lengths(changes["lengths"], **sizes)
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
    sizes = arguments.read_model(values)
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
    others = {"language", "target", "no_autotune", "prof_type"}
    known = plan_targets(plan)
    codes = [code for code in known if code in TARGETS]
    if "target" in values:
        codes = [code.strip() for code in values["target"].split(",") if code.strip()]
        for code in codes:
            if code not in known:
                raise UnknownNameError("target", code, known)
        if not codes:
            got = repr(values["target"])
            raise UsageError(f"--target: expected GPU codes such as {known[0]}, got {got}")
    return RunOptions(
        autotune=not values.get("no_autotune", False),
        targets=tuple(dict.fromkeys(codes)),
        **{name: values[name] for name in set(RUN_OPTIONS) - others if name in values},
    )
