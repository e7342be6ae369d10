"""A tree of drafts verified in one call: every node sees the context and its own ancestors.

python examples/draft_tree.py
"""

import torch

import mla_var3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, D, P, K, CONTEXT = 8, 128, 64, 512, 90
#        0
#      /   \
#     1     2
#    / \     \
#   3   4     5
PARENTS = [-1, 0, 0, 1, 1, 2]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(torch.bfloat16)


def path_to(node: int) -> list[int]:
    """The node's ancestors, oldest first, and the node."""
    return [*path_to(PARENTS[node]), node] if node >= 0 else []


def main() -> None:
    torch.manual_seed(0)
    s = len(PARENTS)
    w_uk, w_uv = random(H, D, K) * 0.06, random(H, K, D) * 0.04
    latent, rope = random(1, CONTEXT + s, K), random(1, CONTEXT + s, P)
    q_nope, q_rope = random(1, s, H, D), random(1, s, H, P)

    cache = mla_var3.LatentCache.allocate(1, t=256, page_size=64, device=DEVICE)
    cache.append(latent, rope)
    tree = torch.tensor(PARENTS)
    o = mla_var3.mla_attention(q_nope, q_rope, cache, w_uk, w_uv, tree_mask=tree)

    # Each path alone, as a plain sequence, gives the same output for its last node.
    for node in range(s):
        kept = [*range(CONTEXT), *(CONTEXT + step for step in path_to(node))]
        alone = mla_var3.mla_attention(
            q_nope[:, node : node + 1],
            q_rope[:, node : node + 1],
            (latent[:, kept].contiguous(), rope[:, kept].contiguous()),
            w_uk,
            w_uv,
        )
        error = (o[:, node] - alone[:, 0]).norm() / alone.norm()
        assert error < 0.02, (node, error)
    print(f"{s} nodes in one call agree with {s} calls along their paths")


if __name__ == "__main__":
    main()
