"""Random inputs of the MLA operation, and the projections between its forms.

Slots of the latent cache at and beyond a request's length hold NaN, so that a kernel that reads
them without masking them out fails its check instead of passing by luck.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem, require_int
from mla_var3.op.product import product

_NAN = float("nan")


@dataclass
class MlaInputs:
    """The raw operands of one attention call.

    Attributes:
        q_nope: Queries without rope, `[b, s, h, d]`.
        q_rope: Rope part of the queries, `[b, s, h, p]`.
        c_kv: Latent cache, `[b, t, k]`; NaN at and beyond each length.
        k_rope: Rope part of the keys, shared by all heads, `[b, t, p]`; NaN likewise.
        w_uk: Up-projection of the keys, `[h, d, k]`.
        w_uv: Up-projection of the values, `[h, k, v]`.
        lengths: KV tokens of each request, int32 `[b]`.
    """

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    c_kv: torch.Tensor
    k_rope: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    lengths: torch.Tensor


def torch_dtype(problem: MlaProblem) -> torch.dtype:
    """The torch dtype that `problem.dtype` names."""
    return torch.bfloat16 if problem.dtype == "bfloat16" else torch.float16


def random_numbers(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own, which leaves the global random state alone; fresh without a seed."""
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
        return generator
    require_int("seed", seed, minimum=-(2**63), maximum=2**63 - 1)
    return generator.manual_seed(seed)


def make_inputs(
    problem: MlaProblem, device: torch.device | str, seed: int | None = None
) -> MlaInputs:
    """Makes random normal inputs with NaN in every slot that holds no token.

    On "meta" they have shapes and no values. A seed makes them repeatable on one kind of device.
    They are in the problem's dtype and have unit variance, except for the weights.
    """
    device = torch.device(device)
    dtype = torch_dtype(problem)
    generator = random_numbers(seed, "cpu" if device.type == "meta" else device)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype, device=device)
        return values if values.is_meta else values.normal_(0.0, std, generator=generator)

    b, s, t, h = problem.b, problem.s, problem.t, problem.h
    d, p, k = problem.d, problem.p, problem.k
    # w_uk is contracted over d in the latent query and over k in the decompressed key. One
    # factor cannot give both unit variance; the geometric mean leaves each within (k / d) ** 0.25.
    inputs = MlaInputs(
        q_nope=normal(b, s, h, d),
        q_rope=normal(b, s, h, p),
        c_kv=normal(b, t, k),
        k_rope=normal(b, t, p),
        w_uk=normal(h, d, k, std=(d * k) ** -0.25),
        w_uv=normal(h, k, problem.v, std=k**-0.5),
        lengths=torch.tensor(problem.kv_lengths, dtype=torch.int32, device=device),
    )
    unused = torch.arange(t, device=device)[None, :] >= inputs.lengths[:, None]  # [b, t]
    inputs.c_kv.masked_fill_(unused[:, :, None], _NAN)
    inputs.k_rope.masked_fill_(unused[:, :, None], _NAN)
    return inputs


def project_queries(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """The queries `[b, s, h, d]` in the latent space: `q_nope @ w_uk [h, d, k]`, head by head."""
    return _project_per_head("q_nope", q_nope, "w_uk", w_uk)


def up_project(o_latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Latent outputs `[b, s, h, k]` at value width: `o_latent @ w_uv [h, k, v]`, head by head."""
    return _project_per_head("o_latent", o_latent, "w_uv", w_uv)


def decompress_all(
    c_kv: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompresses the latent cache `[b, t, k]` into keys `[b, h, t, d]` and values `[b, h, t, v]`.

    NaN slots give NaN keys and values.
    """
    _require_weights(c_kv.shape[-1], w_uk, w_uv)
    b, t, _ = c_kv.shape
    keys = c_kv.new_empty((b, w_uk.shape[0], t, w_uk.shape[1]))
    values = c_kv.new_empty((b, w_uv.shape[0], t, w_uv.shape[2]))
    for request in range(0 if c_kv.is_meta else b):  # on "meta" there is nothing to compute
        _decompress(c_kv[request], w_uk, w_uv, keys[request], values[request])
    return keys, values


def decompress_newest(inputs: MlaInputs, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decompresses the newest `n` tokens of each request into a window of its own.

    Slot `j` of request `r` holds position `max(len_r - n, 0) + j`; slots past the request's
    last token hold NaN.

    Returns:
        `k_new [b, h, n, d]`, `v_new [b, h, n, v]` and `k_rope_new [b, n, p]`.
    """
    b, t, _ = inputs.c_kv.shape
    require_int("n", n, minimum=0, maximum=t, maximum_name="t")
    _require_weights(inputs.c_kv.shape[-1], inputs.w_uk, inputs.w_uv)
    h, d, _ = inputs.w_uk.shape
    lengths = inputs.lengths.long()[:, None]  # [b, 1]
    positions = (lengths - n).clamp(min=0) + torch.arange(n, device=lengths.device)  # [b, n]
    unused = positions >= lengths
    slots = positions.clamp(max=t - 1)

    k_new = inputs.c_kv.new_empty((b, h, n, d))
    v_new = inputs.c_kv.new_empty((b, h, n, inputs.w_uv.shape[2]))
    k_rope_new = inputs.k_rope.new_empty((b, n, inputs.k_rope.shape[-1]))
    # Request by request, so that the largest intermediate is one request's latent window.
    for request in range(0 if inputs.c_kv.is_meta else b):
        latent = inputs.c_kv[request].index_select(0, slots[request])
        latent.masked_fill_(unused[request][:, None], _NAN)
        _decompress(latent, inputs.w_uk, inputs.w_uv, k_new[request], v_new[request])
        k_rope_new[request] = inputs.k_rope[request].index_select(0, slots[request])
    k_rope_new.masked_fill_(unused[:, :, None], _NAN)
    return k_new, v_new, k_rope_new


def _project_per_head(
    rows_name: str, rows: torch.Tensor, weight_name: str, weight: torch.Tensor
) -> torch.Tensor:
    """Multiplies `rows [b, s, h, x]` with `weight [h, x, y]` into `[b, s, h, y]`, contiguous."""
    if rows.dim() != 4:
        raise InvalidArgumentError(rows_name, "4 dimensions [b, s, h, ...]", list(rows.shape))
    b, s, h, width = rows.shape
    if weight.dim() != 3 or weight.shape[:2] != (h, width):
        raise InvalidArgumentError(
            weight_name, f"[{h}, {width}, ...] to match {rows_name}", list(weight.shape)
        )
    by_head = rows.reshape(b * s, h, width).transpose(0, 1)  # [h, b*s, x]
    projected = product(by_head, weight)  # [h, b*s, y]
    return projected.transpose(0, 1).reshape(b, s, h, -1).contiguous()


def _decompress(
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Writes the keys `[h, m, d]` and values `[h, m, v]` of the latent rows `[m, k]`."""
    shared = latent.expand(w_uk.shape[0], *latent.shape)  # every head reads the same rows
    product(shared, w_uk.transpose(1, 2), out=keys)
    product(shared, w_uv, out=values)


def _require_weights(k: int, w_uk: torch.Tensor, w_uv: torch.Tensor) -> None:
    if w_uk.dim() != 3 or w_uk.shape[2] != k:
        raise InvalidArgumentError("w_uk", f"[h, d, k={k}]", list(w_uk.shape))
    h = w_uk.shape[0]
    if w_uv.dim() != 3 or tuple(w_uv.shape[:2]) != (h, k):
        raise InvalidArgumentError("w_uv", f"[h={h}, k={k}, v]", list(w_uv.shape))
