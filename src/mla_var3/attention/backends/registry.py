"""The one interface behind the public calls, and the list of what stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mla_var3.attention.request.shape import CallShape
from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.runtime.paths import current_name, discover_kernels

if TYPE_CHECKING:
    import torch

    from mla_var3.attention.request.task import AttentionTask

AUTO = "auto"
TORCH_TILED = "torch_tiled"


def require_kernel_name(kernel: object) -> None:
    """Require text where a kernel is named; which names there are, `named` says."""
    if not isinstance(kernel, str):
        raise InvalidArgumentError("kernel", "the name of a kernel or 'auto'", repr(kernel))


class Backend(Protocol):
    """Something that can compute a call."""

    @property
    def kernel(self) -> str:
        """Id of the kernel, as everywhere."""

    @property
    def language(self) -> str:
        """Language key, "torch" for the path in PyTorch."""

    @property
    def runs_on_cpu(self) -> bool:
        """Whether it takes CPU tensors."""

    def missing(self) -> str | None:
        """What this machine lacks to run it; None when nothing is."""

    def unsupported(self, shape: CallShape) -> str | None:
        """Why it cannot serve calls of this form; None when it can."""

    def run(self, task: AttentionTask) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of a call that `unsupported` lets pass."""


_registered: list[Backend] = []


def register(backend: Backend) -> None:
    """Add a backend, before the ones of the package; it replaces one of the same id."""
    unregister(backend.kernel, backend.language)
    _registered.append(backend)


def unregister(kernel: str, language: str) -> None:
    """Remove a backend that `register` added, if it is there."""
    from mla_var3.attention.replay.key import forget_forms

    forget_forms()  # they name the backends of earlier calls
    _registered[:] = [
        known for known in _registered if (known.kernel, known.language) != (kernel, language)
    ]


def backends() -> list[Backend]:
    """All backends, in the order in which they win where times are equal.

    Added ones come first, then the absorbed kernels of the package that take any tensors, then its
    plans, base versions before later ones and of each the hand-scheduled language before the
    compiled one, and the PyTorch path at the end.
    """
    from mla_var3.attention.backends.latent import ABSORBED_DESIGNS, AbsorbedKernel
    from mla_var3.attention.backends.plans import PlannedKernel, service_of
    from mla_var3.attention.backends.torch_tiled import TorchTiled

    found: list[Backend] = list(_registered)
    taken = {(known.kernel, known.language) for known in found}
    kernels = [kernel for kernel in discover_kernels() if kernel.layer == "mla"]
    own: list[Backend] = [
        AbsorbedKernel.of_package(kernel)
        for kernel in kernels
        if kernel.language == "cute-dsl" and kernel.design in ABSORBED_DESIGNS
    ]
    # By number first: False comes before True, and CuTe DSL before the others.
    order = sorted(kernels, key=lambda kernel: (kernel.number, kernel.language != "cute-dsl"))
    for kernel in order:
        service = service_of(kernel)
        if service is not None:
            own.append(PlannedKernel(kernel, service))
    own.append(TorchTiled())
    return found + [known for known in own if (known.kernel, known.language) not in taken]


def named(kernel: str, known: Sequence[Backend]) -> list[Backend]:
    """The backends that a `kernel` argument means.

    Args:
        kernel: "auto", an id such as "flash_mla", or id and language, "flash_mla:cutile-dsl".
        known: all backends.

    Raises:
        UnknownNameError: there is none.
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
