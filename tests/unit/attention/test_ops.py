"""The calls inside `torch.compile` and `torch.export`, through their operators."""

import pytest
import torch

import mla_var3
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.ops import latent_attention_op, mla_attention_op

from .attention_support import Model, filled_cache, make_model, normal, operator_operands

P = 4


@pytest.fixture
def call(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, LatentCache, Model]:
    model = make_model(generator)
    cache, _ = filled_cache(generator, [70, 9], model, page_size=64, window=5)
    q_nope, q_rope = (normal(generator, 2, 3, 2, w, dtype=torch.float32) for w in (6, P))
    return q_nope, q_rope, cache, model


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_without_a_break(backend, call):
    q_nope, q_rope, cache, model = call
    parents = torch.tensor([-1, 0, 0])

    def layer(q_nope: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = mla_var3.mla_attention(
            q_nope * 2, q_rope, cache, model.w_uk, model.w_uv, tree_mask=parents, return_lse=True
        )
        return output + 1, lse

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for got, expected in zip(compiled(q_nope, q_rope), layer(q_nope, q_rope), strict=True):
        torch.testing.assert_close(got, expected)


def test_compile_follows_the_cache_and_fills_out(call):
    """The compiled program reads the cache when it runs, and writes where it is told."""
    q_nope, q_rope, cache, model = call
    out = torch.empty(2, 3, 2, 6)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q_nope: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return mla_var3.mla_attention(q_nope, q_rope, cache, model.w_uk, model.w_uv, out=out)

    layer(q_nope, out)
    before = out.clone()
    cache.truncate([2, 1])
    layer(q_nope, out)
    assert not torch.equal(out, before)
    expected = mla_var3.mla_attention(q_nope, q_rope, cache, model.w_uk, model.w_uv)
    torch.testing.assert_close(out, expected)


def test_compile_with_another_scale(call):
    """From the second one on the compiled program takes any."""
    q_nope, q_rope, cache, model = call

    def layer(scale: float) -> torch.Tensor:
        return mla_var3.mla_attention(q_nope, q_rope, cache, model.w_uk, model.w_uv, scale=scale)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for scale in (0.3, 0.4, 0.5):
        torch.testing.assert_close(compiled(scale), layer(scale))


def test_compile_of_latent_and_packed_queries(call):
    _, q_rope, cache, _ = call
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)

    def layer(q: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_var3.mla_latent_attention(
            q, q_rope, cache, d=6, cu_seqlens_q=bounds, max_q=4, sliding_window=2
        )

    q_latent = torch.randn(6, 2, 8)
    rope = q_rope.flatten(0, 1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(q_latent, rope), layer(q_latent, rope), strict=True):
        torch.testing.assert_close(got, expected)


class Layer(torch.nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.w_uk = torch.nn.Parameter(model.w_uk, requires_grad=False)
        self.w_uv = torch.nn.Parameter(model.w_uv, requires_grad=False)

    def forward(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        c_kv: torch.Tensor,
        k_rope: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        cache = (c_kv, k_rope)
        return mla_var3.mla_attention(q_nope, q_rope, cache, self.w_uk, self.w_uv, lengths=lengths)


def test_export(generator):
    layer = Layer(make_model(generator))
    shapes = [(2, 3, 2, 6), (2, 3, 2, P), (2, 20, 8), (2, 20, P)]
    operands = [normal(generator, *shape, dtype=torch.float32) for shape in shapes]
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    program = torch.export.export(layer, (*operands, lengths))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "hyper_mla.mla_attention.default" in targets
    torch.testing.assert_close(program.module()(*operands, lengths), layer(*operands, lengths))


def test_the_operators_follow_their_schema(call):
    """Schema and shapes without values agree with what really comes out."""
    q_nope, q_rope, cache, model = call
    view = cache.view()
    latent = (
        torch.randn(2, 3, 2, 8), q_rope, view.latent, view.rope, view.lengths, view.block_table,
        None, None, None, None, True, 0.3, 3, None, 1, 0, False, None, "auto",
    )  # fmt: skip
    full = operator_operands((q_nope, q_rope), view, model)
    torch.library.opcheck(mla_attention_op, full)
    torch.library.opcheck(latent_attention_op, latent)


def test_the_window_that_a_call_completes_is_declared(generator):
    """After a rollback the mix decompresses what its window lacks, in place."""
    pytest.importorskip("cuda.tile")
    bf16 = torch.bfloat16
    model = make_model(generator, h=2, d=16, k=128, dtype=bf16)
    cache, _ = filled_cache(generator, [60, 21], model, p=16, t=70, dtype=bf16, window=16)
    cache.truncate([3, 0])
    assert cache.window is not None
    q_nope, q_rope = (normal(generator, 2, 2, 2, 16, dtype=bf16) for _ in range(2))
    before = cache.window.start.clone()
    view = cache.view()
    operands = operator_operands((q_nope, q_rope), view, model, "mla_var6_plus")
    torch.library.opcheck(mla_attention_op, operands)
    cache.window.start.copy_(before)

    def layer(q_nope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = mla_var3.mla_attention(
            q_nope, q_rope, cache, model.w_uk, model.w_uv, kernel="mla_var6_plus"
        )
        return output, view.window_start + 0

    output, start = torch.compile(layer, fullgraph=True, backend="aot_eager")(q_nope)
    assert start.tolist() == [41, 5]
    assert cache.window.start.tolist() == [41, 5] != before.tolist()
    torch.testing.assert_close(output, layer(q_nope)[0])
