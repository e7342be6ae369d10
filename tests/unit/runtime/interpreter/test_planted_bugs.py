"""Bugs planted into a correct attention kernel must not go unnoticed.

A mutation either raises on the interpreter, or its result is NaN or far outside the error bound
that the correct kernel keeps.
"""

import inspect
import math
from typing import Any, NamedTuple

import cuda.tile as ct
import pytest
import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime import interpreter

LOG2E = 1 / math.log(2)
TILE_M, TILE_N = 16, 32
HEADS, DEPTH = 2, 64
Const = ct.Constant[int]


@ct.kernel
def flash_attention(Q, K, V, O, LSE, scale: float, TM: Const, TN: Const, D: Const):  # noqa: E741
    """Attention of Q [h, s, d] over K, V [h, t, d]; writes O [h, s, d] and LSE [h, s]."""
    block, head = ct.bid(0), ct.bid(1)
    length = K.shape[1]
    zero = ct.PaddingMode.ZERO
    q = ct.load(Q, (head, block, 0), (1, TM, D), padding_mode=zero).reshape((TM, D))
    m = ct.full((TM, 1), -math.inf, ct.float32)
    total = ct.zeros((TM, 1), ct.float32)
    acc = ct.zeros((TM, D), ct.float32)
    columns = ct.arange(TN, dtype=ct.int32)
    for j in range(ct.cdiv(length, TN)):
        k = ct.load(K, (head, 0, j), (1, D, TN), order=(0, 2, 1), padding_mode=zero)
        scores = ct.mma(q, k.reshape((D, TN)), ct.zeros((TM, TN), ct.float32))
        scores = scores * (scale * LOG2E)
        if (j + 1) * TN > length:
            scores = ct.where((j * TN + columns)[None, :] < length, scores, -math.inf)
        m_new = max(m, ct.max(scores, axis=1, keepdims=True))
        p = ct.exp2(scores - m_new, flush_to_zero=True)
        alpha = ct.exp2(m - m_new, flush_to_zero=True)
        total = total * alpha + ct.sum(p, axis=1, keepdims=True)
        v = ct.load(V, (head, j, 0), (1, TN, D), padding_mode=zero).reshape((TN, D))
        acc = ct.mma(p.astype(V.dtype), v, acc * alpha)
        m = m_new
    ct.store(O, (head, block, 0), (acc / total).reshape((1, TM, D)).astype(O.dtype))
    ct.store(LSE, (head, block), (m + ct.log2(total)).reshape((1, TM)))


class Mutation(NamedTuple):
    """A change of the kernel's source, and how it is expected to show."""

    name: str
    old: str
    new: str
    raises: str | None = None


RANGE = "range(ct.cdiv(length, TN))"
MUTATIONS = [
    Mutation("tail not masked", "if (j + 1) * TN > length:", "if length < 0:"),
    Mutation("mask off by one", "[None, :] < length,", "[None, :] <= length,"),
    # The weights are 0 outside, but 0 * NaN is NaN.
    Mutation("padding of V not given", "(1, TN, D), padding_mode=zero)", "(1, TN, D))"),
    Mutation("maximum of columns", "ct.max(scores, axis=1", "ct.max(scores, axis=0", "broadcast"),
    Mutation("sum of columns", "ct.sum(p, axis=1", "ct.sum(p, axis=0", "broadcast"),
    Mutation("keys not transposed", ", order=(0, 2, 1), padding", ", padding", "outside"),
    Mutation("same tile of V", "ct.load(V, (head, j, 0)", "ct.load(V, (head, 0, 0)"),
    Mutation("element for tile index", "(head, 0, j), (1", "(head, 0, j * TN), (1", "outside"),
    Mutation("one tile too many", RANGE, "range(ct.cdiv(length, TN) + 1)", "outside"),
    Mutation("one tile too few", RANGE, "range(length // TN)"),
    Mutation("store without cast", ").astype(O.dtype))", "))", "cannot implicitly cast float32"),
    Mutation("mma of mixed dtypes", "p.astype(V.dtype)", "p", "must have the same dtype"),
    Mutation("bfloat16 accumulator", "acc * alpha)", "(acc * alpha).astype(V.dtype))", "acc dtype"),
    Mutation("31 columns", "ct.arange(TN, dtype", "ct.arange(TN - 1, dtype", "power of two"),
]


def mutated(mutation: Mutation) -> Any:
    source = inspect.getsource(flash_attention._pyfunc)
    assert source.count(mutation.old) == 1, f"{mutation.name}: the text to change is not unique"
    namespace: dict[str, Any] = dict(globals())
    exec(source.replace(mutation.old, mutation.new), namespace)
    return namespace["flash_attention"]


class Problem(NamedTuple):
    """Inputs and float64 references of a ragged attention problem."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def error(self, kernel: Any) -> float:
        """The largest error of output and log-sum-exp, each relative to the largest value."""
        heads, rows, depth = self.q.shape
        output = torch.full((heads, rows, depth), math.nan, dtype=torch.bfloat16)
        lse, scale = torch.full((heads, rows), math.nan), DEPTH**-0.5
        arguments = (*self, output, lse, scale, TILE_M, TILE_N, depth)
        interpreter.launch((-(-rows // TILE_M), heads), kernel, arguments)
        scores = self.q.double() @ self.k.double().mT * scale
        expected = torch.softmax(scores, -1) @ self.v.double(), torch.logsumexp(scores, -1) * LOG2E
        pairs = zip((output, lse), expected, strict=True)
        errors = [float((f.double() - e).abs().max() / e.abs().max()) for f, e in pairs]
        return math.nan if any(map(math.isnan, errors)) else max(errors)


def problem(rows: int, length: int) -> Problem:
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    q, k, v = (torch.randn(HEADS, n, DEPTH, generator=generator) for n in (rows, length, length))
    # Spread scores, because with a flat softmax many mistakes average out; and negative ones, so
    # that a padded key with its score of 0 would outweigh all others.
    return Problem((1.5 * q + 1).bfloat16(), (1.5 * k - 1).bfloat16(), v.bfloat16())


BOUND = 8e-3  # twice the resolution of bfloat16
RAGGED = problem(rows=37, length=85)


@pytest.mark.parametrize("sizes", [(16, 32), (37, 85), (1, 1), (16, 33), (5, 64)], ids=str)
def test_correct_kernel(sizes):
    assert problem(*sizes).error(flash_attention) < BOUND


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_planted_bug_is_caught(mutation):
    kernel = mutated(mutation)
    if mutation.raises is not None:
        with pytest.raises(InterpreterError, match=mutation.raises) as caught:
            RAGGED.error(kernel)
        assert "kernel flash_attention, block (0, 0, 0)" in str(caught.value)
        return
    error = RAGGED.error(kernel)
    assert math.isnan(error) or error > 10 * BOUND
