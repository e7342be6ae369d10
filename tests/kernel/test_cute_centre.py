"""When the 8-bit latent kernel centres its output, by the device code on plain numbers."""

import pytest

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.kernel.cute_python.mla.latent_fp8.centre import is_centred, is_due
from mla_var3.kernel.cute_python.mla.latent_fp8.state import CENTRE_PAIRS, FLUSH_PAIRS


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("pairs", range(1, 3 * FLUSH_PAIRS + 2))
def test_segments_are_centred_as_they_are_opened(pairs: int, parity: int) -> None:
    """Both warpgroups at the same pairs, never in a segment that is not opened for it.

    An accumulator holds at most half of `CENTRE_PAIRS` behind a centring or a segment's start, or
    a few more at the end.
    """
    for begin in range(0, pairs, FLUSH_PAIRS):
        end = min(begin + FLUSH_PAIRS, pairs)
        due = [pair for pair in range(begin, end) if is_due(2 * pair + parity, pairs)]
        assert bool(due) == is_centred(end - begin)
        done = [pair + 1 - begin for pair in due]
        assert done == [CENTRE_PAIRS // 2 + CENTRE_PAIRS * i for i in range(len(due))]
        last = done[-1] + CENTRE_PAIRS // 2 if done else 0
        assert end - begin - last <= CENTRE_PAIRS // 2 + 1
