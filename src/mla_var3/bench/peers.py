"""The peers' kernels on our inputs, and the libraries they come from.

Every peer gets the same numbers in the layout it wants. It reads either the latent cache or cached
keys and values (decompressed; there every request has `t` tokens), and is checked against the
float32 reference before it is timed. FlashMLA, vLLM's 8-bit extension of it and FlashAttention-3
come as torch operator libraries inside the vLLM package; a folder with just these files will do.
Otherwise their own packages are used.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mla_var3.bench.record import DECOMPRESSED, LATENT, first_line
from mla_var3.errors import MissingToolError, UnknownNameError
from mla_var3.op.cost import Cost
from mla_var3.op.mla import cache_formats
from mla_var3.op.mla.cache_formats import PER_TENSOR, QuantisedCache, cache_format
from mla_var3.op.mla.cost import flash_attention_cost, flash_mla_cost
from mla_var3.op.mla.inputs import MlaInputs, decompress_all, make_inputs, project_queries
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.reference import reference_decompressed, reference_latent
from mla_var3.op.mla.window.quantise import E4M3, E4M3_MAX
from mla_var3.runtime.environment import installed

OPERATORS = {
    "flashmla": ("_flashmla_C", "_flashmla_C.abi3.so"),
    "flashmla_fp8": ("_flashmla_extension_C", "_flashmla_extension_C.abi3.so"),
    "fa3": ("_vllm_fa3_C", "vllm_flash_attn/_vllm_fa3_C.abi3.so"),
}
"""Library -> namespace of its torch operators, and its file inside the vLLM package."""
MODULES = {
    "flashmla": ("flash_mla",),
    "fa3": ("flash_attn_interface",),
    "flashinfer": ("flashinfer.mla",),
    "triton": (
        "vllm.v1.attention.ops.triton_decode_attention",
        "vllm.attention.ops.triton_decode_attention",
    ),
}
"""Library -> Python modules; the first that imports is used, and only without operators."""
DISTRIBUTIONS = {
    "flash_mla": "flash-mla",
    "flash_attn_interface": "flash-attn-3",
    "flashinfer": "flashinfer-python",
}
"""Package -> its distribution, where that has another name."""


class PeerLibraries:
    """The wanted libraries of the peers that could be loaded, from a folder or an installed vLLM.

    Attributes:
        absent: library -> why it cannot be used.
        operators: library -> namespace of its torch operators, where these were loaded.
        modules: library -> Python module, where that is used instead.
        versions: library -> version, or the file it came from.
    """

    def __init__(
        self, folder: Path | None = None, wanted: Collection[str] = (*OPERATORS, *MODULES)
    ) -> None:
        self.absent: dict[str, str] = {}
        self.operators: dict[str, Any] = {}
        self.modules: dict[str, Any] = {}
        self.versions: dict[str, str] = {"torch": _version("torch")}
        self._load_operators(folder, [name for name in OPERATORS if name in wanted])
        for name, modules in MODULES.items():
            if name in wanted and name not in self.operators:
                self._load_module(name, modules, hint=self.absent.get(name, ""))

    def require(self, name: str) -> None:
        """Raise MissingToolError, with the reason, where a library cannot be used."""
        if name in self.absent:
            raise MissingToolError(f"{name}: {self.absent[name]}")

    def _load_operators(self, folder: Path | None, names: Sequence[str]) -> None:
        found = {name: _find(folder, OPERATORS[name][1]) for name in names}
        if any(found.values()):
            # The libraries expect the driver's symbols in the process already.
            try:
                ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                self.absent |= {name: first_line(error) for name in names}
                return
        for name, path in found.items():
            namespace, file = OPERATORS[name]
            if path is None:
                where = "in --peer_libs" if folder else "(install vllm, or --peer_libs)"
                self.absent[name] = f"{Path(file).name} not found {where}"
                continue
            try:
                torch.ops.load_library(str(path))
                self.operators[name] = getattr(torch.ops, namespace)
                version = f"vllm {_version('vllm')}" if folder is None else ""
                self.versions[name] = version or f"{path.name} from --peer_libs"
            except (OSError, RuntimeError) as error:
                self.absent[name] = first_line(error)

    def _load_module(self, name: str, candidates: tuple[str, ...], hint: str = "") -> None:
        reasons = [hint] if hint else []
        for module in candidates:
            try:
                self.modules[name] = importlib.import_module(module)
            except Exception as error:  # importing a foreign package can fail in any way
                reasons.append(f"{module}: {first_line(error)}")
                continue
            self.absent.pop(name, None)
            package = module.partition(".")[0]
            self.versions[name] = f"{package} {_version(package)}"
            return
        self.absent[name] = "; ".join(reasons)


def _find(folder: Path | None, file: str) -> Path | None:
    if folder is not None:
        return next(iter(sorted(folder.rglob(Path(file).name))), None)
    spec = importlib.util.find_spec("vllm")
    root = Path(spec.origin).parent if spec is not None and spec.origin else None
    return root / file if root is not None and (root / file).is_file() else None


def _version(package: str) -> str:
    return installed(DISTRIBUTIONS.get(package, package)) or "unknown"


def call_operator(operator: Any, defaults: Mapping[str, Any], **given: Any) -> Any:
    """Call a torch operator by argument names; what is not given is its default, or None."""
    names = [argument.name for argument in operator._schema.arguments]
    return operator(*[given.get(name, defaults.get(name)) for name in names])


def call_known(function: Callable[..., Any], **given: Any) -> Any:
    """Call a function with those of the arguments that its release knows; it must want no other."""
    parameters = inspect.signature(function).parameters.values()
    unknown = [p.name for p in parameters if p.default is p.empty and p.name not in given]
    if unknown:
        raise MissingToolError(
            f"{function.__name__}: expected a release that needs only {', '.join(given)}, "
            f"got one that also wants {', '.join(unknown)}"
        )
    return function(**{p.name: given[p.name] for p in parameters if p.name in given})


PAGE = 64
SEED = 1
FLASHINFER_WORKSPACE = 384 << 20
TRITON_SPLITS = 4
"""What vLLM uses for its Triton decode kernel."""
FA3_DEFAULTS = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "attention_chunk": 0,
}

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class PeerInputs:
    """The numbers of one problem, from which every peer's layout is made."""

    problem: MlaProblem
    raw: MlaInputs

    @classmethod
    def make(cls, problem: MlaProblem, device: torch.device | str) -> PeerInputs:
        """The same numbers at every call."""
        return cls(problem, make_inputs(problem, device, seed=SEED))

    def latent_queries(self) -> Tensor:
        """[b, s, h, k + p]."""
        q_latent = project_queries(self.raw.q_nope, self.raw.w_uk)
        return torch.cat([q_latent, self.raw.q_rope], dim=-1)

    def separate_queries(self) -> tuple[Tensor, Tensor]:
        """The same as [b, s, h, k] and [b, s, h, p], for our own call."""
        parts = self.latent_queries().split([self.problem.k, self.problem.p], dim=-1)
        return parts[0].contiguous(), parts[1].contiguous()

    def latent_cache(self) -> Tensor:
        """[b, whole pages, k + p], zero in slots without a token: some peers do not mask NaN."""
        b, t, _ = self.raw.c_kv.shape
        cache = self.raw.c_kv.new_zeros((b, -(-t // PAGE) * PAGE, self.problem.k + self.problem.p))
        cache[:, :t] = torch.cat([self.raw.c_kv, self.raw.k_rope], dim=-1)
        used = torch.arange(cache.shape[1], device=cache.device) < self.raw.lengths[:, None]
        return cache.masked_fill_(~used[:, :, None], 0.0)

    def quantised_cache(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Pages `[pages, PAGE, bytes]` of an 8-bit format, and its scale if it has one for all."""
        fmt, values = cache_format(name), self._quantised(name)
        k, p = self.problem.k, self.problem.p
        scale = values.scales if values.scales.dim() == 1 else None
        rows = values.latent.shape[0] * values.latent.shape[1]
        shape = (rows // PAGE, PAGE, fmt.row_bytes(k, p))
        pages = torch.empty(shape, dtype=torch.uint8, device=values.latent.device)
        parts = fmt.parts(pages, k, p, scale)
        for part, new in (
            (parts.latent, values.latent), (parts.rope, values.rope),
            *([] if scale is not None else [(parts.scales, values.scales)]),
        ):  # fmt: skip
            in_pages = new.contiguous().view(torch.uint8).view(*part.shape[:2], -1)
            part.view(torch.uint8).copy_(in_pages)
        return pages, scale

    def worth(self, name: str) -> tuple[Tensor, Tensor]:
        """Latent rows and rope keys that the pages of a format stand for, float32."""
        return cache_formats.dequantise(self._quantised(name))

    def _quantised(self, name: str) -> QuantisedCache:
        rows, k = self.latent_cache(), self.problem.k
        scale = rows.abs().amax().float().reshape(1) / E4M3_MAX if name == PER_TENSOR.name else None
        fmt = cache_format(name)
        return cache_formats.quantise(rows[..., :k], rows[..., k:], fmt, scale)

    def page_table(self) -> Tensor:
        """[b, pages]: the pages of a request are consecutive."""
        b, pages = self.problem.b, -(-self.problem.t // PAGE)
        return torch.arange(b * pages, dtype=torch.int32, device=self.raw.c_kv.device).view(b, -1)

    def starts(self, tokens: int) -> Tensor:
        """[b + 1]: where each request starts among rows of `tokens` per request."""
        steps = torch.arange(self.problem.b + 1, dtype=torch.int32, device=self.raw.c_kv.device)
        return steps * tokens


@dataclass(frozen=True)
class PeerKernel:
    """One way of a peer to compute the problem: `build` makes the call that returns o."""

    title: str
    library: str
    path: str
    build: Callable[[PeerLibraries, PeerInputs], Run]
    cache_dtype: str = ""

    def cost(self, problem: MlaProblem) -> Cost:
        """FLOPs and bytes of its path, the same count as for our kernels."""
        if self.cache_dtype:
            row = cache_format(self.cache_dtype).row_bytes(problem.k, problem.p)
            return flash_mla_cost(problem, row)
        return (flash_mla_cost if self.path == LATENT else flash_attention_cost)(problem)


def reference(path: str, inputs: PeerInputs, cache_dtype: str = "") -> Tensor:
    """The output of a path in float32; on what an 8-bit cache is worth, in float64."""
    raw, problem = inputs.raw, inputs.problem
    settings: dict[str, Any] = {"causal": problem.causal, "scale": problem.softmax_scale}
    if path == LATENT:
        rows, queries = (raw.c_kv, raw.k_rope), project_queries(raw.q_nope, raw.w_uk)
        if cache_dtype:
            rows, settings["compute_dtype"] = inputs.worth(cache_dtype), torch.float64
        return reference_latent(queries, raw.q_rope, *rows, raw.lengths, **settings)[0]
    keys, values = decompress_all(raw.c_kv, raw.w_uk, raw.w_uv)
    operands = (raw.q_nope, raw.q_rope, keys, values, raw.k_rope, raw.lengths)
    return reference_decompressed(*operands, **settings)[0]


def _flashmla(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    problem, lengths, table = inputs.problem, inputs.raw.lengths, inputs.page_table()
    q, k, scale = inputs.latent_queries(), problem.k, problem.softmax_scale
    paged = inputs.latent_cache().view(-1, PAGE, 1, k + problem.p)
    if "flashmla" in libraries.operators:
        operator = libraries.operators["flashmla"].dense_decode_fwd.default
        extra = [None] * (len(operator._schema.arguments) - 9)

        def call(plan: tuple[Any, Any]) -> Any:
            return operator(q, paged, k, lengths, table, scale, problem.causal, *plan, *extra)

        first = call((None, None))  # also schedules; engines reuse that, so we do
        plan = (first[2], first[3])
        return lambda: call(plan)[0]
    module = libraries.modules["flashmla"]
    metadata, splits = module.get_mla_metadata(lengths, problem.s * problem.h, 1)
    return lambda: module.flash_mla_with_kvcache(
        q, paged, table, lengths, k, metadata, splits, softmax_scale=scale, causal=problem.causal
    )[0]


def _flashmla_fp8(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    """VLLM's dense 8-bit kernel: queries and cache in e4m3, one scale each."""
    problem, lengths, table = inputs.problem, inputs.raw.lengths, inputs.page_table()
    operators, k = libraries.operators["flashmla_fp8"], problem.k
    pages, cache_scale = inputs.quantised_cache(PER_TENSOR.name)
    paged = pages.view(E4M3).view(-1, PAGE, 1, k + problem.p)
    wide = inputs.latent_queries().float()
    query_scale = wide.abs().amax().reshape(1) / E4M3_MAX
    q = (wide / query_scale).to(E4M3)
    metadata = operators.get_mla_decoding_metadata_dense_fp8(lengths, problem.s * problem.h, 1)

    def call() -> Tensor:
        out: Tensor = operators.fwd_kvcache_mla_fp8(
            q, paged, k, lengths, table, problem.softmax_scale, problem.causal, *metadata,
            query_scale, cache_scale,
        )[0]  # fmt: skip
        return out

    return call


def _fa3_qv(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    k, cache = inputs.problem.k, inputs.latent_cache()[:, : inputs.problem.t, None]
    q, parts = inputs.latent_queries(), (cache[..., k:], cache[..., :k])
    return _fa3_call(libraries, inputs, q[..., k:], *parts, splits=0, qv=q[..., :k])


def _fa3(splits: int) -> Callable[[PeerLibraries, PeerInputs], Run]:
    def build(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
        problem, raw = inputs.problem, inputs.raw
        keys, values = decompress_all(raw.c_kv, raw.w_uk, raw.w_uv)
        k = keys.new_empty((problem.b, problem.t, problem.h, problem.d + problem.p))
        k[..., : problem.d] = keys.transpose(1, 2)
        k[..., problem.d :] = raw.k_rope[:, :, None, :]
        q = torch.cat([raw.q_nope, raw.q_rope], dim=-1)
        return _fa3_call(libraries, inputs, q, k, values.transpose(1, 2).contiguous(), splits)

    return build


def _fa3_call(
    libraries: PeerLibraries,
    inputs: PeerInputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    splits: int,
    qv: Tensor | None = None,
) -> Run:
    """FlashAttention-3 on q [b, s, h, x], k [b, t, hk, x] and v [b, t, hk, y].

    With `qv` it reads the latent cache, whose requests may have different lengths.
    """
    problem, lengths = inputs.problem, inputs.raw.lengths
    settings: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "num_splits": splits}
    if "fa3" not in libraries.operators:
        attend = libraries.modules["fa3"].flash_attn_with_kvcache
        settings |= {"causal": problem.causal, "cache_seqlens": lengths}
        settings |= {} if qv is None else {"qv": qv}

        def call() -> Tensor:
            out = attend(q=q, k_cache=k, v_cache=v, **settings)
            result: Tensor = out[0] if isinstance(out, tuple) else out
            return result

        return call
    operator = libraries.operators["fa3"].fwd.default
    settings |= {
        "q": q.flatten(0, 1), "cu_seqlens_q": inputs.starts(problem.s), "is_causal": problem.causal,
        "max_seqlen_q": problem.s, "max_seqlen_k": problem.t,
    }  # fmt: skip
    if qv is None:
        starts = inputs.starts(problem.t)
        settings |= {"k": k.flatten(0, 1), "v": v.flatten(0, 1), "cu_seqlens_k": starts}
    else:
        settings |= {"k": k, "v": v, "q_v": qv.flatten(0, 1), "seqused_k": lengths}

    def varlen() -> Tensor:
        out: Tensor = call_operator(operator, FA3_DEFAULTS, **settings)[0]
        return out.view(problem.b, problem.s, problem.h, -1)

    return varlen


def _flashinfer(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    problem, lengths, table = inputs.problem, inputs.raw.lengths, inputs.page_table()
    b, s, h, k, p = problem.b, problem.s, problem.h, problem.k, problem.p
    q = inputs.latent_queries().view(b * s, h, k + p)
    paged = inputs.latent_cache().view(-1, PAGE, k + p)
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.int8, device=q.device)
    wrapper = libraries.modules["flashinfer"].BatchMLAPagedAttentionWrapper(workspace)
    wrapper.plan(
        inputs.starts(s), inputs.starts(table.shape[1]), table.flatten(), lengths, h, k, p, PAGE,
        problem.causal, problem.softmax_scale, q.dtype, paged.dtype,
    )  # fmt: skip
    out = q.new_empty((b * s, h, k))

    def call() -> Tensor:
        wrapper.run(q[..., :k], q[..., k:], paged[..., :k], paged[..., k:], out=out)
        return out.view(b, s, h, k)

    return call


def _triton(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    """The Triton kernel of vLLM takes one query per request, so every query is a request."""
    problem = inputs.problem
    b, s, h, k, p = problem.b, problem.s, problem.h, problem.k, problem.p
    attend = libraries.modules["triton"].decode_attention_fwd
    q = inputs.latent_queries().view(b * s, h, k + p)
    paged = inputs.latent_cache().view(-1, PAGE, 1, k + p)
    lengths = inputs.raw.lengths[:, None].expand(b, s)
    later = torch.arange(s - 1, -1, -1, dtype=torch.int32, device=q.device)
    visible = lengths - later if problem.causal else lengths
    out, lse = q.new_empty((b * s, h, k)), torch.empty((b * s, h), device=q.device)
    partials = torch.empty((b * s, h, TRITON_SPLITS, k + 1), device=q.device)
    operands = {
        "q": q, "k_buffer": paged, "v_buffer": paged[..., :k], "o": out, "lse": lse,
        "req_to_token": inputs.page_table().repeat_interleave(s, dim=0),
        "b_seq_len": visible.reshape(-1), "attn_logits": partials, "num_kv_splits": TRITON_SPLITS,
        "sm_scale": problem.softmax_scale, "page_size": PAGE, "is_mla": True,
    }  # fmt: skip

    def call() -> Tensor:
        call_known(attend, **operands)
        return out.view(b, s, h, k)

    return call


def _sdpa(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    problem, raw = inputs.problem, inputs.raw
    s, t = problem.s, problem.t
    keys, values = decompress_all(raw.c_kv, raw.w_uk, raw.w_uv)
    k = torch.cat([keys, raw.k_rope[:, None].expand(-1, problem.h, -1, -1)], dim=-1)
    q = torch.cat([raw.q_nope, raw.q_rope], dim=-1).transpose(1, 2)
    mask = None
    if problem.causal and s > 1:
        position = torch.arange(t, device=q.device)[None, :]
        limit = (t - s + torch.arange(s, device=q.device))[:, None]
        mask = torch.zeros((s, t), dtype=q.dtype, device=q.device)
        mask.masked_fill_(position > limit, float("-inf"))
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q, k, values, attn_mask=mask, scale=problem.softmax_scale
            )
        return out.transpose(1, 2)

    return call


KERNELS = {
    "flashmla": PeerKernel("FlashMLA", "flashmla", LATENT, _flashmla),
    "flashmla_fp8": PeerKernel(
        "FlashMLA (vLLM)", "flashmla_fp8", LATENT, _flashmla_fp8, PER_TENSOR.name
    ),
    "fa3_qv": PeerKernel("FlashAttention-3 qv", "fa3", LATENT, _fa3_qv),
    "flashinfer": PeerKernel("FlashInfer", "flashinfer", LATENT, _flashinfer),
    "triton": PeerKernel("Triton (vLLM decode)", "triton", LATENT, _triton),
    "fa3": PeerKernel("FlashAttention-3", "fa3", DECOMPRESSED, _fa3(0)),
    "fa3_one_split": PeerKernel("FlashAttention-3, one split", "fa3", DECOMPRESSED, _fa3(1)),
    "sdpa": PeerKernel("torch SDPA (cuDNN)", "torch", DECOMPRESSED, _sdpa),
}


def peer_kernel(name: str) -> PeerKernel:
    """A peer by its short name."""
    if name not in KERNELS:
        raise UnknownNameError("peer", name, KERNELS)
    return KERNELS[name]
