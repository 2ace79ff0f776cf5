"""Bounds of what a rank tells: templates, what stands for the rest of them, rows, tags."""

from typing import Any, cast

import pytest

from nbdist.engine.tap import encode, in_flight
from nbdist.engine.tap.collective import LaunchedCollective
from nbdist.engine.tap.counters import MAX_TAGS, GroupCounters
from nbdist.engine.tap.encode import MAX_TEMPLATES, Templates
from nbdist.shared.packed import ANY_TAG, CALL, Calls


class _Book:
    """What a template reads of a group's book."""

    name, title, ranks = "0", "the default group", (0, 1)


BOOK = cast("GroupCounters", _Book())


def _launch(
    size: int, kind: str = "all_reduce", seq: int = 1, peer: int | None = None
) -> LaunchedCollective:
    return LaunchedCollective(kind, BOOK, seq, size, 1_000, None, peer)


def _columns(calls: Calls) -> list[tuple[int, int]]:
    flat = calls.calls.tolist()
    return [(flat[i], flat[i + 1]) for i in range(0, len(flat), len(CALL))]


def test_more_templates_than_a_cell_may_have_are_told_as_other() -> None:
    templates = Templates()
    known = templates.pack([_launch(size) for size in range(MAX_TEMPLATES)], [], 0, 0)
    assert sorted(known.new) == list(range(MAX_TEMPLATES))
    more = templates.pack([_launch(10**6 + i, seq=i) for i in range(1000)], [], 0, 0)
    assert [(t.kind, t.bytes, t.line) for t in more.new.values()] == [("all_reduce", 0, "other")]
    assert _columns(more) == [(MAX_TEMPLATES, i) for i in range(1000)]
    again = templates.pack([_launch(7)], [], 0, 0)
    assert not again.new
    assert _columns(again) == [(7, 1)]


def test_there_is_one_other_for_each_kind_and_peer() -> None:
    templates = Templates()
    templates.pack([_launch(size) for size in range(MAX_TEMPLATES)], [], 0, 0)
    calls = [
        *(_launch(10**6 + i) for i in range(3)),
        *(_launch(10**6 + i, "broadcast") for i in range(3)),
        *(_launch(10**6 + i, "send", peer=1) for i in range(3)),
        *(_launch(10**6 + i, "send", peer=2) for i in range(3)),
    ]
    told = templates.pack(calls, [], 0, 0)
    assert [(t.kind, t.peer, t.tag) for t in told.new.values()] == [
        ("all_reduce", None, 0),
        ("broadcast", None, 0),
        ("send", 1, ANY_TAG),
        ("send", 2, ANY_TAG),
    ]
    at = MAX_TEMPLATES
    assert [number for number, _ in _columns(told)] == [at] * 3 + [at + 1] * 3 + [at + 2] * 3 + [
        at + 3
    ] * 3


def test_a_message_told_as_other_has_its_number_among_all_to_its_peer() -> None:
    templates = Templates()
    templates.pack([_launch(size) for size in range(MAX_TEMPLATES)], [], 0, 0)
    message = _launch(10**6, "send", seq=12, peer=1)
    message.tag, message.tag_number = 5, 3
    assert _columns(templates.pack([message], [], 0, 0)) == [(MAX_TEMPLATES, 12)]


def _fresh_book() -> Any:
    book = GroupCounters.__new__(GroupCounters)
    book.tagged = {}
    return book


def numbered(book: Any, sends: bool, peer: int, tag: int, seq: int) -> tuple[int, int]:
    """LaunchedCollective a message; return its tag and number."""
    found: tuple[int, int] = book.next_in_tag(sends, peer, tag, seq)
    assert book.next_in_tag(sends, peer, tag, seq) == found, "not launched yet"
    book.count_in_tag(sends, peer, *found)
    return found


def test_messages_are_numbered_by_peer_direction_and_tag() -> None:
    book = _fresh_book()
    calls = [(True, 1, 0), (True, 1, 7), (True, 1, 0), (False, 1, 0), (True, 2, 7), (True, 1, 7)]
    assert [numbered(book, *call, 99) for call in calls] == [
        (0, 1),
        (7, 1),
        (0, 2),
        (0, 1),
        (7, 1),
        (7, 2),
    ]


def test_messages_of_too_many_tags_are_numbered_by_peer_alone() -> None:
    book = _fresh_book()
    for tag in range(MAX_TAGS):
        numbered(book, True, 1, tag, tag + 1)
    assert numbered(book, True, 1, MAX_TAGS, 5000) == (ANY_TAG, 5000)
    assert numbered(book, True, 1, 3, 5001) == (3, 2)
    assert len(book.tagged) == MAX_TAGS


def test_of_a_step_with_too_many_calls_the_first_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    state = in_flight.TapState()
    monkeypatch.setattr(in_flight, "state", state)
    state.level = "full"
    for number in range(in_flight.MAX_ROWS + 100):
        launch = _launch(8, seq=number)
        state.collectives += 1
        if in_flight.sample(launch):
            launch.begin_ns, launch.end_ns = 2_000, 3_000
            state.ended.append(launch)
    traffic = in_flight.take(1)
    assert traffic.collectives == in_flight.MAX_ROWS + 100
    assert traffic.total_ns is None  # of a part it would be no total
    assert traffic.calls is not None
    assert len(_columns(traffic.calls)) == in_flight.MAX_ROWS
    assert traffic.calls.skipped == 100
    assert encode.MAX_TEMPLATES <= in_flight.MAX_ROWS
    launch = _launch(8)
    assert in_flight.sample(launch)  # the next step begins anew
