"""The project's headline figures, ours and the peers' in one run.

    python -m tests.benchmark.bench_figures --out_dir out/tests/bench_figures [--peer_libs FOLDER]

Every row is checked against the float32 reference first and then timed the same way, ours and
theirs: CUDA-graph replays with a cold L2 cache, median and spread. Rows that exclude each other in
memory are measured shape by shape. Needs a GPU; peers that are not installed are reported absent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_var3.errors import UnsupportedError
from mla_var3.op.compare import compare
from mla_var3.runtime.check import check_stage
from mla_var3.runtime.environment import environment
from mla_var3.runtime.files import write_atomic
from mla_var3.runtime.markdown import table
from mla_var3.runtime.measure import require_cuda, time_gpu
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.workflow import current_device_spec
from tests.benchmark.peers import Peer, PeerLibraries, absorbed_peers, decompressed_peers

PEER_ERROR_LIMIT = 0.01
"""A bf16 peer above this relative error computes something else."""


@dataclass
class Row:
    """One measured kernel at one shape."""

    shape: str
    kernel: str
    time_us: float
    spread_us: float
    tflops: float
    gbps: float
    error: float
    note: str = ""


class Figures:
    """Measures rows and keeps them."""

    def __init__(self, libraries: PeerLibraries) -> None:
        self.libraries = libraries
        self.spec = current_device_spec()
        self.rows: list[Row] = []

    def ours(self, design: str, **fields: Any) -> tuple[Any, tuple[Tensor, ...], Tensor]:
        """Check and time one of our kernels; returns plan, inputs and reference output."""
        plan = plan_class(find_kernel(design))(**fields)
        plan = plan.for_target(self.spec.target).on_device(self.spec)
        inputs = plan.prepare_inputs("cuda")
        stage = plan.plan(*inputs)
        check = check_stage(plan, inputs, stage)
        check.require()
        cost = stage.cost()
        chosen = [
            f"{name}={getattr(plan, name)}" for name in ("n", "splits") if hasattr(plan, name)
        ]
        error = check.outputs[0].error.relative_frobenius
        self._time(_shape(fields), design, stage.launch, cost, error, " ".join(chosen))
        return plan, inputs, plan.reference_fn(*inputs)[0]

    def peers(self, shape: str, peers: list[Peer], reference: Tensor, cost: Any) -> None:
        """Check and time peers; one that fails is a row with its reason."""
        for peer in peers:
            try:
                error = compare(peer.run(), reference).relative_frobenius
                if not error <= PEER_ERROR_LIMIT:
                    raise RuntimeError(f"relative error {error:.2g}")
                self._time(shape, peer.name, lambda run=peer.run: run(), cost, error, "")
            except RuntimeError as failure:
                reason = str(failure).splitlines()[0][:120]
                self.rows.append(Row(shape, peer.name, *[float("nan")] * 5, note=reason))

    def _time(
        self, shape: str, kernel: str, run: Callable[[], Any], cost: Any, error: float, note: str
    ) -> None:
        timing = time_gpu(run, graph=True, max_seconds=0.6)
        us = timing.median_us
        tflops, gbps = cost.flops / us / 1e6, cost.bytes / us / 1e3
        self.rows.append(Row(shape, kernel, us, timing.spread_us, tflops, gbps, error, note))
        print(f"{shape:34} {kernel:28} {us:9.1f} us ±{timing.spread_us:6.1f} {note}", flush=True)


def _shape(fields: dict[str, Any]) -> str:
    causal = "" if fields.get("causal", True) else " full"
    return " ".join(f"{key}={fields[key]}" for key in ("b", "s", "t")) + causal


def decompressed(figures: Figures, sdpa: bool = True, **fields: Any) -> None:
    """flash_attention and the peers that read cached keys and values."""
    plan, inputs, reference = figures.ours("flash_attention", **fields)
    peers = decompressed_peers(figures.libraries, plan.problem(), inputs, sdpa)
    figures.peers(_shape(fields), peers, reference, plan.plan(*inputs).cost())
    torch.cuda.empty_cache()


def absorbed(figures: Figures, **fields: Any) -> None:
    """flash_mla and the peers that read the latent cache."""
    plan, inputs, reference = figures.ours("flash_mla", **fields)
    peers = absorbed_peers(figures.libraries, plan.problem(), inputs)
    figures.peers(_shape(fields), peers, reference, plan.plan(*inputs).cost())
    torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    """Measure everything, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out_dir", type=Path, default=Path("out/tests/bench_figures"))
    parser.add_argument("--peer_libs", type=Path, help="folder with the peers' libraries")
    options = parser.parse_args(argv)
    try:
        require_cuda("bench_figures")
    except UnsupportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    figures = Figures(PeerLibraries(options.peer_libs))
    for name, reason in figures.libraries.absent.items():
        print(f"absent: {name}: {reason}")
    decompressed(figures, b=8, s=16, t=4096)
    decompressed(figures, b=2, s=1024, t=4096, causal=False)
    decompressed(figures, b=2, s=1024, t=4096)
    absorbed(figures, b=4, s=1, t=32768)
    figures.ours("flash_mla_split_kv", b=4, s=1, t=32768)
    for s in (16, 32, 64):
        absorbed(figures, b=32, s=s, t=4096)
        decompressed(figures, sdpa=False, b=32, s=s, t=4096)
        figures.ours("mla_var6_plus", b=32, s=s, t=4096)
        figures.ours("mla_var6_plus", b=32, s=s, t=4096, n=0)
        torch.cuda.empty_cache()
    rows = [
        (r.shape, r.kernel, f"{r.time_us:.1f}", f"± {r.spread_us:.1f}", f"{r.tflops:.0f}",
         f"{r.gbps:.0f}", f"{r.error:.2e}", r.note)
        for r in figures.rows
    ]  # fmt: skip
    headers = ("shape (h=128)", "kernel", "us", "spread", "TFLOP/s", "GB/s", "error", "")
    text = table(headers, rows)
    print(text)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    record = {
        "environment": environment(),
        "absent_peers": figures.libraries.absent,
        "rows": [asdict(row) for row in figures.rows],
    }
    write_atomic(options.out_dir / "figures.json", json.dumps(record, indent=2) + "\n")
    write_atomic(options.out_dir / "figures.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
