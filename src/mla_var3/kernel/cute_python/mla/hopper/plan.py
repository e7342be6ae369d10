"""What the plans of the CuTe DSL kernels for Hopper share: fixed sizes, target, SMs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.hopper.constants import DEFAULT_SM_COUNT, ROWS
from mla_var3.kernel.mla_plan import MlaPlan


@dataclass
class HopperPlan(MlaPlan):
    """A plan whose kernels are written for sm_90a and for some sizes only.

    A version names its `targets` itself, because lists of kernels read them without importing it.

    Attributes:
        made_for: sizes that the tiles are made for, by field.
    """

    made_for: ClassVar[Mapping[str, int]] = {}

    @property
    def sm_count(self) -> int:
        """SMs of the device that it is planned for."""
        return self.target.sm_count(DEFAULT_SM_COUNT)

    @property
    def row_tiles(self) -> int:
        """Tiles of 64 query rows per request."""
        return -(-self.s * self.h // ROWS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, wanted in self.made_for.items():
            if getattr(self, name) != wanted:
                raise InvalidArgumentError(
                    name, f"{wanted}, which the tiles are made for", getattr(self, name)
                )
