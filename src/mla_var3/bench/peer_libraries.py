"""The libraries that HyperMLA is measured against: which are installed, and why others are not.

FlashMLA and FlashAttention-3 come as torch operator libraries inside the vLLM package; a folder
that holds just these files will do. Where neither is there, their own packages are used.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_var3.errors import MissingToolError

OPERATORS = {
    "flashmla": ("_flashmla_C", "_flashmla_C.abi3.so"),
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
"""Library -> Python modules, the first that imports is taken. Operators come before modules."""
DISTRIBUTIONS = {
    "flash_mla": "flash-mla",
    "flash_attn_interface": "flash-attn-3",
    "flashinfer": "flashinfer-python",
    "triton": "triton",
    "vllm": "vllm",
    "torch": "torch",
}
LIBRARIES = ("flashmla", "fa3", "flashinfer", "triton", "torch")


class PeerLibraries:
    """What could be loaded.

    Args:
        folder: folder with the operator libraries; None looks into an installed vLLM.
        wanted: the libraries to load; some packages take seconds to import.

    Attributes:
        absent: library -> why it cannot be used.
        operators: library -> namespace of its torch operators, where these were loaded.
        modules: library -> Python module, where that is used instead.
        versions: library -> version, or the file it came from.
    """

    def __init__(self, folder: Path | None = None, wanted: Collection[str] = LIBRARIES) -> None:
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
        import torch

        found = {name: _find(folder, OPERATORS[name][1]) for name in names}
        if any(found.values()):
            # The libraries leave the driver's symbols to whoever loaded it; without a driver they
            # fail to load below, with the reason.
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
            except Exception as error:
                # Importing somebody else's package can fail in any way; each is a reason.
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
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def first_line(error: BaseException) -> str:
    """The first line of an error, short enough for a table; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160]


def call_operator(operator: Any, defaults: Mapping[str, Any], **given: Any) -> Any:
    """Call a torch operator by argument names; what is not given is its default, or None."""
    names = [argument.name for argument in operator._schema.arguments]
    return operator(*[given.get(name, defaults.get(name)) for name in names])


def call_known(function: Callable[..., Any], **given: Any) -> Any:
    """Call a function with those of the arguments that its release knows.

    Raises:
        MissingToolError: the function wants an argument that was not given.
    """
    parameters = inspect.signature(function).parameters.values()
    unknown = [p.name for p in parameters if p.default is p.empty and p.name not in given]
    if unknown:
        raise MissingToolError(
            f"{function.__name__}: expected a release that needs only {', '.join(given)}, "
            f"got one that also wants {', '.join(unknown)}"
        )
    return function(**{p.name: given[p.name] for p in parameters if p.name in given})
