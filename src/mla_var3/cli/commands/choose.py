"""`hyper-mla choose`: which kernel the public call uses for a problem, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_var3.cli.arguments import Parser, ValueType, read_problem, sizes_text
from mla_var3.cli.console import print_json, print_table, say, usage_errors
from mla_var3.runtime.markdown import microseconds

if TYPE_CHECKING:
    from mla_var3.attention.select.choice import Candidate, Explanation

_COUNTS = {
    "window": ("newest tokens that the cache keeps decompressed", 0),
    "prefix": ("first tokens that requests share, for one group decompressed as well", 0),
    "groups": ("groups of requests, each with a prefix of its own", 1),
}
_FLAGS = {
    "ragged": "requests have different numbers of query tokens, at most s",
    "tree": "the newest tokens form a tree",
    "latent_only": "the caller does the projections",
}


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    parser.add_problem()
    parser.add_option("dtype", "NAME", "bfloat16, float16 or float32", default="bfloat16")
    text = "fp8_per_token, fp8_ds_mla or fp8, an 8-bit cache (default: none, as --dtype)"
    parser.add_option("cache_dtype", "NAME", text, type=ValueType(str, optional=True))
    parser.add_option(
        "causal", "true|false", "mask later tokens", type=ValueType(bool), default=True
    )
    text = "tokens per page (default: none, a dense cache)"
    parser.add_option("page_size", "N", text, type=ValueType(int, optional=True))
    text = "newest tokens, up to itself, that a query sees (default: none, all tokens)"
    parser.add_option("sliding_window", "N", text, type=ValueType(int, optional=True))
    text = "fp8, a window in 8 bits (default: none, as --dtype)"
    parser.add_option("window_dtype", "NAME", text, type=ValueType(str, optional=True))
    for name, (text, default) in _COUNTS.items():
        parser.add_option(name, "N", text, type=ValueType(int), default=default)
    for name, text in _FLAGS.items():
        parser.add_flag(name, text)
    parser.add_option("kernel", "NAME", "a kernel to insist on", default="auto")
    text = "device of the table to choose for (default: the GPU here, else an NVIDIA H200)"
    parser.add_option("for_device", "NAME", text, dest="device_name")
    parser.add_json()


def choose_command(parser: Parser, argv: Sequence[str]) -> int:
    """Print the choice and the candidates."""
    values = parser.parse(argv)
    as_json = values.pop("json")
    read_problem(values)
    from mla_var3.attention.call import explain

    if values["groups"] != 1:  # only a prefix of all requests can be kept decompressed
        values["shared"] = values.pop("prefix")
    with usage_errors():
        explanation = explain(**values)
    if as_json:
        print_json(explanation.to_dict())
    else:
        _print(explanation)
    return 0


def _print(explanation: Explanation) -> None:
    shape = explanation.shape
    cache = "" if shape.cache_dtype is None else f", {shape.cache_dtype} cache"
    window = "" if shape.window_dtype is None else f", {shape.window_dtype} window"
    title = f"{sizes_text(shape)} {shape.dtype}{cache}{window} on {explanation.device}"
    able = [candidate for candidate in explanation.candidates if candidate.estimate is not None]
    first = explanation.candidates[0]
    if first.estimate is not None and not first.fitted:
        title += f", {first.estimate.basis}"
    rows = []
    for each in able:
        kernel_us = None if each.estimate is None else each.estimate.kernel_us
        times = (kernel_us, each.predicted_us, each.steady_us, each.measured_us)
        choice = " ".join(f"{name}={value}" for name, value in each.choice.items())
        rows.append((_name(each) + " *" * (each is first), *map(microseconds, times), choice))
    headers = ("kernel", "kernel time", "call time", "steady", "measured", "choice")
    print_table(title, headers, rows, best=0 if able and able[0] is first else None)
    say(f"* {explanation.kernel}:{explanation.language}: {explanation.reason}")
    for text in _notes(explanation, able):
        say(text)


def _name(candidate: Candidate) -> str:
    return f"{candidate.kernel}:{candidate.language}"


def _notes(explanation: Explanation, able: Sequence[Candidate]) -> list[str]:
    """What the times include and rest on, and why other kernels are not in the table."""
    notes = ["call time: from q_nope to the output; steady: call time at the power limit"]
    added, sources, refused = (defaultdict[str, list[str]](list) for _ in range(3))
    for candidate in able:
        if candidate.estimate is not None:
            added[", ".join(candidate.estimate.around) or "nothing"].append(_name(candidate))
            sources[candidate.estimate.basis].append(_name(candidate))
    notes += _gains(able)
    notes += [f"adds {parts}: {', '.join(names)}" for parts, names in added.items()]
    for source, names in sources.items():
        of = f" of {', '.join(names)}" if len(sources) > 1 else ""
        notes.append(f"times{of}: {source}")
    notes += [f"measured: {c.kernel}, {c.measured.source}" for c in able if c.measured]
    for candidate in explanation.candidates:
        if candidate.refusal:
            refused[candidate.refusal].append(_name(candidate))
        elif candidate.missing:
            notes.append(f"{_name(candidate)}: {candidate.missing}")
        elif candidate.estimate is None:
            notes.append(f"{_name(candidate)} serves every call; it was not timed")
    for reason, names in refused.items():
        verb = "does" if len(names) == 1 else "do"
        notes.append(f"{', '.join(names)} {verb} not support {reason}")
    return notes


def _gains(able: Sequence[Candidate]) -> list[str]:
    """What reading a shared prefix once gains over the best kernel that does not."""
    sharing = [candidate for candidate in able if "prefix" in candidate.choice]
    others = [candidate.advised_us for candidate in able if candidate not in sharing]
    if not sharing or not others or not all(candidate.fitted for candidate in sharing):
        return []
    gains = (f"{each.kernel} {min(others) / each.advised_us:.2f}x" for each in sharing)
    return [f"sharing the prefix: {', '.join(gains)} as fast as the best kernel without it"]
