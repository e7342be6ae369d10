"""Time the decode attention of vLLM's MLA backends per layer, without starting an engine.

    python -m tests.gpu.serving.layers OUT.json [--heads=8,16,32,128] [--cold] [--seconds=240]

Builds what vLLM would run: each backend's metadata builder and one implementation per layer, on
scattered pages of 64 tokens, inside a CUDA graph of several layers with a cache each. Backends take
turns. Queries have the strides that vLLM's projections leave; the copies, merges and splits that a
backend needs are inside of its time. The schedule that each computes once per step is not. Outputs
are compared before anything is timed.

Layers of attention alone leave code, lengths and block table in the caches. With `--cold` each
layer begins as in a model, behind other kernels and more bytes than the L2 cache holds; their time,
from a graph of them alone, is taken off.

`uniform` batches have equal lengths and 1 + drafts query tokens per request. `ragged` ones have
lengths between half and all of the context and 1 to 1 + drafts query tokens; there FLASHMLA sends
requests to prefill, so it has no time. `host` is the time of an eager launch on the host.

Needs vLLM 0.26 or newer and a Hopper GPU. `--device=cpu` tries the construction of our backend with
tiny sizes on a machine without a GPU. Exit code 1: outputs differ, or rows are missing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..attention_record import cuda_is_missing, write_record
from .one_engine import ENVIRONMENT, OURS, PEERS, model_config

os.environ.update(ENVIRONMENT, VLLM_LOGGING_LEVEL="WARNING")

import torch

PAGE, WIDTH, LATENT = 64, 576, 512
NOPE, ROPE = 128, 64
BYTES_PER_GRAPH = 10**9
"""Cache bytes that the layers of a graph have together: far more than the L2 cache."""
FEWEST_LAYERS, MOST_LAYERS = 3, 12
LAYERS = ["layer", "another"]
"""Names of layers, of which vLLM knows two; a graph has more of the same."""
BIG_BATCH = 2**21
"""Tokens of a batch that is timed after all others."""
TOLERANCE = 2e-2
ALONE = "between layers"
"""The graph of what lies between layers, without attention."""
SPIN_CYCLES = 200_000
"""Keeps the GPU busy while the host enqueues what is timed."""


@dataclass(frozen=True)
class Row:
    """One batch.

    Attributes:
        heads: Query heads.
        batch: Requests.
        context: Longest length.
        drafts: Draft tokens; a request has up to one query token more.
        kind: `uniform` or `ragged`.
    """

    heads: int
    batch: int
    context: int
    drafts: int
    kind: str

    def counts(self) -> list[int]:
        """Query tokens of each request."""
        if self.kind == "uniform":
            return [1 + self.drafts] * self.batch
        rng = random.Random(self.batch + self.drafts)
        drawn = [rng.randint(1, 1 + self.drafts) for _ in range(self.batch - 1)]
        return [*sorted(drawn), 1 + self.drafts]

    def lengths(self) -> list[int]:
        """Tokens of each request with the new ones."""
        if self.kind == "uniform":
            return [self.context] * self.batch
        rng = random.Random(self.context)
        return [rng.randint(self.context // 2, self.context) for _ in range(self.batch)]

    @property
    def blocks(self) -> int:
        """Pages of a layer's cache."""
        return self.batch * -(-self.context // PAGE)

    def layers(self) -> int:
        """Layers of the graph."""
        bytes_per_layer = 2 * WIDTH * sum(self.lengths())
        return max(FEWEST_LAYERS, min(MOST_LAYERS, -(-BYTES_PER_GRAPH // bytes_per_layer)))

    def served_by(self, backend: str) -> bool:
        """Whether a backend decodes all requests of the batch."""
        return backend != "FLASHMLA" or self.kind == "uniform" or self.drafts == 0


class NoPrefill:
    """Takes the place of a layer's prefill backend, which these batches never reach."""

    def clone(self) -> NoPrefill:
        return self


class Backend:
    """A backend's builder and its implementations, one per layer."""

    def __init__(self, name: str, config: Any, device: torch.device, layers: int) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        from mla_var3.integrations.vllm import flag

        cls = AttentionBackendEnum[flag() if name == OURS else name].get_class()
        assert cls.get_name() == name
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
        spec = MLAAttentionSpec(
            block_size=PAGE, num_kv_heads=1, head_size=WIDTH, dtype=torch.bfloat16
        )
        with set_current_vllm_config(config):
            self.builder = cls.get_builder_cls()(spec, LAYERS, config, device)
            self.impls = [
                cls.get_impl_cls()(
                    num_heads=heads, head_size=WIDTH, scale=(NOPE + ROPE) ** -0.5, num_kv_heads=1,
                    alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
                    logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
                    q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
                    qk_rope_head_dim=ROPE, qk_head_dim=NOPE + ROPE, v_head_dim=NOPE, kv_b_proj=None,
                )
                for _ in range(layers)
            ]  # fmt: skip
        for impl in self.impls:
            impl.dcp_world_size = 1  # what the layer sets before its first call
        self.layer = SimpleNamespace(_k_scale=torch.ones((), device=device))

    def step(
        self,
        batch: Any,
        queries: tuple[torch.Tensor, torch.Tensor],
        caches: list[torch.Tensor],
        other: torch.Tensor,
        between: Callable[[], object] | None,
    ) -> Callable[[], torch.Tensor]:
        """The attention of all layers in a decode step; it returns the last layer's output.

        A layer on the `other` cache comes first, outside of the step: in ours it finds the schedule
        of the others. `between` is called in front of each layer.
        """
        metadata = self.builder.build(0, batch)
        assert metadata.num_prefills == 0, "the backend would send requests to prefill"
        self.impls[0].forward_mqa(queries, other, metadata, self.layer)

        def run() -> torch.Tensor:
            for impl, cache in zip(self.impls, caches, strict=False):
                if between is not None:
                    between()
                output, _ = impl.forward_mqa(queries, cache, metadata, self.layer)
            return output

        return run


def vllm_config(heads: int, folder: Path, most_tokens: int, longest: int, most_seqs: int) -> Any:
    """The configuration of an engine with full CUDA graphs."""
    from vllm.engine.arg_utils import EngineArgs

    sizes = {"hidden": 1024, "mlp": 2048, "lora": 512, "layers": 2, "heads": heads}
    model = folder / f"model-{heads}"
    model.mkdir(parents=True, exist_ok=True)
    options = model_config(sizes) | {"max_position_embeddings": longest + PAGE}
    (model / "config.json").write_text(json.dumps(options))
    config = EngineArgs(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        block_size=PAGE, max_model_len=longest + PAGE, max_num_seqs=most_seqs,
        max_num_batched_tokens=max(8192, most_tokens), gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=2**30,
        compilation_config={
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [most_tokens],
        },
    ).create_engine_config()  # fmt: skip
    layer = SimpleNamespace(
        prefill_backend=NoPrefill(), q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=NOPE, num_heads=heads,
    )  # fmt: skip
    config.compilation_config.static_forward_context |= dict.fromkeys(LAYERS, layer)
    return config


def batch_of(row: Row, device: torch.device) -> Any:
    """vLLM's description of a batch, with pages scattered over the cache."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    counts, lengths = row.counts(), row.lengths()
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths_cpu = torch.tensor(lengths, dtype=torch.int32)
    width = -(-row.context // PAGE)
    pages = torch.randperm(row.blocks, generator=torch.Generator().manual_seed(1))
    table = pages.view(row.batch, width).to(torch.int32)
    tokens = sum(counts)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device), query_start_loc_cpu=starts,
        seq_lens=lengths_cpu.to(device), num_reqs=row.batch, num_actual_tokens=tokens,
        max_query_len=max(counts), max_seq_len=max(lengths), block_table_tensor=table.to(device),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
        seq_lens_cpu_upper_bound=lengths_cpu, causal=True,
    )  # fmt: skip


def queries_of(row: Row, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and rope queries with the strides that vLLM 0.26 leaves: by head, and inside of q."""
    tokens = sum(row.counts())
    q = torch.randn(tokens, row.heads, NOPE + ROPE, device=device, dtype=torch.bfloat16)
    latent = torch.randn(row.heads, tokens, LATENT, device=device, dtype=torch.bfloat16)
    return latent.transpose(0, 1), q[..., NOPE:]


class OtherWork:
    """What lies between the attention of two layers: other code, and weights that fill L2."""

    def __init__(self, device: torch.device) -> None:
        bytes_read = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._weights = torch.zeros(bytes_read // 4, device=device)
        self._matrix = torch.zeros(1024, 1024, device=device, dtype=torch.bfloat16)

    def __call__(self) -> None:
        self._weights.sum()
        torch.mm(self._matrix, self._matrix)


@dataclass
class Clock:
    """Times of steps of all layers by several backends, which take turns.

    The time of what the steps call in front of each layer, `between`, is taken off.
    """

    steps: dict[str, Callable[[], Any]]
    layers: int
    between: Callable[[], object] | None = None

    def graphs(self) -> dict[str, dict[str, float]]:
        """Microseconds per layer inside of CUDA graphs: median and spread."""
        graphs = {name: captured(step) for name, step in self.steps.items()}
        between = self.between
        if between is not None:
            graphs[ALONE] = captured(lambda: [between() for _ in range(self.layers)])
        for graph in graphs.values():
            graph.replay()
        first = {name: self._replay(graph) for name, graph in graphs.items()}
        rounds = max(4, min(12, int(0.1 / max(first.values()))))
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(rounds):
            for name, graph in graphs.items():
                times[name].append(1e6 * self._replay(graph) / self.layers)
                time.sleep(min(0.02, first[name]))  # let the card cool down after a long one
        alone = times.pop(ALONE, [0.0])
        return {
            name: {
                "us": statistics.median(found) - statistics.median(alone),
                "spread": math.hypot(statistics.pstdev(found), statistics.pstdev(alone)),
            }
            for name, found in times.items()
        }

    def _replay(self, graph: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def host(self, rounds: int = 15) -> dict[str, float]:
        """Microseconds per layer that the host needs for eager launches."""
        times: dict[str, list[float]] = {name: [] for name in self.steps}
        for _ in range(rounds):
            for name, step in self.steps.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                step()
                times[name].append(1e6 * (time.perf_counter() - begin) / self.layers)
        return {name: statistics.median(found) for name, found in times.items()}


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of a step. `torch.cuda.graph` would collect garbage first, for half a second."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            step()
        finally:
            graph.capture_end()
    return graph


def programs(heads: list[int], drafts: list[int]) -> list[tuple[int, int]]:
    """Heads and query tokens of the programs that the rows need."""
    from mla_var3.integrations.paged import KERNEL_ROWS

    most = 1 + max(drafts)
    return sorted(
        {
            (h, 1 + count if (1 + count) <= -(-KERNEL_ROWS // h) else most)
            for h in heads
            for count in drafts
        }
    )


def compile_program(heads: int, tokens: int) -> None:
    """Compile our program for vLLM's queries into the cache on the disk, in its own process."""
    from mla_var3.integrations import paged

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    q = torch.zeros(heads, 2 * tokens, WIDTH, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    pages = paged.Pages.of(torch.zeros(2, PAGE, WIDTH, dtype=torch.bfloat16, device="cuda"))
    latent = torch.zeros(heads, 2 * tokens, LATENT, dtype=torch.bfloat16, device="cuda")
    paged.paged_attention(
        latent.transpose(0, 1), q[..., LATENT:], pages, ints(0, 1).view(2, 1),
        ints(tokens, tokens), scale=1.0, max_q=tokens,
        query_start_loc=ints(0, tokens, 2 * tokens), step=paged.Step("cuda"),
    )  # fmt: skip
    torch.cuda.synchronize()


def measured(
    rows: list[Row], device: torch.device, folder: Path, until: float, cold: bool
) -> Iterator[dict[str, Any]]:
    """Results of the rows, as they come."""
    from mla_var3.integrations import paged
    from mla_var3.integrations.vllm import register

    register()
    gpu = device.type == "cuda"
    paged.warm_up = lambda *args, **options: None  # the programs needed here are compiled before
    bounds = (
        max(sum(row.counts()) for row in rows), max(row.context for row in rows),
        max(row.batch for row in rows),
    )  # fmt: skip
    layers = max(row.layers() for row in rows)
    memory = torch.empty(
        max(row.layers() * row.blocks for row in rows), PAGE, WIDTH, dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip
    for part in memory.split(2**14):
        part.normal_()
    backends: dict[int, dict[str, Backend]] = {}
    between = OtherWork(device) if cold and gpu else None
    for row in rows:
        if time.time() > until:
            break
        if row.heads not in backends:
            config = vllm_config(row.heads, folder, *bounds)
            names = (OURS, *PEERS) if gpu else (OURS,)
            backends[row.heads] = {name: Backend(name, config, device, layers) for name in names}
        result = asdict(row) | {"layers": row.layers()}
        try:
            caches = [memory[i * row.blocks : (i + 1) * row.blocks] for i in range(row.layers())]
            batch, queries = batch_of(row, device), queries_of(row, device)
            steps = {
                name: backend.step(batch, queries, caches, memory[1 : 1 + row.blocks], between)
                for name, backend in backends[row.heads].items()
                if row.served_by(name)
            }
            outputs = {name: step().view(-1, row.heads, LATENT) for name, step in steps.items()}
            result["difference"] = max(
                float((outputs[OURS].float() - output.float()).abs().max())
                for output in outputs.values()
            )
            del outputs
            if gpu:
                clock = Clock(steps, row.layers(), between)
                if not cold and row.kind == "uniform" and row.batch == min(r.batch for r in rows):
                    result["host_us"] = clock.host()
                result["graph"] = clock.graphs()
                del clock
                torch.cuda.empty_cache()
        except Exception as error:  # the other rows are worth having
            result["error"] = f"{type(error).__name__}: {error}"
        yield result


def line_of(result: dict[str, Any]) -> str:
    """A line of the table."""
    name = f"{result['kind']:<8}{result['heads']:>4}{result['batch']:>5}"
    name += f"{result['context']:>7}{result['drafts']:>3}"
    if "error" in result:
        return f"{name}  {result['error'][:200]}"
    times = {backend: found["us"] for backend, found in result.get("graph", {}).items()}
    cells = [f"{times[b]:>9.1f}" if b in times else f"{'-':>9}" for b in (OURS, *PEERS)]
    peers = [times[b] for b in PEERS if b in times]
    ratio = f"{min(peers) / times[OURS]:>6.2f}" if peers else f"{'-':>6}"
    host = result.get("host_us", {})
    shown = " ".join(f"{host[b]:.0f}" for b in (OURS, *PEERS) if b in host)
    text = name + "".join(cells) + ratio + (f"  {shown}" if shown else "")
    return text + ("  DIFFERS" if result["difference"] > TOLERANCE else "")


def summary_of(results: list[dict[str, Any]]) -> list[str]:
    """The ratios to the better peer, by kind and heads."""
    lines = []
    for kind in ("uniform", "ragged"):
        for heads in sorted({result["heads"] for result in results}):
            ratios = []
            for result in results:
                if (result["kind"], result["heads"]) == (kind, heads) and "graph" in result:
                    times = {b: found["us"] for b, found in result["graph"].items()}
                    ours = times.pop(OURS)
                    ratios.append(min(times.values()) / ours)
            if ratios:
                lines.append(
                    f"{kind} {heads} heads: {min(ratios):.2f} to {max(ratios):.2f}, "
                    f"geometric mean {statistics.geometric_mean(ratios):.2f}, {len(ratios)} rows"
                )
    return lines


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="where the JSON goes")
    parser.add_argument("--heads", type=numbers, default=[8, 16, 32, 128])
    parser.add_argument("--batch", type=numbers, default=[16, 64, 256])
    parser.add_argument("--context", type=numbers, default=[1024, 4096, 16384])
    parser.add_argument("--drafts", type=numbers, default=[0, 1, 3, 7])
    parser.add_argument("--kinds", default="uniform,ragged")
    parser.add_argument("--cold", action="store_true", help="other work in front of each layer")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = parser.parse_args()
    if given.device == "cuda" and cuda_is_missing():
        return 1
    started = time.time()
    rows = [
        Row(heads, batch, context, drafts, kind)
        for heads in given.heads
        for kind in given.kinds.split(",")
        for batch in given.batch
        for context in given.context
        for drafts in given.drafts
    ]
    rows.sort(key=lambda row: row.batch * row.context > BIG_BATCH)  # the largest last
    device = torch.device("cuda:0" if given.device == "cuda" else "cpu")
    if device.type == "cuda":
        from ..compile_ahead import compile_ahead

        compile_ahead([(compile_program, which) for which in programs(given.heads, given.drafts)])
        print(f"compiled after {time.time() - started:.0f} s", flush=True)
    print(f"{'kind':<8}{'h':>4}{'b':>5}{'t':>7}{'mtp':>4}", *(OURS, *PEERS), "ratio  host us")
    results = []
    folder = Path(tempfile.mkdtemp(prefix="vllm-layers-"))
    for result in measured(rows, device, folder, started + given.seconds, given.cold):
        results.append(result)
        print(line_of(result), flush=True)
    print("\n".join(summary_of(results)))
    done = [result for result in results if "error" not in result]
    worst = max((result["difference"] for result in done), default=0.0)
    seconds = time.time() - started
    record = {"rows": results, "asked": len(rows), "cold": given.cold}
    write_record(given.out, "serving.layers", record)
    print(f"{len(done)} of {len(rows)} rows, largest difference {worst:.4f}, {seconds:.0f} s")
    return 0 if len(done) == len(rows) and worst <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
