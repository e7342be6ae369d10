"""What a backend is, and the list of all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from mla_var3.attention.backends.latent import LATENT_DESIGNS, LatentBackend
from mla_var3.attention.backends.plans import PlannedBackend, service_of
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.prefix.attend import PrefixBackend
from mla_var3.attention.prefix.decompressed import GroupedPrefixBackend
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.paths import current_name, discover_kernels

AUTO = "auto"
SHARED_PREFIX = "mla_var6_plus_v6"
"""The kernel of one decompressed prefix."""


def require_kernel_name(kernel: object) -> None:
    """Require a string as the name of a kernel; `named` checks that it exists."""
    if not isinstance(kernel, str):
        raise InvalidArgumentError("kernel", "the name of a kernel or 'auto'", repr(kernel))


class Backend(Protocol):
    """Something that can compute a call.

    Attributes:
        kernel: id of the kernel, as everywhere.
        language: language key, "torch" for the path in PyTorch.
        runs_on_cpu: whether it takes CPU tensors.
        targets: architectures that it serves, such as "sm_90"; None for all.
    """

    kernel: str
    language: str
    runs_on_cpu: bool
    targets: tuple[str, ...] | None

    def missing(self) -> str | None:
        """What this machine lacks to run it; None when nothing is."""

    def unsupported(self, shape: CallShape) -> str | None:
        """Why it cannot serve calls of this shape; None when it can."""

    def run(self, task: AttentionTask) -> tuple[Tensor, Tensor]:
        """Output and LSE of a call that `unsupported` accepts."""


_registered: list[Backend] = []


def register(backend: Backend) -> None:
    """Add a backend before those of the package; it replaces one of the same id."""
    _remove(backend.kernel, backend.language)
    _registered.append(backend)
    CALL_STATE.clear()  # choices and replays of earlier calls


def unregister(kernel: str, language: str) -> None:
    """Remove a backend that `register` added, if it is there."""
    _remove(kernel, language)
    CALL_STATE.clear()


def _remove(*name: str) -> None:
    _registered[:] = [each for each in _registered if (each.kernel, each.language) != name]


def backends() -> list[Backend]:
    """All backends, in the order in which they win where times are equal.

    Registered ones come first, then the latent kernels of the package that take any tensors, then
    its plans, base versions before later ones and CuTe DSL before cuTile, and the PyTorch path
    last.
    """
    found: list[Backend] = list(_registered)
    taken = {(known.kernel, known.language) for known in found}
    kernels = [kernel for kernel in discover_kernels() if kernel.layer == "mla"]
    latent = [
        LatentBackend.of_package(kernel)
        for kernel in kernels
        if kernel.language == "cute-dsl" and kernel.design in LATENT_DESIGNS
    ]
    own: list[Backend] = [*latent, *(PrefixBackend(backend) for backend in latent)]
    # By number first: False comes before True, and CuTe DSL before the others.
    order = sorted(kernels, key=lambda kernel: (kernel.number, kernel.language != "cute-dsl"))
    for kernel in order:
        service = service_of(kernel)
        if service is not None:
            planned = PlannedBackend(kernel, service)
            own.append(planned)
            if kernel.full_name == SHARED_PREFIX and latent:
                own.append(GroupedPrefixBackend(planned, latent[0]))
    own.append(TorchTiled())
    return found + [known for known in own if (known.kernel, known.language) not in taken]


def named(kernel: str, known: Sequence[Backend]) -> list[Backend]:
    """Those of the known backends that a `kernel` argument means; `UnknownNameError` for none.

    That is "auto", an id such as "flash_mla", or id and language, "flash_mla:cutile-dsl".
    """
    require_kernel_name(kernel)
    if kernel == AUTO:
        return list(known)
    name, _, language = kernel.partition(":")
    asked = [backend for backend in known if not language or backend.language == language]
    found = [backend for backend in asked if backend.kernel == name]
    found = found or [b for b in asked if b.kernel == current_name(name, b.language)]
    if not found:
        ids = {backend.kernel for backend in known}
        ids |= {f"{backend.kernel}:{backend.language}" for backend in known} if language else set()
        raise UnknownNameError("kernel", kernel, {AUTO, *ids})
    return found
