"""What the plans of the latent kernels share: their inputs, dense or paged, and the call's options.

    q_latent [b, s, h, k], q_rope [b, s, h, p]; packed: [tokens, h, k] and [tokens, h, p]
    c_kv [b, t, k], k_rope [b, t, p]; paged: [pages, page, k] and [pages, page, p]
    lengths [b] int32         KV length per request
    block_table [b, pages of a request] int32, for a paged cache
    cu_seqlens_q [b+1] int32  first query of each request and the end of the last, for packed ones
    tree [b, s, s] bool       which of the s newest tokens a query sees, within causal order

With packed queries s is the most that a request has; further ones, and rows of no request, give 0
and an LSE of -inf. A length beyond the slots of a request, an entry of the table outside of the
pool and a wrong `cu_seqlens_q` are clamped: the result is then wrong, but nothing outside of the
tensors is read or written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.mla_plan import MlaPlan, sliding_window_field
from mla_var3.kernel.paging import check_pages, dense_inputs, paged_inputs
from mla_var3.op.mla.problem import require_int
from mla_var3.runtime.tensors import check_tensor, require_view

PAGE_STEP = 16
"""Pages are multiples of this: the shortest KV tile that the tensor cores take."""


class LatentInputs(NamedTuple):
    """The tensors of a call, see the module."""

    q_latent: Tensor
    q_rope: Tensor
    c_kv: Tensor
    k_rope: Tensor
    lengths: Tensor
    block_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    tree: Tensor | None = None

    @classmethod
    def of(cls, inputs: tuple[Any, ...]) -> LatentInputs:
        """The arguments of `KernelPlan.plan`, by name."""
        return cls(*inputs)


@dataclass(frozen=True)
class LatentOperands:
    """The first arguments of a latent kernel and its options.

    Attributes:
        tensors: queries as rows, cache, lengths, table, bounds and tree, in the order of the
            kernel's arguments. What a call lacks is replaced by something that is not read.
        lead: leading sizes of the outputs, (b, s), or (1, tokens) for packed queries.
        page, packed, tree, sliding_window: options that the kernel is compiled for.
    """

    tensors: tuple[Tensor, ...]
    lead: tuple[int, int]
    page: int
    packed: bool
    tree: bool
    sliding_window: int

    def results(self, *sizes: int, dtype: torch.dtype, empty: float = 0.0) -> Tensor:
        """A tensor for results; rows of no request, which kernels leave as they are, are `empty`.

        Args:
            sizes: leading sizes, those of `lead`, and what follows.
            dtype: element type.
            empty: for rows of no request.
        """
        like = self.tensors[0]
        if self.packed:
            return like.new_full(sizes, empty, dtype=dtype)
        return like.new_empty(sizes, dtype=dtype)

    def as_given(self, *results: Tensor) -> list[Tensor]:
        """Results [lead, ...] with the leading sizes of the queries."""
        return [result[0] if self.packed else result for result in results]

    @property
    def options(self) -> tuple[int, int, int, int]:
        """The compile-time arguments PAGE, PACKED, TREE and WINDOW."""
        return self.page, int(self.packed), int(self.tree), self.sliding_window


@dataclass
class LatentPlan(MlaPlan):
    """Plan of a latent kernel."""

    page: int = field(
        default=0,
        metadata={"help": "tokens of a cache page, a multiple of 16; 0 for a dense cache"},
    )
    sliding_window: int = sliding_window_field()

    needs_v: ClassVar[bool] = False
    needs_rope: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page < 0 or self.page % PAGE_STEP:
            raise InvalidArgumentError("page", f"a multiple of {PAGE_STEP}, or 0", self.page)
        require_int("sliding_window", self.sliding_window, minimum=0)

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        inputs = self.latent_inputs(device)
        return paged_inputs(inputs, self.page, self.seed) if self.page else inputs

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        dense = dense_inputs(inputs, self.t) if self.page else inputs
        return self.latent_reference(
            *dense, compute_dtype=compute_dtype, sliding_window=self.sliding_window
        )

    def operands(self, given: LatentInputs) -> LatentOperands:
        """Check the inputs and bring them into the form that the kernels take."""
        q_latent, q_rope, c_kv, k_rope, lengths, table, bounds, tree = given
        device, packed = q_latent.device, bounds is not None
        rows = [("b", self.b), ("s", self.s)]
        if packed:
            rows = [("tokens", q_latent.shape[0])]
        heads = [*rows, ("h", self.h)]
        check_tensor("q_latent", q_latent, [*heads, ("k", self.k)], self.torch_dtype, device)
        check_tensor("q_rope", q_rope, [*heads, ("p", self.p)], self.torch_dtype, device)
        check_tensor("lengths", lengths, [("b", self.b)], torch.int32, device)
        if self.page:
            check_pages(self, self.page, c_kv, k_rope, table)
        else:
            slots = [("b", self.b), ("t", self.t)]
            check_tensor("c_kv", c_kv, [*slots, ("k", self.k)], self.torch_dtype, device)
            check_tensor("k_rope", k_rope, [*slots, ("p", self.p)], self.torch_dtype, device)
        if bounds is not None:
            check_tensor("cu_seqlens_q", bounds, [("b+1", self.b + 1)], torch.int32, device)
        if tree is not None:
            size = [("b", self.b), ("s", tree.shape[-1]), ("s", tree.shape[-1])]
            check_tensor("tree", tree, size, torch.bool, device)
            if not self.causal:
                raise InvalidArgumentError("tree", "none with causal=False", "a tree")
        lead = (1, q_latent.shape[0]) if packed else (self.b, self.s)
        count = lead[1] * self.h
        latent_rows = require_view("q_latent", q_latent, lead[0], count, self.k)
        if self.p:
            rope_rows = require_view("q_rope", q_rope, lead[0], count, self.p)
        else:
            rope_rows, k_rope = latent_rows, c_kv
        tensors = (
            latent_rows,
            rope_rows,
            c_kv,
            k_rope,
            lengths,
            lengths[None] if table is None else table,
            lengths if bounds is None else bounds,
            lengths[None, None] if tree is None else tree.view(torch.int8),
        )
        return LatentOperands(
            tensors, lead, self.page, packed, tree is not None, self.sliding_window
        )
