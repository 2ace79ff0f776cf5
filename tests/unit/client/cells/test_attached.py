"""What one rank has sent before anybody listened stands before what it sends from then on."""

from typing import Any

import pytest

from nbdist.client.cells import attached
from nbdist.client.cells.attached import AttachedCell, Missed
from nbdist.client.cluster.connection import Message
from nbdist.client.metrics.telemetry import Telemetry
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


class OfForgetfulRanks(AttachedCell):
    """Of a cell whose ranks have none of the records that they are asked for."""

    def __init__(self) -> None:
        self._telemetry = Telemetry()
        self.gone = []

    def _fetch_records(self, *_: Any, **__: Any) -> None: ...


def test_records_that_ranks_have_not_are_said_to_be_gone() -> None:
    cell = OfForgetfulRanks()
    cell._fetch({0: (10, 2510)})
    assert [sentence.partition(":")[0] for sentence in cell.gone] == [
        "2,500 records of rank 0 are gone"
    ]


def test_records_that_there_was_no_time_for_are_not_said_to_be_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attached, "_FETCH_S", -1.0)
    cell = OfForgetfulRanks()
    cell._fetch({0: (10, 2510)})
    assert cell.gone == []
