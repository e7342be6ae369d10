"""The loop of speculative decoding: append drafts, verify them in one call, drop the rejected.

    python examples/speculative_loop.py

A random model stands in for a real one: it accepts each draft with a fixed probability.
"""

import torch

import mla_var3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, DRAFTS, H, D, P, K = 4, 3, 8, 128, 64, 512
STEPS, ACCEPTANCE = 10, 0.7


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(torch.bfloat16)


def main() -> None:
    torch.manual_seed(0)
    w_uk, w_uv = random(H, D, K) * 0.06, random(H, K, D) * 0.04
    s = 1 + DRAFTS  # the last accepted token and its drafts
    cache = mla_var3.LatentCache.allocate(B, t=512, page_size=64, device=DEVICE)
    cache.append(random(B, 100, K), random(B, 100, P), counts=[100, 64, 33, 7])

    accepted_in_all = 0
    expected = cache.lengths.clone()
    for _ in range(STEPS):
        cache.append(random(B, s, K), random(B, s, P))
        o = mla_var3.mla_attention(random(B, s, H, D), random(B, s, H, P), cache, w_uk, w_uv)
        assert o.isfinite().all()

        # Drafts are accepted up to the first rejected one; all of it stays on the device.
        coins = torch.rand(B, DRAFTS, device=DEVICE) < ACCEPTANCE
        accepted = coins.long().cumprod(1).sum(1)
        cache.truncate((DRAFTS - accepted).int())
        accepted_in_all += int(accepted.sum())
        expected += (1 + accepted).int()

    cache.check()
    assert torch.equal(cache.lengths, expected)
    per_step = 1 + accepted_in_all / (STEPS * B)
    print(f"{per_step:.2f} tokens per request and step, lengths {cache.lengths.tolist()}")


if __name__ == "__main__":
    main()
