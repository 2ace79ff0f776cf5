"""What both ends of a message announce, and what they say when they differ."""

import threading

import pytest

from nbdist.engine.tap.collective_check import DTYPES, MESSAGES, SharedTable, pack, size_bytes
from nbdist.engine.tap.message_check import MessageEnd, Messages, messages
from nbdist.shared.errors import MismatchError

F32, I32 = DTYPES.index("float32"), DTYPES.index("int32")
HERE = 7 << 32 | 5


def group_of(n: int) -> list[Messages]:
    """Return every member's way to announce messages in one group over the same memory."""
    memory = memoryview(bytearray(size_bytes(n)))
    found = [
        messages(SharedTable(memory, r, n), "0", "group dp", tuple(range(n)), "1") for r in range(n)
    ]
    return [each for each in found if each is not None]


def send(from_rank: Messages, to: int, count: int, tag: int = 0) -> object:
    return from_rank.announce(True, to, tag, False, MessageEnd(F32, 4 * count, HERE))


def receive(at_rank: Messages, source: int | None, count: int, tag: int = 0) -> object:
    return at_rank.announce(False, source, tag, False, MessageEnd(F32, 4 * count, HERE))


def test_ends_that_agree_meet_whoever_comes_first() -> None:
    first, second = group_of(2)
    for number in range(3 * MESSAGES):
        if number % 2:
            send(first, 1, number)
            receive(second, 0, number)
        else:
            receive(second, 0, number)
            send(first, 1, number)


def test_the_end_that_comes_second_is_told_both_sizes_and_places() -> None:
    first, second = group_of(2)
    send(first, 1, 3)
    receive(second, 0, 3)
    send(first, 1, 9)
    with pytest.raises(MismatchError) as caught:
        receive(second, 0, 4)
    assert str(caught.value) == (
        "Message #2 from rank 0 to rank 1 of group dp differs between its two ends.\n"
        "Why: rank 0 sends 9 float32 (36 B), cell 7, line 5; "
        "rank 1 receives 4 float32 (16 B), cell 7, line 5.\n"
        "Do:  receive into a tensor of the size and type that is sent; messages between two ranks "
        "meet in the order of their calls, those of each tag separately."
    )


def test_a_receiver_with_room_to_spare_differs_too_and_the_sender_says_so() -> None:
    first, second = group_of(2)
    receive(second, 0, 9, tag=3)
    with pytest.raises(MismatchError, match=r"#1 with tag 3 from rank 0 to rank 1") as caught:
        send(first, 1, 4, tag=3)
    assert "rank 0 sends 4 float32 (16 B)" in str(caught.value)


def test_another_type_of_as_many_bytes_differs() -> None:
    first, second = group_of(2)
    send(first, 1, 4)
    with pytest.raises(MismatchError, match="receives 4 int32"):
        second.announce(False, 0, 0, False, MessageEnd(I32, 16, 0))


def test_both_ends_are_told_when_they_come_together() -> None:
    together = threading.Barrier(2)
    told: list[str] = []

    def call(function: object, *args: object) -> None:
        together.wait(30)
        try:
            function(*args)  # type: ignore[operator]
        except MismatchError as error:
            told.append(str(error))

    first, second = group_of(2)
    threads = [
        threading.Thread(target=call, args=(send, first, 1, 9)),
        threading.Thread(target=call, args=(receive, second, 0, 4)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert told
    assert len(set(told)) == 1


def test_a_message_that_was_refused_can_be_received_rightly_afterwards() -> None:
    first, second = group_of(2)
    send(first, 1, 9)
    with pytest.raises(MismatchError):
        receive(second, 0, 4)
    receive(second, 0, 9)
    send(first, 1, 2)
    receive(second, 0, 2)


def test_what_the_backend_would_not_have_is_taken_back_with_its_number() -> None:
    first, second = group_of(2)
    message = first.announce(True, 1, 0, False, MessageEnd(F32, 8, 0))
    assert message is not None
    first.withdraw(message)
    receive(second, 0, 4)
    send(first, 1, 4)
    send(first, 1, 5)
    with pytest.raises(MismatchError):
        receive(second, 0, 6)


def test_tags_directions_peers_groups_and_second_backends_are_lanes_of_their_own() -> None:
    ranks = group_of(3)
    for tag in (0, 1):
        for source in range(3):
            for to in {0, 1, 2} - {source}:
                send(ranks[source], to, 10 * source + to + 100 * tag, tag)
    ranks[0].announce(True, 1, 0, True, MessageEnd(F32, 4, 0))
    for tag in (1, 0):
        for to in range(3):
            for source in {0, 1, 2} - {to}:
                receive(ranks[to], source, 10 * source + to + 100 * tag, tag)
    ranks[1].announce(False, 0, 0, True, MessageEnd(F32, 4, 0))


def test_what_follows_a_receive_from_anyone_with_its_tag_is_not_compared() -> None:
    ranks = group_of(3)
    send(ranks[1], 0, 7)
    send(ranks[2], 0, 8)
    receive(ranks[0], None, 7)  # of which rank it was, nobody knows
    assert receive(ranks[0], 2, 9) is None
    send(ranks[1], 0, 7, tag=1)
    with pytest.raises(MismatchError):
        receive(ranks[0], 1, 9, tag=1)


def test_of_two_ranks_anyone_is_the_other() -> None:
    first, second = group_of(2)
    send(first, 1, 9)
    with pytest.raises(MismatchError, match="from rank 0 to rank 1"):
        receive(second, None, 4)


def test_a_sender_that_is_far_ahead_is_not_compared() -> None:
    first, second = group_of(2)
    for _ in range(MESSAGES + 1):
        send(first, 1, 4)
    receive(second, 0, 5)


def test_messages_leave_what_is_announced_of_collectives_alone() -> None:
    memory = memoryview(bytearray(size_bytes(2)))
    tables = [SharedTable(memory, rank, 2) for rank in range(2)]
    channels = [table.channel("0", "group dp", (0, 1), "1") for table in tables]
    ends = [messages(table, "0", "group dp", (0, 1), "1") for table in tables]
    assert channels[0] is not None
    assert channels[1] is not None
    assert ends[0] is not None
    assert ends[1] is not None
    channels[0].announce(1, pack("all_reduce", F32), 4, 4, 0)
    for _ in range(5 * MESSAGES):
        send(ends[0], 1, 6)
        receive(ends[1], 0, 6)
    with pytest.raises(MismatchError):
        channels[1].announce(1, pack("all_reduce", F32), 8, 8, 0)


def test_a_rank_outside_the_group_or_alone_in_it_announces_nothing() -> None:
    table = SharedTable(memoryview(bytearray(size_bytes(2))), 0, 2)
    assert messages(table, "1", "group 1", (1,), "1") is None
    assert messages(table, "1", "group 1", (0,), "1") is None
