"""The merge of shared prefixes without a GPU: it compiles, and what it is launched with."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.kernel.cute_python.mla.latent.call import ELEMENT_TYPES
from mla_var3.kernel.cute_python.mla.prefix import merge
from mla_var3.runtime.cute.arguments import kinds_of
from mla_var3.runtime.cute_kernel import compile_program
from mla_var3.runtime.stage import Tiling

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(dtype: torch.dtype, parts: int) -> tuple[torch.Tensor, torch.Tensor, list[Part]]:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    part = (empty(6, 4, 512, dtype=dtype), empty(6, 4), empty(6, dtype=torch.int32))
    return empty(3, 2, 4, 512, dtype=dtype), empty(3, 2, 4), [part] * parts


@pytest.mark.parametrize(
    ("dtype", "parts"), [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 1)]
)
def test_it_compiles_with_wide_loads_and_no_spills(dtype: torch.dtype, parts: int) -> None:
    arguments = merge.merge_arguments(*operands(dtype, parts), sm_count=132)
    assert arguments[-3:] == (24, 4, 3)  # rows, heads, CTAs
    program = compile_program(
        merge.MergePrefix.merge_prefix,
        merge.MergePrefix(ELEMENT_TYPES[dtype]),
        kinds_of(arguments),
        Tiling(),
        "sm_90a",
    )
    assert program.ptx.count("ld.global.v4") == merge.CHUNKS * (1 + parts)
    assert program.ptx.count("st.global.v4") == merge.CHUNKS
    assert ".local" not in program.ptx
