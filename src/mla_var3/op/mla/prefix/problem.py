"""Requests that share their first tokens: the problem and its costs.

The requests of a group start with the same `prefix` tokens, a system prompt for example. There are
two ways to read them once for all queries of the group:

- latent: one pass over the latent rows of the prefix for all these queries, another one over the
  own tokens of each request, merged by LSE;
- decompressed: keys and values of the prefix, `[h, prefix, d]`, are made once. That path needs
  fewer operations per pair but more bytes, so it pays with many queries. Own tokens stay latent.

A request may be shorter than the prefix; then it has the first of its tokens and none of its own.
Counting follows `op/mla/cost.py`: every pair of a query and a token of its request, each operand
once. Inputs and reference are in `op/mla/prefix/reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_mla_cost, mix_cost
from mla_var3.op.mla.problem import MlaProblem, require_int
from mla_var3.op.mla.window.formats import PLAIN, WindowForm

_FLOAT32 = 4
TOKEN_US = 0.025
"""Microseconds of a token and a query tile on an SM of an H200, about: 1.6 per KV block."""
OVERLAP_US = 120.0
"""Longest work of both latent passes for which they run at the same time. Work of 9 to 49 us gained
21 to 31 % (docs/results/2026-11-16-nvidia-h200-prefix.md), more was not measured. Longer passes
gain less, and lose more where the groups say other numbers than the device."""
LEAST_SMS = 12
"""Fewest SMs of a pass. Other numbers were not measured."""


@dataclass(frozen=True)
class SharedPrefixProblem:
    """An attention call whose requests share their first tokens.

    Attributes:
        problem: Sizes, dtype, mask and lengths; lengths and `t` count the prefix.
        prefix: Tokens that the requests of a group share, `0..t`.
        groups: Groups of about equal size, each with a prefix of its own.
    """

    problem: MlaProblem
    prefix: int
    groups: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.problem, MlaProblem):
            raise InvalidArgumentError("problem", "an MlaProblem", repr(self.problem))
        require_int("prefix", self.prefix, minimum=0, maximum=self.problem.t, maximum_name="t")
        require_int("groups", self.groups, minimum=1, maximum=self.problem.b, maximum_name="b")

    @property
    def prefix_pairs(self) -> int:
        """Tokens of the prefix summed over the requests that attend them."""
        return self.problem.tokens_up_to(self.prefix)

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefixes that any request attends, each once."""
        # Some groups may have no request that is as long, or none with a token.
        return min(self.longest_prefix * self.groups, self.prefix_pairs)

    @property
    def longest_prefix(self) -> int:
        """Tokens of its prefix that the longest request attends."""
        return min(self.prefix, self.problem.longest)

    @property
    def own_tokens(self) -> int:
        """Tokens after the prefix, over the batch."""
        return self.problem.total_tokens - self.prefix_pairs


def shared_prefix_attention_cost(shared: SharedPrefixProblem, form: WindowForm = PLAIN) -> Cost:
    """Attention over the decompressed prefix and the latent own tokens.

    Reads all three query forms, the prefix once for the batch and the latent rows of the own
    tokens; writes a latent and a decompressed partial output, each with its LSE. `form` is how keys
    and values of the prefix are stored.
    """
    pairs, once = shared.prefix_pairs, shared.prefix_tokens
    return mix_cost(shared.problem, shared.own_tokens, pairs, form, stored=once)


def latent_copied_cost(shared: SharedPrefixProblem) -> Cost:
    """All tokens latent, every request with its own copy of the prefix."""
    return flash_mla_cost(shared.problem)


def latent_shared_cost(shared: SharedPrefixProblem) -> Cost:
    """All tokens latent, the rows of the prefix read once for the group."""
    problem = shared.problem
    copied = flash_mla_cost(problem)
    saved = (shared.prefix_pairs - shared.prefix_tokens) * (problem.k + problem.p)
    return Cost(copied.flops, copied.bytes - saved * problem.element_size)


def latent_shared_passes(shared: SharedPrefixProblem) -> tuple[MlaProblem, MlaProblem, Cost]:
    """Latent sharing in passes: over own tokens, over prefixes, and the merge of both.

    A group is one request of the second pass, with the queries of all its members.
    """
    problem, prefix = shared.problem, shared.prefix
    own = tuple(length - min(prefix, length) for length in problem.kv_lengths)
    queries = -(-problem.b * problem.s // shared.groups)
    of_groups = replace(
        problem, b=shared.groups, s=queries, t=max(prefix, 1), causal=False,
        lengths=(shared.longest_prefix,) * shared.groups,
    )  # fmt: skip
    rows = problem.b * problem.s * problem.h
    merge = Cost(4 * rows * problem.k, 3 * rows * (problem.k * problem.element_size + _FLOAT32))
    return replace(problem, lengths=own), of_groups, merge


def overlap_sms(shared: float, own: float, sms: int) -> int:
    """SMs of the latent pass over shared tokens beside the one over own tokens, by their work.

    The work of a pass is its tokens times its query tiles. 0 where one pass runs after the other.
    """
    if not 0 < (shared + own) * TOKEN_US / sms <= OVERLAP_US:
        return 0
    chosen = round(sms * shared / (shared + own))
    return chosen if min(chosen, sms - chosen) >= LEAST_SMS else 0
