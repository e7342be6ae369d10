"""Shared by the tests of the operation."""

from mla_var3.op.mla.inputs import MlaInputs
from mla_var3.op.mla.problem import MlaProblem


def wide(inputs: MlaInputs) -> MlaInputs:
    """The same values in float64, in which the projections do not round."""
    return MlaInputs(
        **{name: x if name == "lengths" else x.double() for name, x in vars(inputs).items()}
    )


def visible(problem: MlaProblem, request: int, query: int) -> int:
    """How many KV positions, counted from 0, a query attends."""
    length = problem.kv_lengths[request]
    return len(range(min(length, length - problem.s + query + 1) if problem.causal else length))
