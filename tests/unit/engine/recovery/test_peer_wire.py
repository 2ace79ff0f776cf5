"""Bytes from one rank's memory into another's, over real connections."""

import time
from collections.abc import Iterator

import pytest

from nbdist.engine.recovery.snapshots.peer_wire import _HEAD, Inbox, Outbox

KEY = b"of the session"
LONGEST_S = 20.0  # a bound that tells a hang from a slow machine


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox("127.0.0.1", KEY)
    yield made
    made.close()


@pytest.fixture
def outbox(inbox: Inbox) -> Iterator[Outbox]:
    made = Outbox(3, KEY)
    made.connect(inbox.address)
    yield made
    made.disconnect()


def send(outbox: Outbox, header: bytes, *parts: bytes) -> None:
    outbox.send("box", header, [memoryview(part) for part in parts])
    assert outbox.wait(LONGEST_S)


def held(inbox: Inbox) -> list[tuple[bytes, bytes]]:
    return [(m.header, bytes(m.body)) for m in inbox.held(3).get("box", ())]


def test_a_message_is_whole_when_its_sender_need_not_wait_any_more(
    inbox: Inbox, outbox: Outbox
) -> None:
    send(outbox, b"first", b"ab", b"", b"c" * 100_000)
    assert held(inbox) == [(b"first", b"ab" + b"c" * 100_000)]
    assert inbox.held(2) == {}


def test_the_two_newest_are_kept_and_the_memory_of_older_ones_is_used_again(
    inbox: Inbox, outbox: Outbox
) -> None:
    send(outbox, b"1", b"one")
    oldest = inbox.held(3)["box"][0].body
    send(outbox, b"2", b"two")
    send(outbox, b"3", b"six")
    assert held(inbox) == [(b"3", b"six"), (b"2", b"two")]
    assert inbox.held(3)["box"][0].body is oldest


def test_half_a_message_replaces_no_whole_one(inbox: Inbox, outbox: Outbox) -> None:
    send(outbox, b"1", b"one")
    send(outbox, b"2", b"two")
    connection = outbox._socket
    assert connection is not None
    connection.sendall(_HEAD.pack(3, 1, 3) + b"box" + b"3" + b"si")
    deadline = time.monotonic() + LONGEST_S
    while len(held(inbox)) > 1:  # its memory is taken from the oldest
        assert time.monotonic() < deadline
        time.sleep(0.001)
    outbox.disconnect()
    anew = Outbox(3, KEY)
    anew.connect(inbox.address)
    send(anew, b"4", b"ten")
    found = held(inbox)
    anew.disconnect()
    assert found[:2] == [(b"4", b"ten"), (b"2", b"two")]


def test_a_sender_that_does_not_know_the_key_is_not_heard(inbox: Inbox) -> None:
    stranger = Outbox(3, b"another key")
    with pytest.raises(OSError, match=r"closed|reset|Broken"):
        stranger.connect(inbox.address)
    assert not stranger.is_connected


def test_what_is_sent_without_a_connection_is_given_up() -> None:
    lone = Outbox(3, KEY)
    lone.send("box", b"1", [])
    assert lone.wait(LONGEST_S)
