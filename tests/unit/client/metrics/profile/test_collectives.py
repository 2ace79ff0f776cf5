"""The lanes of collectives in the common trace."""

from array import array
from typing import Any

from nbdist.client.metrics.profile.chosen import ChosenSteps
from nbdist.client.metrics.profile.collectives import ProfiledCollectives, lanes
from nbdist.shared.packed import CALL, Calls, Packer, Template
from nbdist.shared.wire import Record

ALL_REDUCE = Template("all_reduce", "0", "the default group", (0, 1), 4096, "float32", "line 3")
ORIGIN_NS = 1_000_000_000
MS = 1_000_000  # in nanoseconds


def told(*calls: tuple[int, float, float, float], base_ns: int = ORIGIN_NS) -> Calls:
    """Return calls of (number, launch, begin, end), moments in ms from `base_ns`."""
    packer = Packer(base_ns)
    for number, *moments in calls:
        packer.call(0, number, [base_ns + int(moment * MS) for moment in moments])
    return Calls(base_ns, {0: ALL_REDUCE}, packer.calls, packer.waits)


def names(events: list[dict[str, Any]], rank: int) -> list[tuple[str, float, float]]:
    """Return the slices of a rank: name, begin and end in ms."""
    return [
        (e["name"], e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000)
        for e in events
        if e["ph"] == "X" and e["pid"] == rank * 100
    ]


def test_a_call_is_waiting_then_queueing_then_transfer() -> None:
    events = lanes(
        {0: [(3, told((7, 1, 2, 20)))], 1: [(3, told((7, 10, 12, 21)))]}, ORIGIN_NS, lambda _: 0
    )
    assert names(events, 0) == [
        ("all_reduce", 1, 20),
        ("waiting for rank 1", 1, 10),
        ("transfer", 10, 20),
    ]
    assert names(events, 1) == [
        ("all_reduce", 10, 21),
        ("queueing", 10, 12),
        ("transfer", 12, 21),
    ]


def test_an_arrow_leads_from_the_last_launch_to_each_that_waited_for_it() -> None:
    events = lanes(
        {0: [(3, told((7, 1, 2, 20)))], 1: [(3, told((7, 10, 12, 21)))]}, ORIGIN_NS, lambda _: 0
    )
    (start,) = [e for e in events if e["ph"] == "s"]
    (end,) = [e for e in events if e["ph"] == "f"]
    assert start["id"] == end["id"]
    assert (start["pid"], start["ts"]) == (100, 10_000)
    assert (end["pid"], end["ts"]) == (0, 10_000)


def test_collectives_of_one_group_each_have_their_own_arrow() -> None:
    first, second = (7, 1, 1, 20), (8, 30, 30, 41)
    events = lanes(
        {0: [(3, told(first, second))], 1: [(3, told((7, 10, 10, 20), (8, 25, 25, 41)))]},
        ORIGIN_NS,
        lambda _: 0,
    )
    starts = sorted((e["ts"], e["pid"]) for e in events if e["ph"] == "s")
    assert starts == [(10_000, 100), (30_000, 0)]


def test_another_hosts_moments_come_to_the_common_clock() -> None:
    ahead_ns = 5_000 * MS
    there = told((7, 10, 12, 21), base_ns=ORIGIN_NS + ahead_ns)
    events = lanes(
        {0: [(3, told((7, 1, 2, 20)))], 1: [(3, there)]},
        ORIGIN_NS,
        {0: 0, 1: -ahead_ns}.__getitem__,
    )
    assert names(events, 1)[0] == ("all_reduce", 10, 21)


def test_calls_that_overlap_lie_in_lanes_of_their_own_and_those_behind_share_one() -> None:
    calls = told((7, 1, 1, 10), (8, 5, 5, 12), (9, 11, 11, 13))
    events = lanes({0: [(3, calls)]}, ORIGIN_NS, lambda _: 0)
    lane = {e["args"]["number"]: e["tid"] for e in events if e["name"] == "all_reduce"}
    assert lane[7] == lane[9] != lane[8]
    titles = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert titles == ["collectives", "collectives 2"]


def test_a_call_that_only_one_rank_has_told_is_shown_without_a_cause() -> None:
    events = lanes({0: [(3, told((7, 1, 2, 20)))]}, ORIGIN_NS, lambda _: 0)
    assert [name for name, *_ in names(events, 0)] == ["all_reduce", "queueing", "transfer"]
    assert not [e for e in events if e["ph"] in "sf"]


def test_nothing_told_gives_nothing() -> None:
    assert lanes({}, ORIGIN_NS, lambda _: 0) == []


def test_only_chosen_steps_are_kept_with_what_all_calls_have_in_common() -> None:
    heard = ProfiledCollectives(ChosenSteps(3, 4))

    def record(step: int, calls: Calls) -> Record:
        return Record(0, step, "calls", step, 0, {}, calls)

    later = [Calls(ORIGIN_NS, {}, told((n, 1, 2, 3)).calls, array("I")) for n in range(2, 6)]
    heard.receive([Record(0, 0, "step", 1, 0, {"loss": 1.0}), record(1, told((1, 1, 2, 3)))])
    heard.receive([record(step, calls) for step, calls in zip(range(2, 6), later, strict=True)])
    kept = heard.calls_by_rank()[0]
    counts = [(step, len(calls.calls) // len(CALL)) for step, calls in kept]
    assert counts == [(1, 0), (3, 1), (4, 1)]
    numbers = [
        e["args"]["number"]
        for e in lanes(heard.calls_by_rank(), ORIGIN_NS, lambda _: 0)
        if e["name"] == "all_reduce"
    ]
    assert numbers == [3, 4]
