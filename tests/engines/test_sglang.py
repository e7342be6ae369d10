"""SGLang's own attention test kit, with the plug-in as the backend, on the CPU."""

from __future__ import annotations

import unittest
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("sglang_plugins")

KIT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 256,
    "max_context_len": 256,
    "device": "cpu",
    "dtype": torch.float32,
}


def case(mode: str, prefix, extend=(), page: int = 64):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods.mla_attention import MLAAttentionCase

    return MLAAttentionCase(
        name=f"{mode} {prefix}", backend="hyper_mla", forward_mode=ForwardMode[mode], num_heads=4,
        page_size=page, prefix_lens=prefix, extend_lens=extend,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "prefix", "extend"),
    [
        ("EXTEND", (0,), (64,)),
        ("EXTEND", (0, 0, 0), (63, 64, 65)),
        ("EXTEND", (63,), (2,)),
        ("EXTEND", (0, 32, 64), (63, 32, 1)),
        ("DECODE", (61, 62, 63), ()),
        ("DECODE", (31,), ()),
        ("DECODE", (127, 0, 64, 200), ()),
    ],
)
def test_extend_and_decode(mode, prefix, extend) -> None:
    from sglang.test.kits.attention_unittest.attention_methods.mla_attention import (
        run_mla_attention_case,
    )

    run_mla_attention_case(unittest.TestCase(), case(mode, prefix, extend), **KIT)


@pytest.mark.parametrize(
    ("topk", "prefix", "drafts"), [(1, (61, 7), 4), (1, (64, 0, 130), 8), (2, (61, 7, 64), 3)]
)
def test_verify_chains_and_trees(topk, prefix, drafts) -> None:
    from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner

    verify = case("TARGET_VERIFY", prefix, (drafts,) * len(prefix))
    speculative_target_verify_runner.run_mla_eagle_verify_case(
        unittest.TestCase(), verify, topk=topk, **KIT
    )


def test_metadata_for_graphs_equal_eager_ones() -> None:
    """What a CUDA graph replays reads the same pages, lengths and tree as an eager pass."""
    backend = verifying_backend(drafts=3)
    batch = verify_batch(context=(61, 7, 64), drafts=3)
    backend.init_forward_metadata(batch)
    eager = backend.forward_metadata
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=24)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    first = backend.forward_metadata
    backend.init_forward_metadata_out_graph(batch)
    again = backend.forward_metadata
    pages = eager.block_table.shape[1]
    for found in (first, again):
        assert torch.equal(found.lengths, eager.lengths)
        assert torch.equal(found.tree_mask, eager.tree_mask)
        assert torch.equal(found.block_table[:, :pages], eager.block_table)
    for name in ("lengths", "tree_mask", "block_table"):
        assert getattr(first, name).data_ptr() == getattr(again, name).data_ptr()


def test_drafts_may_end_behind_the_context(monkeypatch) -> None:
    from mla_var3.integrations.sglang import backend

    monkeypatch.setattr(backend, "draft_tokens", lambda runner: 8)
    pool = SimpleNamespace(req_to_token=torch.zeros((2, 256 + 4 + 8), dtype=torch.int32))
    runner = SimpleNamespace(
        model_config=SimpleNamespace(context_len=256, kv_lora_rank=512), use_mla_backend=True,
        kv_cache_dtype=torch.bfloat16, page_size=64, token_to_kv_pool=None, device="cpu",
        req_to_token_pool=pool,
    )  # fmt: skip
    made = backend.HyperMLABackend(runner)
    made.init_cuda_graph_state(max_bs=2, max_num_tokens=16)
    # 256 tokens and 8 drafts are on five pages, eager and in a graph.
    batch = SimpleNamespace(req_pool_indices=torch.tensor([1]))
    assert made._table(batch, 256).shape[1] == made._graph.block_table.shape[1] == 5


def test_a_rank_without_requests() -> None:
    """Under data parallelism a rank may be idle while others decode."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = verifying_backend(drafts=3)
    none = torch.zeros(0, dtype=torch.int64)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.IDLE, seq_lens=none, seq_lens_cpu=none, req_pool_indices=none
    )
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata.block_table.shape[0] == 0


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_cache_in_8_bits_has_the_scale_of_its_layer(scale) -> None:
    backend = verifying_backend(drafts=0)
    rows = torch.zeros((130, 1, 576), dtype=torch.float8_e4m3fn)
    backend.k, backend._layers = 512, {}
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer_id: rows)
    k_scale = None if scale is None else torch.tensor(scale)
    pages = backend._pages(SimpleNamespace(layer_id=0, k_scale=k_scale))
    assert pages.latent.shape == (2, 64, 512) and pages.scales.tolist() == [scale or 1.0]


def verifying_backend(drafts: int):
    """The backend without an engine around it."""
    from mla_var3.integrations.sglang.backend import HyperMLABackend

    backend = object.__new__(HyperMLABackend)
    backend.page_size, backend.draft_tokens, backend.device = 64, drafts, torch.device("cpu")
    tokens = torch.arange(4 * 256, dtype=torch.int32).view(4, 256)
    backend._first_tokens = tokens[:, ::64]
    backend._graph = backend._verify_mask = None
    return backend


def verify_batch(context, drafts: int):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    masks = []
    for tokens in context:
        mask = torch.ones((drafts, tokens + drafts), dtype=torch.bool)
        mask[:, tokens:] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
        masks.append(mask.flatten())
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(context),
        seq_lens=torch.tensor(context),
        seq_lens_cpu=torch.tensor(context),
        req_pool_indices=torch.tensor([2, 0, 3]),
        spec_info=SimpleNamespace(custom_mask=torch.cat(masks), topk=2),
    )


@pytest.mark.parametrize("drafts", [None, "EAGLE"])
def test_one_flag_sets_the_others(drafts) -> None:
    from mla_var3.integrations.sglang import complete_settings

    arguments = SimpleNamespace(
        attention_backend="hyper_mla", prefill_attention_backend=None,
        decode_attention_backend=None, page_size=None, speculative_algorithm=drafts,
        speculative_attention_mode="prefill", speculative_draft_attention_backend=None,
    )  # fmt: skip
    complete_settings(arguments)
    assert arguments.attention_backend == "fa3"
    assert (arguments.decode_attention_backend, arguments.page_size) == ("hyper_mla", 64)
    if drafts:
        assert arguments.speculative_attention_mode == "decode"
        assert arguments.speculative_draft_attention_backend == "fa3"


def test_server_arguments_take_the_name() -> None:
    """SGLang's own parser accepts the flag, and the hook completes what it parsed."""
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="dummy", attention_backend="hyper_mla")
    arguments.resolve_once()
    assert arguments.decode_attention_backend == "hyper_mla"
    assert arguments.page_size == 64


def test_other_backends_are_left_alone() -> None:
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="dummy", attention_backend="triton")
    arguments.resolve_once()
    assert arguments.attention_backend == "triton"
    assert arguments.decode_attention_backend is None


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_page_size_that_does_not_fit_is_refused(page_size) -> None:
    from mla_var3.integrations.sglang import complete_settings

    arguments = SimpleNamespace(
        attention_backend="hyper_mla", prefill_attention_backend=None,
        decode_attention_backend=None, page_size=page_size,
    )  # fmt: skip
    with pytest.raises(ValueError, match="--page-size: hyper_mla needs 64"):
        complete_settings(arguments)
