"""`hyper-mla plan`: how many tokens to keep decompressed in a memory budget, and what it gains.

With `--prefix` the question is another one: how to attend to first tokens that requests share.

The times are predictions, in the quantities of `op/mla/model/times.py`. Advice follows the steady
call time where it is known; a device on which no kernel was timed gets ideal times and no advice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mla_var3.cli import arguments
from mla_var3.cli.arguments import CALL_SIZES, Parser, ValueType, sizes_text
from mla_var3.cli.console import print_json, print_table, say, usage_errors
from mla_var3.conf.devices import DeviceSpec, device_spec
from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.hopper import constants
from mla_var3.op.mla.model import window_plan
from mla_var3.op.mla.model.designs import WINDOW_STEP, estimate
from mla_var3.op.mla.model.mix import MixModel
from mla_var3.op.mla.model.parameters import UNITS, MixParameters, mix_parameters
from mla_var3.op.mla.model.prefix_plan import COPIED, DECOMPRESSED, LATENT, PrefixPlan, plan_prefix
from mla_var3.op.mla.model.times import IDEAL, Estimate
from mla_var3.op.mla.model.window_plan import PlanPoint, WindowPlan, plan_curve, plan_window
from mla_var3.op.mla.prefix.problem import SharedPrefixProblem
from mla_var3.op.mla.problem import DTYPES, SIZE_NAMES, MlaProblem
from mla_var3.op.mla.window.formats import FP8, PLAIN, WindowForm
from mla_var3.runtime import markdown
from mla_var3.runtime.markdown import byte_count, microseconds
from mla_var3.runtime.paths import make_folder, output_root, timestamp, write_atomic
from mla_var3.runtime.workflow import planning_device

_WINDOW_DTYPES = (*DTYPES, FP8.name)
_MOST_ROWS = 12
_HEADERS = (
    "n", "window", "all layers", "SMs latent", "kernel time", "call time", "steady", "waits for",
    "energy", "",
)  # fmt: skip
_PARAMETER_HEADERS = ("parameter", "value", "origin", "source")
_PREDICTED = (
    "These are predictions, not measurements. Kernel and call time: in a burst; the call runs from "
    "q_nope to the output. Steady: call time at the power limit."
)
_WAITS = {
    "latent": "latent work",
    "heads": "decompressed work",
    "chip": "power",
    "memory": "memory",
    "together": "both at once",
}
_WAYS = {
    COPIED: "do not share the prefix",
    LATENT: "share the prefix in latent form",
    DECOMPRESSED: "share the prefix decompressed",
}


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    parser.add_problem()
    number = ValueType(int)
    text = (
        "memory for decompressed keys and values: bytes, or with a unit such as 4GiB; of one "
        "layer, or of all with --layers"
    )
    parser.add_option("budget", "AMOUNT", text, required=True)
    parser.add_option("layers", "N", "layers that share the budget", type=number, default=1)
    text = (
        "of the decompressed keys and values: bfloat16, float16, or fp8 (e4m3 with a scale per "
        "token and head, all else bfloat16)"
    )
    parser.add_option("dtype", "NAME", text, default="bfloat16")
    text = "fp8: the window in 8 bits, all else as --dtype (default: none, as --dtype)"
    parser.add_option("window_dtype", "NAME", text, type=ValueType(str, optional=True))
    parser.add_lengths()
    text = "plan for first tokens that requests share, not for a window"
    parser.add_option("prefix", "N", text, type=number)
    text = "groups of requests, each with a prefix of its own"
    parser.add_option("groups", "N", text, type=number, default=1)
    text = "device of the table to plan for (default: the GPU here, else an NVIDIA H200)"
    parser.add_option("for_device", "NAME", text, dest="device_name")
    text = "fitted parameters (default: those that ship for the device, else its table entry)"
    parser.add_option("parameters", "FILE", text, type=Path)
    parser.add_json()
    text = "folder of table and plots (default: out/plan/<timestamp>; none with --json)"
    parser.add_option("out_dir", "FOLDER", text, type=Path)


def _budget(text: str, spec: DeviceSpec) -> int:
    """The bytes that an option gives, at most the memory of the device."""
    budget = window_plan.parse_bytes(text)
    memory = int(spec["dram_GiB"] * 2**30) if "dram_GiB" in spec else budget
    if budget > memory:
        expected = f"at most {memory} bytes, the memory of {spec.name}"
        raise InvalidArgumentError("budget", expected, f"{budget} bytes")
    return budget


def plan_command(parser: Parser, argv: Sequence[str]) -> int:
    """Print the plan, and write it with its plots."""
    values = parser.parse(argv)
    layers, device = values["layers"], values["device_name"]
    with usage_errors():
        spec = planning_device() if device is None else device_spec(device)
    problem, form = _problem(values)
    budget = _budget(values["budget"], spec)
    if values["prefix"] is None and values["groups"] != 1:
        raise InvalidArgumentError("groups", "1 without --prefix", values["groups"])
    if values["prefix"] is not None:
        in_8_bits = "dtype" if values["dtype"] == FP8.name else "window_dtype"
        for name, used in ((in_8_bits, form is FP8), ("parameters", values["parameters"])):
            if used:
                raise InvalidArgumentError(name, "none of a window with --prefix", values[name])
        shared = SharedPrefixProblem(problem, values["prefix"], values["groups"])
        _show(plan_prefix(shared, spec, budget, layers), values["json"], values["out_dir"])
        return 0
    model = MixModel(mix_parameters(spec, problem.dtype, values["parameters"]), form)
    plan = plan_window(problem, model, budget, layers=layers, multiple=WINDOW_STEP)
    _show(plan, values["json"], values["out_dir"])
    return 0


def _show(plan: WindowPlan | PrefixPlan, as_json: bool, out_dir: Path | None) -> None:
    """Print a plan and write its files; as JSON write them only to a folder that was given."""
    if out_dir is None and not as_json:
        out_dir = output_root() / "plan" / timestamp()
    folder = None if out_dir is None else make_folder(out_dir)
    if as_json:
        print_json(plan.to_dict())
    elif isinstance(plan, PrefixPlan):
        _print_prefix(plan)
    else:
        _print(plan)
    for file in [] if folder is None else write_plan(plan, folder):
        if not as_json:
            say(f"written: {file}")


def _print_prefix(plan: PrefixPlan) -> None:
    shared, heading = plan.shared, "predicted" if plan.fitted else IDEAL
    groups = f" groups={shared.groups}" if shared.groups > 1 else ""
    title = f"{heading} for {plan.device}, {_sizes(shared.problem)} prefix={shared.prefix}{groups}"
    rows = []
    for way in plan.ways:
        kernel = f"{way.estimate.kernel}:{way.estimate.language}"
        copies = byte_count(way.copy_bytes) if way.copy_bytes else None
        remark = "" if plan.fits(way) else "over budget"
        if way is plan.chosen:
            remark = "chosen" if plan.fitted else "least"
        ratio = f"{plan.gain(way):.2f}x"
        rows.append((way.name, kernel, copies, *_times(way.estimate), ratio, remark))
    headers = ("prefix", "kernel", "copies", "kernel time", "call time", "steady", "gain", "")
    print_table(title, headers, rows)
    text = f"no advice: no kernel was timed on {plan.device}"
    if plan.fitted:
        time_us, gain = microseconds(plan.chosen.estimate.advised_us), plan.gain(plan.chosen)
        text = (
            f"{_WAYS[plan.chosen.name]}: {time_us} per layer, {gain:.2f}x as fast as with a copy "
        )
        text += "per request"
    say(text, "bold")
    say(_PREDICTED)


def write_plan(plan: WindowPlan | PrefixPlan, folder: Path) -> list[Path]:
    """Write the plan as JSON; of a window also a page and plots of time against n and memory."""
    from mla_var3.bench.plots import line_plot

    record, page = folder / "plan.json", folder / "plan.md"
    markdown.write_json(record, plan.to_dict())
    if isinstance(plan, PrefixPlan):
        return [record]
    axes: dict[str, tuple[str, Callable[[PlanPoint], float]]] = {
        "n": ("decompressed tokens per request, n", lambda point: point.n),
        "memory": (
            "decompressed keys and values of a layer, GiB",
            lambda point: point.window_bytes / 2**30,
        ),
    }
    title = f"{_heading(plan)}, {_sizes(plan.problem)}"
    labels: dict[str, Any] = {"title": title, "y_label": f"{_kind(plan)} call time of a layer, µs"}
    plots, curves = [], _curves(plan).items()
    for name, (label, x) in axes.items():
        series = {key: [(x(p), p.advised_us) for p in points] for key, points in curves}
        plots += line_plot(series, folder / f"time-against-{name}", x_label=label, **labels)
    write_atomic(page, _page(plan))
    return [record, page, *plots]


def summary(plan: WindowPlan) -> str:
    """The plan in one sentence."""
    chosen, best, none = plan.chosen, plan.unlimited, plan.curve[0]
    time_us, kind = microseconds(chosen.advised_us), _kind(plan)
    if not plan.fitted:
        return (
            f"no advice: no mix was timed on {plan.model.parameters.device} in "
            f"{plan.problem.dtype}; of the ideal times n={chosen.n} has the least, {time_us} per "
            "layer"
        )
    if chosen.n == 0:
        text = f"keep nothing decompressed: {time_us} {kind} call time per layer"
    else:
        window, gain = byte_count(chosen.window_bytes), none.advised_us / chosen.advised_us
        text = f"keep n={chosen.n} tokens per request decompressed, {window} per layer: {time_us} "
        text += f"{kind} call time per layer, {gain:.2f}x as fast as with none"
    if best.n > chosen.n:
        window, time_us = byte_count(best.window_bytes), microseconds(best.advised_us)
        text += f"; {window} per layer would allow n={best.n} and {time_us}"
    elif chosen.window_bytes < plan.layer_budget_bytes:
        text += "; more memory would not help"
    return text


def _heading(plan: WindowPlan) -> str:
    return f"{'predicted' if plan.fitted else IDEAL} for {plan.model.parameters.device}"


def _kind(plan: WindowPlan) -> str:
    """What the call times are that the advice goes by."""
    if not plan.fitted:
        return IDEAL
    return "burst" if plan.chosen.estimate.steady_call_us is None else "steady"


def _problem(values: dict[str, Any]) -> tuple[MlaProblem, WindowForm]:
    dtype, window_dtype = values["dtype"], values["window_dtype"]
    if dtype not in _WINDOW_DTYPES:
        raise InvalidArgumentError("dtype", " or ".join(_WINDOW_DTYPES), repr(dtype))
    if window_dtype not in (None, FP8.name):
        raise InvalidArgumentError("window_dtype", FP8.name, repr(window_dtype))
    form = FP8 if FP8.name in (dtype, window_dtype) else PLAIN
    arguments.read_problem(values)
    sizes = {name: values[name] for name in SIZE_NAMES if name in values}
    lengths = arguments.read_lengths(values["lengths"], values["b"], values["t"])
    dtype = DTYPES[0] if dtype == FP8.name else dtype
    return MlaProblem(**sizes, dtype=dtype, lengths=lengths), form


def _print(plan: WindowPlan) -> None:
    title = f"{_heading(plan)}, {_sizes(plan.problem)}, {_window(plan)}"
    print_table(title, _HEADERS, _rows(plan))
    say(summary(plan), "bold")
    if plan.layers > 1:
        say(
            f"all {plan.layers} layers: {byte_count(plan.chosen.window_bytes * plan.layers)}, "
            f"{microseconds(plan.chosen.advised_us * plan.layers)}"
        )
    say("")
    for text in (*arguments.width_notes(plan.problem), *_eight_bit_notes(plan)):
        say(text)
    print_table("parameters", _PARAMETER_HEADERS, _parameter_rows(plan))
    say(f"{_PREDICTED} {_trust(plan.model.parameters)}")


def _eight_bit_notes(plan: WindowPlan) -> list[str]:
    """What the latent kernel takes on an 8-bit cache, where it was timed; it reads no window."""
    from mla_var3.attention.request.shape import CallShape

    problem, spec = plan.problem, device_spec(plan.model.parameters.device)
    if (problem.k, problem.p) != (constants.LATENT, constants.ROPE):
        return []
    times = []
    for name in constants.FP8_FORMATS:
        sizes = {size: getattr(problem, size) for size in SIZE_NAMES}
        work = replace(CallShape(**sizes, cache_dtype=name).workload(), problem=problem)
        found = estimate("flash_mla", work, spec, "cute-dsl")
        if found is not None and found.fitted:
            times.append(f"{microseconds(found.call_us)} with {name}")
    text = f"8-bit latent cache without a window, flash_mla, burst call time: {', '.join(times)}"
    return [text] if times else []


def _page(plan: WindowPlan) -> str:
    parameters = plan.model.parameters
    head = {"kind": "plan", "predicted": True, "device": parameters.device}
    head |= {"fitted": parameters.fitted, "n": plan.chosen.n}
    sentence = summary(plan)
    parts = [
        markdown.front_matter(head),
        f"# Decompressed window, {_sizes(plan.problem)}\n",
        f"{parameters.device}, {_window(plan)}. {_PREDICTED}\n",
        f"{sentence[0].upper()}{sentence[1:]}.\n",
        markdown.table([*_HEADERS[:-1], "choice"], _rows(plan)),
        "![time against n](time-against-n.png)\n",
        "![time against memory](time-against-memory.png)\n",
        f"## Parameters\n\n{_trust(parameters)}\n",
        markdown.table(_PARAMETER_HEADERS, _parameter_rows(plan)),
    ]
    return "\n".join(parts)


def _rows(plan: WindowPlan) -> list[tuple[object, ...]]:
    """A readable number of windows, the chosen and the best one always among them."""
    keep = {0, plan.chosen.n, plan.unlimited.n, plan.curve[-1].n}
    step = math.ceil(len(plan.curve) / _MOST_ROWS)
    keep |= {point.n for point in plan.curve[::step]}
    rows: list[tuple[object, ...]] = []
    for point in (point for point in plan.curve if point.n in keep):
        window = byte_count(point.window_bytes)
        layers = byte_count(point.window_bytes * plan.layers) if plan.layers > 1 else None
        energy = None if point.joules is None else f"{markdown.number(point.joules)} J"
        remark = "over budget" if point.window_bytes > plan.layer_budget_bytes else ""
        remark = "best of all" if point.n == plan.unlimited.n else remark
        if point.n == plan.chosen.n:
            remark = "chosen" if plan.fitted else "least"
        times, waits = _times(point.estimate), _WAITS[point.bound]
        rows.append((point.n, window, layers, point.sms, *times, waits, energy, remark))
    return rows


def _times(found: Estimate) -> tuple[str, ...]:
    return tuple(map(microseconds, (found.kernel_us, found.call_us, found.steady_call_us)))


def _parameter_rows(plan: WindowPlan) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    for name, parameter in plan.model.parameters.parameters.items():
        value = f"{parameter.value:.4g} {UNITS[name]}".strip()
        if parameter.error is not None:
            value += f" ± {100 * parameter.error:.1f} %"
        rows.append((name, value, parameter.origin, parameter.source))
    return rows


def _trust(parameters: MixParameters) -> str:
    if parameters.fitted:
        names = [n for n, p in parameters.parameters.items() if p.origin == "fitted"]
        return f"Fitted to measured times: {', '.join(names)}."
    return (
        f"Times are {IDEAL}: no parameter was fitted to measured kernels, and no kernel has been "
        "shown to reach these times."
    )


def _curves(plan: WindowPlan) -> dict[str, list[PlanPoint]]:
    """The planned window, the same in the other format, and the chosen point."""
    other = PLAIN if plan.model.form is FP8 else FP8
    other_model = MixModel(plan.model.parameters, other)
    names = {PLAIN.name: plan.problem.dtype, FP8.name: FP8.name}
    return {
        names[plan.model.form.name]: list(plan.curve),
        names[other.name]: list(plan_curve(plan.problem, other_model, plan.multiple)),
        f"chosen, n={plan.chosen.n}": [plan.chosen],
    }


def _sizes(problem: MlaProblem) -> str:
    return sizes_text(problem, CALL_SIZES)


def _window(plan: WindowPlan) -> str:
    form = FP8.name if plan.model.form is FP8 else plan.problem.dtype
    share = "per layer" if plan.layers == 1 else f"for {plan.layers} layers"
    return f"window {form}, budget {byte_count(plan.budget_bytes)} {share}"
