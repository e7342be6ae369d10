"""The state of the call path: bounded tables, and one `clear` for all of it and all threads."""

import threading
from typing import Any

from mla_var3.runtime.call_state import CallState


def test_clear_drops_everything():
    state = CallState()
    made: list[int] = []

    @state.cached(4)
    def double(number: int) -> int:
        made.append(number)
        return 2 * number

    table, own = state.table(4), state.per_thread()
    for _ in range(2):
        assert double(3) == 6
        table.keep("key", "value")
        own.values["key"] = "value"
    assert made == [3]
    state.clear()
    assert double(3) == 6 and made == [3, 3]
    assert not table and not own.values


def test_clear_reaches_other_threads():
    state = CallState()
    own = state.per_thread()
    own.values["key"] = "here"
    both, seen = threading.Barrier(2, timeout=10), []

    def work() -> None:
        seen.append(dict(own.values))
        own.values["key"] = "there"
        both.wait()
        both.wait()  # cleared in between
        seen.append(dict(own.values))

    thread = threading.Thread(target=work)
    thread.start()
    both.wait()
    assert own.values == {"key": "here"}
    state.clear()
    both.wait()
    thread.join()
    assert seen == [{}, {}] and not own.values


def test_clear_waits_for_a_thread_that_makes_room():
    """An entry that is gone between finding and dropping it would be an error."""
    state = CallState()
    table: Any = state.table(1)

    class Key:
        def __hash__(self) -> int:
            if not waited:
                clearing.start()
                clearing.join(0.2)
                waited.append(clearing.is_alive())
            return 0

    clearing, waited = threading.Thread(target=state.clear), []
    table.keep(Key(), "value")
    clearing.join()
    assert waited == [True] and not table


def test_a_full_table_drops_the_oldest_entry():
    table: Any = CallState().table(3)
    for number in range(3):
        assert table.keep(number, str(number)) == []
    assert table.keep(0, "again") == []  # now the newest
    assert table.keep(3, "3") == ["1"]
    assert list(table.items()) == [(2, "2"), (0, "again"), (3, "3")]
