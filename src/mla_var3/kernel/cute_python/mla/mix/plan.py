"""Plans of the mix: some tokens latent, the others decompressed.

A version says which tokens are decompressed and how they are stored; the plan gives each kernel its
SMs and connects them:

    both kinds of tokens   latent beside (or after) decompressed attention, then decompress_combine
    latent tokens only     latent attention, up-projection
    decompressed only      decompressed attention, which writes the final output
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.decompressed.stage import (
    DecompressedOperands,
    DecompressedShape,
    DecompressedTiling,
    decompressed_stage,
)
from mla_var3.kernel.cute_python.mla.hopper.constants import HEAD, LATENT, ROPE
from mla_var3.kernel.cute_python.mla.hopper.plan import HopperPlan
from mla_var3.kernel.cute_python.mla.latent.call import shape_for
from mla_var3.kernel.cute_python.mla.latent.groups import GroupShape, group_shape
from mla_var3.kernel.cute_python.mla.latent.kernel import (
    FlashMLATiling,
    default_few,
    latent_stage,
)
from mla_var3.kernel.cute_python.mla.latent.operands import LatentOperands
from mla_var3.kernel.cute_python.mla.projections.outputs import (
    DecompressCombineTiling,
    combine_stage,
)
from mla_var3.kernel.newest_window import WINDOW_STEP, NewestWindowPlan
from mla_var3.kernel.paging import check_paged
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.op.mla.model.mix import MixModel, MixWork
from mla_var3.op.mla.model.parameters import mix_parameters
from mla_var3.op.mla.window.formats import PLAIN, WindowForm
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import check_tensor, require_view

FIRST_PRIORITY, SECOND_PRIORITY = -1, 0
"""CUDA stream priorities; the lower one starts first. At the same time that is the latent kernel,
whose CTAs then find empty SMs."""


LATENT_TFLOPS_PER_SM = 5.2
"""What an SM is taken to do with the latent kernel where no model was fitted: cautious beside the
5.9 of the kernel alone on an H200 (774 TFLOP/s at b=32 s=16, docs/kernels/flash-mla.md)."""
DECOMPRESSED_GBPS_PER_SM = 60.0
"""What an SM is taken to read with the decompressed kernel: 57 to 62 GB/s on 44 and 66 SMs of an
H200 (docs/kernels/flash-attention.md). Only the first guess depends on both numbers: tuning times
its neighbours."""
SPLIT_STEPS = (-2, -1, 1, 2)
"""Neighbours of the first guess that tuning tries, in sixteenths of the device. Not measured."""


@dataclass(frozen=True)
class SmSplit:
    """SMs of each kernel."""

    latent: int
    decompressed: int


def balanced_split(latent: Cost, decompressed: Cost, sm_count: int) -> SmSplit:
    """The split at which both kernels are expected to end together."""

    def last_us(sms: int) -> float:
        latent_us, decompressed_us = (
            max(work.time_us(LATENT_TFLOPS_PER_SM, DECOMPRESSED_GBPS_PER_SM), 1e-9)
            for work in (latent, decompressed)
        )
        return max(latent_us / sms, decompressed_us / (sm_count - sms))

    # Of equally good splits the one with most SMs for the latent kernel, which starves first.
    chosen = min(range(sm_count - 1, 0, -1), key=last_us)
    return SmSplit(chosen, sm_count - chosen)


def neighbours(split: SmSplit) -> list[SmSplit]:
    """Other splits of the same SMs that tuning tries, each once."""
    total = split.latent + split.decompressed
    step = max(1, total // 16)
    wanted = (split.latent + k * step for k in SPLIT_STEPS)
    chosen = sorted({min(max(latent, 1), total - 1) for latent in wanted} - {split.latent})
    return [SmSplit(latent, total - latent) for latent in chosen]


@dataclass(frozen=True)
class LatentTokens:
    """What the latent kernel attends to.

    Attributes:
        q_latent, q_rope: [b, s, h, 512] and [b, s, h, 64].
        latent, rope: dense [b, t, ...] or paged [pages, page, ...] cache.
        table: block table of a paged cache, [b, pages of a request] int32.
        seen_by_all: whether all queries see all of these tokens, so that only lengths hide any.
    """

    q_latent: Tensor
    q_rope: Tensor
    latent: Tensor
    rope: Tensor
    lengths: Tensor
    table: Tensor | None = None
    newest: int = 0
    seen_by_all: bool = False


@dataclass
class CuteMixPlan(HopperPlan):
    """Plan of a mix; a version adds which tokens are decompressed."""

    tiling: FlashMLATiling = field(default_factory=FlashMLATiling)
    decompressed_tiling: DecompressedTiling = field(default_factory=DecompressedTiling)
    combine_tiling: DecompressCombineTiling = field(default_factory=DecompressCombineTiling)

    made_for = {"k": LATENT, "d": HEAD, "p": ROPE}
    in_turn: ClassVar[bool] = False
    """Whether the kernels run one after the other, each on all SMs."""

    # -- what a version defines --------------------------------------------------------------------

    @abstractmethod
    def latent_lengths(self) -> list[int]:
        """Latent tokens that are attended, per request."""

    @abstractmethod
    def decompressed_slots(self) -> int:
        """Slots for decompressed tokens: none means latent only, t means decompressed only."""

    @abstractmethod
    def decompressed_cost(self) -> Cost:
        """Work of the decompressed kernel."""

    @property
    @abstractmethod
    def decompressed_shape(self) -> DecompressedShape:
        """How the work of the decompressed kernel may be divided."""

    # -- SMs ---------------------------------------------------------------------------------------

    @property
    def _shares_sms(self) -> bool:
        """Whether both kernels run at the same time, each on some SMs."""
        both = 0 < self.decompressed_slots() < self.t
        return both and self.sm_count > 1 and not self.in_turn

    def split(self) -> SmSplit:
        """SMs of each kernel where its tiling names none.

        A kernel that is alone, or in turn with the other, has all of them. Where the SMs of one
        kernel were chosen, the other has the rest; otherwise both should end together.
        """
        if not self._shares_sms:
            return SmSplit(self.sm_count, self.sm_count)
        pinned = self.tiling.sms or self.sm_count - self.decompressed_tiling.sms
        if pinned != self.sm_count:
            return SmSplit(max(pinned, 1), max(self.sm_count - pinned, 1))
        guess = self.balanced_split()
        # CTA groups take whole numbers of SMs; the other kernel gets the rest.
        used = group_shape(self.row_tiles, self.b, guess.latent, self.tiling.group_ctas).ctas
        return SmSplit(used, self.sm_count - used)

    def balanced_split(self) -> SmSplit:
        """The split of all SMs at which both kernels are expected to end together."""
        return balanced_split(self.latent_cost(), self.decompressed_cost(), self.sm_count)

    def groups(self, tiling: FlashMLATiling) -> GroupShape:
        """The CTA groups of the latent kernel with this tiling."""
        sms = tiling.sms or self.split().latent
        shape = shape_for(self.row_tiles, self.b, sms, tiling.group_ctas)
        # Clusters beside another kernel were not measured.
        return replace(shape, cluster_ctas=1)

    def settled(self) -> Self:
        """The same plan with the SMs of its kernels written into its tilings.

        For calls that build their stages anew each time: the split is not computed again.
        """
        if not self._shares_sms:
            return self
        split, window = self.split(), self.decompressed_tiling
        return self.copy(
            tiling=replace(self.tiling, sms=self.tiling.sms or split.latent),
            decompressed_tiling=replace(window, sms=window.sms or split.decompressed),
        )

    def _splits(self) -> list[SmSplit]:
        """Splits of the SMs that tuning tries, that of the model first."""
        return [SmSplit(0, 0), *(neighbours(self.split()) if self._shares_sms else ())]

    # -- tilings and costs -------------------------------------------------------------------------

    def _default_tiling(self, name: str) -> Tiling | None:
        return FlashMLATiling(few=default_few(self.s * self.h)) if name == "tiling" else None

    def _autotune_configs(self) -> Sequence[FlashMLATiling]:
        few = default_few(self.s * self.h)
        return [FlashMLATiling(sms=each.latent, few=few) for each in self._splits()]

    def latent_cost(self) -> Cost:
        """Work of the latent kernel."""
        return flash_mla_cost(replace(self.problem(), lengths=tuple(self.latent_lengths())))

    def _algorithmic_flops_bytes(self, tiling: Tiling) -> tuple[float, float]:
        slots = self.decompressed_slots()
        parts = [self.latent_cost()] if slots < self.t else []
        parts += [self.decompressed_cost()] if slots > 0 else []
        return sum(cost.flops for cost in parts), sum(cost.bytes for cost in parts)

    # -- stages ------------------------------------------------------------------------------------

    def _latent(self, tokens: LatentTokens) -> CuteKernel:
        """The latent kernel, on tensors that are checked."""
        count = self.b * self.s * self.h
        operands = LatentOperands.allocate(
            (self.b, self.s, self.h),
            require_view("q_latent", tokens.q_latent, count, self.k),
            require_view("q_rope", tokens.q_rope, count, self.p),
            tokens.latent,
            tokens.rope,
            tokens.lengths,
            tokens.table,
        )
        cost = self.latent_cost()
        return latent_stage(
            self._without_mask if tokens.seen_by_all else self,
            self.tiling, operands, self.groups, self.latent_lengths(),
            lambda tiling: (cost.flops, cost.bytes), self._autotune_configs(), tokens.newest,
            clusters=False,
        )  # fmt: skip

    @functools.cached_property
    def _without_mask(self) -> Self:
        return self.copy(causal=False)

    def check_latent(self, tokens: LatentTokens, page: int = 0) -> None:
        """Check the operands of the latent kernel; `page` is the tokens of a page, if paged.

        Raises:
            InvalidArgumentError: names the argument that is wrong.
        """
        rows = (tokens.q_latent, tokens.q_rope, tokens.latent, tokens.rope, tokens.lengths)
        if tokens.table is None:
            self.latent_rows(*rows)
        else:
            check_paged(self, page, (*rows, tokens.table))

    def _decompressed(
        self, operands: DecompressedOperands, shared: bool, alone: bool = False
    ) -> CuteKernel:
        cost = self.decompressed_cost()
        return decompressed_stage(
            self, self.decompressed_tiling, operands, self.decompressed_shape,
            self.decompressed_slots(), self.split().decompressed,
            lambda tiling: (cost.flops, cost.bytes),
            [DecompressedTiling(sms=each.decompressed) for each in self._splits()], shared, alone,
        )  # fmt: skip

    def _mixed(
        self,
        latent: LatentTokens | None,
        decompressed: DecompressedOperands,
        w_uv: Tensor,
        shared: bool = False,
    ) -> KernelPipeline:
        """The stages, on inputs that are checked.

        Args:
            shared: whether the decompressed tokens are a prefix of all requests.
        """
        slots = self.decompressed_slots()
        if slots == self.t:
            alone = self._decompressed(decompressed, shared, alone=True)
            return KernelPipeline(_name=self.name, stages=[alone])
        if latent is None:
            raise InvalidArgumentError("latent", f"the tokens beside {slots} of {self.t}", None)
        old = self._latent(latent)
        new = self._decompressed(decompressed, shared) if slots else None
        parts = old.output_tensors, None if new is None else new.output_tensors
        combine = combine_stage(self, self.combine_tiling, *parts, w_uv)
        attention = old if new is None else self._together(old, new)
        return KernelPipeline(_name=self.name, stages=[attention, combine])

    def _together(self, old: CuteKernel, new: CuteKernel) -> ConcurrentKernels:
        if self.in_turn:
            # The latent CTAs start as those of the other kernel end.
            return ConcurrentKernels(
                _name="decompressed_then_latent",
                concurrent_kernels=[new, old],
                stream_priorities=[FIRST_PRIORITY, SECOND_PRIORITY],
            )

        def validate(tilings: list[Any]) -> Constraints:
            # A CTA of either kernel fills the shared memory of an SM. One without an SM of its own
            # waits until the other kernel has ended.
            split, most = self.split(), self.sm_count
            latent, window = tilings[0].sms or split.latent, tilings[1].sms or split.decompressed
            return Constraints(
                (
                    latent + window <= most,
                    f"sms: expected at most {most} SMs for both kernels, got {latent} + {window} = "
                    f"{latent + window}",
                )
            )

        return ConcurrentKernels(
            _name="latent_and_decompressed",
            concurrent_kernels=[old, new],
            validate_joint_tiling_fn=validate,
            stream_priorities=[FIRST_PRIORITY, SECOND_PRIORITY],
        )

    def _check_queries(self, q_nope: Tensor, w_uv: Tensor) -> None:
        """Check what the latent kernel does not check itself."""
        self.check_inputs({"q_nope": "bshd", "w_uv": "hkd"}, (q_nope, w_uv))


@dataclass
class NewestMixPlan(NewestWindowPlan, CuteMixPlan):
    """Plan of a mix with a window of the newest tokens."""

    window_form: ClassVar[WindowForm] = PLAIN

    @functools.cached_property
    def model(self) -> MixModel | None:
        """The model of the mix, if it was fitted for the device that the plan is made for.

        It then chooses n and the SMs. Otherwise the roofline and the rates above do.
        """
        if self.target.device is None:
            return None
        parameters = mix_parameters(self.target.device, self.dtype)
        return MixModel(parameters, self.window_form) if parameters.fitted else None

    def model_n(self, peak_tflops: float, peak_gbps: float) -> int:
        if self.model is None:
            return super().model_n(peak_tflops, peak_gbps)
        return self.model.worthwhile_n(self.problem(), multiple=WINDOW_STEP)

    def balanced_split(self) -> SmSplit:
        if self.model is None:
            return super().balanced_split()
        work = MixWork(self.latent_cost(), self.decompressed_cost(), (), self.window_form.effort)
        wanted = self.model.split_of(work)
        chosen = min(max(wanted, 1), self.sm_count - 1)
        return SmSplit(chosen, self.sm_count - chosen)

    def latent_lengths(self) -> list[int]:
        return [old for old, _ in self.problem().window(self.chosen_n)]

    def new_lengths(self) -> list[int]:
        """Decompressed tokens per request."""
        return [new for _, new in self.problem().window(self.chosen_n)]

    def decompressed_slots(self) -> int:
        return self.chosen_n

    @property
    def decompressed_shape(self) -> DecompressedShape:
        return DecompressedShape(self.b, self.s, self.h, max(self.new_lengths()))

    def plan_parts(
        self, latent: LatentTokens | None, window: DecompressedOperands, w_uv: Tensor, page: int = 0
    ) -> KernelPipeline:
        """The stages on the operands of each kernel, for paged caches and windows that are rings.

        Args:
            latent: the older tokens, dense or paged; None with n=t, where there are none.
            window: the newest n, in order or as a ring with `starts`. Before a ring all tokens are
                seen by all queries.
            page: tokens of a page where the older ones are paged.
        """
        if latent is not None:
            self.check_latent(latent, page)
        self._check_queries(window.q_nope, w_uv)
        self._check_window(window)
        return self._mixed(latent, window, w_uv)

    def _check_window(self, window: DecompressedOperands) -> None:
        """Check the window; a version that stores it in another form checks that one."""
        dtype, device = self.torch_dtype, window.q_nope.device
        b, n = ("b", self.b), ("n", self.decompressed_slots())
        rows = [b, ("h", self.h), n, ("d", self.d)]
        check_tensor("k_new", window.keys, rows, dtype, device)
        check_tensor("v_new", window.values, rows, dtype, device)
        check_tensor("k_rope_new", window.k_rope, [b, n, ("p", self.p)], dtype, device)
        self._check_lengths(window)

    def _check_lengths(self, window: DecompressedOperands) -> None:
        device = window.q_nope.device
        check_tensor("lengths", window.lengths, [("b", self.b)], torch.int32, device)
        if window.starts is not None:
            check_tensor("starts", window.starts, [("b", self.b)], torch.int32, device)
