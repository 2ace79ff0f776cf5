"""What ranks announce of their collectives, and what they say when two cannot meet."""

import threading

import pytest

from nbdist.engine.tap.collective_check import (
    CUDA,
    DTYPES,
    ENTRIES,
    ROWS,
    CheckChannel,
    CollectiveCall,
    SharedTable,
    mismatch,
    pack,
    size_bytes,
)
from nbdist.engine.tap.purpose import BUFFERS, UNKNOWN, of_parameters
from nbdist.shared.errors import MismatchError

F32 = DTYPES.index("float32")
SUM = pack("all_reduce", F32)


def channels(world_size: int, *, members: tuple[int, ...] | None = None) -> list[CheckChannel]:
    """Return every member's channel of one group over the same memory."""
    memory = memoryview(bytearray(size_bytes(world_size)))
    members = members or tuple(range(world_size))
    tables = [SharedTable(memory, rank, world_size) for rank in members]
    found = [table.channel("0", "group dp", members, "1") for table in tables]
    return [channel for channel in found if channel is not None]


def test_equal_calls_meet_whoever_comes_first() -> None:
    first, second = channels(2)
    for number in range(1, 3 * ENTRIES):
        for channel in (first, second) if number % 2 else (second, first):
            channel.announce(number, SUM, 4, 4, 0)


def test_who_comes_second_is_told_what_both_call_and_where() -> None:
    first, second = channels(2)
    first.announce(12, SUM, 4000, 4000, 7 << 32 | 5)
    with pytest.raises(MismatchError) as caught:
        second.announce(12, SUM, 4004, 4004, 7 << 32 | 9)
    assert str(caught.value) == (
        "Collective #12 of group dp (ranks 0-1) differs between ranks.\n"
        "Why: rank 0 calls all_reduce of 1,000 float32 (4.0 kB), cell 7, line 5; "
        "rank 1 calls all_reduce of 1,001 float32 (4.0 kB), cell 7, line 9.\n"
        "Do:  let all ranks of the group make the same calls, in one order and of equal sizes."
    )


def test_calls_of_one_size_for_different_parameters_do_not_meet() -> None:
    first, second = channels(2)
    one, other = of_parameters(("expert.0.weight",)), of_parameters(("expert.1.weight",))
    for number, (mine, peers) in enumerate([(one, one), (one, UNKNOWN), (UNKNOWN, other)], 1):
        first.announce(number, SUM, 4, 4, 0, mine)
        second.announce(number, SUM, 4, 4, 0, peers)
    first.announce(4, SUM, 4, 4, 0, one)
    with pytest.raises(MismatchError) as caught:
        second.announce(4, SUM, 4, 4, 0, other)
    assert str(caught.value) == (
        "Collective #4 of group dp (ranks 0-1) differs between ranks.\n"
        "Why: rank 0 calls all_reduce of 1 float32 (4 B) for other parameters; "
        "rank 1 calls all_reduce of 1 float32 (4 B) for expert.1.weight.\n"
        "Do:  let all ranks run the same parts of the model, and multiply by 0 what a rank's loss "
        "does not need."
    )


def test_buffers_that_one_rank_alone_sends_are_named_on_either_side() -> None:
    broadcast = pack("broadcast", F32, root=0)
    for calls in ([(SUM, UNKNOWN), (broadcast, BUFFERS)], [(broadcast, BUFFERS), (SUM, UNKNOWN)]):
        first, second = channels(2)
        first.announce(1, calls[0][0], 8, 8, 0, calls[0][1])
        with pytest.raises(MismatchError) as caught:
            second.announce(1, calls[1][0], 8, 8, 0, calls[1][1])
        assert "of 2 float32 (8 B) for buffers after a forward in training" in caught.value.why
        assert "model.train() or model.eval()" in caught.value.do


def test_both_are_told_when_they_come_together() -> None:
    together = threading.Barrier(2)
    told: list[str] = []

    def call(channel: CheckChannel, size: int) -> None:
        together.wait(30)
        try:
            channel.announce(1, SUM, size, size, 0)
        except MismatchError as error:
            told.append(str(error))

    threads = [
        threading.Thread(target=call, args=(channel, 8 * i))
        for i, channel in enumerate(channels(2), start=1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert told
    assert len(set(told)) == 1


def test_a_collective_that_was_refused_can_be_called_rightly_afterwards() -> None:
    first, second = channels(2)
    first.announce(1, SUM, 8, 8, 0)
    with pytest.raises(MismatchError):
        second.announce(1, SUM, 4, 4, 0)
    second.announce(1, SUM, 8, 8, 0)
    first.announce(2, SUM, 4, 4, 0)
    second.announce(2, SUM, 4, 4, 0)


def test_what_the_backend_would_not_have_is_compared_with_nothing_else() -> None:
    first, second = channels(2)
    first.announce(1, SUM, 8, 8, 0)
    first.withdraw(1)
    first.announce(1, SUM, 4, 4, 0)
    second.announce(1, SUM, 8, 8, 0)  # its backend is about to refuse it as well
    second.withdraw(1)
    second.announce(1, SUM, 4, 4, 0)
    with pytest.raises(MismatchError):
        second.announce(1, SUM, 5, 5, 0)


def test_other_numbers_other_groups_and_other_ranks_are_not_compared() -> None:
    memory = memoryview(bytearray(size_bytes(3)))
    tables = [SharedTable(memory, rank, 3) for rank in range(3)]
    groups = [
        ("0", (0, 1, 2), "1"),
        ("1", (0, 1, 2), "1"),
        ("1", (0, 1), "1"),
        ("1", (0, 1), "2"),
    ]
    for size, (name, members, made) in enumerate(groups, start=1):
        for rank in members:
            channel = tables[rank].channel(name, "group", members, made)
            assert channel is not None
            channel.announce(1, SUM, size, size, 0)
            channel.announce(2, SUM, size + 1, size + 1, 0)


def test_a_peer_that_is_far_ahead_is_not_compared() -> None:
    first, second = channels(2)
    first.announce(1, SUM, 4, 4, 0)
    first.announce(1 + ENTRIES, SUM, 8, 8, 0)
    second.announce(1, SUM, 5, 5, 0)


def test_a_rank_outside_the_group_or_alone_in_it_announces_nothing() -> None:
    table = SharedTable(memoryview(bytearray(size_bytes(2))), 0, 2)
    assert table.channel("1", "group 1", (1,), "1") is None
    assert table.channel("1", "group 1", (0,), "1") is None


def test_ranks_that_call_alike_are_named_together_and_roots_by_their_global_rank() -> None:
    calls = {
        4: CollectiveCall(pack("broadcast", F32, root=0), 8, 8, 0),
        5: CollectiveCall(pack("broadcast", F32, root=1), 8, 8, 0),
        6: CollectiveCall(pack("broadcast", F32, root=0), 8, 8, 0),
        7: CollectiveCall(pack("barrier"), 0, 0, 3 << 32 | 2),
    }
    error = mismatch("group 3", 2, (4, 5, 6, 7), calls)
    assert error is not None
    assert error.why == (
        "ranks 4, 6 call broadcast from rank 4 of 2 float32 (8 B); "
        "rank 5 calls broadcast from rank 5 of 2 float32 (8 B); "
        "rank 7 calls barrier, cell 3, line 2."
    )


def test_tensors_on_different_devices_are_named() -> None:
    calls = {0: CollectiveCall(SUM + CUDA, 4, 4, 0), 1: CollectiveCall(SUM, 4, 4, 0)}
    error = mismatch("the default group", 1, (0, 1), calls)
    assert error is not None
    assert "rank 0 calls all_reduce of 1 float32 (4 B) on cuda; rank 1 calls" in error.why


def test_reductions_are_named_where_they_differ() -> None:
    calls = {
        0: CollectiveCall(SUM, 4, 4, 0),
        1: CollectiveCall(pack("all_reduce", F32, 4), 4, 4, 0),
    }
    error = mismatch("the default group", 1, (0, 1), calls)
    assert error is not None
    assert "rank 0 calls all_reduce (SUM) of 1 float32 (4 B)" in error.why
    assert "rank 1 calls all_reduce (MAX) of 1 float32 (4 B)" in error.why
    assert mismatch("the default group", 1, (0, 1), {0: calls[0], 1: calls[0]}) is None


EXCHANGE = pack("all_to_all", F32)


def test_splits_meet_pair_by_pair_in_a_group_of_some_ranks() -> None:
    first, second = channels(6, members=(2, 5))
    for number in range(1, 3 * ROWS):
        first.announce(number, EXCHANGE, 0, 8, 0, UNKNOWN, (number, 4, number, 12))
        second.announce(number, EXCHANGE, 0, 8, 0, UNKNOWN, (12, 8, 4, 8))
    first.announce(3 * ROWS, EXCHANGE, 0, 8, 0, UNKNOWN, (0, 4, 0, 12))
    with pytest.raises(MismatchError, match=r"rank 5 .* sends rank 2 4 float32 .* receives 3 "):
        second.announce(3 * ROWS, EXCHANGE, 0, 8, 0, UNKNOWN, (16, 8, 4, 8))


def test_splits_meet_a_rank_that_gives_none_where_its_equal_parts_fit() -> None:
    first, second = channels(2)
    first.announce(1, EXCHANGE, 16, 16, 0)
    second.announce(1, EXCHANGE, 0, 48, 0, UNKNOWN, (8, 40, 8, 40))
    second.announce(2, EXCHANGE, 0, 44, 0, UNKNOWN, (4, 40, 8, 40))
    with pytest.raises(MismatchError, match=r"rank 1 .* sends rank 0 1 float32 .* receives 2 "):
        first.announce(2, EXCHANGE, 16, 16, 0)


def test_splits_that_newer_ones_have_replaced_are_not_compared() -> None:
    first, second = channels(2)
    for number in range(1, ROWS + 2):
        first.announce(number, EXCHANGE, 0, 8, 0, UNKNOWN, (4, 4, 4, 4))
    second.announce(1, EXCHANGE, 0, 8, 0, UNKNOWN, (8, 8, 8, 8))
