"""The traces of several ranks on one clock."""

import json
from typing import Any

from nbdist.client.metrics.profile.traces import RankTrace, merged

BASE_NS = 1_790_000_000_000_000_000
WALL_MINUS_PERF_NS = 1_795_000_000_000_000_000


def slice_at(perf_ns: int, name: str = "aten::mm", dur: float = 1.0, **more: Any) -> dict[str, Any]:
    """Return an event as torch writes it of a rank whose clocks differ as above."""
    ts = (perf_ns + WALL_MINUS_PERF_NS - BASE_NS) / 1000
    event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 77, "tid": 77, "ts": ts, "dur": dur}
    return {**event, **more}


def trace(
    rank: int, events: list[dict[str, Any]], *, began_ns: int = 0, offset_ns: int = 0
) -> RankTrace:
    facts = {
        "rank": rank,
        "pid": 77,
        "steps": [3],
        "end": "steps",
        "began_ns": began_ns,
        "ended_ns": began_ns + 10**9,
        "wall_minus_perf_ns": WALL_MINUS_PERF_NS,
    }
    content = {"baseTimeNanoseconds": BASE_NS, "nbdist": facts, "traceEvents": events}
    return RankTrace(rank, "host-a, cpu", content, offset_ns)


def slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X"]


def test_moments_count_from_the_origin_of_the_common_clock_in_microseconds() -> None:
    one = trace(0, [slice_at(5_000_000_000)])
    events, left_out = merged(one, origin_ns=4_000_000_000, most=10)
    assert left_out == 0
    assert slices(events)[0]["ts"] == 1_000_000.0


def test_the_offset_of_a_rank_brings_its_moments_beside_those_of_the_others() -> None:
    here = trace(0, [slice_at(5_000_000_000)])
    # The other machine's clock began 3 s later.
    there = trace(1, [slice_at(2_000_000_000)], offset_ns=3_000_000_000)
    ours, theirs = (slices(merged(t, 4_000_000_000, 10)[0])[0] for t in (here, there))
    assert ours["ts"] == theirs["ts"]
    assert there.began_ns == 3_000_000_000


def test_ranks_with_the_same_process_number_stay_apart_and_are_named() -> None:
    first, second = (merged(trace(r, [slice_at(0)]), 0, 10)[0] for r in (0, 3))
    assert {e["pid"] for e in first} == {0}
    assert {e["pid"] for e in second} == {300}
    (name,) = [e for e in second if e["name"] == "process_name"]
    assert name["args"]["name"] == "rank 3 (host-a, cpu)"


def test_a_gpu_follows_its_rank_under_a_number_of_its_own() -> None:
    kernel = slice_at(0, "ampere_sgemm", pid=0, tid=7, cat="kernel")
    events, _ = merged(trace(2, [slice_at(0), kernel]), 0, 10)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {200: "rank 2 (host-a, cpu)", 201: "rank 2: GPU 0"}
    assert {e["name"]: e["pid"] for e in slices(events)} == {"aten::mm": 200, "ampere_sgemm": 201}


def test_arrows_keep_their_two_ends_and_are_not_taken_for_those_of_other_ranks() -> None:
    ends = [{**slice_at(0), "ph": ph, "id": 6, "name": "fwdbwd"} for ph in "sf"]
    ids = [
        {e["id"] for e in merged(trace(r, [slice_at(0), *ends]), 0, 10)[0] if e["ph"] in "sf"}
        for r in (0, 1)
    ]
    assert all(len(of_rank) == 1 for of_rank in ids)
    assert ids[0] != ids[1]


def test_the_profilers_own_spans_are_left_away() -> None:
    spans = [
        slice_at(0, "PyTorch Profiler (0)", pid="Spans", tid="PyTorch Profiler"),
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 0.0},
    ]
    events, _ = merged(trace(0, [slice_at(0), *spans]), 0, 10)
    assert [e["name"] for e in slices(events)] == ["aten::mm"]


def test_a_thread_keeps_the_name_that_is_its_own_and_the_main_one_is_called_so() -> None:
    def name(tid: int, text: str) -> dict[str, Any]:
        return {"ph": "M", "name": "thread_name", "pid": 77, "tid": tid, "args": {"name": text}}

    names = [
        name(77, "thread 77 (python)"),
        name(9, "thread 9 (pt_gloo_runloop)"),
        name(9, "thread 9 (python)"),
        name(10, "thread 10 (never used)"),
    ]
    events, _ = merged(trace(0, [*names, slice_at(0), slice_at(0, tid=9)]), 0, 10)
    told = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert told == {77: "main", 9: "thread 9 (pt_gloo_runloop)"}


def test_beyond_the_bound_the_shortest_slices_are_left_out_and_counted() -> None:
    many = [slice_at(i * 1000, f"op {i}", dur=float(i)) for i in range(20)]
    events, left_out = merged(trace(0, many), 0, most=5)
    assert left_out == 15
    assert sorted(e["name"] for e in slices(events)) == [f"op {i}" for i in range(15, 20)]


def test_what_comes_out_is_json_and_leaves_the_rank_own_events_as_they_were() -> None:
    own = slice_at(0)
    before = dict(own)
    events, _ = merged(trace(1, [own]), 0, 10)
    assert json.loads(json.dumps(events)) == events
    assert own == before
