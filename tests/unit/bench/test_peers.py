"""Peers: our layouts are right, wrong results are caught, and absence has a reason.

The peers' kernels cannot run here. Stand-ins with their interfaces compute plain attention from
exactly what they are handed, so a wrong page, stride, length or scale shows as an error.
"""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_var3.bench import contenders
from mla_var3.bench import peers as peers_module
from mla_var3.bench.contenders import peer_contender
from mla_var3.bench.peers import KERNELS, MODULES, PeerInputs, PeerLibraries, call_known
from mla_var3.bench.suites import EIGHT_BIT_PEERS, LATENT_PEERS, PEERS
from mla_var3.errors import CheckFailedError, MissingToolError, UnknownNameError, UnsupportedError
from mla_var3.op.compare import compare
from mla_var3.op.mla.cache_formats import FORMATS
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.op.mla.problem import MlaProblem

WIDTHS = {"d": 32, "p": 16, "k": 64}
SMALL = MlaProblem(b=2, s=3, t=70, h=4, **WIDTHS)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """q [s, h, x], k [t, hk, x], v [t, hk, y] -> [s, h, y], bottom-right causal, in float32."""
    s, h, _ = q.shape
    t = k.shape[0]
    k, v = (x.float().expand(-1, h, -1) for x in (k, v))
    scores = torch.einsum("shx,thx->hst", q.float(), k) * scale
    if causal:
        hidden = torch.arange(t)[None] > torch.arange(s)[:, None] + t - s
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hst,thy->shy", scores.softmax(-1), v).to(q.dtype)


def metadata_of(lengths: Tensor, rows: int, heads: int) -> Any:
    return ("metadata", rows), None


def flash_mla_with_kvcache(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, width: int, metadata: Any,
    splits: Any, softmax_scale: float, causal: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    assert metadata == ("metadata", q.shape[1] * q.shape[2])
    out = []
    for r in range(len(q)):
        rows = cache[table[r].long()].flatten(0, 1)[: int(lengths[r])]
        out.append(attend(q[r], rows, rows[..., :width], softmax_scale, causal))
    return torch.stack(out), None


FLASH_MLA = {"get_mla_metadata": metadata_of, "flash_mla_with_kvcache": flash_mla_with_kvcache}


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, softmax_scale: float,
    causal: bool, num_splits: int, qv: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = []
    for r in range(len(q)):
        query, length = q[r], int(cache_seqlens[r])
        k, v = k_cache[r, :length], v_cache[r, :length]
        if qv is not None:
            k, query = torch.cat([k, v], -1), torch.cat([query, qv[r]], -1)
        out.append(attend(query, k, v, softmax_scale, causal))
    return torch.stack(out)


class FlashInferWrapper:
    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype == torch.int8

    def plan(
        self, q_starts: Tensor, kv_starts: Tensor, pages: Tensor, lengths: Tensor, h: int, k: int,
        p: int, page: int, causal: bool, scale: float, q_type: Any, kv_type: Any,
    ) -> None:  # fmt: skip
        self.planned = (q_starts, kv_starts, pages, lengths, causal, scale)

    def run(self, q: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, out: Tensor) -> None:
        q_starts, kv_starts, pages, lengths, causal, scale = self.planned
        for r in range(len(lengths)):
            rows = slice(int(q_starts[r]), int(q_starts[r + 1]))
            own = pages[int(kv_starts[r]) : int(kv_starts[r + 1])].long()
            length = int(lengths[r])
            latent, rope = (x[own].flatten(0, 1)[:length, None] for x in (ckv, kpe))
            query = torch.cat([q[rows], q_pe[rows]], -1)
            out[rows] = attend(query, torch.cat([latent, rope], -1), latent, scale, causal)


def decode_attention_fwd(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, o: Tensor, lse: Tensor, req_to_token: Tensor,
    b_seq_len: Tensor, attn_logits: Tensor, num_kv_splits: int, sm_scale: float,
    page_size: int = 1, logit_cap: float = 0.0,
) -> None:  # fmt: skip
    assert num_kv_splits == attn_logits.shape[2]
    assert k_buffer.shape[1] == page_size
    for r in range(len(q)):
        own, length = req_to_token[r].long(), int(b_seq_len[r])
        k, v = (x[own].flatten(0, 1)[:length] for x in (k_buffer, v_buffer))
        o[r] = attend(q[r : r + 1], k, v, sm_scale, False)[0]


class Operator:
    """A torch operator: positional arguments with names in a schema."""

    def __init__(self, names: str, function: Any) -> None:
        self._schema = SimpleNamespace(arguments=[SimpleNamespace(name=n) for n in names.split()])
        self.function, self.default = function, self

    def __call__(self, *arguments: Any) -> Any:
        names = [argument.name for argument in self._schema.arguments]
        return self.function(**dict(zip(names, arguments, strict=True)))


def flashmla_operator(meta: Any, splits: Any, x: Any, scale: float, **given: Any) -> Any:
    plan = meta or ("metadata", given["q"].shape[1] * given["q"].shape[2])
    out = flash_mla_with_kvcache(**given, metadata=plan, splits=None, softmax_scale=scale)
    return *out, plan, None


def fa3_operator(**given: Any) -> Any:
    assert given["window_size_left"] == -1 and given["unknown_extra"] is None
    q, k, v, qv, lengths = (given[name] for name in ("q", "k", "v", "q_v", "seqused_k"))
    steps = given["cu_seqlens_q"].diff()
    assert all(steps == given["max_seqlen_q"]) and steps.sum() == len(q)
    q, qv = (None if x is None else x.unflatten(0, (len(steps), -1)) for x in (q, qv))
    if qv is None:
        lengths = given["cu_seqlens_k"].diff()
        k, v = (x.unflatten(0, (len(steps), -1)) for x in (k, v))
    scale, causal = given["softmax_scale"], given["is_causal"]
    out = flash_attn_with_kvcache(q, k, v, lengths, scale, causal, given["num_splits"], qv)
    return out.flatten(0, 1), None


def fwd_kvcache_mla_fp8(
    q: Tensor, cache: Tensor, width: int, lengths: Tensor, table: Tensor, scale: float,
    causal: bool, metadata: Any, splits: Any, descale_q: Tensor, descale_k: Tensor,
) -> tuple[Tensor, None]:  # fmt: skip
    """Of vLLM's 8-bit extension of FlashMLA: e4m3 queries and rows, one scale each."""
    assert q.dtype is cache.dtype is torch.float8_e4m3fn
    wide, rows = (q.float() * descale_q).bfloat16(), cache.float() * descale_k
    return flash_mla_with_kvcache(
        wide, rows, table, lengths, width, metadata, splits, softmax_scale=scale, causal=causal
    )


def stand_ins(operators: bool = False) -> PeerLibraries:
    found = PeerLibraries(wanted=())
    found.modules = {
        "flashmla": SimpleNamespace(**FLASH_MLA),
        "fa3": SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache),
        "flashinfer": SimpleNamespace(BatchMLAPagedAttentionWrapper=FlashInferWrapper),
        "triton": SimpleNamespace(decode_attention_fwd=decode_attention_fwd),
    }
    fp8 = {"get_mla_decoding_metadata_dense_fp8": metadata_of}
    fp8 |= {"fwd_kvcache_mla_fp8": fwd_kvcache_mla_fp8}
    found.operators = {"flashmla_fp8": SimpleNamespace(**fp8)}
    if operators:
        mla = Operator("q cache width lengths table scale causal meta splits x", flashmla_operator)
        names = (
            "q k v q_v cu_seqlens_q cu_seqlens_k seqused_k max_seqlen_q max_seqlen_k "
            "softmax_scale is_causal window_size_left num_splits unknown_extra"
        )
        found.operators["flashmla"] = SimpleNamespace(dense_decode_fwd=mla)
        found.operators["fa3"] = SimpleNamespace(fwd=Operator(names, fa3_operator))
    return found


REFERENCES: dict[tuple[bool, bool], dict[str, Tensor]] = {}
"""The float32 outputs, computed once per problem."""


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("operators", [True, False])
@pytest.mark.parametrize("name", PEERS)
def test_every_peer_gets_the_right_numbers(name, operators, causal):
    """With different lengths where a peer takes them: those on the latent cache."""
    latent = name in (*LATENT_PEERS, *EIGHT_BIT_PEERS)
    problem = replace(SMALL, causal=causal)
    if latent:
        problem = MlaProblem(b=3, s=3, t=200, h=4, causal=causal, lengths=(3, 200, 71), **WIDTHS)
    known = REFERENCES.setdefault((latent, causal), {})
    ready = peer_contender(name, problem, stand_ins(operators), known, "cpu").build()
    assert 0 < ready.check() < (0.03 if name in EIGHT_BIT_PEERS else 0.005)
    if not latent:
        ragged = replace(SMALL, lengths=(70, 5))
        with pytest.raises(UnsupportedError, match="expected t=70 tokens in every request"):
            peer_contender(name, ragged, stand_ins(), device="cpu").build()


@pytest.mark.parametrize("fmt", FORMATS)
def test_our_kernel_on_an_8_bit_cache(fmt):
    """In cuTile, whose products are in 16 bits; against what the cache is worth."""
    widths = {**WIDTHS, "k": 512 if fmt == "fp8_ds_mla" else WIDTHS["k"]}
    problem = MlaProblem(b=3, s=3, t=200, h=4, lengths=(3, 200, 71), **widths)
    entry = contenders.fp8_contender(fmt, "cutile-dsl", problem, "cpu")
    assert (entry.kernel, entry.language, entry.cache_dtype) == ("flash_mla", "cutile-dsl", fmt)
    ready = entry.build()
    assert 0 < ready.check() < 0.005
    assert ready.cost.bytes < flash_mla_cost(problem).bytes
    inputs = PeerInputs.make(problem, "cpu")
    rows = torch.cat([part.float() for part in inputs.worth(fmt)], dim=-1)
    assert 0.01 < compare(rows, inputs.latent_cache().float()).relative_frobenius < 0.05


def test_a_peer_that_computes_something_else_is_caught():
    libraries = stand_ins()
    wrong = lambda **given: flash_attn_with_kvcache(**{**given, "causal": False})  # noqa: E731
    libraries.modules["fa3"].flash_attn_with_kvcache = wrong
    ready = peer_contender("fa3_qv", SMALL, libraries, device="cpu").build()
    with pytest.raises(CheckFailedError, match=r"FlashAttention-3 qv: relative error .* \(bound 0"):
        ready.check()
    assert set(KERNELS) == set(PEERS)
    with pytest.raises(UnknownNameError, match="did you mean 'flashmla'"):
        peers_module.peer_kernel("flashmls")


def test_absent_libraries_have_a_reason(monkeypatch):
    for modules in MODULES.values():
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(peers_module, "_find", lambda folder, file: None)
    libraries = PeerLibraries()
    assert "torch" in libraries.versions
    assert all(libraries.absent[name] for name in ("flashmla", "fa3", "flashinfer", "triton"))
    contender = peer_contender("flashmla", SMALL, libraries, device="cpu")
    with pytest.raises(MissingToolError, match="_flashmla_C.abi3.so not found"):
        contender.build()
    assert contender.versions == {}
    # A package joins when it can be imported.
    package = ModuleType("flash_mla")
    vars(package).update(FLASH_MLA)
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    libraries = PeerLibraries(wanted=("flashmla",))
    assert "flashmla" not in libraries.absent
    assert libraries.versions["flashmla"] == "flash_mla unknown"
    contender = peer_contender("flashmla", SMALL, libraries, device="cpu")
    assert contender.build().check() < 0.005
    assert contender.versions == {"flashmla": "flash_mla unknown"}


def test_a_library_that_cannot_be_loaded_or_has_other_arguments_says_why(tmp_path, monkeypatch):
    libraries = PeerLibraries(tmp_path, wanted=("fa3",))
    assert "_vllm_fa3_C.abi3.so not found in --peer_libs" in libraries.absent["fa3"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "_flashmla_C.abi3.so").write_bytes(b"no library")
    libraries = PeerLibraries(tmp_path, wanted=("flashmla",))
    assert "flashmla" in libraries.absent and not libraries.operators

    def broken(name: str) -> Any:
        raise RuntimeError("wrong CUDA\nmore")

    monkeypatch.setattr(peers_module.importlib, "import_module", broken)
    libraries = PeerLibraries(wanted=("flashinfer",))
    assert libraries.absent == {"flashinfer": f"{MODULES['flashinfer'][0]}: wrong CUDA"}

    def newer(q: Any, pages: Any, page_size: int = 1) -> Any:
        return q

    with pytest.raises(MissingToolError, match="also wants pages"):
        call_known(newer, q=1)
    assert call_known(newer, q=1, pages=2, other=3) == 1
