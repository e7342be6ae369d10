"""What the adapter for transformers refuses; `tests/engines` runs models through it."""

from types import SimpleNamespace

import pytest
import torch

from mla_var3.errors import UnsupportedError
from mla_var3.integrations.transformers import attend, use


@pytest.mark.parametrize("part", ["indexer", "sinks"])
def test_models_with_other_attention_are_refused_by_name(part):
    layer = SimpleNamespace(expand_kv=None, **{part: object()})
    with pytest.raises(UnsupportedError, match=f"expected dense attention, got layers with {part}"):
        use(SimpleNamespace(modules=lambda: [layer]))


@pytest.mark.parametrize("name", ["indices", "s_aux", "sliding_window", "softcap"])
def test_options_that_would_change_the_result_are_refused(name):
    q, key, value = torch.randn(1, 2, 3, 12), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 8)
    with pytest.raises(UnsupportedError, match=f"^{name}: expected none"):
        attend(SimpleNamespace(), q, key, value, None, scaling=1.0, **{name: 3})


@pytest.mark.parametrize("positions", [[[0, 1, 0]], [[0, 1, 2], [1, 2, 3]]])
def test_packed_sequences_and_shifted_positions_are_refused(positions):
    b = len(positions)
    q, key, value = torch.randn(b, 2, 3, 12), torch.randn(b, 1, 3, 4), torch.randn(b, 1, 3, 8)
    with pytest.raises(UnsupportedError, match="^position_ids: expected the newest tokens of one"):
        attend(SimpleNamespace(), q, key, value, None, 1.0, position_ids=torch.tensor(positions))
