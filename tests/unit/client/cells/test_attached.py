"""What one rank has sent before anybody listened stands before what it sends from then on."""

from typing import Any

import pytest

from nbdist.client.cells import attached
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


def test_of_what_has_come_a_bounded_number_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "_MOST_SEEN", 2)
    missed, _ = made()
    missed.fill([])
    for of in ("a", "b", "c"):
        missed.hear(message(of))
    assert missed.has_all(sent("b", "c"))
    assert not missed.has_all(sent("a"))  # so the text is shown again, from the journal
