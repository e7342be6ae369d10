"""The launch that repeats a call over shared prefixes: its steps, each with the same pointers.

A call is several launches: the layout of groups, gathered queries, the passes and their merge. A
replay brings one list of pointers, named after the call's tensors and the workspace. Each step
knows which of them are its operands, under its own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_var3.attention.backends.latent import Launch, StreamLaunch

Operands = Mapping[str, str]
"""The step's operand of each pointer that it takes, by the pointer's name."""

LAYOUT_INPUTS = {
    name: name for name in ("prefix_of", "prefix_length", "lengths", "cu_seqlens_q", "block_table")
}
_CACHE = {name: name for name in ("latent", "rope", "scales")}
OWN_PASS = {
    **_CACHE,
    **{name: name for name in ("q_latent", "q_rope", "cu_seqlens_q", "tree", "o_latent", "lse")},
    "own_table": "block_table",
    "own_lengths": "lengths",
}
MERGE = {
    "o_latent": "o",
    "lse": "lse",
    **{f"{name}_{level}": f"{name}_{level}" for name in ("o", "lse", "places") for level in (0, 1)},
}


def gather_operands(level: int) -> Operands:
    """Operands of the gathered queries of a level."""
    return {
        "q_latent": "q_latent",
        "q_rope": "q_rope",
        f"order_{level}": "order",
        f"bounds_{level}": "bounds",
        f"q_latent_{level}": "packed_latent",
        f"q_rope_{level}": "packed_rope",
    }


def pass_operands(level: int, gathered: bool) -> Operands:
    """Operands of the pass over a level; `gathered` for queries that were copied."""
    queries = f"_{level}" if gathered else ""
    return {
        **_CACHE,
        f"q_latent{queries}": "q_latent",
        f"q_rope{queries}": "q_rope",
        f"table_{level}": "block_table",
        f"lengths_{level}": "lengths",
        f"bounds_{level}": "cu_seqlens_q",
        f"o_{level}": "o_latent",
        f"lse_{level}": "lse",
    }


@dataclass
class PrefixSteps:
    """The steps of a call, as it goes.

    Attributes:
        steps: launches with their operands; one without a launch makes the call unrepeatable.
        workspace: bytes of what the steps write for each other, by name.
        constants: tensors that belong to the call shape, by name.
    """

    steps: list[tuple[Any, Operands]] = field(default_factory=list)
    workspace: dict[str, int] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, launch: Any, operands: Operands) -> None:
        """Add a step."""
        self.steps.append((launch, operands))

    def keep(self, **tensors: torch.Tensor) -> None:
        """Name tensors that one step writes for another."""
        for name, tensor in tensors.items():
            self.workspace[name] = tensor.numel() * tensor.element_size()

    def launch(self) -> PrefixLaunch | None:
        """What repeats the call; None where a step cannot be repeated."""
        if any(launch is None for launch, _ in self.steps):
            return None
        return PrefixLaunch(self)


class PrefixLaunch:
    """Repeats a call over shared prefixes; see `Launch`."""

    def __init__(self, steps: PrefixSteps) -> None:
        """Keep the steps of a first call."""
        self.workspace: Mapping[str, int] = steps.workspace
        self._steps, self._constants = steps.steps, steps.constants
        latent = [launch for launch, operands in steps.steps if operands is OWN_PASS]
        self._attention: Launch = latent[0]

    def stream(self) -> int | None:
        """The stream that it would launch on now; None when it cannot launch now."""
        return self._attention.stream()

    def bind(self, names: Sequence[str], fixed: Mapping[str, int]) -> tuple[StreamLaunch, Any]:
        """The launch on the current stream."""
        kept = {name: tensor.data_ptr() for name, tensor in self._constants.items()}
        kept |= fixed
        launches, owners = [], []
        for step, operands in self._steps:
            taken = [operands.get(name, "") for name in names]
            own = {operands[name]: pointer for name, pointer in kept.items() if name in operands}
            launch, owner = step.bind(taken, own)
            launches.append(launch)
            owners.append(owner)

        def launch_all(pointers: Sequence[int]) -> bool:
            return all(launch(pointers) for launch in launches)

        return launch_all, (owners, self._constants)
