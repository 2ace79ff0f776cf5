"""What the client remembers of the ranks' records."""

import math
import threading
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.client.metrics import telemetry
from nbdist.client.metrics.telemetry import Telemetry, thin
from nbdist.shared.wire import Batch, Record


def batch(rank: int, first: int, *losses: float, facts: dict[str, str] | None = None) -> Batch:
    """Return a batch of step records; record `seq` belongs to step `seq + 1`."""
    records = tuple(
        Record(rank, first + i, "step", first + i + 1, 0, {"loss": loss})
        for i, loss in enumerate(losses)
    )
    return Batch(rank, records, facts or {})


def test_a_batch_that_arrives_twice_counts_once() -> None:
    received = Telemetry()
    seen: list[Record] = []
    received.subscribe(seen.extend)
    received.receive(batch(0, 0, 3.0, 2.0))
    received.receive(batch(0, 1, 2.0, 1.0))
    received.receive(batch(0, 0, 3.0, 2.0))
    assert [r.seq for r in seen] == [0, 1, 2]
    assert received.count == 3
    assert list(received.series("loss")[0].values) == [3.0, 2.0, 1.0]


def test_first_record_is_set_by_a_record_and_not_by_facts_alone() -> None:
    received = Telemetry()
    received.receive(batch(1, 0, facts={"layout": "ddp"}))
    assert not received.first_record.is_set()
    received.receive(batch(1, 0, 1.0, facts={"model": "GPT"}))
    assert received.first_record.is_set()
    assert received.facts == {1: {"layout": "ddp", "model": "GPT"}}


@pytest.mark.parametrize("kind", ["calls", "links"])
def test_collectives_and_links_alone_make_no_run(kind: str) -> None:
    received = Telemetry()
    received.receive(Batch(0, (Record(0, 0, kind, 0, 1, {}),)))
    assert (received.count, received.first_record.is_set()) == (1, False)
    received.receive(Batch(0, (Record(0, 1, "log", 0, 1, {"a": 1.0}),)))
    assert received.first_record.is_set()


def test_gaps_names_what_is_missing_of_each_rank_and_nothing_else() -> None:
    received = Telemetry()
    received.receive(batch(0, 10, *[0.0] * 5))
    received.receive(batch(0, 17, *[0.0] * 3))
    received.receive(batch(1, 0, 0.0))
    bounds = {0: (10, 22), 1: (0, 1), 2: (0, 0), 3: (4, 6)}
    assert received.gaps(bounds) == {0: [(15, 17), (20, 22)], 3: [(4, 6)]}


def test_records_that_fill_a_gap_take_their_place_in_the_series() -> None:
    received = Telemetry()
    received.receive(batch(0, 0, 5.0))
    received.receive(batch(0, 3, 2.0))
    before = received.series("loss")[0]
    received.receive(batch(0, 1, 4.0, 3.0))
    after = received.series("loss")[0]
    assert list(after.steps) == [1, 2, 3, 4]
    assert list(after.values) == [5.0, 4.0, 3.0, 2.0]
    assert after.generation != before.generation
    assert list(before.values[: before.n]) == [5.0, 2.0]
    assert received.latest[0] == {"loss": 2.0, "step": 4}


def test_records_of_an_earlier_cell_are_ignored() -> None:
    received = Telemetry(begin={0: 7})
    received.receive(batch(0, 5, 1.0, 1.0))
    assert not received.first_record.is_set()
    received.receive(batch(0, 6, 1.0, 2.0))
    assert list(received.series("loss")[0].values) == [2.0]


def test_a_subscriber_that_fails_is_dropped_and_the_others_go_on() -> None:
    received = Telemetry()
    seen: list[Record] = []
    calls = []

    def broken(records: list[Record]) -> None:
        calls.append(records)
        raise RuntimeError("no disk")

    received.subscribe(broken)
    received.subscribe(seen.extend)
    received.receive(batch(0, 0, 1.0))
    received.receive(batch(0, 1, 1.0))
    assert len(calls) == 1
    assert len(seen) == 2


def test_a_long_series_stays_bounded_and_keeps_its_spikes() -> None:
    received = Telemetry()
    for first in range(0, 50_000, 100):
        values = [float(step % 7) for step in range(first, first + 100)]
        if first == 10_000:
            values[3] = 1e6
        received.receive(batch(0, first, *values))
    series = received.series("loss")[0]
    assert series.n <= telemetry.MAX_POINTS
    assert series.seen == 50_000
    assert max(series.values) == 1e6
    assert list(series.steps) == sorted(series.steps)
    assert series.steps[-1] == 50_000


def test_thinning_keeps_nan_visible() -> None:
    steps = array("d", range(8))
    values = array("d", [1, math.nan, 3, 2, 5, 6, 7, 8])
    _, kept = thin(steps, values)
    assert math.isnan(kept[0])
    assert kept[1] == 3


def test_a_snapshot_does_not_change_while_records_arrive() -> None:
    received = Telemetry()
    received.receive(batch(0, 0, 1.0))
    before = received.series("loss")[0]
    received.receive(batch(0, 1, 2.0))
    assert list(before.values[: before.n]) == [1.0]
    assert before.generation == received.series("loss")[0].generation


def test_a_logged_loss_and_the_loss_of_the_hooks_are_two_series() -> None:
    received = Telemetry()
    records = (
        Record(0, 0, "step", 1, 0, {"loss": 2.0}),
        Record(0, 1, "log", 1, 0, {"loss": 9.0, "accuracy": 0.5}),
    )
    received.receive(Batch(0, records))
    assert received.keys() == ["loss", "log.loss", "accuracy"]
    assert received.latest[0] == {"loss": 2.0, "log.loss": 9.0, "accuracy": 0.5, "step": 1}


def test_keys_beyond_the_bound_are_named_and_keep_no_history() -> None:
    received = Telemetry()
    values = {f"key{i}": 1.0 for i in range(telemetry.MAX_KEYS + 2)}
    received.receive(Batch(0, (Record(0, 0, "log", 1, 0, values),)))
    assert len(received.keys()) == telemetry.MAX_KEYS
    assert len(received.ignored_keys) == 2


def test_reading_while_another_thread_receives_sees_whole_points() -> None:
    received = Telemetry()
    done = threading.Event()

    def feed() -> None:
        for first in range(0, 30_000, 10):
            received.receive(batch(0, first, *[float(s + 1) for s in range(first, first + 10)]))
        done.set()

    thread = threading.Thread(target=feed)
    thread.start()
    while not done.is_set():
        for series in received.series("loss").values():
            assert series.steps[: series.n] == series.values[: series.n]
    thread.join()


@given(st.permutations(range(12)), st.integers(0, 12))
def test_whatever_the_order_each_record_counts_once_and_no_gap_is_overlooked(
    order: list[int], arrived: int
) -> None:
    received = Telemetry()
    seen: list[Record] = []
    received.subscribe(seen.extend)
    for seq in order[:arrived]:
        received.receive(batch(0, seq, float(seq)))
    holes = received.gaps({0: (0, 12)}).get(0, [])
    missing = [seq for low, high in holes for seq in range(low, high)]
    assert missing == sorted(order[arrived:])
    assert sorted(r.seq for r in seen) == sorted(order[:arrived])
    if arrived:
        assert list(received.series("loss")[0].steps) == sorted(s + 1 for s in order[:arrived])


def test_what_devices_tell_has_a_history_by_time_and_makes_no_run() -> None:
    received = Telemetry()
    rows = [Record(0, i, "device", 7, (50 + i) * 10**9, {"cpu_pct": 90.0 + i}) for i in range(3)]
    received.receive(Batch(0, tuple(rows)))

    told = received.series("cpu_pct")[0]

    assert list(told.steps[: told.n]) == [50.0, 51.0, 52.0]
    assert list(told.values[: told.n]) == [90.0, 91.0, 92.0]
    assert received.latest[0] == {"cpu_pct": 92.0}
    assert not received.first_record.is_set()


def test_days_of_devices_take_little_memory_and_keep_their_peaks() -> None:
    received = Telemetry()
    values = [99.0 if second == 12_345 else 40.0 for second in range(20_000)]
    rows = [Record(0, i, "device", 1, i * 10**9, {"device_c": v}) for i, v in enumerate(values)]
    received.receive(Batch(0, tuple(rows)))

    told = received.series("device_c")[0]

    assert told.n < telemetry.MAX_DEVICE_POINTS
    assert max(told.values[: told.n]) == 99.0


def test_a_number_of_the_user_does_not_mix_with_that_of_a_device() -> None:
    assert telemetry.series_key("log", "device_pct") == "log.device_pct"
