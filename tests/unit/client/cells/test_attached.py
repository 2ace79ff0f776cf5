"""What one rank has sent before anybody listened stands before what it sends from then on."""

from typing import Any

from nbdist.client.cells.attached import Missed
from nbdist.client.cluster.connection import Message
from nbdist.shared import wire


class Collector:
    """Takes the place of a listener: notes what it is given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, message: Message) -> None:
        self.texts.append(message.content["text"])


def made() -> tuple[Missed, list[str]]:
    collector = Collector()
    return Missed(collector), collector.texts  # type: ignore[arg-type]


def message(of: str) -> Message:
    return Message(wire.OUTPUT, {"text": of}, {}, [], False, of)


def sent(*ids: str) -> list[list[Any]]:
    return [[of, wire.OUTPUT, {"text": of}] for of in ids]


def test_what_was_sent_before_comes_first_and_nothing_twice() -> None:
    missed, texts = made()
    for of in ("b", "c"):
        missed.hear(message(of))
    missed.fill(sent("a", "b"))
    missed.hear(message("c"))
    missed.hear(message("d"))
    assert texts == ["a", "b", "c", "d"]
    assert missed.has_all(sent("a", "d"))


def test_what_comes_late_after_it_was_shown_from_the_journal_is_not_shown_again() -> None:
    missed, texts = made()
    missed.fill(sent("a"))
    assert not missed.has_all(sent("a", "b"))
    missed.note(sent("a", "b"))
    missed.hear(message("b"))
    assert texts == ["a"]


def test_of_a_window_that_is_sent_again_and_again_the_newest_is_known() -> None:
    """As the journal keeps it: ranks that print send their window twice a second, for days."""
    missed, texts = made()
    missed.fill(sent("display"))
    for of in ("w1", "w2", "w3"):
        missed.hear(Message(wire.OUTPUT, {"text": of, "window": 0}, {}, [], False, of))
    assert texts == ["display", "w1", "w2", "w3"]
    assert missed.has_all(sent("display", "w3"))
    assert not missed.has_all(sent("w2"))
