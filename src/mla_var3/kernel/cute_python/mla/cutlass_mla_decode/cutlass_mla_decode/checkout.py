"""The MLA decode example of a CUTLASS checkout, imported from where it lies.

The example imports its helper modules by a path that starts at the folder of all examples, which
is no installed package. While it is imported, a finder resolves such names to files below that
folder; afterwards the interpreter is as it was: search path, finders and the names of other
modules. Nothing is written into the checkout.
"""

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_var3.errors import MissingToolError, UnsupportedError

VARIABLE = "HYPER_MLA_CUTLASS_DIR"
DEFAULT = Path("third_party", "cutlass")
EXAMPLES = Path("examples", "python", "CuTeDSL")
PLACES = {
    "CUTLASS 4.5 and later": Path("cute/blackwell/kernel/attention/mla/mla_decode_fp16.py"),
    "CUTLASS 4.4": Path("blackwell/mla/mla_decode_fp16.py"),
}
"""Releases -> where they keep the example, below `EXAMPLES`."""
TRIED = "the examples of CUTLASS 4.4.0 to 4.7.0 compile with 4.8.1"
"""What was tried, for messages about an example that does not work."""
CLASS = "BlackwellMultiHeadLatentAttentionForwardFP16"
PARAMETERS = {
    "__init__": (
        "self acc_dtype lse_dtype mma_qk_tiler_mn mma_pv_tiler_mn max_active_clusters page_size "
        "skip_correction_threshold is_persistent is_var_seq is_var_split_kv"
    ),
    "__call__": (
        "self q_latent q_rope c_latent c_rope page_table o lse workspace split_kv cache_seqs "
        "block_split_kvs softmax_scale output_scale stream"
    ),
    "can_implement": (
        "B S K H L R in_dtype out_dtype acc_dtype lse_dtype mma_qk_tiler_mn mma_pv_tiler_mn "
        "split_kv is_persistent is_var_seq is_var_split_kv page_size"
    ),
    "get_split_kv": "B S K mma_qk_tiler_mn max_active_blocks",
    "get_workspace_size": "H S D B split_kv acc_dtype",
}
"""What the plan calls in the example -> the parameters that it relies on, in order."""

_PIN = re.compile(r"^nvidia-cutlass-dsl\s*==\s*(\S+)", re.MULTILINE)
_lock = threading.RLock()
_by_path: dict[Path, "Example"] = {}
_by_fingerprint: dict[str, "Example"] = {}


@dataclass(frozen=True)
class Example:
    """An imported example.

    Attributes:
        cls: the class with the host function and the kernels.
        files: the example and every helper module of the checkout that it imported.
        release: the nvidia-cutlass-dsl that the checkout was written against; empty if unknown.
    """

    cls: Any
    files: tuple[Path, ...]
    release: str
    fingerprint: str

    @property
    def origin(self) -> str:
        """Where it comes from, for messages."""
        return describe_origin(self.files[0], self.release)


def checkout_folder(named: str | None) -> Path:
    """The checkout: the one named, else that of the environment, else the default place."""
    return Path(named or os.environ.get(VARIABLE) or DEFAULT)


def describe_origin(path: Path, release: str) -> str:
    """Which example a message is about, and which ones are known to work."""
    installed = importlib.metadata.version("nvidia-cutlass-dsl")
    written = f"nvidia-cutlass-dsl {release}" if release else "an unknown nvidia-cutlass-dsl"
    return f"{path} was written against {written}, installed is {installed}; {TRIED}"


def find_example(folder: Path) -> tuple[Path, Path]:
    """The folder of all examples of a checkout, and the file of the MLA decode example.

    Raises:
        MissingToolError: there is no checkout, or it has no such example.
    """
    root = folder / EXAMPLES
    if not root.is_dir():
        raise MissingToolError(
            f"cutlass_dir: expected a checkout of CUTLASS (--cutlass_dir, or the variable "
            f"{VARIABLE}, or {DEFAULT}), got {folder}, which has no {EXAMPLES}"
        )
    for place in PLACES.values():
        if (root / place).is_file():
            return root.resolve(), (root / place).resolve()
    expected = " or ".join(f"{EXAMPLES / place} ({release})" for release, place in PLACES.items())
    raise MissingToolError(f"cutlass_dir: expected {expected}, got {folder} with neither")


def load_example(folder: Path) -> Example:
    """Import the example of a checkout, once in a process.

    Raises:
        MissingToolError: there is no checkout, or it has no such example.
        UnsupportedError: the example cannot be imported, or is not the one this was written for.
    """
    root, path = find_example(folder)
    with _lock:
        if path not in _by_path:
            _by_path[path] = _import_example(folder, root, path)
        example = _by_path[path]
        _by_fingerprint[example.fingerprint] = example
        return example


def loaded_example(fingerprint: str) -> Example:
    """An example that was imported before."""
    return _by_fingerprint[fingerprint]


def _import_example(folder: Path, root: Path, path: Path) -> Example:
    release = _release(folder)
    # The module keeps a name of its own: what is traced later looks its module up by name.
    name = f"hyper_mla_cutlass_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    finder = _ExampleFinder(root)
    try:
        with _visible(finder):
            module = _execute(name, path)
    except Exception as error:
        sys.modules.pop(name, None)
        raise UnsupportedError(
            f"cutlass_dir: the example cannot be imported ({type(error).__name__}: {error}); "
            f"{describe_origin(path, release)}"
        ) from error
    differences = _differences(module)
    if differences:
        sys.modules.pop(name, None)
        raise UnsupportedError(
            f"cutlass_dir: expected the example that this kernel was written for, got one with "
            f"{'; '.join(differences)}; {describe_origin(path, release)}"
        )
    files = (path, *sorted(finder.found - {path}))
    digest = hashlib.sha256()
    for each in files:
        digest.update(each.read_bytes())
    return Example(getattr(module, CLASS), files, release, digest.hexdigest())


def _execute(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a file that ends in .py always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _release(folder: Path) -> str:
    """The version of CuTe DSL that a checkout pins; a copy of the examples alone has none."""
    try:
        text = (folder / "python" / "CuTeDSL" / "requirements.txt").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = _PIN.search(text)
    return match[1] if match else ""


def _differences(module: ModuleType) -> list[str]:
    """What the plan relies on and does not find in the example."""
    cls = getattr(module, CLASS, None)
    if not isinstance(cls, type):
        return [f"no class {CLASS}"]
    found = []
    for name, wanted in PARAMETERS.items():
        function = getattr(cls, name, None)
        try:
            names = " ".join(inspect.signature(function).parameters)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            found.append(f"no {name}")
            continue
        if names != wanted:
            found.append(f"{name}({names}) instead of {name}({wanted})")
    return found


class _ExampleFinder(importlib.abc.MetaPathFinder):
    """Resolves module names to files below the folder of all examples.

    A folder wins over a file of the same name: CUTLASS 4.4 has `mla.py` beside `mla/`, and the
    helpers lie in the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.found: set[Path] = set()

    def owns(self, name: str) -> bool:
        """Whether a module name begins with something below the folder."""
        first = self.root / name.partition(".")[0]
        return first.is_dir() or first.with_suffix(".py").is_file()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        place = self.root.joinpath(*fullname.split("."))
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if source.is_file():
            self.found.add(source)
            return importlib.util.spec_from_file_location(fullname, source)
        if not place.is_dir():
            return None
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec


@contextlib.contextmanager
def _visible(finder: _ExampleFinder) -> Iterator[None]:
    """The modules of the examples can be imported; everything else is restored at the end."""

    def take_owned() -> dict[str, Any]:
        names = [name for name in sys.modules if finder.owns(name)]
        return {name: sys.modules.pop(name) for name in names}

    search_path, writes = list(sys.path), sys.dont_write_bytecode
    hidden = take_owned()
    sys.meta_path.insert(0, finder)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        sys.meta_path.remove(finder)
        sys.path[:] = search_path
        take_owned()
        sys.modules.update(hidden)
