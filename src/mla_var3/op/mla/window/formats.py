"""How decompressed keys and values are stored, and the bytes each form takes."""

from __future__ import annotations

from dataclasses import dataclass

from mla_var3.errors import UnknownNameError
from mla_var3.op.mla.problem import MlaProblem

_FLOAT32 = 4


@dataclass(frozen=True)
class WindowForm:
    """How a decompressed token is stored; its rope part always has the problem's dtype.

    Attributes:
        name: "plain" or "fp8".
        element_bytes: Bytes of one element of a key or value; None: as the problem's dtype.
        scale_bytes: Bytes of the scale that each key and each value has per head; 0 for none.
        effort: Kernel time per counted operation, relative to the problem's dtype: scaling and
            rounding take time but are not counted.
        description: The form in words.
    """

    name: str
    element_bytes: int | None
    scale_bytes: int
    effort: float
    description: str

    def token_bytes(self, problem: MlaProblem) -> int:
        """Bytes of the keys and values of all heads and of the rope part of one token."""
        return self.row_bytes(problem.h, problem.d, problem.v, problem.p, problem.element_size)

    def row_bytes(self, h: int, d: int, v: int, p: int, element_size: int) -> int:
        """The same by the sizes of a token; the rope part has elements of `element_size`."""
        element = element_size if self.element_bytes is None else self.element_bytes
        return h * ((d + v) * element + 2 * self.scale_bytes) + p * element_size


PLAIN = WindowForm("plain", None, 0, 1.0, "in the dtype of the problem")
# Effort: 1251 us at b=32 s=64 t=4096 h=128 on an H200, 549 TFLOP/s where the model has 740. See
# docs/results/2026-11-15-nvidia-h200-mix-development.md.
FP8 = WindowForm("fp8", 1, _FLOAT32, 1.35, "e4m3 with a float32 scale per token and head")
FORMS = {form.name: form for form in (PLAIN, FP8)}


def window_form(name: str) -> WindowForm:
    """The form of a name.

    Raises:
        UnknownNameError: There is no such form.
    """
    try:
        return FORMS[name]
    except KeyError:
        raise UnknownNameError("window form", name, FORMS) from None
