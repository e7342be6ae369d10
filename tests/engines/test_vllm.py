"""Real vLLM on the CPU: its engine on our backend beside its own, and the plug-in's answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "engines" / "vllm_tiny.py"
SECONDS = 600
LAYERS, DRAFT_LAYER = ("0", "1"), "2"


@pytest.fixture(scope="module", params=[0, 3], ids=["no drafts", "MTP 3"])
def engines(request, tmp_path_factory):
    """Results of vLLM's backend and of ours, each in an engine of its own, both at once."""
    started = {}
    for backend in ("own", "hyper_mla"):
        folder = tmp_path_factory.mktemp(f"{backend}-{request.param}")
        log = (folder / "log.txt").open("w")
        command = [sys.executable, str(PROGRAM), str(folder), backend, str(request.param)]
        # vLLM keeps there what it found out about the model class, which takes it long.
        cache = tmp_path_factory.getbasetemp() / "vllm"
        paths = f"{ROOT / 'src'}:{ROOT}"
        environment = os.environ | {"PYTHONPATH": paths, "VLLM_CACHE_ROOT": str(cache)}
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        started[backend] = (folder, process)
    results = {}
    for backend, (folder, process) in started.items():
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = "no end"
        text = (folder / "log.txt").read_text()
        assert code == 0, f"vLLM with {backend}: {code}\n{text[-4000:]}"
        results[backend] = json.loads((folder / "result.json").read_text()) | {"log": text}
    return request.param, results["own"], results["hyper_mla"]


def test_tokens_and_logprobs_equal_those_of_vllms_backend(engines) -> None:
    _, own, ours = engines
    assert ours["tokens"] == own["tokens"]
    assert len({token for row in own["tokens"] for token in row}) > 20  # no trivial model
    differences = [
        abs(mine[token] - theirs[token])
        for row, other in zip(ours["logprobs"], own["logprobs"], strict=True)
        for mine, theirs in zip(row, other, strict=True)
        for token in mine.keys() & theirs.keys()
    ]
    assert max(differences) < 1e-4


def test_every_layer_went_through_our_backend(engines) -> None:
    drafts, _, ours = engines
    calls = ours["calls"]
    for layer in LAYERS:
        assert calls[f"{layer} several"] > 0  # short prompts, and verification
        assert drafts or calls[f"{layer} one"] > 0
    assert (f"{DRAFT_LAYER} one" in calls) == bool(drafts)
    assert calls["prefill"] > 0  # long prompts


def test_layers_share_the_schedule_of_their_step(engines) -> None:
    """The first layer of every pass finds it. A stale one would have ended the engine."""
    drafts, _, ours = engines
    calls = ours["calls"]

    def of(layer: str) -> int:
        return sum(count for name, count in calls.items() if name.startswith(f"{layer} "))

    target = of(LAYERS[0])
    assert calls["schedule read"] == target
    assert calls["schedule found"] == target  # a draft's layer is alone, and has none
    assert (of(DRAFT_LAYER) > 0) == bool(drafts)


def test_drafts_are_accepted(engines) -> None:
    """Otherwise verification of several tokens would not be tested."""
    drafts, own, ours = engines
    assert own["accepted"] == ours["accepted"]
    assert (own["accepted"] > 0) == bool(drafts)


def test_one_line_says_what_runs(engines) -> None:
    _, _, ours = engines
    lines = [line for line in ours["log"].splitlines() if "hyper-mla" in line and "kernel" in line]
    assert len(lines) == 1
    assert "torch_tiled on cpu" in lines[0]


# The plug-in's answers, without an engine


@pytest.fixture(scope="module")
def backend():
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionBackendEnum["HYPER_MLA"].get_path() == AttentionBackendEnum.CUSTOM.get_path()
    return AttentionBackendEnum["HYPER_MLA"].get_class()


def test_registering_again_changes_nothing(backend) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from mla_var3.integrations.vllm import flag, register

    before = list(AttentionBackendEnum.__members__)
    register()
    assert list(AttentionBackendEnum.__members__) == before
    assert flag() == "HYPER_MLA"


@pytest.fixture
def fitting(monkeypatch):
    """A configuration that the backend serves."""
    from vllm.platforms.interface import DeviceCapability

    import mla_var3.integrations.vllm.backend as module

    monkeypatch.setattr(module, "find_spec", lambda name: object())
    without = ("has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales")
    return dict.fromkeys(without, False) | {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64,
        "use_mla": True, "attn_type": "decoder", "device_capability": DeviceCapability(9, 0),
    }  # fmt: skip


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_serves_deepseek_on_hopper(backend, fitting, kv_cache_dtype) -> None:
    assert backend.validate_configuration(**fitting | {"kv_cache_dtype": kv_cache_dtype}) == []
    assert backend.get_preferred_block_size(16) == 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_capability": (10, 0)}, "runs on Hopper .*, this GPU is sm_100"),
        ({"kv_cache_dtype": "fp8", "head_size": 320}, "rows of 576 columns"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "--kv-cache-dtype auto, or fp8"),
        ({"kv_cache_dtype": "nvfp4"}, "does not read nvfp4: --kv-cache-dtype auto, or fp8"),
        ({"kv_cache_dtype": "float16"}, "a cache of the model's dtype: --kv-cache-dtype auto"),
        ({"use_mla": False, "head_size": 128}, '"attention_backend" in --speculative-config'),
        ({"use_non_causal": True}, '"attention_backend" in --speculative-config'),
        ({"use_sparse": True}, "attention is sparse"),
        ({"head_size": 640}, "cache rows of 576, 512, 320, 288 columns, this model has 640"),
        ({"block_size": 16}, "--block-size 64 or a multiple, got 16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses_with_the_reason(backend, fitting, change, reason) -> None:
    from vllm.platforms.interface import DeviceCapability

    if "device_capability" in change:
        change = {"device_capability": DeviceCapability(*change["device_capability"])}
    reasons = backend.validate_configuration(**fitting | change)
    assert any(re.search(reason, text) for text in reasons), reasons


def test_names_the_missing_package(backend, fitting, monkeypatch) -> None:
    import mla_var3.integrations.vllm.backend as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    (reason,) = backend.validate_configuration(**fitting)
    assert "pip install 'hyper-mla[vllm]'" in reason


@pytest.mark.parametrize("width", [576, 512, 320, 288])
def test_batches_have_rows_of_every_width_that_is_served(backend, fitting, width) -> None:
    from mla_var3.integrations.vllm.backend import HyperMLAMetadata

    assert backend.validate_configuration(**fitting | {"head_size": width}) == []
    counts = dict.fromkeys(("num_reqs", "max_query_len", "max_seq_len", "num_actual_tokens"), 1)
    counts |= {"num_decodes": 1, "num_decode_tokens": 1, "num_prefills": 0}
    made = HyperMLAMetadata(query_start_loc=None, slot_mapping=None, head_dim=width, **counts)
    assert made.num_decodes == 1


def settings(drafts: int = 0, dcp: int = 1, method: str = "mtp", **draft):
    """As much of vLLM's configuration as the backend reads."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = SimpleNamespace(use_mla=True, get_head_size=lambda: 576) if drafts else None
    for name, value in draft.items():
        setattr(model, name, value)
    speculative = SimpleNamespace(
        num_speculative_tokens=drafts, parallel_drafting=False, attention_backend=None,
        draft_model_config=model, method=method, kv_cache_dtype=draft.get("cache"),
    )  # fmt: skip
    return SimpleNamespace(
        speculative_config=speculative if drafts else None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
        attention_config=SimpleNamespace(backend=AttentionBackendEnum["HYPER_MLA"]),
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        use_v2_model_runner=True,
    )


def test_graphs_replay_ragged_verify_batches(backend) -> None:
    bound = backend.get_builder_cls().get_varlen_cudagraph_max_query_len
    assert bound(settings(), None) == 1
    assert bound(settings(drafts=3), None) == 4


@pytest.mark.parametrize(
    ("starts", "given", "bound"),
    [
        ([0, 1, 2], None, 1),  # before vLLM passed a bound
        ([0, 4, 6], None, 4),
        ([0, 1, 2], 4, 4),  # captured with one token each, replayed with up to four
        ([0, 1, 2], 2048, 4),  # a prefill in the same batch
        ([0, 30, 31], 2048, 30),  # a short extension
        ([0, 0], 1, 1),
    ],
)
def test_bound_on_query_lengths(backend, starts, given, bound) -> None:
    builder = object.__new__(backend.get_builder_cls())
    builder._decode_queries, builder._step = 4, None
    options = {} if given is None else {"max_query_len": given}
    offsets = torch.tensor(starts, dtype=torch.int32)
    decode = builder._build_decode(
        block_table_tensor=None, seq_lens_device=None, max_seq_len=9, query_start_loc_cpu=offsets,
        query_start_loc_device=offsets, num_decode_tokens=starts[-1], dcp_tot_seq_lens_device=None,
        **options,
    )  # fmt: skip
    assert decode.max_query_len == bound
    assert decode.query_start_loc is offsets


def test_batch_invariance_is_served(backend, fitting) -> None:
    assert backend.validate_configuration(**fitting | {"use_batch_invariant": True}) == []


def impl_of(backend, **attributes):
    """A layer's implementation without the layer."""
    impl = object.__new__(backend.get_impl_cls())
    usual = {
        "kv_lora_rank": 512, "scale": 0.1, "need_to_return_lse_for_decode": True,
        "dcp_world_size": 1, "_batch_invariant": False, "_sharded": False, "_k_scale_cache": None,
    }  # fmt: skip
    for name, value in (usual | attributes).items():
        setattr(impl, name, value)
    return impl


def one_request(queries: int, tokens: int):
    """The metadata of one request with five tokens on this rank, in the second page."""

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32)

    return SimpleNamespace(
        decode=SimpleNamespace(
            block_table=ints([1]), seq_lens=ints(5), dcp_tot_seq_lens=ints(tokens),
            query_start_loc=ints(0, queries), max_query_len=queries, step=None,
        )
    )  # fmt: skip


@pytest.mark.parametrize("interleave", [1, 4])
def test_context_parallelism_knows_the_tokens_of_the_other_ranks(backend, interleave) -> None:
    """Several queries see what the mask of the shards says; longer runs have no such mask."""
    import mla_var3.integrations.vllm.backend as module

    sharded = module.interleaves_tokens(SimpleNamespace(cp_kv_cache_interleave_size=interleave))
    impl = impl_of(backend, dcp_world_size=2, dcp_rank=1, _sharded=sharded)
    queries, cache = torch.randn(3, 4, 576), torch.randn(2, 64, 576)
    _, lse = impl.forward_mqa(queries, cache, one_request(queries=3, tokens=10), None)
    # Queries are tokens 7, 8 and 9; of tokens 1, 3, 5, 7, 9 they see 4, 4 and 5.
    seen = (4, 4, 5) if interleave == 1 else (3, 4, 5)
    for query, count in enumerate(seen):
        scores = queries[query] @ cache[1, :count].T * 0.1
        torch.testing.assert_close(lse[query], scores.logsumexp(-1), atol=1e-4, rtol=1e-4)


def test_a_cache_in_8_bits_has_the_scale_of_its_layer(backend) -> None:
    impl = impl_of(backend)
    queries = torch.randn(1, 4, 576).bfloat16()
    cache = torch.randn(2, 64, 576).to(torch.float8_e4m3fn)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5))
    metadata = one_request(queries=1, tokens=5)
    for scale in (0.5, 2.0):  # as vLLM may set it later, in a new view of the cache
        layer._k_scale.fill_(scale)
        view = cache.view(torch.uint8).view(torch.float8_e4m3fn)
        _, lse = impl.forward_mqa(queries, view, metadata, layer)
        scores = queries[0].float() @ cache[1, :5].float().T * scale * 0.1
        torch.testing.assert_close(lse[0], scores.logsumexp(-1), atol=2e-2, rtol=2e-2)
        pages = impl._pages_of(view, layer)
    assert impl._pages_of(cache, layer) is pages
    assert impl._pages_of(cache[:1], layer) is not pages


def test_a_cache_that_vllm_gives_up_is_freed(backend) -> None:
    """vLLM drops the layers' caches at the end of an engine, whose model may live on."""
    from vllm.v1.worker.utils import clear_layer_kv_caches

    impl = impl_of(backend)
    layer = SimpleNamespace(kv_cache=torch.zeros(2, 64, 576), impl=impl)
    assert impl._pages_of(layer.kv_cache, layer).latent.shape == (2, 64, 512)
    cache = weakref.ref(layer.kv_cache)
    clear_layer_kv_caches([layer])
    assert cache() is None


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        ({}, True),
        ({"method": "dflash"}, False),  # attends without a causal mask
        ({"use_mla": False}, False),
        ({"get_head_size": lambda: 128}, False),
        ({"get_head_size": lambda: 320}, False),  # not with an 8-bit cache
        ({"get_head_size": lambda: 320, "cache": "auto"}, True),
        ({"cache": "fp8_e5m2"}, False),
    ],
)
def test_draft_layers_follow_the_target(backend, change, shared) -> None:
    from mla_var3.integrations.vllm.backend import share_with_draft

    config = settings(drafts=3, **change)
    share_with_draft(config)
    speculative = config.speculative_config
    assert speculative.attention_backend == (config.attention_config.backend if shared else None)


def test_a_backend_named_for_the_draft_stays(backend) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from mla_var3.integrations.vllm.backend import share_with_draft

    config = settings(drafts=3)
    config.speculative_config.attention_backend = AttentionBackendEnum.TRITON_MLA
    share_with_draft(config)
    assert config.speculative_config.attention_backend is AttentionBackendEnum.TRITON_MLA


# The prefill backend


@pytest.fixture(scope="module")
def prefill(backend):
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    cls = MLAPrefillBackendEnum["HYPER_MLA"].get_class()
    assert MLAPrefillBackendEnum.CUSTOM.get_class() is cls
    return cls


@pytest.mark.parametrize(
    ("capability", "widths", "cute", "reason"),
    [
        ((9, 0), (128, 64, 128), True, None),
        ((9, 0), (64, 32, 64), True, None),  # MiniCPM3, which vLLM's own backend does not serve
        ((10, 0), (128, 64, 128), True, "runs on Hopper .*, this GPU is sm_100"),
        ((9, 0), (128, 64, 64), True, r"serves heads of \(d, p, v\)"),
        ((9, 0), (128, 64, 128), False, "nvidia-cutlass-dsl"),
    ],
)
def test_prefill_is_served_or_refused(
    prefill, monkeypatch, capability, widths, cute, reason
) -> None:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

    monkeypatch.setattr(prefill, "is_available", lambda: cute)
    names = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    config = MLAPrefillSelectorConfig(
        torch.bfloat16, MLADimensions(**dict(zip(names, widths, strict=True)))
    )
    reasons = prefill.validate_configuration(DeviceCapability(*capability), config)
    if reason is None:
        assert reasons == []
    else:
        assert any(re.search(reason, text) for text in reasons), reasons


@pytest.mark.parametrize("numbered", [True, False], ids=["chunk_idx", "chunk"])
def test_packed_prefill_equals_attention_of_each_request(prefill, numbered) -> None:
    """New tokens see each other causally, and all of their context, of which there may be none."""
    h, d, p, width = 2, 128, 64, 128
    backend = prefill(h, 0.1, 512, d, p, width, SimpleNamespace())
    counts, context = [3, 1, 4], [2, 0, 5]

    def starts(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def packed(lengths: list[int], columns: int) -> torch.Tensor:
        return torch.randn(sum(lengths), h, columns)

    def keys_of(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        k, decompressed = packed(lengths, d + p), packed(lengths, d + width)
        k[..., d:] = k[:, :1, d:]  # all heads have the same rope part
        return k, decompressed[..., d:]  # values are a view, as in vLLM

    chunks = [starts([9] * 3), starts(context)]
    metadata = SimpleNamespace(
        query_start_loc=starts(counts), chunked_context=SimpleNamespace(cu_seq_lens=chunks),
        query_lens_cpu=None if numbered else torch.tensor(counts),
    )  # fmt: skip
    backend.prepare_metadata(metadata)
    q, (k, v), (k_old, v_old) = packed(counts, d + p), keys_of(counts), keys_of(context)
    new, new_lse = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=True)
    chunk = SimpleNamespace(query_start_loc=metadata.query_start_loc, cu_seq_lens=chunks[1])
    which = {"chunk_idx": 1} if numbered else {"chunk": chunk}
    old, old_lse = backend.run_prefill_context_chunk(**which, q=q, k=k_old, v=v_old)
    assert new_lse.shape == old_lse.shape == (h, sum(counts))
    weights = torch.stack([old_lse, new_lse]).softmax(0)[..., None].transpose(1, 2)
    merged = weights[0] * old + weights[1] * new
    for request, count in enumerate(counts):
        rows = slice(*starts(counts)[request : request + 2].tolist())
        past = slice(*starts(context)[request : request + 2].tolist())
        keys, values = torch.cat([k_old[past], k[rows]]), torch.cat([v_old[past], v[rows]])
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * 0.1
        hidden = torch.ones(count, len(keys)).triu(1 + context[request]).bool()
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values.transpose(0, 1)
        torch.testing.assert_close(merged[rows], expected.transpose(0, 1), atol=1e-4, rtol=1e-4)
        if context[request] == 0:
            assert bool((old_lse[:, rows] == -torch.inf).all() and (old[rows] == 0).all())
    out = torch.empty_like(new)
    assert backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=False, out=out) is out
    torch.testing.assert_close(out, new)
