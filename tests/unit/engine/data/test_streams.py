"""Streams: one order for all, that resumes, and ends that are the same everywhere."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.engine.compat import torch_loaders
from nbdist.engine.compat.libraries import hf_datasets
from nbdist.engine.data.batches import Shard, cut
from nbdist.engine.data.coverage import Coverage, coverage
from nbdist.engine.data.make import loader
from nbdist.engine.data.order import streams
from nbdist.engine.data.order.stream_batches import StreamBatches
from nbdist.engine.data.order.streams import SampleStream
from nbdist.shared.errors import UsageError


class Counted:
    """A stream of numbers, and how many of them were read in all."""

    def __init__(self, samples: int) -> None:
        self.samples, self.read = samples, 0

    def __iter__(self) -> Iterator[int]:
        for i in range(self.samples):
            self.read += 1
            yield i


class Stateful(Counted):
    """It goes on where it stands, as datasets with a state often do."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.samples:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def order(stream: SampleStream, epoch: int = 0, start: int = 0) -> list[int]:
    return [sample for _, sample in stream.read(epoch, start)]


def test_windows_are_shuffled_by_seed_and_epoch_and_a_stream_keeps_its_order_else() -> None:
    shuffled = SampleStream(Counted(10), True, 0, 4)
    first = order(shuffled)
    assert first == order(SampleStream(Counted(10), True, 0, 4)) != order(shuffled, epoch=1)
    assert [sorted(first[at : at + 4]) for at in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert first != order(SampleStream(Counted(10), True, 1, 4))
    assert order(SampleStream(Counted(10), False, 0, 4)) == list(range(10))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", [Counted, Stateful])
def test_an_epoch_resumes_at_any_sample(kind: type[Counted], shuffle: bool) -> None:
    unbroken = order(SampleStream(kind(23), shuffle, 3, 5), epoch=2)
    for start in range(24):
        stream = SampleStream(kind(23), shuffle, 3, 5)
        taken = stream.read(2, 0)
        assert [next(taken)[1] for _ in range(start)] == unbroken[:start]
        assert order(stream, epoch=2, start=start) == unbroken[start:]
        assert sorted(order(stream, epoch=3)) == list(range(23))


def test_a_stream_with_a_state_resumes_without_reading_again() -> None:
    dataset = Stateful(1000)
    stream = SampleStream(dataset, False, 0, 10)
    taken = stream.read(0, 0)
    for _ in range(500):
        next(taken)
    dataset.read = 0
    assert next(stream.read(0, 500)) == (500, 500)
    assert dataset.read == 10  # a window


def test_a_state_of_another_order_is_gone_on_with_and_not_the_own_one() -> None:
    """A window is a global batch where nothing is shuffled, so it changes with that."""

    def batches(seed: int, window: int) -> StreamBatches:
        return StreamBatches(SampleStream(Stateful(100), seed > 0, seed, window), window, False)

    for own, other in (((0, 7), (0, 10)), ((1, 10), (2, 10))):
        theirs = batches(*other)
        unbroken = order(theirs.stream)
        mine = batches(*own)
        order(mine.stream)  # it has notes of its own order
        state = theirs.state(30)
        mine.load({**state, "stream": None})
        assert order(mine.stream, start=30) == unbroken[30:]
        mine = batches(*own)
        order(mine.stream)
        mine.load(state)
        assert order(mine.stream, start=30) == unbroken[30:]


def test_a_state_of_a_dataset_with_a_length_is_refused_by_a_stream() -> None:
    stream = StreamBatches(SampleStream(Counted(9), False, 0, 3), 3, False)
    with pytest.raises(UsageError, match=r"with 100 samples; this one has no length \(a stream\)"):
        stream.load({"samples": 100, "seed": 0})


def test_reading_again_that_takes_long_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streams, "_SAID_FROM_S", 0.0)
    next(SampleStream(Counted(1000), False, 0, 10).read(0, 500))
    assert "The stream has no state_dict: 500 samples were read again" in capsys.readouterr().out
    next(SampleStream(Counted(1000), False, 0, 10).read(0, 0))
    assert capsys.readouterr().out == ""


def test_a_stream_draws_numbers_of_seed_and_epoch_and_leaves_the_ranks_own_alone() -> None:
    def drawn() -> Iterator[tuple[float, float]]:
        for _ in range(6):
            yield torch.rand(()).item(), random.random()

    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    on_a_rank = order(SampleStream(drawn, False, 0, 2))
    assert torch.equal(torch.rand(()), expected)
    torch.rand(3)
    on_another = SampleStream(drawn, False, 0, 2)
    assert order(on_another) == on_a_rank != order(on_another, epoch=1)
    assert order(SampleStream(drawn, False, 0, 2), start=4) == on_a_rank[4:]


@settings(deadline=None, max_examples=150)
@given(
    samples=st.integers(0, 40),
    batch=st.integers(1, 9),
    ranks=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_batches_end_where_those_of_a_dataset_with_a_length_do(
    samples: int, batch: int, ranks: int, drop_last: bool
) -> None:
    batch = max(batch, ranks)
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for rank in range(ranks):
            patch.setattr(
                "nbdist.engine.data.order.stream_batches.data_shard", lambda r=rank: Shard(r, ranks)
            )
            batches = StreamBatches(SampleStream(Counted(samples), False, 0, 4), batch, drop_last)
            parts = [one.samples for one in batches]
            found.append(parts)
            ends = [batches.given().batch.stop for _ in parts]
            assert ends == list(cut(samples, 0, batch, ranks, drop_last))
            assert batches.rest(ends[-1] if ends else 0).stop == samples
    together = [i for parts in zip(*found, strict=True) for part in parts for i in part]
    assert together == list(range(len(together)))


# ---- Hugging Face's ------------------------------------------------------------------------------


def hf(shards: int = 3, samples: int = 30) -> Any:
    made = datasets.Dataset.from_dict({"id": list(range(samples))})
    return made.to_iterable_dataset(num_shards=shards)


def ids(stream: SampleStream, epoch: int = 0, start: int = 0) -> list[int]:
    return [sample["id"] for _, sample in stream.read(epoch, start)]


def test_a_split_by_node_is_taken_back_without_changing_the_users() -> None:
    split = split_dataset_by_node(hf(), rank=1, world_size=3)
    stream = SampleStream(hf_datasets.whole(split), False, 0, 4)
    assert ids(stream) == list(range(30))
    assert [one["id"] for one in split] == list(range(10, 20))


@pytest.mark.parametrize("has_buffer", [False, True])
def test_hugging_faces_streams_resume_at_any_sample_in_each_epoch(has_buffer: bool) -> None:
    def make() -> SampleStream:
        dataset = hf().map(lambda one: {"id": one["id"]})
        return SampleStream(
            dataset.shuffle(seed=1, buffer_size=8) if has_buffer else dataset, True, 0, 4
        )

    for epoch in (0, 1):
        unbroken = ids(make(), epoch)
        assert sorted(unbroken) == list(range(30))
        for start in range(0, 31, 3):
            stream = make()
            taken = stream.read(epoch, 0)
            for _ in range(start):
                next(taken)
            assert stream.has_state is not has_buffer  # its state leaves the buffer out
            assert ids(stream, epoch, start) == unbroken[start:]


def test_what_is_used_of_datasets_private_parts_is_there() -> None:
    assert hf_datasets.check() == []


def test_probe_is_refused_on_a_stream_in_words() -> None:
    with pytest.raises(UsageError, match="cannot try workers on a stream"):
        loader(Counted(8), global_batch=4).probe()


def test_coverage_of_a_stream_knows_positions_and_not_what_is_to_come() -> None:
    train = loader(Counted(8), global_batch=2, transform=odd, on_bad="skip", shuffle=False)
    loop = iter(train)
    next(loop)
    (epoch,) = [one for one in coverage().epochs if one.ids == {"skipped": (0,)}]
    assert epoch.is_by_position
    assert Coverage((epoch,), 1).table().splitlines()[1].split()[-1] == "?"
    assert "could not be read: positions 0" in Coverage((epoch,), 1).table()


def odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError("even")
    return number


def test_what_a_stream_takes_is_told_as_read() -> None:
    never = threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(8):
            never.wait(0.005)
            yield number

    loop: Any = iter(loader(numbers, global_batch=4, shuffle=False))
    next(loop)
    told = torch_loaders.report_of(loop._inner)
    assert told is not None
    assert told.parts_ns["read"] >= 4 * 0.005e9
