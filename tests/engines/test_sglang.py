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
    made = backend.HyperMLABackend(runner())
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


@pytest.mark.parametrize("k_scale", [None, 0.5])
def test_a_cache_in_8_bits_is_read_as_sglang_writes_it(k_scale) -> None:
    """Its cache rounds what it gets and leaves the scale of the checkpoint out."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    generator = torch.Generator().manual_seed(1)
    pool = MLATokenToKVPool(
        size=128, page_size=64, dtype=torch.float8_e4m3fn, kv_lora_rank=512, qk_rope_head_dim=64,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=2, head_dim=576, v_head_dim=512, scaling=0.1,
        k_scale=None if k_scale is None else torch.tensor(k_scale),
    )  # fmt: skip
    rows = torch.randn((70, 1, 576), generator=generator)
    pool.set_kv_buffer(layer, torch.arange(64, 134), rows, rows[..., :512])
    backend = verifying_backend(drafts=0)
    backend.k, backend._layers, backend.token_to_kv_pool = 512, {}, pool
    backend.forward_metadata = SimpleNamespace(
        block_table=torch.tensor([[1, 2]], dtype=torch.int32),
        lengths=torch.tensor([70], dtype=torch.int32), max_q=1, query_start_loc=None,
        tree_mask=None,
    )  # fmt: skip
    q = torch.randn((1, 2, 576), generator=generator)
    found = backend.forward_decode(q, None, None, layer, None)
    held = rows[:, 0].to(torch.float8_e4m3fn).double()
    weights = (q[0].double() @ held.T * 0.1).softmax(-1)
    torch.testing.assert_close(
        found.view(2, 512).double(), weights @ held[:, :512], atol=2e-2, rtol=2e-2
    )


def runner(server_args=None, **config):
    pool = SimpleNamespace(req_to_token=torch.zeros((2, 256 + 4 + 8), dtype=torch.int32))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            context_len=256, kv_lora_rank=512, hf_text_config=SimpleNamespace(**config)
        ),
        use_mla_backend=True, kv_cache_dtype=torch.bfloat16, page_size=64, token_to_kv_pool=None,
        device="cpu", req_to_token_pool=pool, server_args=server_args,
    )  # fmt: skip


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_inference(wanted, monkeypatch) -> None:
    """A request's result does not depend on the rest of the batch."""
    from mla_var3.integrations.sglang import backend

    seen = []

    def attend(q, *_, batch_invariant, **options):
        seen.append(batch_invariant)
        return q, None

    monkeypatch.setattr(backend.paged, "paged_attention", attend)
    monkeypatch.setattr(backend, "draft_tokens", lambda runner: 0)
    made = backend.HyperMLABackend(runner(SimpleNamespace(enable_deterministic_inference=wanted)))
    made._pages = lambda layer: None
    made.forward_metadata = backend.Metadata(None, None, 1)
    layer = SimpleNamespace(tp_q_head_num=2, head_dim=576, v_head_dim=512, scaling=0.1)
    made.forward_decode(torch.zeros((3, 2 * 576)), None, None, layer, None)
    assert seen == [wanted]


def test_a_model_with_sparse_attention_is_refused() -> None:
    """SGLang's indexer takes a backend without its metadata for one that reads all tokens."""
    from mla_var3.integrations.sglang.backend import HyperMLABackend

    with pytest.raises(ValueError, match="serves dense attention, the model has sparse"):
        HyperMLABackend(runner(index_topk=2048))


@pytest.mark.parametrize("name", ["topk_indices", "attn_sink"])
def test_what_the_kernel_does_not_compute_is_refused(name) -> None:
    with pytest.raises(ValueError, match=f"does not compute {name}"):
        verifying_backend(drafts=0).forward_decode(
            None, None, None, None, None, **{name: torch.zeros(1)}
        )


def test_queries_that_grow_with_the_position(monkeypatch) -> None:
    """SGLang's DeepSeek layers apply `llama_4_scaling` only to queries in one piece."""
    from sglang.srt.models.deepseek_common import utils
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    from mla_var3.integrations.sglang import backend

    names = [name for name in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS if name != "hyper_mla"]
    for module in (utils, forward_mla):
        monkeypatch.setattr(module, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", names)
    monkeypatch.setattr(backend, "draft_tokens", lambda runner: 0)
    backend.HyperMLABackend(runner(llama_4_scaling={"beta": 0.1}))

    class Called(Exception):
        pass

    def attend(q, *_, **parts):
        raise Called(q, parts)

    layer = SimpleNamespace(
        current_attention_backend="hyper_mla", learnable_sink_param=None, attn_mqa=attend,
        _fuse_rope_for_trtllm_mla=lambda batch: False, is_dcp_mla_decode_phase=lambda batch: False,
    )  # fmt: skip
    scaling = torch.tensor([1.0, 3.0])[:, None, None]
    q, k = torch.ones((2, 4, 576)), torch.ones((2, 1, 576))
    with pytest.raises(Called) as error:
        forward_mla.DeepseekMLAForwardMixin.forward_absorb_core(
            layer, q[..., 512:], k[..., 512:], q[..., :512], k[..., :512], None, None, None, None,
            scaling,
        )  # fmt: skip
    given, parts = error.value.args
    assert torch.equal(given, q * scaling) and "q_rope" not in parts


def verifying_backend(drafts: int):
    """The backend without an engine around it."""
    from mla_var3.integrations.sglang.backend import HyperMLABackend

    backend = object.__new__(HyperMLABackend)
    backend.page_size, backend.draft_tokens, backend.device = 64, drafts, torch.device("cpu")
    tokens = torch.arange(4 * 256, dtype=torch.int32).view(4, 256)
    backend._first_tokens = tokens[:, ::64]
    backend._graph = backend._verify_mask = None
    backend._batch_invariant = False
    backend._step = backend._step_metadata = None
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


@pytest.mark.parametrize("settings", [{}, {"enable_deterministic_inference": True}])
def test_server_arguments_take_the_name(settings) -> None:
    """SGLang's own parser accepts the flag, and the hook completes what it parsed."""
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="dummy", attention_backend="hyper_mla", **settings)
    arguments.resolve_once()
    assert arguments.decode_attention_backend == "hyper_mla"
    assert arguments.page_size == 64


def test_other_backends_are_left_alone() -> None:
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="dummy", attention_backend="triton")
    arguments.resolve_once()
    assert arguments.attention_backend == "triton"
    assert arguments.decode_attention_backend is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill_attention_backend": "hyper_mla"}, "--prefill-attention-backend: hyper_mla"),
        (
            {"attention_backend": "hyper_mla", "rl_on_policy_target": "fsdp"},
            "--rl-on-policy-target: the trainer does not run hyper_mla",
        ),
        ({"decode_attention_backend": "hyper_mla", "dcp_size": 2}, "--dcp-size: .* got 2"),
        (
            {
                "attention_backend": "hyper_mla",
                "enable_two_batch_overlap": True,
                "speculative_eagle_topk": 2,
            },
            "--speculative-eagle-topk: hyper_mla needs 1",
        ),
    ],
)
def test_settings_that_are_not_served_are_refused(settings, message) -> None:
    """SGLang looks at the backend of prefill, and lets them through."""
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(ValueError, match=message):
        ServerArgs(model_path="dummy", **settings).resolve_once()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_page_size_that_does_not_fit_is_refused(page_size) -> None:
    from mla_var3.integrations.sglang import complete_settings

    arguments = SimpleNamespace(
        attention_backend="hyper_mla", prefill_attention_backend=None,
        decode_attention_backend=None, page_size=page_size,
    )  # fmt: skip
    with pytest.raises(ValueError, match="--page-size: hyper_mla needs 64"):
        complete_settings(arguments)
