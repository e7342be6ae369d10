"""mla_var6_plus_v5: old tokens latent, the n newest decompressed in 8 bits, at the same time.

    q_nope [b, s, h, 128]   q_latent [b, s, h, 512]   q_rope [b, s, h, 64]
    c_kv [b, t, 512]        k_rope [b, t, 64]
    keys [b, h, slots, 128] and values [b, h, slots / 16, 128, 16] in e4m3, scales [b, h, slots, 2]
        float32: the window as `pack_window` lays it out, slots being n rounded up to a multiple
        of 64; slot j is position max(len-n,0)+j
    k_rope_new [b, slots, 64]   of the window, in the dtype of the queries
    w_uv [h, 512, 128]      lengths [b] int32
    -> o [b, s, h, 128] in the input dtype, lse [b, s, h] float32 (natural logarithm)

Otherwise the contract of the base version: bfloat16 and float16, causal or not, any n in 0..t, NaN
in slots without a token. Target: sm_90a.

Parent: mla_var6_plus. Idea: the window is memory bound, and e4m3 with a scale per token and head
halves its bytes, so the same time pays for a window twice as long.

`errors` tells two errors apart. That of the format: keys and values are rounded to three bits of
mantissa, whatever kernel reads them; the reference of the check reads the same rounded window, so
the check does not count this error. That of the kernel: queries and the weights of the values are
rounded to e4m3 as well, each with a scale per row.

A cache with an 8-bit window keeps it as a ring, n being a multiple of 64: slot x holds the position
with position % n == x; the stages of `plan_parts` read it as it lies. No other cache runs this
version. Its id in CuTe DSL was once mla_var6_plus_v2.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedOperands
from mla_var3.kernel.cute_python.mla.mix.plan import LatentTokens, NewestMixPlan
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_attention_cost
from mla_var3.op.mla.inputs import decompress_newest, project_queries
from mla_var3.op.mla.reference import reference_mix
from mla_var3.op.mla.window.formats import FP8, PLAIN
from mla_var3.op.mla.window.packed import (
    TOKEN_GROUP,
    PackedWindow,
    pack_window,
    padded_slots,
    unpack_window,
)
from mla_var3.op.mla.window.quantise import (
    E4M3,
    FormErrors,
    QuantisedRows,
    dequantise,
    form_errors,
    quantise,
)
from mla_var3.runtime.composite import KernelPipeline
from mla_var3.runtime.tensors import check_tensor, require_view


@dataclass
class CuteMlaVar6PlusV5(NewestMixPlan):
    """Plan of version 5 of mla_var6_plus in CuTe DSL."""

    targets = ("sm_90",)
    window_form = FP8

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        raw = self.make_inputs(device)
        q_latent = project_queries(raw.q_nope, raw.w_uk)
        k_new, v_new, k_rope_new = decompress_newest(raw, self.chosen_n)
        packed = pack_window(quantise(k_new), quantise(v_new, powers_of_two=True))
        missing = padded_slots(self.chosen_n) - self.chosen_n
        k_rope_new = functional.pad(k_rope_new, (0, 0, 0, missing), value=torch.nan)
        return (
            raw.q_nope, q_latent, raw.q_rope, raw.c_kv, raw.k_rope, *packed, k_rope_new, raw.w_uv,
            raw.lengths,
        )  # fmt: skip

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """The attention on the same 8-bit window.

        A 16-bit `compute_dtype` asks for the error of the kernel's own precision in PyTorch, e4m3
        queries and weights included. Weights cannot be rounded from here; keys that are rounded a
        second time, with another scale, move them by as much.
        """
        q_nope, q_latent, q_rope, c_kv, k_rope, *packed, rope_new, w_uv, lengths = inputs
        n = self.chosen_n
        k_new, v_new = unpack_window(PackedWindow(*packed), n)
        if compute_dtype is not None and compute_dtype.itemsize < 4:
            q_nope, k_new = dequantise(quantise(q_nope)), rounded_again(k_new)
        dtype = compute_dtype or torch.float32
        return reference_mix(
            q_nope, q_latent, q_rope, c_kv, k_rope, dequantise(k_new, dtype),
            dequantise(v_new, dtype), rope_new[:, :n], w_uv, lengths,
            **self.attend_options(compute_dtype),
        )  # fmt: skip

    def errors(
        self, out: Tensor, inputs: tuple[Tensor, ...], window: tuple[Tensor, Tensor, Tensor]
    ) -> FormErrors:
        """The error of the format and the error of the kernel.

        Args:
            window: keys and values [b, h, n, 128] before rounding, and their rope part [b, n, 64].
        """
        q_nope, q_latent, q_rope, c_kv, k_rope, *_, w_uv, lengths = inputs
        k, v, rope = window
        unrounded, _ = reference_mix(
            q_nope, q_latent, q_rope, c_kv, k_rope, k, v, rope, w_uv, lengths,
            **self.attend_options(),
        )  # fmt: skip
        return form_errors(out, self.reference_fn(*inputs)[0], unrounded)

    def decompressed_cost(self) -> Cost:
        problem = replace(self.problem(), lengths=tuple(self.new_lengths()))
        plain = flash_attention_cost(problem)
        saved = PLAIN.token_bytes(problem) - FP8.token_bytes(problem)
        return Cost(plain.flops, plain.bytes - problem.total_tokens * saved)

    def plan(self, *inputs: Tensor) -> KernelPipeline:
        q_nope, q_latent, q_rope, c_kv, k_rope, *packed, k_rope_new, w_uv, lengths = inputs
        latent = LatentTokens(q_latent, q_rope, c_kv, k_rope, lengths, newest=self.chosen_n)
        keys, values, scales = packed
        window = DecompressedOperands(q_nope, q_rope, keys, values, k_rope_new, lengths, scales)
        return self.plan_parts(latent, window, w_uv)

    def _check_window(self, window: DecompressedOperands) -> None:
        device, slots = window.q_nope.device, padded_slots(self.chosen_n)
        b, h, d, tokens = ("b", self.b), ("h", self.h), ("d", self.d), ("slots", slots)
        groups, group = ("slots/16", slots // TOKEN_GROUP), ("tokens", TOKEN_GROUP)
        check_tensor("keys", window.keys, [b, h, tokens, d], E4M3, device)
        check_tensor("values", window.values, [b, h, groups, d, group], E4M3, device)
        rope = [b, tokens, ("p", self.p)]
        check_tensor("k_rope_new", window.k_rope, rope, self.torch_dtype, device)
        if window.scales is None:
            raise InvalidArgumentError("scales", "those of a window in 8 bits", None)
        scales = [b, h, tokens, ("of key and value", 2)]
        check_tensor("scales", window.scales, scales, torch.float32, device)
        parts = {"keys": window.keys, "values": window.values, "scales": window.scales}
        for name, tensor in parts.items():
            # Bulk copies take contiguous parts of all of them.
            require_view(name, tensor, tensor.numel())
        self._check_lengths(window)


def rounded_again(rows: QuantisedRows) -> QuantisedRows:
    """The same rows in e4m3 with scales a third larger, so that their numbers fall elsewhere."""
    scales = rows.scales * (4.0 / 3.0)
    return QuantisedRows((dequantise(rows) / scales[..., None]).to(E4M3), scales)


if __name__ == "__main__":
    raise SystemExit(CuteMlaVar6PlusV5().benchmark_kernel_argparse())
