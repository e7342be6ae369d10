"""A limit on how long one contender may hold the device.

A kernel that waits for ever, for a barrier or a queue, cannot be stopped from within its process:
the host sits in a synchronisation. So a thread waits beside it, and what was measured so far is
handed on before the process is given up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mla_var3.bench.record import BenchRow

PATIENCE = 180.0
"""Seconds; a peer that compiles on first use may take more than a minute."""
TUNING_FACTOR = 10
"""Searching tilings compiles and times many."""


@dataclass(frozen=True)
class Watchdog:
    """Gives a run up when one contender takes too long.

    Attributes:
        seconds: how long one contender may take in one round.
        give_up: gets the rows of the shape as they are then, in a thread of its own.
    """

    seconds: float
    give_up: Callable[[Sequence[BenchRow]], None]

    @contextmanager
    def over(self, rows: Callable[[str], Sequence[BenchRow]]) -> Iterator[None]:
        """Watch over the body; `rows` makes the rows from the reason, if it comes to that."""
        reason = f"did not finish within {self.seconds:g} s"
        timer = threading.Timer(self.seconds, lambda: self.give_up(rows(reason)))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
