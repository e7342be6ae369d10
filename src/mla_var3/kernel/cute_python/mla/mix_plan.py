"""What the versions of the mix share: some tokens latent, the others decompressed, at once.

A version says which tokens are decompressed and in what form; this plan gives each kernel its SMs
and connects them:

    both kinds of tokens   (absorbed attention, its merge) beside decompressed attention, then
                           decompress_combine
    latent tokens only     absorbed attention, its merge, up-projection
    decompressed only      decompressed attention, which writes the final output
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mla_var3.kernel.cute_python.mla.absorbed_attention import (
    AbsorbedOperands,
    FlashMLATiling,
    absorbed_stage,
    default_few,
)
from mla_var3.kernel.cute_python.mla.decompress_combine import (
    DecompressCombineTiling,
    combine_stage,
)
from mla_var3.kernel.cute_python.mla.hopper_plan import HopperPlan
from mla_var3.kernel.cute_python.mla.latent_call import ELEMENT_TYPES
from mla_var3.kernel.cute_python.mla.latent_ops import LATENT, ROPE
from mla_var3.kernel.cute_python.mla.merge_partials import MergeTiling
from mla_var3.kernel.cute_python.mla.schedule import ROWS, GangShape, gang_shape
from mla_var3.kernel.cute_python.mla.sm_split import (
    SmSplit,
    balanced_split,
    joint_constraints,
    neighbours,
)
from mla_var3.kernel.cute_python.mla.window_jobs import HEAD
from mla_var3.kernel.cute_python.mla.window_stage import (
    WindowOperands,
    WindowShape,
    WindowTiling,
    window_stage,
)
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import check_tensor, require_view

LATENT_PRIORITY, WINDOW_PRIORITY = -1, 0
"""CUDA stream priorities; the lower one starts first."""


@dataclass
class CuteMixPlan(HopperPlan):
    """Plan of a mix; a version adds which tokens are decompressed."""

    tiling: FlashMLATiling = field(default_factory=FlashMLATiling)
    merge_tiling: MergeTiling = field(default_factory=MergeTiling)
    window_tiling: WindowTiling = field(default_factory=WindowTiling)
    combine_tiling: DecompressCombineTiling = field(default_factory=DecompressCombineTiling)

    made_for = {"k": LATENT, "d": HEAD, "p": ROPE}

    # -- what a version says -----------------------------------------------------------------------

    @abstractmethod
    def latent_lengths(self) -> list[int]:
        """Latent tokens that are attended, per request."""

    @abstractmethod
    def decompressed_slots(self) -> int:
        """Slots for decompressed tokens: none means latent only, t means decompressed only."""

    @abstractmethod
    def window_cost(self) -> Cost:
        """Work of the decompressed kernel."""

    @property
    @abstractmethod
    def window_shape(self) -> WindowShape:
        """How the work of the decompressed kernel may be cut."""

    # -- SMs ---------------------------------------------------------------------------------------

    @property
    def row_tiles(self) -> int:
        """Tiles of 64 query rows per request."""
        return -(-self.s * self.h // ROWS)

    def split(self) -> SmSplit:
        """SMs of each kernel where its tiling names none.

        A kernel that is alone has all of them. When somebody chose the SMs of one kernel, the other
        has the rest; otherwise both should end together.
        """
        slots = self.decompressed_slots()
        if slots in (0, self.t) or self.sm_count < 2:
            return SmSplit(self.sm_count, self.sm_count)
        pinned = self.tiling.sms or self.sm_count - self.window_tiling.sms
        if pinned != self.sm_count:
            return SmSplit(max(pinned, 1), max(self.sm_count - pinned, 1))
        guess = self.balanced_split()
        # Gangs take whole numbers of SMs; those that they leave over go to the other kernel.
        used = gang_shape(self.row_tiles, self.b, guess.latent, self.tiling.gang).blocks
        return SmSplit(used, self.sm_count - used)

    def balanced_split(self) -> SmSplit:
        """The split of all SMs at which both kernels are expected to end together."""
        shape = self.window_shape
        jobs = shape.requests * shape.units(shape.form(self.window_tiling))
        # Windows that are cut into parts fill their SMs evenly.
        whole = jobs >= self.sm_count
        return balanced_split(
            self.latent_cost(), self.window_cost(), self.sm_count, jobs if whole else 0
        )

    def latent_sms(self, tiling: FlashMLATiling) -> int:
        """SMs of the latent kernel."""
        return tiling.sms or self.split().latent

    def window_sms(self, tiling: WindowTiling) -> int:
        """SMs of the decompressed kernel."""
        return tiling.sms or self.split().window

    def gangs(self, tiling: FlashMLATiling) -> GangShape:
        """The gangs of the latent kernel with this tiling."""
        return gang_shape(self.row_tiles, self.b, self.latent_sms(tiling), tiling.gang)

    def _splits(self) -> list[SmSplit]:
        """Splits that tuning tries beside the one of the model."""
        together = 0 < self.decompressed_slots() < self.t
        return neighbours(self.split()) if together and self.sm_count > 1 else []

    # -- tilings and costs -------------------------------------------------------------------------

    def _few(self) -> int:
        return default_few(self.s * self.h)

    def _default_tiling(self, name: str) -> Tiling | None:
        return FlashMLATiling(few=self._few()) if name == "tiling" else None

    def _autotune_configs(self) -> Sequence[FlashMLATiling]:
        few = self._few()
        return [
            FlashMLATiling(sms=sms, few=few) for sms in (0, *(x.latent for x in self._splits()))
        ]

    def _window_configs(self) -> list[WindowTiling]:
        return [WindowTiling(sms=sms) for sms in (0, *(x.window for x in self._splits()))]

    def latent_cost(self) -> Cost:
        """Work of the latent kernel."""
        return flash_mla_cost(replace(self.problem(), lengths=tuple(self.latent_lengths())))

    def _algorithmic_flops_bytes(self, tiling: Tiling) -> tuple[float, float]:
        slots = self.decompressed_slots()
        parts = [self.latent_cost()] if slots < self.t else []
        parts += [self.window_cost()] if slots > 0 else []
        return sum(cost.flops for cost in parts), sum(cost.bytes for cost in parts)

    # -- stages ------------------------------------------------------------------------------------

    def _absorbed(self, inputs: tuple[Tensor, ...], newest: int) -> KernelPipeline:
        """The latent kernel on q_latent, q_rope, c_kv, k_rope and lengths, checked before."""
        q_latent, q_rope, latent, rope, lengths = inputs
        count = self.b * self.s * self.h
        operands = AbsorbedOperands(
            require_view("q_latent", q_latent, count, self.k),
            require_view("q_rope", q_rope, count, self.p),
            latent,
            rope,
            lengths,
            newest=newest,
        )
        cost = self.latent_cost()
        return absorbed_stage(
            self, self.tiling, self.merge_tiling, operands, self.gangs, self.latent_lengths(),
            lambda tiling: (cost.flops, cost.bytes), self._autotune_configs(), "latent_tokens",
        )  # fmt: skip

    def _window(self, operands: WindowOperands, shared: bool) -> CuteKernel:
        cost = self.window_cost()
        return window_stage(
            self, self.window_tiling, ELEMENT_TYPES[self.torch_dtype], operands,
            self.window_shape, self.decompressed_slots(), self.split().window,
            lambda tiling: (cost.flops, cost.bytes), self._window_configs(), shared,
        )  # fmt: skip

    def _mixed(
        self,
        latent: tuple[Tensor, ...],
        newest: int,
        window: WindowOperands,
        w_uv: Tensor,
        shared: bool = False,
    ) -> KernelPipeline:
        """The stages, on inputs that are checked.

        Args:
            latent: q_latent, q_rope, c_kv, k_rope and lengths of the latent kernel.
            newest: newest tokens that it leaves out.
            window: operands of the decompressed kernel.
            w_uv: for the up-projection.
            shared: whether the decompressed tokens are a prefix of all requests.
        """
        slots, dtype = self.decompressed_slots(), ELEMENT_TYPES[self.torch_dtype]
        if slots == self.t:
            return KernelPipeline(_name=self.name, stages=[self._window(window, shared)])
        old = self._absorbed(latent, newest)
        new = self._window(window, shared) if slots else None
        combine = combine_stage(
            self,
            self.combine_tiling,
            dtype,
            (old.output_tensors[0], old.output_tensors[1]),
            None if new is None else (new.output_tensors[0], new.output_tensors[1]),
            w_uv,
            self.sm_count,
        )
        attention = old if new is None else self._together(old, new)
        return KernelPipeline(_name=self.name, stages=[attention, combine])

    def _together(self, old: KernelPipeline, new: CuteKernel) -> ConcurrentKernels:
        def validate(tilings: list[Any]) -> Constraints:
            of_latent, _, of_window = tilings
            return joint_constraints(
                self.latent_sms(of_latent), self.window_sms(of_window), self.sm_count
            )

        return ConcurrentKernels(
            _name="latent_and_decompressed",
            concurrent_kernels=[old, new],
            validate_joint_tiling_fn=validate,
            stream_priorities=[LATENT_PRIORITY, WINDOW_PRIORITY],
        )

    def _check_queries(self, q_nope: Tensor, w_uv: Tensor) -> None:
        """What the latent kernel does not check itself."""
        dtype, device = self.torch_dtype, q_nope.device
        rows = [("b", self.b), ("s", self.s), ("h", self.h)]
        check_tensor("q_nope", q_nope, [*rows, ("d", self.d)], dtype, device)
        weights = [("h", self.h), ("k", self.k), ("d", self.d)]
        check_tensor("w_uv", w_uv, weights, dtype, device)
