"""cutlass_mla_decode: the MLA decode example of CUTLASS for Blackwell, as a kernel of ours.

Computes, for every request, o = softmax(q_latent c_kv^T + q_rope k_rope^T) c_kv.

    q_latent [b, s, h, 512]       absorbed queries            q_rope [b, s, h, 64]
    latent   [pages, page, 512]   pages of the latent cache   rope   [pages, page, 64]
    lengths  [b] int32            KV length per request, on the device
    table    [b, pages of a request] int32, for whole tiles of 128 tokens
    -> o_latent [b, s, h, 512] in the input dtype, lse [b, s, h] float32 (logarithm to base 2)

float16; 1 <= s <= 4; h <= 128; every length >= 1; pages that divide 128. The example masks by
length only, so `causal` with more than one query is refused. Slots beyond a length must be finite:
their probability is 0, and 0 times NaN is NaN. Fewer than 128 heads are not split. Target: sm_100a.

Imported, not copied: the kernels, their host function and the choice of the split come from a
checkout of CUTLASS that the user names (`--cutlass_dir`, the variable HYPER_MLA_CUTLASS_DIR, or
`third_party/cutlass`), see `checkout.py`. The checkout is needed to compile and to run; plans,
costs and candidates do without. What is here turns pointers into tensors in the example's modes:

    queries and output   (head, column, query, request)
    cache                (token of a page, column, page)
    table                (page of a request, request)        lse (head, query, request)

Base version. Idea: a yardstick written with explicit control, measured in the same way as our own
kernels. Limits: the softmax statistics are exact (no lazy rescaling), one split count serves all
requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float16, Float32, Int8, Int32, Int64
from torch import Tensor

from mla_var3.errors import (
    InvalidArgumentError,
    KernelCompileError,
    MissingToolError,
    UnsupportedError,
)
from mla_var3.kernel.cute_python.mla.cutlass_mla_decode.cutlass_mla_decode.checkout import (
    Example,
    checkout_folder,
    load_example,
    loaded_example,
)
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.kernel.paging import check_paged, dense_inputs, paged_inputs
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.runtime.cute_kernel import CuteKernel, Int64Arg
from mla_var3.runtime.plan import Constraints, KernelPlan, Tiling
from mla_var3.runtime.stage import CompiledKernel

LATENT = 512
ROPE = 64
HEADS = 128
"""Rows of the example's tile: all heads of one query, over two blocks."""
QUERIES = 4
TILE = 128
"""Tokens of the example's tile."""
QK_TILE = (HEADS, TILE)
PV_TILE = (HEADS, 256)
CLUSTER = 2
MOST_SPLITS = 256
"""Splits that the example's reduction has room for."""
DEFAULT_SM_COUNT = 148
"""SMs of a B200, for a plan that has not met a device."""
WORKSPACE_ALIGNMENT = 32
"""Bytes: the widest store of Blackwell. Allocations of torch are aligned to more."""
LOG2_E = 1.4426950408889634


class MlaDecodeSm100:
    """Host code for one page size and schedule: makes the tensors and calls the example.

    The example is held by its fingerprint, which the compile cache can compare.
    """

    def __init__(self, fingerprint: str, page: int, clusters: int, persistent: bool):
        self.fingerprint = fingerprint
        self.page = page
        self.clusters = clusters
        self.persistent = persistent

    @cute.jit
    def __call__(
        self,
        q_latent: cute.Pointer,
        q_rope: cute.Pointer,
        latent: cute.Pointer,
        rope: cute.Pointer,
        table: cute.Pointer,
        lengths: cute.Pointer,
        o_latent: cute.Pointer,
        lse: cute.Pointer,
        partials: cute.Pointer | None,
        scale: Float32,
        requests: Int32,
        queries: Int32,
        heads: Int32,
        q_latent_stride: Int32,
        q_latent_request_stride: Int64,
        q_rope_stride: Int32,
        q_rope_request_stride: Int64,
        pages: Int32,
        latent_stride: Int32,
        latent_page_stride: Int64,
        rope_stride: Int32,
        rope_page_stride: Int64,
        table_width: Int32,
        table_stride: Int32,
        partial_bytes: Int64,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        # Strides of 16-bit tensors are multiples of 16 bytes; the bulk copy engine must know.
        def rows_of(pointer, columns, stride, request_stride):
            row = cute.assume(stride, divby=8)
            query = cute.assume(stride * heads, divby=8)
            request = cute.assume(request_stride, divby=8)
            layout = cute.make_layout(
                (heads, columns, queries, requests), stride=(row, 1, query, request)
            )
            return cute.make_tensor(pointer, layout)

        def pages_of(pointer, columns, stride, page_stride):
            token = cute.assume(stride, divby=8)
            page = cute.assume(page_stride, divby=8)
            layout = cute.make_layout((self.page, columns, pages), stride=(token, 1, page))
            return cute.make_tensor(pointer, layout)

        rows = queries * heads
        workspace = None
        if cutlass.const_expr(partials is not None):
            start = cute.recast_ptr(partials, dtype=Int8).align(WORKSPACE_ALIGNMENT)
            workspace = cute.make_tensor(start, cute.make_layout(partial_bytes))
        self.cutlass_mla_decode(
            rows_of(q_latent, LATENT, q_latent_stride, q_latent_request_stride),
            rows_of(q_rope, ROPE, q_rope_stride, q_rope_request_stride),
            pages_of(latent, LATENT, latent_stride, latent_page_stride),
            pages_of(rope, ROPE, rope_stride, rope_page_stride),
            cute.make_tensor(
                table, cute.make_layout((table_width, requests), stride=(1, table_stride))
            ),
            rows_of(o_latent, LATENT, Int32(LATENT), Int64(rows) * LATENT),
            cute.make_tensor(
                lse, cute.make_layout((heads, queries, requests), stride=(1, heads, rows))
            ),
            workspace,
            splits,
            cute.make_tensor(lengths, cute.make_layout(requests)),
            None,
            scale,
            Float32(1.0),
            stream,
        )

    def cutlass_mla_decode(self, *tensors):
        """The example's host function, on tensors in its own modes."""
        example = loaded_example(self.fingerprint).cls(
            acc_dtype=Float32,
            lse_dtype=Float32,
            mma_qk_tiler_mn=QK_TILE,
            mma_pv_tiler_mn=PV_TILE,
            max_active_clusters=self.clusters,
            page_size=self.page,
            skip_correction_threshold=0.0,
            is_persistent=self.persistent,
            is_var_seq=True,
            is_var_split_kv=False,
        )
        example(*tensors)


@dataclass
class CutlassMlaDecodeTiling(Tiling):
    """How the work is spread; the tiles themselves are the example's.

    Attributes:
        splits: parts that the tokens of a request are cut into; 0 lets the example choose.
        persistent: whether a block takes several pieces of work, or one.
        opt_level: of the compiler; the example asks for 2, and spills at 3.
    """

    splits: int = 0
    persistent: bool = True
    opt_level: int = 2

    def validate(self, pd: "CutlassMlaDecodeKernel") -> Constraints:
        most = min(MOST_SPLITS, pd.tiles) if pd.h == HEADS else 1
        return Constraints(
            (
                0 <= self.splits <= most,
                f"splits: expected 0 to {most} (tiles of {TILE} tokens; 1 with fewer than "
                f"{HEADS} heads), got {self.splits}",
            ),
            (
                pd.b * pd.s * pd.h * self.splits * (LATENT + 1) < 1 << 31,
                f"splits: expected partial results of fewer than 2**31 elements, which the example "
                f"can count, got {self.splits} splits of b={pd.b} s={pd.s} h={pd.h}",
            ),
            (
                0 <= self.opt_level <= 3,
                f"opt_level: expected 0 to 3, got {self.opt_level}",
            ),
        )


@dataclass
class ImportedKernel(CuteKernel):
    """A kernel whose device code lies in a checkout."""

    def compile(self, target: str, tiling: Any = None) -> CompiledKernel:
        try:
            return super().compile(target, tiling)
        except KernelCompileError as error:
            example = self.plan.example()
            raise KernelCompileError(f"{error}; {example.origin}") from error

    def source_files(self) -> list[Path]:
        own = super().source_files()
        try:
            return [*own, *self.plan.example().files]
        except MissingToolError:  # without a checkout there is nothing to run, or to tune
            return own


@dataclass
class CutlassMlaDecodeKernel(MlaPlan):
    """Plan of the imported MLA decode example."""

    dtype: str = field(default="float16", metadata={"help": "float16, all that the example takes"})
    page: int = field(
        default=TILE, metadata={"help": f"tokens of a cache page, a divisor of {TILE} above 1"}
    )
    cutlass_dir: str | None = field(
        default=None,
        metadata={
            "help": "checkout of CUTLASS; none: HYPER_MLA_CUTLASS_DIR, or third_party/cutlass"
        },
    )
    tiling: CutlassMlaDecodeTiling = field(default_factory=CutlassMlaDecodeTiling)

    targets = ("sm_100",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page < 2 or TILE % self.page:
            raise InvalidArgumentError("page", f"a divisor of {TILE} above 1", self.page)
        shortest = min(self.problem().kv_lengths)
        rules = (
            ("dtype", self.dtype, "float16", self.dtype == "float16"),
            ("k", self.k, str(LATENT), self.k == LATENT),
            ("p", self.p, str(ROPE), self.p == ROPE),
            ("h", self.h, f"1 to {HEADS}", self.h <= HEADS),
            ("s", self.s, f"1 to {QUERIES}", self.s <= QUERIES),
            (
                "causal",
                f"True with s={self.s}",
                "False, or s=1 (it masks by length only)",
                not self.causal or self.s == 1,
            ),
            ("lengths", f"a request of {shortest}", "at least 1 token each", shortest >= 1),
        )
        for name, got, expected, holds in rules:
            if not holds:
                raise UnsupportedError(
                    f"{name}: expected {expected}, which the MLA decode example of CUTLASS takes, "
                    f"got {got}"
                )

    @property
    def tiles(self) -> int:
        """Tiles of tokens of the longest request."""
        return -(-max(self.problem().kv_lengths) // TILE)

    @property
    def clusters(self) -> int:
        """Clusters that the device runs at a time: a block fills an SM."""
        return self.target.sm_count(DEFAULT_SM_COUNT) // CLUSTER

    def params_label(self) -> str:
        # A folder name: the place of the checkout is no part of the problem.
        return KernelPlan.params_label(self.copy(cutlass_dir=None))

    def example(self) -> Example:
        """The example of the checkout, imported at the first call."""
        return load_example(checkout_folder(self.cutlass_dir))

    def split_count(self, tiling: CutlassMlaDecodeTiling) -> int:
        """Parts that the tokens of a request are cut into with this tiling."""
        if tiling.splits or self.h < HEADS:
            return tiling.splits or 1
        longest, blocks = max(self.problem().kv_lengths), self.clusters * CLUSTER
        return int(self.example().cls.get_split_kv(self.b, self.s, longest, QK_TILE, blocks))

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        q_latent, q_rope, c_kv, k_rope, lengths = self.latent_inputs(device)
        slots = -(-self.t // TILE) * TILE
        beyond = torch.arange(slots, device=device) >= lengths.unsqueeze(1)

        def whole_tiles(cache: Tensor) -> Tensor:
            padded = cache.new_zeros((self.b, slots, cache.shape[-1]))
            padded[:, : self.t] = cache
            return padded.masked_fill_(beyond.unsqueeze(2), 0.0)

        dense = (q_latent, q_rope, whole_tiles(c_kv), whole_tiles(k_rope), lengths)
        return paged_inputs(dense, self.page, self.seed)

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        dense = dense_inputs(inputs, self.t)
        o_latent, lse = self.latent_reference(*dense, compute_dtype=compute_dtype)
        return o_latent, lse * LOG2_E

    def _autotune_configs(self) -> Sequence[CutlassMlaDecodeTiling]:
        counts = [0, *(n for n in (1, 2, 4, 8, 16, 32) if n <= self.tiles)]
        tilings = [
            CutlassMlaDecodeTiling(splits=n, persistent=persistent)
            for n in counts
            for persistent in (True, False)
        ]
        return [tiling for tiling in tilings if tiling.validate(self)]

    def _algorithmic_flops_bytes(self, tiling: CutlassMlaDecodeTiling) -> tuple[float, float]:
        cost = flash_mla_cost(self.problem())
        return cost.flops, cost.bytes

    def plan(self, *inputs: Tensor) -> ImportedKernel:
        latent, rope, lengths, table = inputs[2:]
        rows = check_paged(self, self.page, inputs)
        self._require_whole_tiles(table)
        o_latent = inputs[0].new_empty(inputs[0].shape)
        lse = inputs[0].new_empty(inputs[0].shape[:-1], dtype=torch.float32)

        def host_fn(tiling: CutlassMlaDecodeTiling) -> MlaDecodeSm100:
            example = self.example()
            self._ask_example(example, tiling)
            return MlaDecodeSm100(example.fingerprint, self.page, self.clusters, tiling.persistent)

        def args_fn(tiling: CutlassMlaDecodeTiling) -> tuple[object, ...]:
            splits = self.split_count(tiling)
            partials = self._partials(splits, lse)
            partial_bytes = 0 if partials is None else partials.numel() * partials.element_size()
            strides = [n for each in rows for n in (each.stride(1), Int64Arg(each.stride(0)))]
            return (
                *rows, latent, rope, table, lengths, o_latent, lse, partials,
                self.problem().softmax_scale, self.b, self.s, self.h, *strides,
                latent.shape[0],
                latent.stride(1), Int64Arg(latent.stride(0)),
                rope.stride(1), Int64Arg(rope.stride(0)),
                table.shape[1], table.stride(0), Int64Arg(partial_bytes), splits,
            )  # fmt: skip

        return ImportedKernel(
            kernel_fn=MlaDecodeSm100.cutlass_mla_decode,
            host_fn=host_fn,
            args_fn=args_fn,
            requires_arch="sm_100a",
            tiling=self.tiling,
            plan=self,
            input_tensors=list(inputs),
            output_tensors=[o_latent, lse],
            autotune_configs=self._autotune_configs(),
            algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
        )

    def _partials(self, splits: int, like: Tensor) -> Tensor | None:
        """Memory for the partial results of a split; None without one."""
        sizes = (self.h, self.s, LATENT, self.b)
        count = int(self.example().cls.get_workspace_size(*sizes, splits, Float32))
        return like.new_empty((-(-count // like.element_size()),)) if count else None

    def _require_whole_tiles(self, table: Tensor) -> None:
        # The example reads the pages of whole tiles, and takes page 0 for those it has no entry of.
        wanted = -(-self.t // TILE) * (TILE // self.page)
        if table.shape[1] < wanted:
            raise InvalidArgumentError(
                "table", f"[b={self.b}, at least {wanted} pages]", list(table.shape)
            )

    def _ask_example(self, example: Example, tiling: CutlassMlaDecodeTiling) -> None:
        """The example has the last word on what it takes."""
        splits, longest = self.split_count(tiling), max(self.problem().kv_lengths)
        if not example.cls.can_implement(
            self.b, self.s, longest, self.h, self.k, self.p, Float16, Float16, Float32, Float32,
            QK_TILE, PV_TILE, splits, tiling.persistent, True, False, self.page,
        ):  # fmt: skip
            raise UnsupportedError(
                f"cutlass_mla_decode: the example refuses b={self.b} s={self.s} t={longest} "
                f"h={self.h} page={self.page} splits={splits}; {example.origin}"
            )


if __name__ == "__main__":
    raise SystemExit(CutlassMlaDecodeKernel().benchmark_kernel_argparse())
