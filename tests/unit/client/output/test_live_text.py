"""Live text, with slots that remember what they were given."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from nbdist.client.output.live_text import LiveText
from nbdist.client.output.slots import Display, Slot, Slots


class Seen(Slots):
    """Slots that are live and remember, in place of a notebook's page."""

    def __init__(self, live: bool = True) -> None:
        super().__init__(live)
        self.shown: list[str] = []
        self.changed = threading.Event()

    def open(
        self, shown: Any, beside: Mapping[str, Any] | None = None, *, stays: bool = False
    ) -> Slot:
        slot = Slot(self, "id")
        self._update(slot, shown)
        return slot

    def _update(self, slot: Slot, display: Display) -> None:
        self.shown.append(str(display.data["text/plain"]))
        self.changed.set()

    def wait_for(self, text: str) -> None:
        for _ in range(100):
            if self.shown and text in self.shown[-1]:
                return
            assert self.changed.wait(30), f"{text!r} never appeared"
            self.changed.clear()
        pytest.fail(f"{text!r} never appeared")


def said(text: str) -> dict[str, Any]:
    """Return the message in which a rank tells what it has printed."""
    return {"parts": [["stdout", text]]}


def test_the_first_line_is_shown_at_once_and_later_ones_follow() -> None:
    slots = Seen()
    live = LiveText(slots, [0, 1])
    live.receive(1, said("hello\n"))
    slots.wait_for("rank 1 │ hello")
    live.receive(0, said("hello\n"))
    slots.wait_for("ranks 0-1 │ hello")
    live.close()


def test_a_flood_of_messages_makes_few_and_small_updates() -> None:
    slots = Seen()
    live = LiveText(slots, [0])
    for i in range(5000):
        live.receive(0, said(f"line {i}\n"))
    slots.wait_for("line 4999")
    live.close()
    assert len(slots.shown) < 100
    assert max(len(text) for text in slots.shown) < 5000


def test_nothing_is_shown_in_static_mode_and_everything_is_kept() -> None:
    slots = Seen(live=False)
    live = LiveText(slots, [0])
    live.receive(0, said("hello\n"))
    live.close()
    assert slots.shown == []
    assert live.outputs[0].text() == "hello"


def test_closing_without_any_output_does_not_wait() -> None:
    slots = Seen()
    LiveText(slots, [0]).close()
    assert slots.shown == []


def test_a_page_that_breaks_leaves_the_text_for_the_end() -> None:
    class Broken(Seen):
        def open(
            self, shown: Any, beside: Mapping[str, Any] | None = None, *, stays: bool = False
        ) -> Slot:
            self.changed.set()
            raise RuntimeError("no page")

    slots = Broken()
    live = LiveText(slots, [0])
    live.receive(0, said("hello\n"))
    assert slots.changed.wait(30)
    live.receive(0, said("bye\n"))
    live.close()
    assert live.outputs[0].text() == "hello\nbye"


def test_a_note_stands_below_everything_is_replaced_and_goes() -> None:
    slots = Seen()
    live = LiveText(slots, [0])
    live.receive(0, said("hello\n"))
    live.note("No progress for 10 s.")
    slots.wait_for("hello\nNo progress for 10 s.")
    live.note("No progress for 11 s.")
    slots.wait_for("hello\nNo progress for 11 s.")
    live.note(None)
    live.receive(0, said("on\n"))
    slots.wait_for("on")
    assert "Nothing" not in slots.shown[-1]
    live.close()


def test_in_static_mode_no_note_is_shown() -> None:
    slots = Seen(live=False)
    live = LiveText(slots, [0])
    live.note("No progress for 10 s.")
    live.close()
    assert slots.shown == []


def test_a_note_takes_the_place_of_the_one_before_and_counts_as_shown_once_drawn() -> None:
    slots = Seen()
    live = LiveText(slots, [0])
    live.note("Rank 0 computes.")
    slots.wait_for("Rank 0 computes.")
    live.note("Rank 0 waits.")
    slots.wait_for("Rank 0 waits.")
    assert "computes" not in slots.shown[-1]
    assert live.has_shown("Rank 0 waits.")
    assert not live.has_shown("Rank 0 computes.")
    live.note(None)
    slots.wait_for("")
    live.close()


def test_where_no_note_is_ever_drawn_none_is_waited_for() -> None:
    assert LiveText(Seen(live=False), [0]).has_shown("Rank 0 computes.")
