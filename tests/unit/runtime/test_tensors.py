"""Checks of tensors: every error names the argument, what was expected and what came."""

from typing import Any

import pytest
import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.tensors import check_tensor, require_view

CPU = torch.device("cpu")
BF16 = torch.bfloat16
STRIDED = torch.zeros(64, dtype=BF16).as_strided((2, 3, 8), (32, 9, 1))


def check(tensor: torch.Tensor, **changes: Any) -> None:
    shape = [("b", 2), ("s", 3), ("d", 8)]
    check_tensor("q", tensor, **{"shape": shape, "dtype": BF16, "device": CPU, **changes})


def make(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape or (2, 3, 8), dtype=dtype, device=device)


def test_what_fits_is_silent():
    check(make())
    check(make(2, 5, 16)[:, :3, :8])  # a slice with strides of whole 16-byte steps
    check(make(1, 3, 8).expand(2, -1, -1))
    check(make(device="meta"), device=torch.device("meta"))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (make(2, 4, 8), r"q: expected [b=2, s=3, d=8], got [2, 4, 8]"),
        (make(2, 24), r"q: expected [b=2, s=3, d=8], got [2, 24]"),
        (make(2, 3, 8, 1), r"q: expected [b=2, s=3, d=8], got [2, 3, 8, 1]"),
        (make(dtype=torch.float16), "q: expected dtype torch.bfloat16, got torch.float16"),
        (make(device="meta"), "q: expected a tensor on cpu, got one on meta"),
        (make(2, 3, 16)[..., ::2], "q: expected stride 1 in the last dimension, got strides (48,"),
        (make(2, 3, 9)[..., :8], "q: expected a stride of dimension b that is a multiple of 16 b"),
        (STRIDED, "q: expected a stride of dimension s that is a multiple of 16 bytes, got"),
    ],
)
def test_errors(tensor, message):
    with pytest.raises(InvalidArgumentError) as caught:
        check(tensor)
    assert str(caught.value).startswith(message)
    assert caught.value.argument == "q"


def test_pointer():
    shifted = make(2, 3, 16)[..., 4:12]
    with pytest.raises(
        InvalidArgumentError, match="^q: expected a pointer aligned to 16 bytes, got 0x"
    ):
        check(shifted)


def test_a_stride_that_is_never_taken_does_not_matter():
    """A dimension of size 1 may have any stride; so may an empty tensor."""
    one = torch.zeros(64, dtype=BF16).as_strided((1, 3, 8), (27, 8, 1))
    check(one, shape=[("b", 1), ("s", 3), ("d", 8)])
    check(make(2, 0, 9)[..., :8], shape=[("b", 2), ("n", 0), ("d", 8)])


def test_a_copy_is_never_made():
    """A copy would keep the values of the first launch."""
    with pytest.raises(InvalidArgumentError) as caught:
        require_view("q", make(3, 2, 8).transpose(0, 1), 6, 8)
    assert str(caught.value) == (
        "q: expected a layout that is [6, 8] without a copy, "
        "got shape [2, 3, 8] with strides (8, 16, 1)"
    )
