"""A kernel without a race whose only exchange goes through a named barrier, for the sanitizer.

    compute-sanitizer --tool racecheck .venv/bin/python -m tests.gpu.racecheck_control
    compute-sanitizer --tool racecheck .venv/bin/python -m tests.gpu.racecheck_control apart

Two warpgroups of a block of three write shared memory, meet at a named barrier of their 256
threads, and read what the other has written; the third ends at once. By the definition of the
barrier there is no race, whether both come to it at one instruction or, with `apart`, each at its
own. Hazards that the sanitizer reports here are its own, and so are those of the same kind in a
kernel with the same barriers. Ends with 1 if a result is wrong.
"""

from __future__ import annotations

import sys

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.runtime.cute_kernel import program_for
from mla_var3.runtime.stage import Tiling

from .attention_record import cuda_is_missing

THREADS, MEET = 384, 256


class Exchange:
    """Every thread of two warpgroups reads what its counterpart has written."""

    def __init__(self, apart: bool) -> None:
        self.apart = apart

    @cute.jit
    def __call__(self, out: cute.Pointer, rounds: Int32, stream: cuda.CUstream):
        @cute.struct
        class Shared:
            values: cute.struct.MemRange[Float32, MEET]

        self.Shared = Shared
        self.exchange(cute.make_tensor(out, cute.make_layout(MEET)), rounds).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def exchange(self, out: cute.Tensor, rounds: Int32):
        thread, _, _ = cute.arch.thread_idx()
        values = SmemAllocator().allocate(self.Shared).values.get_tensor(cute.make_layout(MEET))
        if thread < MEET:
            total = Float32(0.0)
            for turn in range(rounds):
                values[thread] = Float32(thread + turn)
                if const_expr(self.apart):
                    if thread < MEET // 2:
                        cute.arch.barrier(barrier_id=1, number_of_threads=MEET)
                    else:
                        values[thread] = Float32(thread + turn)  # so that the paths differ
                        cute.arch.barrier(barrier_id=1, number_of_threads=MEET)
                else:
                    cute.arch.barrier(barrier_id=1, number_of_threads=MEET)
                total += values[(thread + MEET // 2) % MEET]
                cute.arch.barrier(barrier_id=2, number_of_threads=MEET)
            out[thread] = total


def main() -> int:
    """Run it once; 0 when the result is right."""
    if cuda_is_missing():
        return 1
    rounds = 8
    out = torch.full((MEET,), torch.nan, device="cuda")
    arguments = (out, rounds)
    host = Exchange(sys.argv[1:] == ["apart"])
    program_for(Exchange.exchange, host, arguments, Tiling(), out.device)(*arguments)
    torch.cuda.synchronize()
    partners = (torch.arange(MEET) + MEET // 2) % MEET
    wanted = (partners * rounds + sum(range(rounds))).float()
    right = torch.equal(out.cpu(), wanted)
    print("ok" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
