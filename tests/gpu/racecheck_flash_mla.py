"""Small runs of flash_mla in CuTe DSL for the sanitizer, which slows a kernel down manyfold.

    compute-sanitizer --tool racecheck .venv/bin/python -m tests.gpu.racecheck_flash_mla
    compute-sanitizer --tool memcheck .venv/bin/python -m tests.gpu.racecheck_flash_mla
    compute-sanitizer --tool synccheck .venv/bin/python -m tests.gpu.racecheck_flash_mla

The kernel is built with barriers at which both sides wait: the sanitizer does not follow a named
barrier at which one side only arrives, and would report what the other side reads after it.

Runs each case once, prints what it ran, compares with a reference computed on the CPU, where the
sanitizer does not look, and ends with 1 if a result is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from mla_var3.kernel.cute_python.mla.latent.call import ELEMENT_TYPES
from mla_var3.kernel.cute_python.mla.latent.groups import partial_count
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLASm90
from mla_var3.kernel.paging import paged_inputs
from mla_var3.op.compare import compare
from mla_var3.runtime.check import poison_outputs
from mla_var3.runtime.workflow import current_device_spec

from .attention_record import cuda_is_missing
from .gpu_support import LSE_RELATIVE, RELATIVE
from .test_cute_flash_mla import Case, choose_groups

DEVICE = "cuda"


def cases() -> Iterator[Case]:
    """Cut by many parts, cut by three, whole, halved and balanced by length, with both masks.

    Of balanced ones the last is split where items are left.
    """
    for t, page in itertools.product((200, 450, 700), (0, 64)):
        yield Case(2, 2, t, 64, "mixed", page=page)
        yield Case(2, 2, t, 64, "edges", page=page, group_ctas=1, sms=3, causal=False)
        yield Case(2, 2, t, 64, "equal", page=page, group_ctas=2, sms=4)
        yield Case(2, 2, t, 64, "equal", page=page, group_ctas=1, sms=8)
        yield Case(2, 1, t, 16, "equal", page=page, sms=4)
        yield Case(13, 1, t, 64, "ragged", page=page, group_ctas=1, sms=3)
    yield Case(3, 4, 2000, 64, "equal", group_ctas=1, sms=8)


def run(case: Case) -> bool:
    """Run a case once; whether the result is right."""
    plan = case.plan().for_target("sm_90").on_device(current_device_spec())
    dense = plan.latent_inputs("cpu")
    inputs = tuple(tensor.to(DEVICE) for tensor in dense)
    if plan.page:
        inputs = paged_inputs(inputs, plan.page, plan.seed)
    stage = plan.plan(*inputs)
    attention = next(iter(stage.kernels()))
    dtype = ELEMENT_TYPES[plan.torch_dtype]
    attention.host_fn = lambda tiling: FlashMLASm90(dtype, tiling.few, strict=True)
    shape = case.shape(plan)
    choose_groups(stage, shape)
    poison_outputs(stage)
    stage.launch()
    torch.cuda.synchronize()
    out, lse = (output.cpu() for output in stage.output_tensors)
    wanted, wanted_lse = plan.latent_reference(*dense)
    error, lse_error = compare(out, wanted), compare(lse, wanted_lse)
    right = (
        error.relative_frobenius < RELATIVE[plan.dtype]
        and lse_error.relative_frobenius < LSE_RELATIVE
    )
    partials = partial_count(plan.problem().kv_lengths, shape) * shape.group_ctas
    groups = f"{shape.group_count} CTA groups of {shape.group_ctas}"
    print(
        f"{'ok' if right else 'WRONG'}: {case}, {groups}, {partials} partials, "
        f"relative error {error.relative_frobenius:.2g}, of lse {lse_error.relative_frobenius:.2g}",
        flush=True,
    )
    return right


def main() -> int:
    """Run all cases; 0 when every result is right."""
    if cuda_is_missing():
        return 1
    outcomes = [run(case) for case in cases()]
    print(f"{sum(outcomes)} of {len(outcomes)} right")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
