"""Steps and masks of draft trees as SGLang hands them over, on stand-ins for its two modules."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

S = 3
CONTEXT = (5, 1, 9)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend without an engine around it, in a graph of four requests."""
    for name, attribute in (
        ("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend"),
        ("sglang.srt.mem_cache.memory_pool", "KVWriteLoc"),
    ):
        module = ModuleType(name)
        setattr(module, attribute, type(attribute, (), {}))
        parts = name.split(".")
        for end in range(1, len(parts)):
            package = ModuleType(".".join(parts[:end]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mla_var3.integrations.sglang.backend", raising=False)
    made = importlib.import_module("mla_var3.integrations.sglang.backend")
    found = object.__new__(made.HyperMLABackend)
    found._step, found._step_metadata = made.paged.Step("cpu"), None
    found.draft_tokens, found.page_size, found.device = S, 64, torch.device("cpu")
    found._batch_invariant = False
    found._first_tokens = torch.zeros((8, 2), dtype=torch.int32)
    found._graph = None
    buffer = torch.zeros(4 * S * S, dtype=torch.bool)
    found._verify_mask = SimpleNamespace(buffer=buffer)
    yield found
    sys.modules.pop("mla_var3.integrations.sglang.backend", None)


def trees(generator: torch.Generator, b: int) -> torch.Tensor:
    own = torch.eye(S, dtype=torch.bool)
    return own | (torch.rand((b, S, S), generator=generator) < 0.5).tril()


def full_mask(trees: torch.Tensor) -> torch.Tensor:
    """Of each request a row of context and drafts per draft, one behind the other."""
    rows = [
        torch.cat([torch.ones((S, length), dtype=torch.bool), tree], 1).flatten()
        for tree, length in zip(trees, CONTEXT, strict=True)
    ]
    return torch.cat(rows)


def verification(b: int, **spec: Any) -> SimpleNamespace:
    mode = SimpleNamespace(is_decode_or_idle=lambda: False, is_target_verify=lambda: True)
    lengths = torch.ones(b, dtype=torch.int64)
    lengths[: len(CONTEXT)] = torch.tensor(CONTEXT)[:b]
    return SimpleNamespace(
        forward_mode=mode, batch_size=b, seq_lens=lengths, seq_lens_cpu=lengths,
        req_pool_indices=torch.arange(b), spec_info=SimpleNamespace(**spec),
    )  # fmt: skip


@pytest.mark.parametrize("p", [4, 0])
@pytest.mark.parametrize("apart", [False, True])
def test_a_decode_step_with_and_without_rope(backend, generator, p, apart):
    """Queries come flat, with or without their rope part beside them."""
    b, h, k = 2, 3, 8
    rows = torch.randn((128, 1, k + p), generator=generator)
    q = torch.randn((b, h, k + p), generator=generator)
    backend.k, backend._layers = k, {}
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: rows)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    backend.forward_metadata = SimpleNamespace(
        block_table=table, lengths=torch.tensor([64, 7], dtype=torch.int32), max_q=1,
        query_start_loc=None, tree_mask=None,
    )  # fmt: skip
    layer = SimpleNamespace(tp_q_head_num=h, head_dim=k + p, v_head_dim=k, scaling=0.5, layer_id=0)
    if apart:
        parts = q[..., :k].flatten(1), None, None, layer, None, False, q[..., k:]
    else:
        parts = q.flatten(1), None, None, layer, None, False
    found = backend.forward_decode(*parts).view(b, h, k)
    for request, length in enumerate((64, 7)):
        tokens = rows[64 * request :][:length, 0].double()
        weights = (q[request].double() @ tokens.T * 0.5).softmax(-1)
        torch.testing.assert_close(
            found[request].double(), weights @ tokens[:, :k], atol=1e-5, rtol=1e-4
        )


def test_layers_of_a_pass_share_a_step(backend):
    first, second = SimpleNamespace(), SimpleNamespace()
    step = backend._step_of(first)
    assert backend._step_of(first) is step
    other = backend._step_of(second)
    assert other is not step and other._memory is step._memory  # which graphs have captured
    backend._step = None  # as a draft's, which has one layer
    assert backend._step_of(first) is None


def test_the_views_of_an_8_bit_cache_are_kept(backend):
    """SGLang makes a new view of it in every call; another pool is another cache."""
    pool = torch.zeros((128, 1, 576), dtype=torch.uint8)
    backend.k, backend._layers = 512, {}
    backend.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=lambda layer: pool.view(torch.float8_e4m3fn)
    )
    layer = SimpleNamespace(layer_id=0)
    known = backend._pages(layer)
    assert backend._pages(layer) is known
    pool = torch.zeros_like(pool)
    assert backend._pages(layer).latent.data_ptr() == pool.data_ptr()


def test_more_requests_than_the_buffer_has(backend, generator):
    """Then the mask over drafts alone is a tensor of its own, not the backend's buffer."""
    wanted = trees(generator, 5)
    batch = verification(5, custom_mask=wanted.flatten(), topk=2)
    backend.init_forward_metadata(batch)
    assert torch.equal(backend.forward_metadata.tree_mask, wanted)


@pytest.mark.parametrize("room", [4, 2])
def test_requests_that_only_pad_the_batch(room, backend, generator):
    """Data parallelism adds them before an eager pass; the mask has no part for them.

    Two requests fit the buffer of four, or have a tensor of their own beside one of two.
    """
    wanted = trees(generator, 2)
    own = torch.zeros(room * S * S, dtype=torch.bool)
    own[: wanted.numel()] = wanted.flatten()
    backend._verify_mask = SimpleNamespace(buffer=own)
    mask = own if room == 4 else own.clone()
    backend.init_forward_metadata(verification(6, custom_mask=mask, topk=2))
    found = backend.forward_metadata.tree_mask
    assert found.shape == (6, S, S) and torch.equal(found[:2], wanted)


def test_a_full_mask_with_as_many_entries_as_there_are_trees(backend, generator):
    """Without a buffer SGLang makes full masks; one of padded batches may be as large."""
    backend._verify_mask = None
    wanted = trees(generator, 1)
    rows = torch.cat([torch.ones((S, 6), dtype=torch.bool), wanted[0]], 1)
    batch = verification(3, custom_mask=rows.flatten(), topk=2)
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor([6, 1, 1])
    backend.init_forward_metadata(batch)
    assert torch.equal(backend.forward_metadata.tree_mask[:1], wanted)


def test_lengths_on_the_host_are_asked_for(backend):
    """SGLang 0.5.16, which has no `VerifyMask`, sizes the mask of a verification by them."""
    assert backend.needs_cpu_seq_lens


@pytest.mark.parametrize("spec", [{"topk": 2}, {"tree_topk": -1}, {}])
def test_full_masks_of_regular_and_other_trees(spec, backend, generator):
    """Those of n-grams name no number of branches, or -1."""
    wanted = trees(generator, 3)
    backend.init_forward_metadata(verification(3, custom_mask=full_mask(wanted), **spec))
    assert torch.equal(backend.forward_metadata.tree_mask, wanted)


def test_chains_need_no_mask(backend, generator):
    mask = full_mask(trees(generator, 3))
    for spec in ({"topk": 1}, {"topk": 1, "tree_topk": 1}):
        backend.init_forward_metadata(verification(3, custom_mask=mask, **spec))
        assert backend.forward_metadata.tree_mask is None


def test_a_graph_with_requests_that_the_mask_does_not_have(backend, generator):
    wanted = trees(generator, 3)
    graph = SimpleNamespace(
        lengths=torch.ones(8, dtype=torch.int32),
        block_table=torch.zeros((8, 2), dtype=torch.int32),
        tree_mask=torch.zeros((8, S, S), dtype=torch.bool),
    )
    backend._graph = graph
    # 8 requests of which 3 have a mask of as many entries as 8 trees.
    for b in (3, 4, 8):
        batch = verification(b, custom_mask=full_mask(wanted), topk=2)
        backend.init_forward_metadata_out_graph(batch)
        assert torch.equal(graph.tree_mask[:3], wanted)
