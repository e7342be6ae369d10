"""Requests that share their first tokens: the problem and its costs.

All requests of a batch start with the same `prefix` tokens, a system prompt for example. Keys and
values of the prefix are decompressed once, `[h, prefix, d]`, and serve every request: their bytes
are read once for `b * s` queries per head, so the path with few operations per pair costs almost no
bytes there. The tokens after the prefix are each request's own and stay latent.

A request may be shorter than the prefix; then it has the first of its tokens and none of its own.
Counting follows `op/mla/cost.py`: every pair of a query and a token of its request, each operand
once. Inputs and reference are in `op/mla/prefix/reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.op.mla.problem import MlaProblem, require_int
from mla_var3.op.mla.window.formats import PLAIN, WindowForm

_FLOAT32 = 4


@dataclass(frozen=True)
class SharedPrefixProblem:
    """An attention call whose requests share their first tokens.

    Attributes:
        problem: Sizes, dtype, mask and lengths; lengths and `t` count the prefix.
        prefix: Tokens that all requests share, `0..t`.
    """

    problem: MlaProblem
    prefix: int

    def __post_init__(self) -> None:
        """Checks both fields."""
        if not isinstance(self.problem, MlaProblem):
            raise InvalidArgumentError("problem", "an MlaProblem", repr(self.problem))
        require_int("prefix", self.prefix, minimum=0, maximum=self.problem.t, maximum_name="t")

    @property
    def prefix_pairs(self) -> int:
        """Tokens of the prefix summed over the requests that attend them."""
        return sum(min(self.prefix, length) for length in self.problem.kv_lengths)

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix that any request attends, each once."""
        return max(min(self.prefix, length) for length in self.problem.kv_lengths)

    @property
    def own_tokens(self) -> int:
        """Tokens after the prefix, over the batch."""
        return self.problem.total_tokens - self.prefix_pairs


def shared_prefix_attention_cost(shared: SharedPrefixProblem, form: WindowForm = PLAIN) -> Cost:
    """Attention over the decompressed prefix and the latent own tokens.

    Reads all three query forms, the prefix once for the batch and the latent rows of the own
    tokens; writes a latent and a decompressed partial output, each with its LSE.

    Args:
        shared: The problem.
        form: How keys and values of the prefix are stored.
    """
    problem = shared.problem
    d, p, k, v = problem.d, problem.p, problem.k, problem.v
    rows = problem.b * problem.s * problem.h
    per_pair = 2 * problem.h * problem.s
    flops = per_pair * (shared.prefix_pairs * (d + p + v) + shared.own_tokens * (2 * k + p))
    elements = rows * (d + k + p) + shared.own_tokens * (k + p) + rows * (k + v)
    prefix = shared.prefix_tokens * form.token_bytes(problem)
    return Cost(flops, elements * problem.element_size + prefix + 2 * rows * _FLOAT32)


def absorbed_copied_cost(shared: SharedPrefixProblem) -> Cost:
    """All tokens latent, every request with its own copy of the prefix."""
    return flash_mla_cost(shared.problem)


def absorbed_shared_cost(shared: SharedPrefixProblem) -> Cost:
    """All tokens latent, the rows of the prefix read once for the batch."""
    problem = shared.problem
    copied = flash_mla_cost(problem)
    saved = (shared.prefix_pairs - shared.prefix_tokens) * (problem.k + problem.p)
    return Cost(copied.flops, copied.bytes - saved * problem.element_size)
