"""Planted defects that show what the fuzzer finds: `--plant=wrong` or `--plant=hang`."""

import time
from typing import Any

import mla_var3

LONG = 50
"""Tokens from which on a planted defect shows."""


def plant(name: str) -> None:
    """Break `mla_attention` of this process for requests of more than `LONG` tokens."""
    right = mla_var3.mla_attention

    def broken(q: Any, q_rope: Any, cache: Any, *rest: Any, **options: Any) -> Any:
        output, lse = right(q, q_rope, cache, *rest, **options)
        lengths = options.get("lengths", getattr(cache, "lengths", None))
        if lengths is not None and int(lengths.max()) > LONG:
            if name == "hang":
                time.sleep(3600.0)
            output = output.mul_(1.2)
        return output, lse

    mla_var3.mla_attention = broken
