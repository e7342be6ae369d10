"""The problem type: derived sizes, and errors that name the argument."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem

sizes = st.integers(1, 64)


@st.composite
def problems(draw: st.DrawFn) -> MlaProblem:
    b, t = draw(st.integers(1, 6)), draw(sizes)
    lengths = draw(
        st.none() | st.lists(st.integers(0, t), min_size=b, max_size=b).map(lambda x: tuple(x))
    )
    return MlaProblem(b, draw(sizes), t, draw(sizes), causal=draw(st.booleans()), lengths=lengths)


def test_v_is_d_unless_given_and_p_may_be_0():
    problem = MlaProblem(1, 1, 1, 1, d=192, p=0)
    assert (problem.v, problem.p) == (192, 0)
    assert problem == MlaProblem(1, 1, 1, 1, d=192, p=0, v=192)
    assert MlaProblem(1, 1, 1, 1, d=192, v=256).softmax_scale == 256**-0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in "bsthdk"),  # p and v may be 0
        *itertools.product("bsthdkpv", (-3, True, False, 2.0, "4", None)),
    ],
)
def test_sizes_must_be_positive_integers(name, value):
    good = {"b": 1, "s": 1, "t": 1, "h": 1}
    with pytest.raises(InvalidArgumentError, match=f"^{name}: expected a"):
        MlaProblem(**(good | {name: value}))


@pytest.mark.parametrize(
    ("dtype", "suggestion"),
    [
        ("bf16", "bfloat16"),
        ("bfloat", "bfloat16"),
        ("fp16", "float16"),
        ("torch.float16", "float16"),
    ],
)
def test_unknown_dtype_suggests_the_nearest(dtype, suggestion):
    with pytest.raises(InvalidArgumentError, match=f"^dtype: .*did you mean '{suggestion}'"):
        MlaProblem(1, 1, 1, 1, dtype=dtype)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"scale": scale}, "scale: expected a positive finite number")
            for scale in (0.0, -1.0, float("nan"), float("inf"), "1", True)
        ),
        ({"causal": 1}, "causal: expected True or False, got 1"),
        ({"dtype": "int8"}, "dtype: expected 'bfloat16' or 'float16', got 'int8'$"),
        *(
            ({"lengths": lengths}, f"lengths{message}")
            for lengths, message in (
                ((1,), ": expected b=2 entries, got 1$"),
                ((1, 9), r"\[1\]: expected an integer from 0 to t=8, got 9$"),
                ((-1, 1), r"\[0\]: .*got -1$"), ((1, True), r"\[1\]: .*got True$"),
                ((1, 2.0), r"\[1\]: .*got 2.0$"),
                ("12", ": expected a sequence of b=2 integers"),
                (5, ": expected a sequence of b=2 integers"),
            )
        ),
    ],
)  # fmt: skip
def test_bad_options(fields, message):
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        MlaProblem(2, 1, 8, 1, **fields)


@given(problems(), st.data())
def test_window_splits_every_request(problem, data):
    n = data.draw(st.integers(0, problem.t))
    windows = problem.window(n)
    assert [old + new for old, new in windows] == list(problem.kv_lengths)
    assert all(0 <= new <= n and old >= 0 for old, new in windows)
    assert all(old == 0 or new == n for old, new in windows)
    assert problem.tokens_up_to(n) == sum(new for _, new in windows)
    assert (problem.total_tokens, problem.longest) == (
        sum(problem.kv_lengths),
        max(problem.kv_lengths),
    )


def test_within_a_sliding_window():
    """Three queries, of which the first sees two tokens that the last does not."""
    problem = MlaProblem(2, 3, 100, 1, lengths=(100, 5))
    found = problem.within(10)
    assert (found.t, found.lengths, found.s) == (12, (12, 5), 3)
    assert MlaProblem(2, 3, 100, 1).within(10) == MlaProblem(2, 3, 12, 1)
    assert problem.within(None) is problem.within(0) is problem
    assert problem.within(98) == problem
