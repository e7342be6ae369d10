"""Burst time of the mix's attention when latent and decompressed work have SMs of their own.

A roofline lets both kinds of work run at the full rate of the device at once. Here `split` SMs do
the latent work of the old tokens and the others stream the decompressed window of the `n` newest,
so each kind has the rate of its SMs only:

- latent: the larger of its FLOPs over the rate of its SMs and its bytes over their bandwidth;
- decompressed: the same with the other SMs; with few queries it is limited by bandwidth, which does
  not grow evenly with the SMs (`MixParameters.bandwidth_gbps`);
- both: no faster than all FLOPs at the rate of the whole chip, and all bytes at that of the memory;
- at once: no faster than `together` of both kinds one after the other, each on all SMs, because
  they share power and memory bandwidth. The loads of the latent work wait behind the stream, so it
  is slower while many SMs stream (`MixParameters.lost_to_stream`).

The longest of these is the time of the attention. Outside the model: work tiles that do not fill
their SMs evenly, and queries hidden by the mask, which count as in the cost model.

The ends are the pure paths: `n = 0` is flash_mla with both projections, and a window that holds
every token is flash_attention with none. To compare them, projections and the merge count at the
rates of the whole chip; `op/mla/model/designs.py` has what they really take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from mla_var3.conf.kernel_rates import energy_rates
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.cost import NOTHING, Cost
from mla_var3.op.mla.cost import (
    decompress_combine_cost,
    decompressed_bytes,
    flash_attention_cost,
    flash_mla_cost,
    output_up_projection_cost,
    query_projection_cost,
)
from mla_var3.op.mla.model.parameters import MixParameters
from mla_var3.op.mla.model.times import power_limit_us
from mla_var3.op.mla.problem import MlaProblem, require_int
from mla_var3.op.mla.window.formats import PLAIN, WindowForm

MixBound = Literal["latent", "heads", "chip", "memory", "together"]
"""What the attention may wait for, by the fields of `MixTime`."""

WORTH_MIXING = 0.08
"""The share that a mix must gain over the better pure path before a plan mixes. It is the model's
error on single rows: with less, mixes that are slower than a pure path would be chosen."""
# Windows looked at before the search narrows to the neighbourhood of the best of them.
_SEARCH_POINTS = 64


@dataclass(frozen=True)
class MixWork:
    """What has to be done for one `n`.

    Attributes:
        latent: Attention of the old tokens in the latent space.
        heads: Attention of the window on decompressed keys and values.
        others: The kernels around the attention: projections, merge.
        effort: What an operation on the window takes of a kernel's time, see `WindowForm`.
    """

    latent: Cost
    heads: Cost
    others: tuple[Cost, ...]
    effort: float = 1.0

    @cached_property
    def heads_effort(self) -> Cost:
        """The work on the window as the kernel's time counts it."""
        return replace(self.heads, flops=self.effort * self.heads.flops)

    @cached_property
    def flops(self) -> float:
        """Operations of the attention as time counts them."""
        return self.latent.flops + self.heads_effort.flops


@dataclass(frozen=True)
class MixTime:
    """Predicted time of one choice of `n` and split, in microseconds.

    Attributes:
        n: Decompressed tokens per request.
        split: SMs of the latent work; the others do the decompressed work.
        latent_us: The latent work on its SMs, slowed by the stream of the others.
        heads_us: The decompressed work on its SMs.
        chip_us: All FLOPs at the rate of the whole chip.
        memory_us: All bytes at the bandwidth of the memory.
        together_us: What both kinds need at least when they run at once.
        attention_us: The attention: the longest of these, and the launch.
        others_us: Projections and merge, with their launches.
    """

    n: int
    split: int
    latent_us: float
    heads_us: float
    chip_us: float
    memory_us: float
    together_us: float
    attention_us: float
    others_us: float

    @property
    def total_us(self) -> float:
        """From `q_nope` to `o`."""
        return self.attention_us + self.others_us

    @property
    def bound(self) -> MixBound:
        """What the attention waits for."""
        longest: MixBound = max(get_args(MixBound), key=lambda part: getattr(self, f"{part}_us"))
        return longest


def mix_work(problem: MlaProblem, n: int, form: WindowForm = PLAIN) -> MixWork:
    """The work of one `n`; each kind reads its own queries and writes its own partial output."""
    new = problem.tokens_up_to(n)
    if n == 0:
        others = (query_projection_cost(problem), output_up_projection_cost(problem))
        return MixWork(flash_mla_cost(problem), NOTHING, others)
    heads = flash_attention_cost(problem, new)
    smaller = PLAIN.token_bytes(problem) - form.token_bytes(problem)
    heads = Cost(heads.flops, heads.bytes - new * smaller)
    if n >= problem.longest:
        return MixWork(NOTHING, heads, (), form.effort)
    latent = flash_mla_cost(problem, tokens=problem.total_tokens - new)
    others = (query_projection_cost(problem), decompress_combine_cost(problem))
    return MixWork(latent, heads, others, form.effort)


def part_times_us(
    parameters: MixParameters, work: MixWork, split: int
) -> tuple[float, float, float, float, float]:
    """Times of the latent and the decompressed work, limits of chip, memory and both at once.

    The latent work has `split` SMs. A kind that has work and no SM takes infinitely long.
    """
    moved = work.latent.bytes + work.heads.bytes
    sms, rest = parameters.sm_count, parameters.sm_count - split
    latent, heads = _alone_us(parameters, work, split, rest)
    one_by_one = 0.0
    if work.latent != NOTHING and work.heads != NOTHING:
        if parameters.together.value:
            one_by_one = sum(_alone_us(parameters, work, sms, sms))
        lost = parameters.lost_to_stream(rest)
        if 0.0 < lost < 1.0:
            # The rate is lower only until the stream has ended.
            latent += lost * min(heads, latent / (1.0 - lost))
    return (
        latent,
        heads,
        work.flops / (parameters.chip_tflops.value * 1e6),
        moved / (parameters.stream_gbps.value * 1e3),
        parameters.together.value * one_by_one,
    )


@dataclass(frozen=True)
class MixModel:
    """The model of one device, by its rates, and of one form of the window."""

    parameters: MixParameters
    form: WindowForm = PLAIN

    def time_us(self, problem: MlaProblem, n: int, split: int) -> MixTime:
        """The time of n decompressed tokens per request, with 0 to all SMs for the latent work."""
        most = self.parameters.sm_count
        require_int("split", split, minimum=0, maximum=most, maximum_name="sm_count")
        return self._time(self._work(problem, n), n, split)

    def best_split(self, problem: MlaProblem, n: int) -> int:
        """The SMs that the latent work should get for one `n`."""
        return self.split_of(self._work(problem, n))

    def split_of(self, work: MixWork) -> int:
        """The SMs that the latent part of some work should get: all or none if it is alone."""
        sms = self.parameters.sm_count
        if work.heads == NOTHING:
            return sms
        if work.latent == NOTHING:
            return 0
        # More SMs make the latent work shorter and the other longer: look for the crossing.
        low, high = 1, sms - 1
        while low < high:
            middle = (low + high) // 2
            latent, heads, *_ = part_times_us(self.parameters, work, middle)
            if latent <= heads:
                high = middle
            else:
                low = middle + 1
        before = max(1, low - 1)
        return min((low, before), key=lambda g: max(part_times_us(self.parameters, work, g)))

    def at(self, problem: MlaProblem, n: int) -> MixTime:
        """The time of one `n` at its best split."""
        work = self._work(problem, n)
        return self._time(work, n, self.split_of(work))

    def best_n(self, problem: MlaProblem, max_bytes: int | None = None, multiple: int = 1) -> int:
        """The window of least time within `max_bytes`: some multiple, or the whole cache.

        The ends count as the pure paths that they are.
        """
        require_int("multiple", multiple, minimum=1)
        candidates = self.candidates(problem, max_bytes, multiple)
        return fastest_window(candidates, lambda n: self.at(problem, n).total_us)

    def joules(self, problem: MlaProblem, n: int) -> float | None:
        """Energy of the attention; None where the energy of work on the device is unknown."""
        rates = energy_rates(self.parameters.device)
        if rates is None:
            return None
        work = mix_work(problem, n, self.form)
        moved = work.latent.bytes + work.heads.bytes
        return rates.joules(work.latent.flops, work.heads.flops, moved)

    def steady_us(self, problem: MlaProblem, n: int) -> float:
        """Time of one `n` that is repeated without a pause, from `q_nope` to `o`.

        It is that of `at`, or what the energy of the attention takes at the power limit.
        """
        found, work = self.at(problem, n), mix_work(problem, n, self.form)
        device, others_us = self.parameters.device, found.others_us
        limit_us = power_limit_us(device, work.latent, work.heads, others_us)
        return found.total_us if limit_us is None else max(found.total_us, limit_us)

    def worthwhile_n(self, problem: MlaProblem, multiple: int = 1) -> int:
        """The best `n` in a burst, or that of the better pure path where the mix gains too little.

        The mix has to gain `WORTH_MIXING` both in a burst and steadily.
        """
        ends = (0, problem.longest)
        n = self.best_n(problem, multiple=multiple)
        for time_us in (self._total_us, self.steady_us):
            pure = min(ends, key=lambda end: time_us(problem, end))
            if time_us(problem, n) >= (1.0 - WORTH_MIXING) * time_us(problem, pure):
                return min(ends, key=lambda end: self.steady_us(problem, end))
        return n

    def _total_us(self, problem: MlaProblem, n: int) -> float:
        return self.at(problem, n).total_us

    def candidates(self, problem: MlaProblem, max_bytes: int | None, multiple: int) -> list[int]:
        """Windows that fit: multiples, and the whole cache."""
        longest = problem.longest
        if max_bytes is not None:
            require_int("max_bytes", max_bytes, minimum=0)
            fitting = int(max_bytes // decompressed_bytes(problem, 1, self.form))
            if fitting < longest:
                return list(range(0, fitting + 1, multiple))
        return sorted({*range(0, longest, multiple), longest})

    def _time(self, work: MixWork, n: int, split: int) -> MixTime:
        parts = part_times_us(self.parameters, work, split)
        launch = self.parameters.launch_us.value
        rates = self.parameters.chip_tflops.value, self.parameters.stream_gbps.value
        others = sum(cost.time_us(*rates) + launch for cost in work.others)
        return MixTime(n, split, *parts, attention_us=max(parts) + launch, others_us=others)

    def _work(self, problem: MlaProblem, n: int) -> MixWork:
        if problem.dtype != self.parameters.dtype:
            raise InvalidArgumentError(
                "problem.dtype", f"{self.parameters.dtype}, as the parameters", problem.dtype
            )
        return mix_work(problem, n, self.form)


def fastest_window(candidates: Sequence[int], time_us: Callable[[int], float]) -> int:
    """The window of least time; of equally good ones the smallest, because it takes memory.

    Times change slowly between the ends but for the steps of whole SMs, so the best window is in
    the neighbourhood of the best of a few.
    """
    times: dict[int, float] = {}
    first, last = 0, len(candidates) - 1
    while True:
        step = max(1, (last - first) // _SEARCH_POINTS)
        indices = sorted({0, *range(first, last + 1, step), last, len(candidates) - 1})
        for index in indices:
            n = candidates[index]
            if n not in times:
                times[n] = time_us(n)
        best = min(indices, key=lambda index: times[candidates[index]])
        if step == 1:
            break
        first, last = max(0, best - step), min(len(candidates) - 1, best + step)
    # Not just of the last round: its steps need not meet the best of the round before.
    return min(sorted(times), key=times.__getitem__)


def _alone_us(
    parameters: MixParameters, work: MixWork, latent_sms: int, heads_sms: int
) -> tuple[float, float]:
    """Both kinds of work, each on so many SMs as if the other did nothing."""
    return (
        _part_us(parameters, work.latent, latent_sms, parameters.latent_tflops_per_sm.value),
        _part_us(parameters, work.heads_effort, heads_sms, parameters.heads_tflops_per_sm.value),
    )


def _part_us(parameters: MixParameters, cost: Cost, sms: int, tflops_per_sm: float) -> float:
    if cost == NOTHING:
        return 0.0
    if sms == 0:
        return math.inf
    return max(
        cost.flops / (sms * tflops_per_sm * 1e6),
        cost.bytes / (parameters.bandwidth_gbps(sms) * 1e3),
    )
