"""`hyper-mla choose`: which kernel the public call uses for a problem, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from mla_var3.cli.arguments import SIZE_TEXTS, SIZES, Parser, ValueType, add_sizes, parse
from mla_var3.cli.console import say, stdout, usage_errors
from mla_var3.op.mla.model.times import IDEAL
from mla_var3.runtime.markdown import json_ready, microseconds

if TYPE_CHECKING:
    from mla_var3.attention.select.choice import Candidate, Explanation

_COUNTS = {
    "window": "newest tokens that the cache keeps decompressed",
    "prefix": "first tokens that requests share, for one group decompressed as well",
}
_FLAGS = {
    "ragged": "requests have different numbers of queries",
    "tree": "the newest tokens form a tree",
    "latent_only": "the caller does the projections",
}


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    add_sizes(parser, {**SIZE_TEXTS, "s": "query tokens per request, the most of any"})
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        metavar="NAME",
        help="bfloat16, float16 or float32 (default: bfloat16)",
    )
    parser.add_argument(
        "--causal",
        type=ValueType(bool),
        default=True,
        metavar="true|false",
        help="mask later tokens (default: true)",
    )
    parser.add_argument(
        "--page_size",
        type=ValueType(int, optional=True),
        metavar="N",
        help="tokens per page (default: none, a dense cache)",
    )
    for name, text in _COUNTS.items():
        parser.add_argument(
            f"--{name}", type=ValueType(int), default=0, metavar="N", help=f"{text} (default: 0)"
        )
    parser.add_argument(
        "--groups",
        type=ValueType(int),
        default=1,
        metavar="N",
        help="groups of requests, each with a prefix of its own (default: 1)",
    )
    for name, text in _FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument(
        "--kernel", default="auto", metavar="NAME", help="a kernel to insist on (default: auto)"
    )
    parser.add_for_device(
        "device of the table to choose for (default: the GPU here, else an NVIDIA H200)",
        "device_name",
        "device_name",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def choose_command(parser: Parser, argv: Sequence[str]) -> int:
    """Print the choice and the candidates."""
    values = parse(parser, argv)
    as_json = values.pop("json")
    from mla_var3.attention.call import explain

    if values["groups"] != 1:  # only a prefix of all requests can be kept decompressed
        values["shared"] = values.pop("prefix")
    with usage_errors():
        explanation = explain(**values)
    if as_json:
        print(json.dumps(json_ready(explanation.to_dict()), indent=2))
    else:
        _print(explanation)
    return 0


def _print(explanation: Explanation) -> None:
    shape = explanation.shape
    sizes = " ".join(f"{name}={getattr(shape, name)}" for name in SIZES)
    able = [candidate for candidate in explanation.candidates if candidate.estimate is not None]
    fitted = all(candidate.fitted for candidate in able)
    call = "call time" if fitted else f"call time ({IDEAL})"
    columns = ["kernel time", call, "steady", "measured", "choice"]
    if not any(candidate.measured for candidate in able):
        columns.remove("measured")
    table = Table(title=f"{sizes} {shape.dtype} on {explanation.device}", title_justify="left")
    table.add_column("kernel", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="left" if title == "choice" else "right")
    for index, candidate in enumerate(able):
        found = candidate.estimate
        cells = {
            "kernel time": _time(None if found is None else found.kernel_us),
            call: _time(candidate.predicted_us),
            "steady": _time(candidate.steady_us),
            "measured": _time(candidate.measured_us),
            "choice": " ".join(f"{name}={value}" for name, value in candidate.choice.items()),
        }
        best = index == 0 and candidate is explanation.candidates[0]
        table.add_row(
            f"{candidate.kernel}:{candidate.language}" + (" *" if best else ""),
            *(cells[title] for title in columns),
            style="bold" if best else "",
        )
    stdout().print(table)
    say(f"* {explanation.kernel}:{explanation.language}: {explanation.reason}")
    for text in _notes(explanation, able):
        say(text)


def _notes(explanation: Explanation, able: Sequence[Candidate]) -> list[str]:
    """What the times include and rest on, and why other kernels are not in the table."""
    notes = ["call time: from q_nope to the output; steady: call time at the power limit"]
    added: dict[str, list[str]] = {}
    sources: dict[str, None] = {}
    for candidate in able:
        if candidate.estimate is not None:
            parts = ", ".join(candidate.estimate.around) or "nothing"
            added.setdefault(parts, []).append(f"{candidate.kernel}:{candidate.language}")
            sources[candidate.estimate.basis] = None
    notes += _gains(able)
    notes += [f"adds {parts}: {', '.join(names)}" for parts, names in added.items()]
    notes += [f"times: {source}" for source in sources]
    notes += [
        f"measured: {candidate.kernel}, {candidate.measured.source}"
        for candidate in able
        if candidate.measured is not None
    ]
    for candidate in explanation.candidates:
        name = f"{candidate.kernel}:{candidate.language}"
        if candidate.refusal:
            notes.append(f"{name} does not support {candidate.refusal}")
        elif candidate.missing:
            notes.append(f"{name}: {candidate.missing}")
        elif candidate.estimate is None:
            notes.append(f"{name} serves every call; it was not timed")
    return notes


def _gains(able: Sequence[Candidate]) -> list[str]:
    """What reading a shared prefix once gains over the best kernel that does not."""
    sharing = [candidate for candidate in able if "prefix" in candidate.choice]
    others = [candidate.advised_us for candidate in able if candidate not in sharing]
    if not sharing or not others or not all(candidate.fitted for candidate in sharing):
        return []
    gains = (f"{each.kernel} {min(others) / each.advised_us:.2f}x" for each in sharing)
    return [f"sharing the prefix: {', '.join(gains)} as fast as the best kernel without it"]


def _time(time_us: float | None) -> str:
    return "-" if time_us is None else microseconds(time_us)
