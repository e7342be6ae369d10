"""The options that set the sizes of a problem, the same in every command that has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mla_var3.cli.values import MIXED, ValueType

SIZE_TEXTS = {
    "b": "requests in the batch",
    "s": "query tokens per request",
    "t": "KV slots per request",
    "h": "query heads",
    "d": "head dimension without rope",
    "p": "rope dimension",
    "k": "latent dimension",
}
CALL_SIZES = ("b", "s", "t", "h")
"""Sizes that differ from call to call; the others belong to the model."""

SIZES = {"b": 32, "s": 16, "t": 4096, "h": 128, "d": 128, "p": 64, "k": 512}
"""Their defaults, where a command has some."""


def add_sizes(parser: Any, texts: Mapping[str, str] = SIZE_TEXTS) -> None:
    """Add the seven sizes with their defaults.

    Args:
        parser: the parser or group.
        texts: what each of them is.
    """
    for name, default in SIZES.items():
        parser.add_argument(
            f"--{name}",
            type=ValueType(int),
            default=default,
            metavar="N",
            help=f"{texts[name]} (default: {default})",
        )


def add_unset_sizes(
    parser: Any, names: Iterable[str] = SIZE_TEXTS, note: str = "", **settings: Any
) -> None:
    """Add sizes whose defaults somebody else knows.

    Args:
        parser: the parser or group.
        names: which.
        note: what follows each text.
        settings: further ones of each argument.
    """
    common = {"type": ValueType(int), "metavar": "N", **settings}
    for name in names:
        parser.add_argument(f"--{name}", help=SIZE_TEXTS[name] + note, **common)


def add_lengths(parser: Any, note: str = " (default: all t)", **settings: Any) -> None:
    """Add the KV lengths.

    Args:
        parser: the parser or group.
        note: what follows the text.
        settings: further ones of the argument.
    """
    parser.add_argument(
        "--lengths",
        type=ValueType(int, optional=True, sequence=True, words=(MIXED,)),
        metavar="N,N,...",
        help=f"KV length per request: comma list or mixed{note}",
        **settings,
    )
