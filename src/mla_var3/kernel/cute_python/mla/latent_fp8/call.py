"""Calls of the 8-bit latent kernel on tensors that change from call to call."""

from typing import Any

from torch import Tensor

from mla_var3.kernel.cute_python.mla.hopper.constants import ROWS
from mla_var3.kernel.cute_python.mla.latent.call import (
    ELEMENT_TYPES,
    LatentLaunch,
    call_arguments,
)
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLATiling
from mla_var3.kernel.cute_python.mla.latent.operands import LatentOperands, LatentOptions
from mla_var3.kernel.cute_python.mla.latent_fp8.kernel import LatentFp8Sm90, columns_for
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.cute_kernel import CuteProgram, program_for, require_arch

_programs = CALL_STATE.table(256)


def attend_fp8(operands: LatentOperands, options: LatentOptions) -> LatentLaunch | None:
    """As `attend` of flash_mla, with a cache in 8 bits."""
    arguments, sm_count, copied = call_arguments(operands, options)
    rows = options.max_q * operands.lse.shape[-1]
    columns = ROWS if options.batch_invariant else columns_for(rows)
    scales = operands.scales
    assert scales is not None
    program = _program(arguments, operands.o_latent, columns, scales.numel() > 1, options)
    program(*arguments)
    if copied:
        return None
    return LatentLaunch(program.repeated(*arguments), operands.o_latent.device, sm_count)


def _program(
    arguments: tuple[Any, ...], like: Tensor, columns: int, per_token: bool, options: LatentOptions
) -> CuteProgram:
    """The program of a call, compiled for its dtype and for which of its tensors are present."""
    present = tuple(argument is not None for argument in arguments)
    key = (like.dtype, columns, per_token, options.empty_positive, present, like.device.index)
    program: CuteProgram | None = _programs.get(key)
    if program is None:
        kernel_fn = LatentFp8Sm90.latent_fp8
        require_arch(kernel_fn.__name__, "sm_90a", like.device)
        host = LatentFp8Sm90(ELEMENT_TYPES[like.dtype], columns, per_token, options.empty_positive)
        program = program_for(
            kernel_fn, host, arguments, FlashMLATiling(few=columns % ROWS), like.device
        )
        _programs.keep(key, program)
    return program
