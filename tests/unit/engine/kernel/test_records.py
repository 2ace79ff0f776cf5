"""How a rank numbers, publishes and keeps its records."""

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.engine.kernel import records
from nbdist.engine.kernel.records import Recorder
from nbdist.shared.wire import Batch


class Client:
    """Takes what a rank publishes, as JSON, as on the real wire."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.has_news = threading.Event()
        self.is_down = False

    def __call__(self, content: dict[str, Any]) -> None:
        if self.is_down:
            raise OSError("no route")
        self.batches.append(Batch.from_wire(json.loads(json.dumps(content, allow_nan=False))))
        self.has_news.set()

    def seqs(self) -> list[int]:
        return [record.seq for batch in self.batches for record in batch.records]


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def recorder(client: Client) -> Iterator[Recorder]:
    made = Recorder(1, client)
    yield made
    made.close()


def test_a_record_is_published_without_being_asked_for(recorder: Recorder, client: Client) -> None:
    recorder.add("step", 1, {"loss": 2.0})
    assert client.has_news.wait(30)
    (record,) = client.batches[0].records
    assert (record.rank, record.seq, record.kind, record.step) == (1, 0, "step", 1)
    assert record.values == {"loss": 2.0}


def test_flush_returns_when_everything_is_published(recorder: Recorder, client: Client) -> None:
    for step in range(5000):
        recorder.add("step", step, {"loss": 1.0})
    assert recorder.flush() == 5000
    assert client.seqs() == list(range(5000))
    assert max(len(batch.records) for batch in client.batches) <= records.MAX_ROWS


def test_records_of_several_threads_get_one_number_each(recorder: Recorder, client: Client) -> None:
    def add() -> None:
        for step in range(500):
            recorder.add("log", step, {"x": 1.0})

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.flush()
    assert client.seqs() == list(range(2000))


def test_a_loss_that_is_not_a_number_arrives_as_such(recorder: Recorder, client: Client) -> None:
    recorder.add("step", 1, {"loss": float("nan"), "x": float("-inf")})
    recorder.flush()
    values = client.batches[0].records[0].values
    assert values["loss"] != values["loss"]
    assert values["x"] == float("-inf")


def test_resend_gives_a_range_again(recorder: Recorder) -> None:
    for step in range(10):
        recorder.add("step", step, {"loss": float(step)})
    recorder.flush()
    (content,) = recorder.resend(3, 6)
    assert [record.values["loss"] for record in Batch.from_wire(content).records] == [3, 4, 5]
    assert recorder.resend(10, 12) == []


def test_records_that_could_not_be_published_are_still_there_to_be_asked_for(
    recorder: Recorder, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.is_down = True
    recorder.fact(layout="ddp")
    recorder.add("step", 1, {"loss": 1.0})
    recorder.flush()
    recorder.add("step", 2, {"loss": 1.0})
    recorder.flush()
    assert len(caplog.records) == 1
    client.is_down = False
    recorder.add("step", 3, {"loss": 1.0})
    recorder.flush()
    assert client.seqs() == [2]
    assert client.batches[0].facts == {"layout": "ddp"}
    assert len(Batch.from_wire(recorder.resend(0, 2)[0]).records) == 2


def test_records_beyond_the_ring_are_counted_and_said(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "RING_POINTS", 20)
    monkeypatch.setattr(records, "INTERVAL_S", 60)
    recorder = Recorder(0, client)
    recorder.add("log", 0, {"x": 0.0})
    assert client.has_news.wait(30)
    for step in range(1, 31):
        recorder.add("log", step, {"x": 0.0})
    recorder.flush()
    recorder.close()
    assert client.batches[-1].facts["records_lost"] == "10"
    assert client.seqs() == [0, *range(11, 31)]


def test_facts_travel_with_records_and_again_in_the_next_cell(
    recorder: Recorder, client: Client
) -> None:
    recorder.fact(layout="ddp")
    recorder.flush()
    assert client.batches == []
    recorder.add("step", 1, {"loss": 1.0})
    recorder.flush()
    recorder.add("step", 2, {"loss": 1.0})
    recorder.flush()
    assert [batch.facts for batch in client.batches] == [{"layout": "ddp"}, {}]
    assert recorder.begin_cell() == 2
    recorder.add("step", 1, {"loss": 1.0})
    recorder.flush()
    assert client.batches[-1].facts == {"layout": "ddp"}


def test_a_forked_child_neither_hangs_nor_publishes(recorder: Recorder, client: Client) -> None:
    recorder.add("step", 1, {"loss": 1.0})
    recorder.flush()
    child = os.fork()
    if child == 0:
        recorder.add("step", 2, {"loss": 1.0})
        os._exit(0 if recorder.flush() == 1 and len(client.batches) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recorder.add("step", 2, {"loss": 1.0})
    assert recorder.flush() == 2


def test_what_is_sampled_beside_the_records_travels_with_them_and_may_fail(
    recorder: Recorder, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    asked = threading.Event()

    def sample() -> None:
        if asked.is_set():
            raise OSError("gone")
        recorder.add("links", 1, {"1@10.0.0.1:5000.sent_bytes": 8.0})
        asked.set()

    recorder.before_publishing(sample)
    recorder.add("step", 1, {"loss": 1.0})
    assert client.has_news.wait(30)
    kinds = [record.kind for record in client.batches[0].records]
    assert kinds == ["step", "links"]
    client.has_news.clear()
    recorder.add("step", 2, {"loss": 1.0})
    assert client.has_news.wait(30)
    assert client.seqs() == [0, 1, 2]
    assert len(caplog.records) == 1


def test_samples_are_taken_in_a_cell_whose_steps_are_long_and_not_between_cells(
    recorder: Recorder, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "SAMPLE_S", 0.01)
    monkeypatch.setattr(records, "INTERVAL_S", 0.01)
    samples = threading.Semaphore(0)
    recorder.before_publishing(samples.release)
    recorder.begin_cell()
    recorder.add("step", 1, {"loss": 1.0})
    assert all(samples.acquire(timeout=30) for _ in range(5))
    recorder.flush()
    taken = 0
    while samples.acquire(timeout=0.5):  # ends only where sampling does
        taken += 1
        assert taken < 100


def test_a_sample_that_fails_leaves_the_others(recorder: Recorder, client: Client) -> None:
    taken = threading.Semaphore(0)
    recorder.before_publishing(lambda: 1 / 0, taken.release)  # type: ignore[arg-type]
    recorder.add("step", 1, {"loss": 1.0})
    assert taken.acquire(timeout=30)


def test_a_sample_that_fails_when_others_have_come_leaves_those(
    recorder: Recorder, client: Client
) -> None:
    taken = threading.Semaphore(0)

    def fail() -> None:
        recorder.before_publishing(taken.release)
        raise ZeroDivisionError

    recorder.before_publishing(fail)
    recorder.add("step", 1, {"loss": 1.0})
    assert client.has_news.wait(30)
    recorder.add("step", 2, {"loss": 1.0})
    assert taken.acquire(timeout=30)
