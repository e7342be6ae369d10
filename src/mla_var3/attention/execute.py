"""Running a checked call: choose its backend, and compute.

Both the public calls and the `torch.library` operators end here.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import torch

from mla_var3.attention.backends.latent import Attended, LatentBackend
from mla_var3.attention.backends.registry import AUTO, Backend, require_kernel_name
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.prefix.attend import PrefixBackend
from mla_var3.attention.request.checks import debug_on, inference
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.attention.request.validate import check_values
from mla_var3.attention.select.choice import choose, settled
from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import UnknownNameError
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.workflow import current_device_spec, planning_device

log = logging.getLogger(__name__)


@inference
def execute(task: AttentionTask, kernel: str) -> Attended:
    """Output, LSE and, where the kernel has one, the launch that repeats the call."""
    if debug_on():
        check_values(task)
    require_kernel_name(kernel)
    device = task.q.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        backend = backend_for(task.shape(), kernel, device)
        if isinstance(backend, (LatentBackend, PrefixBackend)):
            return backend.run_repeatable(task)
        output, lse = backend.run(task)
        return output, task.with_empty_sums(lse), None


@CALL_STATE.cached(4096)
def backend_for(shape: CallShape, kernel: str, device: torch.device) -> Backend:
    """The backend of a call shape on a device, which is the current one; chosen once."""
    if settled(kernel, device.type):
        return TorchTiled()  # without loading a kernel language for the comparison
    try:
        spec = spec_for(device.type)
    except UnknownNameError as error:
        if kernel != AUTO:
            raise
        log.warning("%s; until then calls on this GPU use torch_tiled", error)
        return TorchTiled()
    return choose(shape, spec, kernel=kernel, runs_on=device.type)[1]


def spec_for(device_type: str) -> DeviceSpec:
    """The device that predictions are for."""
    return current_device_spec() if device_type == "cuda" else planning_device()
