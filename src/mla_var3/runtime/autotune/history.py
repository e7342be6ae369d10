"""The tuning history of one stage: a JSON file that survives interruption.

A file is found by a digest of its key (device, compute capability, toolkit, kernel sources, stage,
problem) and holds the whole key; it is used only when the two agree. It is rewritten as a whole
after every candidate, so an interrupted search resumes where it stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from mla_var3.conf.devices import DeviceSpec
from mla_var3.runtime import paths
from mla_var3.runtime.environment import environment, toolkit_versions
from mla_var3.runtime.measure import Timing
from mla_var3.runtime.paths import write_atomic
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.stage import KernelStage

log = logging.getLogger(__name__)

SCHEMA = 1
"""Part of the key: a file of another form is another file."""

Status = Literal["ok", "rejected", "failed"]
_DIGEST_LENGTH = 12


class Entry(TypedDict):
    """One candidate and its outcome.

    Keys:
        config: the fields of the tiling; for kernels tuned together, those of each by its name.
        status: "ok" (timed), "rejected" (not worth or not possible to time), "failed" (in timing).
        reason: why it was rejected, why it failed, or what is special about it.
        timing: `Timing.to_dict`, None when it was not timed.
        compile: figures of `CompileReport`, None when it was not compiled; for kernels tuned
            together, those of each by its name.
    """

    config: dict[str, Any]
    status: Status
    reason: str | None
    timing: dict[str, Any] | None
    compile: dict[str, Any] | None


@dataclass
class StageTuning:
    """The outcome of tuning one stage.

    Attributes:
        stage: stage name; that of the group for kernels tuned together.
        best: the fastest config, None when no candidate ran; `best_us` its median time.
        from_cache: nothing was timed now, the history had it.
        complete: all candidates were handled; False when a limit ended the search.
    """

    stage: str
    key: dict[str, Any]
    path: Path
    best: dict[str, Any] | None
    best_us: float | None
    results: list[Entry]
    from_cache: bool
    complete: bool
    candidates: int

    @property
    def tried(self) -> int:
        """Candidates that were timed, or failed."""
        return sum(map(is_attempted, self.results))


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    # A plan made of plans: their tilings are what is being tuned and must not be in the key.
    if hasattr(value, "params"):
        return value.params()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def tuning_key(
    plan: KernelPlan, spec: DeviceSpec, stage: str, kernels: Iterable[KernelStage], **more: Any
) -> dict[str, Any]:
    """Everything that a tuning result depends on."""
    kernels = list(kernels)
    languages = sorted({kernel.language for kernel in kernels} | {plan.kernel_id.language})
    toolkit = {k: v for language in languages for k, v in toolkit_versions(language).items()}
    key = {
        "schema": SCHEMA,
        "device": spec.name,
        "compute_capability": list(spec.compute_capability),
        "toolkit": toolkit,
        "source": source_hash(plan, kernels),
        "kernel": plan.name,
        "stage": stage,
        "problem": plan.params(),
        **more,
    }
    restored: dict[str, Any] = json.loads(canonical(key))
    return restored


def source_hash(plan: KernelPlan, kernels: Iterable[KernelStage]) -> str:
    """A digest of the kernels' source files and of the modules of their plans and tilings.

    File names count without their folders, so that a checkout may move.
    """
    files: set[Path] = set()
    owners: list[object] = [plan]
    for kernel in kernels:
        files.update(kernel.source_files())
        owners += [kernel.plan, kernel.tiling]
    modules = (inspect.getmodule(type(owner)) for owner in owners)
    files.update(Path(path) for m in modules if (path := getattr(m, "__file__", None)))
    digest = hashlib.sha256()
    for name, content in sorted((file.name, file.read_bytes()) for file in files):
        digest.update(f"{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def history_path(plan: KernelPlan, spec: DeviceSpec, key: Mapping[str, Any]) -> Path:
    """The file of a key: `cache/kernel-autotune/<device>/<language>/<kernel>/<stage>-....json`."""
    digest = hashlib.sha256(canonical(key).encode()).hexdigest()[:_DIGEST_LENGTH]
    folder = paths.cache_root() / "kernel-autotune" / paths.slug(spec.name)
    return folder / plan.kernel_id.language / plan.name / f"{key['stage']}-{digest}.json"


class History:
    """The candidates of one search and their outcomes, kept in step with the file."""

    def __init__(self, path: Path, key: dict[str, Any], *, retune: bool = False) -> None:
        self.path = path
        self.key = key
        self.complete = False
        self.found = False
        self._entries: dict[str, Entry] = {}
        self._environment: dict[str, Any] | None = None
        if retune:
            # The old file is not touched: the first new result replaces it as a whole.
            log.info("%s: searching again, %s is not used", key["stage"], path)
            return
        stored = _load(path, key)
        if stored is None:
            return
        self.found = True
        self.complete = stored["complete"]
        self._entries = {canonical(entry["config"]): entry for entry in stored["results"]}

    @property
    def entries(self) -> list[Entry]:
        """All outcomes, in the order in which the candidates were first met."""
        return list(self._entries.values())

    def get(self, config: Mapping[str, Any]) -> Entry | None:
        return self._entries.get(canonical(config))

    def record(
        self,
        config: Mapping[str, Any],
        status: Status,
        reason: str | None = None,
        *,
        timing: Timing | None = None,
        compiled: dict[str, Any] | None = None,
        save: bool = True,
    ) -> Entry:
        """Note an outcome and write the file, unless it costs nothing to find again (`save`)."""
        entry = self._entries[canonical(config)] = Entry(
            config=json.loads(canonical(config)),
            status=status,
            reason=reason,
            timing=None if timing is None else timing.to_dict(),
            compile=compiled,
        )
        self.complete = False
        if save:
            self.save()
        return entry

    def finish(self, complete: bool) -> None:
        """Note whether all candidates were handled, and write the file."""
        self.complete = complete
        self.save()

    def best(self) -> Entry | None:
        return fastest(self._entries.values())

    def save(self) -> None:
        if self._environment is None:
            self._environment = environment()
        best = self.best()
        content = {
            "key": self.key,
            "environment": self._environment,
            "complete": self.complete,
            "best": best and best["config"],
            "best_us": best and median_us(best),
            "results": self.entries,
        }
        write_atomic(self.path, json.dumps(content, indent=1, default=_plain) + "\n")


def is_timed(entry: Entry) -> bool:
    """Whether a candidate ran and has a time."""
    return entry["status"] == "ok" and entry["timing"] is not None


def is_attempted(entry: Entry) -> bool:
    """Whether the GPU was spent on a candidate."""
    return entry["status"] == "failed" or is_timed(entry)


def median_us(entry: Entry) -> float:
    """The median time of a timed candidate."""
    return math.inf if entry["timing"] is None else float(entry["timing"]["median_us"])


def fastest(entries: Iterable[Entry]) -> Entry | None:
    """The fastest of the candidates that were timed, None when none was."""
    return min(filter(is_timed, entries), key=median_us, default=None)


def _load(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The content of a file that is valid and belongs to the key, else None."""
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        if stored["key"] != key:
            log.warning("%s was made for something else; it is not used, tuning again", path)
            return None
        if not isinstance(stored["complete"], bool) or not all(map(_is_entry, stored["results"])):
            raise ValueError("a result without config, status or time")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%r); it is not used, tuning again", path, error)
        return None
    return stored


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != set(Entry.__annotations__):
        return False
    timing, configs = value["timing"], (value["config"], value["compile"] or {})
    time_us = 1.0 if timing is None else timing["median_us"]
    known = value["status"] in get_args(Status) and all(isinstance(c, dict) for c in configs)
    return known and isinstance(time_us, (int, float)) and 0 < time_us < math.inf
