"""One decoding step: two requests of different length over a paged latent cache.

python examples/decode_step.py
"""

import torch

import mla_var3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, S, H, D, P, K = 2, 1, 16, 128, 64, 512


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(torch.bfloat16)


def main() -> None:
    torch.manual_seed(0)
    w_uk, w_uv = random(H, D, K) * 0.06, random(H, K, D) * 0.04
    latent, rope = random(B, 200, K), random(B, 200, P)

    # The prompts: 199 tokens of the first request, 30 of the second.
    cache = mla_var3.LatentCache.allocate(B, t=1024, page_size=64, device=DEVICE)
    cache.append(latent[:, :199], rope[:, :199], counts=[199, 30])

    # The step: append one token per request, then attend with its query.
    cache.append(latent[:, 199:], rope[:, 199:])
    q_nope, q_rope = random(B, S, H, D), random(B, S, H, P)
    o, lse = mla_var3.mla_attention(q_nope, q_rope, cache, w_uk, w_uv, return_lse=True)

    choice = mla_var3.explain(q_nope, q_rope, cache, w_uk, w_uv)
    print(f"kernel: {choice.kernel} ({choice.language}); {choice.reason}")
    print(f"output {tuple(o.shape)}, LSE {tuple(lse.shape)}, lengths {cache.lengths.tolist()}")

    # The same for the first request in float64: decompress, softmax, sum.
    c, r = latent[0].double(), rope[0].double()
    keys = torch.einsum("tk,hdk->htd", c, w_uk.double())
    values = torch.einsum("tk,hkd->htd", c, w_uv.double())
    scores = torch.einsum("hd,htd->ht", q_nope[0, 0].double(), keys)
    scores = (scores + q_rope[0, 0].double() @ r.T) * (D + P) ** -0.5
    expected = torch.einsum("ht,htd->hd", scores.softmax(-1), values)
    error = (o[0, 0] - expected).norm() / expected.norm()
    assert error < 0.02, error
    assert torch.allclose(lse[0, 0].double(), scores.logsumexp(-1), atol=0.05)
    print(f"relative error against float64: {error:.1e}")


if __name__ == "__main__":
    main()
