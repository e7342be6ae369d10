"""What the call path keeps between calls, and one `clear` for all of it.

Chosen backends, plans, compiled programs by call shape, replays and workspaces are kept so that a
repeated call finds them. Every such cache is made by `CALL_STATE`, so that registering a backend,
or a test, can drop all of them at once, in every thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., Any])


class CallState:
    """The registry of the call path's caches."""

    def __init__(self) -> None:
        self.generation = 0
        self._clears: list[Callable[[], None]] = []

    def clear(self) -> None:
        """Drop everything that calls keep; the next call of each shape starts afresh."""
        self.generation += 1
        for clear in self._clears:
            clear()

    def on_clear(self, clear: Callable[[], None]) -> None:
        """Have a function called by `clear`."""
        self._clears.append(clear)

    def cached(self, maxsize: int) -> Callable[[F], F]:
        """`functools.lru_cache`, emptied by `clear`."""

        def decorate(function: F) -> F:
            made: Any = lru_cache(maxsize=maxsize)(function)
            self.on_clear(made.cache_clear)
            return made  # type: ignore[no-any-return]

        return decorate

    def table(self, maxsize: int) -> Table[Any, Any]:
        """A dict that drops its oldest entry when it is full, emptied by `clear`."""
        made: Table[Any, Any] = Table(maxsize)
        self.on_clear(made.clear)
        return made

    def per_thread(self) -> PerThread:
        """Dicts that each belong to one thread, emptied by `clear`."""
        return PerThread(self)


class Table(dict[K, V], Generic[K, V]):
    """A dict of bounded size.

    The oldest entry goes first, one at a time: a server that brings ever new call shapes prepares
    each of them once more after `maxsize` others, and never all of them at once.
    """

    def __init__(self, maxsize: int) -> None:
        super().__init__()
        self.maxsize = maxsize
        self._lock = threading.Lock()

    def keep(self, key: K, value: V) -> list[V]:
        """Add or replace an entry; returns the values that had to go."""
        gone = []
        with self._lock:
            self.pop(key, None)
            while len(self) >= self.maxsize:
                gone.append(self.pop(next(iter(self))))
            self[key] = value
        return gone

    def clear(self) -> None:
        """Drop all entries, but not while another thread makes room for one."""
        with self._lock:
            super().clear()


class PerThread(threading.local):
    """A dict for each thread. `CallState.clear` empties those of all threads."""

    def __init__(self, state: CallState) -> None:
        self._state = state
        self._generation = state.generation
        self._values: dict[Any, Any] = {}

    @property
    def values(self) -> dict[Any, Any]:
        """The dict of the calling thread."""
        if self._generation != self._state.generation:
            self._generation, self._values = self._state.generation, {}
        return self._values


CALL_STATE = CallState()
