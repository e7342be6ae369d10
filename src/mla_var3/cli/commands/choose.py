"""`hyper-mla choose`: which kernel the public call uses for a problem, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from mla_var3.cli.arguments import SIZE_TEXTS, SIZES, Parser, ValueType, add_sizes, parse
from mla_var3.cli.console import say, stdout, usage_errors
from mla_var3.runtime.markdown import json_ready, microseconds

if TYPE_CHECKING:
    from mla_var3.attention.select.choice import Candidate, Explanation

_COUNTS = {
    "window": "newest tokens that the cache keeps decompressed",
    "prefix": "shared first tokens that the cache keeps decompressed",
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
    table = Table(title=f"{sizes} {shape.dtype} on {explanation.device}", title_justify="left")
    for title in ("kernel", "language", "predicted", "measured", "choice", "remark"):
        table.add_column(title, justify="right" if title.endswith("ed") else "left")
    for index, candidate in enumerate(explanation.candidates):
        table.add_row(
            candidate.kernel + (" *" if index == 0 else ""),
            candidate.language,
            _time(candidate.predicted_us),
            _time(candidate.measured_us),
            " ".join(f"{name}={value}" for name, value in candidate.choice.items()),
            _remark(candidate),
            style="bold" if index == 0 else "dim" if candidate.refusal else "",
        )
    stdout().print(table)
    say(f"* {explanation.kernel} ({explanation.language}): {explanation.reason}")
    if not explanation.measured:
        say("Times are predictions of the cost model for the whole call, not measurements.")


def _time(time_us: float | None) -> str:
    return "-" if time_us is None else microseconds(time_us)


def _remark(candidate: Candidate) -> str:
    if candidate.refusal:
        return f"does not support {candidate.refusal}"
    remarks = [text for text in (candidate.missing, candidate.source) if text]
    if candidate.predicted_us is None:
        remarks.append("serves what no kernel serves; the model knows nothing of it")
    return "; ".join(remarks)
