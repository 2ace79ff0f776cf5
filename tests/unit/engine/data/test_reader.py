"""What a rank reads ahead of its loop: the right samples, few groups, threads that end."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.engine.data.batches import Shard, cut, part
from nbdist.engine.data.reading import mixing, reader, reader_threads
from nbdist.engine.data.reading.interleave import Interleave
from nbdist.engine.data.reading.reader import GroupFeed
from nbdist.engine.data.sources.source import Columns
from nbdist.shared.errors import DataError


class Memory:
    """A source of numbered samples, that counts what is read and can be made to wait or to fail."""

    name, fingerprint, is_far = "memory", 1, True

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = np.array(sizes, dtype=np.int64)
        self.reads: list[int] = []
        self.broken: set[int] = set()
        self.may_read = threading.Event()
        self.may_read.set()

    def where(self, group: int) -> str:
        return f"group {group}"

    def read(self, group: int) -> Columns:
        self.may_read.wait()
        self.reads.append(group)
        if group in self.broken:
            raise DataError(f"group {group} is broken.")
        first = int(self.sizes[:group].sum())
        ids = np.arange(first, first + self.sizes[group])
        return {"x": ids * 2, "xy": np.stack([ids, -ids], axis=1), "name": [str(i) for i in ids]}


def feed(source: Memory, lanes: int, batch: int, shard: Shard, **how: Any) -> GroupFeed:
    order = Interleave(source.sizes, lanes, how.pop("shuffle", True), 0, 0)
    start = how.pop("start", 0)
    ends = cut(int(source.sizes.sum()), start, batch, shard.count, drop_last=False)
    return GroupFeed(source, order, start, ends, shard, **how)


def expected(source: Memory, lanes: int, batch: int, shard: Shard, **how: Any) -> list[list[int]]:
    """Return the numbers of the samples of each batch, found one piece after the other."""
    order = Interleave(source.sizes, lanes, how.get("shuffle", True), 0, 0)
    start, found = how.get("start", 0), []
    for end in cut(int(source.sizes.sum()), start, batch, shard.count, drop_last=False):
        numbers: list[int] = []
        for piece in order.pieces(start, end, part(start, end, shard, how.get("weights"))):
            ids, rows = order.ids(piece.group), order.rows(piece.group)
            ids = ids if rows is None else ids[rows]
            numbers += ids[piece.start : piece.stop].tolist()
        found.append(numbers)
        start = end
    return found


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_batches_hold_what_the_order_says_made_alone_or_several_at_once(
    data: st.DataObject,
) -> None:
    lanes = data.draw(st.integers(1, 6))
    is_regular = data.draw(st.booleans())  # batches that several are made of at once
    numbers = st.lists(st.integers(1, 60), min_size=1, max_size=14)
    sizes = [48] * data.draw(st.integers(lanes, 12)) if is_regular else data.draw(numbers)
    ranks = data.draw(st.integers(1, 3))
    batch = lanes * data.draw(st.integers(1, 4)) if is_regular else data.draw(st.integers(3, 30))
    shard = Shard(data.draw(st.integers(0, ranks - 1)), ranks)
    how: dict[str, Any] = {"shuffle": data.draw(st.booleans())}
    batch = max(batch, ranks)
    if data.draw(st.booleans()):
        how["start"] = min(batch * data.draw(st.integers(0, 5)), sum(sizes))
    if data.draw(st.booleans()):
        how["weights"] = (3.0, 1.0, 2.0)[:ranks]
    source = Memory(sizes)
    blocks = list(feed(source, lanes, batch, shard, **how))
    assert [block.ids.tolist() for block in blocks] == expected(source, lanes, batch, shard, **how)
    for block in blocks:
        assert block.columns["x"].tolist() == (block.ids * 2).tolist()
        assert block.columns["xy"].tolist() == [[i, -i] for i in block.ids]
        assert block.columns["name"] == [str(i) for i in block.ids]


def test_some_batches_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    mixed = mixing.mixed

    def noted(one: mixing.Stretch, cut: Any) -> list[Columns]:
        made.append(one.batches)
        return mixed(one, cut)

    monkeypatch.setattr(mixing, "mixed", noted)
    list(feed(Memory([64] * 8), 4, 8, Shard(0, 2)))
    assert sum(made) == 8 * 64 // 8
    assert max(made) > 1


def test_the_next_batches_are_mixed_by_a_reader_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    by: list[str] = []
    mixed = mixing.mixed

    def noted(one: mixing.Stretch, cut: Any) -> list[Columns]:
        by.append(threading.current_thread().name)
        return mixed(one, cut)

    monkeypatch.setattr(mixing, "mixed", noted)
    one = feed(source := Memory([64] * 8), 4, 8, Shard(0, 1))
    blocks = [next(one)]
    assert one._coming is not None
    one._coming.result(10)
    assert by[1].startswith("nbdist-read")
    blocks += one
    assert [b.ids.tolist() for b in blocks] == expected(source, 4, 8, Shard(0, 1))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_group_is_read_once_over_all_ranks(ranks: int) -> None:
    source = Memory([40] * 24)
    for rank in range(ranks):
        list(feed(source, 8, 16, Shard(rank, ranks)))
    assert sorted(source.reads) == list(range(24))


def test_the_buffer_holds_a_ranks_lanes_and_two_groups_more_and_uses_the_room() -> None:
    source = Memory([80] * 40)
    one = feed(source, 4, 8, Shard(0, 1))
    held = [sum(group.left for group in one._groups.values()) for _ in one]
    assert max(held) <= (4 + reader.AHEAD) * 80
    assert sorted(held)[len(held) // 2] > 3 * 80


def test_threads_end_with_the_pass_and_with_a_loop_that_is_left() -> None:
    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("nbdist-read")]

    def look(blocks: Iterator[Any]) -> None:
        next(blocks)
        running.extend(threads())

    running: list[threading.Thread] = []
    look(feed(Memory([9] * 9), 3, 3, Shard(0, 1)))
    list(feed(Memory([9] * 9), 3, 3, Shard(0, 1)))
    assert len(running) == reader_threads.MOST
    for thread in [*running, *threads()]:
        thread.join(10)
        assert not thread.is_alive()


def test_a_feed_that_is_closed_does_not_wait_for_a_store_that_stalls() -> None:
    source = Memory([9] * 9)
    source.may_read.clear()
    one = feed(source, 3, 3, Shard(0, 1))
    one._read_ahead(0)
    one.close()
    source.may_read.set()
    assert len(source.reads) <= reader_threads.MOST


def test_an_error_is_raised_by_the_loop_which_may_ask_again() -> None:
    source = Memory([6] * 6)
    source.broken = {2}
    one = feed(source, 6, 6, Shard(0, 1), shuffle=False)
    with pytest.raises(DataError, match="group 2 is broken"):
        next(one)
    source.broken.clear()
    seen = [block.ids.tolist() for block in one]
    assert seen == expected(Memory([6] * 6), 6, 6, Shard(0, 1), shuffle=False)
