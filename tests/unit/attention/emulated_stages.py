"""What the CuTe DSL kernels of a stage do by their contracts, in float64, on the stage's arguments.

Instead of a launch: the operands, numbers and options that a stage hands to its kernels are those
that a GPU would get.
"""

import inspect
from dataclasses import replace
from typing import Any

import torch

from mla_var3.attention.backends.plans import PlannedBackend, planned, service_of
from mla_var3.attention.request.task import AttentionTask
from mla_var3.kernel.cute_python.mla.decompressed.kernel import DecompressedArguments
from mla_var3.kernel.cute_python.mla.latent.operands import LATENT_FIELDS
from mla_var3.kernel.cute_python.mla.projections.outputs import DecompressCombineSm90
from mla_var3.op.mla.window.packed import PackedWindow, unpack_window
from mla_var3.op.mla.window.quantise import dequantise
from mla_var3.runtime.paths import find_kernel

from .attention_support import attended

ARGUMENTS = {
    "flash_mla": LATENT_FIELDS,
    "decompressed_attention": DecompressedArguments._fields,
    "decompress_combine": tuple(inspect.signature(DecompressCombineSm90.__call__).parameters)[1:-1],
}
"""Names of the arguments of each kernel's host entry, in order."""


def backend(kernel: str) -> PlannedBackend:
    """The backend of a kernel of CuTe DSL that a plan drives."""
    found = find_kernel(kernel, language="cute-dsl")
    service = service_of(found)
    assert service is not None
    return PlannedBackend(found, service)


def stage_of(kernel: str, task: AttentionTask) -> Any:
    """The stage that such a kernel builds for a call on an H200."""
    shape, found = task.shape(), backend(kernel)
    assert found.unsupported(shape) is None
    plan, service = planned(found._id, shape, "NVIDIA H200"), found._service
    return service.build(plan, shape, service.operands(task, shape, plan))


def attend(kernel: str, task: AttentionTask) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a call by its emulated stage."""
    stage = stage_of(kernel, task)
    emulate(stage)
    output, lse = stage.output_tensors[:2]
    return output, lse


def emulate(stage: Any) -> None:
    """Write the outputs of all kernels of a stage, in order."""
    for kernel in stage.kernels():
        tiling = kernel.tiling
        if kernel.name == "decompressed_attention":
            tiling = replace(tiling, splits=1)
        assert not tiling.validate(kernel.plan).failures
        named = named_arguments(kernel, tiling)
        outputs = EMULATIONS[kernel.name](named, kernel.host_fn(tiling))
        for target, result in zip(kernel.output_tensors, outputs, strict=False):
            target.copy_(result.view(target.shape))


def named_arguments(kernel: Any, tiling: Any = None) -> dict[str, Any]:
    """Arguments of a kernel's host entry by name."""
    arguments = kernel.args_fn(tiling or kernel.tiling)
    return dict(zip(ARGUMENTS[kernel.name], arguments, strict=True))


def scale_of(named: dict[str, Any]) -> float:
    return float(named["scale_log2e"]) * float(torch.log(torch.tensor(2.0)))


def flash_mla(named: dict[str, Any], host: Any) -> tuple[torch.Tensor, torch.Tensor]:
    b, s, h = (named[name] for name in ("requests", "queries", "heads"))
    q = torch.cat([named["q_latent"].view(b, s, h, -1), named["q_rope"].view(b, s, h, -1)], -1)
    outputs, sums = [], []
    for request, length in enumerate(named["lengths"].tolist()):
        table = named["block_table"]
        at = request if table is None else table[request].long()
        latent, rope = named["latent"][at], named["rope"][at]
        latent, rope = (rows.reshape(-1, rows.shape[-1])[:length] for rows in (latent, rope))
        keys = torch.cat([latent, rope], -1).expand(h, -1, -1)
        positions = torch.arange(length)
        visible = (positions < length - named["newest"]).expand(s, -1)
        if named["causal"]:
            visible = visible & (positions < length - s + 1 + torch.arange(s)[:, None])
        o, lse = attended(q[request], keys, keys[..., :512], visible, scale_of(named))
        outputs.append(o)
        sums.append(lse)
    return torch.stack(outputs), torch.stack(sums)


def decompressed_attention(named: dict[str, Any], host: Any) -> tuple[torch.Tensor, torch.Tensor]:
    b, s, h = (named[name] for name in ("requests", "queries", "heads"))
    q = named["q_nope"].view(b, s, h, -1)
    if named["q_rope"] is not None:
        q = torch.cat([q, named["q_rope"].view(b, s, h, -1)], -1)
    n, outputs, sums = named["kept"], [], []
    all_keys, all_values = named["keys"], named["values"]
    assert host.fp8 is (named["scales"] is not None)
    if host.fp8:
        packed = PackedWindow(all_keys, all_values, named["scales"])
        all_keys, all_values = (
            dequantise(part, torch.float64) for part in unpack_window(packed, named["slots"])
        )
    slots, rows = torch.arange(named["slots"]), torch.arange(s)[:, None]
    assert host.ring is (named["starts"] is not None)
    for request, length in enumerate(named["lengths"].tolist()):
        at = 0 if host.shared else request
        keys, values = all_keys[at], all_values[at]
        if named["k_rope"] is not None:
            keys = torch.cat([keys, named["k_rope"][at].expand(h, -1, -1)], -1)
        oldest, start, missing = max(length - n, 0), 0, False
        positions = slots if host.shared else oldest + slots
        if host.ring:
            assert n % 64 == 0 and n == named["slots"]
            start = min(int(named["starts"][request]), length)
            positions = oldest + (slots - oldest) % n
            seen_by_all = max(length - s + 1, 0) if named["causal"] else length
            missing = start < oldest or start > (0 if host.alone else seen_by_all)
        visible = ((positions >= start) & (positions < length)).expand(s, -1)
        if named["causal"]:
            visible = visible & (positions < length - s + 1 + rows)
        o, lse = attended(q[request], keys, values, visible, scale_of(named))
        outputs.append(o * (torch.nan if missing else 1.0))
        sums.append(lse * (torch.nan if missing else 1.0))
    return torch.stack(outputs), torch.stack(sums)


def decompress_combine(named: dict[str, Any], host: Any) -> tuple[torch.Tensor, ...]:
    h = named["heads"]
    latent = named["o_latent"].view(-1, h, 512).double()
    old = torch.einsum("rhk,hkd->rhd", latent, named["w_uv"].view(h, 512, 128).double())
    if named["o_new"] is None:
        return (old,)
    sums = [named[name].view(-1, h).double() for name in ("lse_latent", "lse_new")]
    lse = torch.logaddexp(*sums)
    shares = [torch.nan_to_num(torch.exp(one - lse), nan=0.0)[..., None] for one in sums]
    o = old * shares[0] + named["o_new"].view(-1, h, 128).double() * shares[1]
    return o, lse


EMULATIONS: dict[str, Any] = {
    "flash_mla": flash_mla,
    "decompressed_attention": decompressed_attention,
    "decompress_combine": decompress_combine,
}
