"""What a rank did in its recorded steps: times by kind, operators."""

from typing import Any

import pytest

from nbdist.client.metrics.profile.summary import summarize
from nbdist.client.metrics.profile.traces import RankTrace

MAIN, GLOO = 77, 78


def at(start: float, end: float, name: str, tid: int = MAIN, **more: Any) -> dict[str, Any]:
    """Return an event from `start` to `end`, in ms."""
    cat = "user_annotation" if name.startswith(("Prof", "Opt", "enum", "gloo", "DDP")) else "cpu_op"
    event = {"ph": "X", "cat": cat, "name": name, "pid": MAIN, "tid": tid}
    return {**event, "ts": start * 1000, "dur": (end - start) * 1000, **more}


def trace(events: list[dict[str, Any]], steps: list[int]) -> RankTrace:
    return RankTrace(0, "", {"nbdist": {"pid": MAIN, "steps": steps}, "traceEvents": events})


STEP = [
    at(0, 100, "ProfilerStep#3"),
    at(0, 10, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
    at(2, 6, "aten::stack"),
    at(10, 30, "DDP.forward"),
    at(12, 28, "aten::linear"),
    at(14, 24, "aten::addmm"),
    at(30, 50, "autograd::engine::evaluate_function: AddmmBackward0"),
    at(40, 44, "c10d::allreduce_"),
    at(41, 75, "gloo:all_reduce", GLOO),
    at(80, 95, "Optimizer.step#SGD.step"),
    at(82, 90, "aten::add_"),
]


def test_each_moment_of_the_main_thread_belongs_to_one_kind() -> None:
    summary = summarize(trace(STEP, [3]))
    # Communication: its launch, 40-44, and the wait from the end of backward to 75.
    assert summary.by_kind == pytest.approx(
        {
            "data": 10,
            "compute": 16 + 16,
            "communication": 4 + 25,
            "optimizer": 15,
            "other": 2 + 2 + 5 + 5,
        }
    )
    assert sum(summary.by_kind.values()) == pytest.approx(summary.step_ms) == 100
    assert summary.communication_ms == pytest.approx(35)  # also beside backward


def test_times_are_the_mean_of_the_steps_that_were_recorded_whole() -> None:
    later = [{**e, "ts": e["ts"] + 100_000} for e in STEP]
    later[0] = {**later[0], "name": "ProfilerStep#4"}
    cut = [at(200, 260, "ProfilerStep#5"), at(210, 260, "aten::mm")]
    one = summarize(trace(STEP, [3]))
    two = summarize(trace([*STEP, *later, *cut], [3, 4]))
    assert two.step_ms == pytest.approx(one.step_ms)
    assert two.by_kind == pytest.approx(one.by_kind)
    assert "aten::mm" not in two.ops
    assert two.ops["aten::addmm"].calls == 2


def test_self_time_is_what_an_operator_did_not_spend_in_those_it_called() -> None:
    ops = summarize(trace(STEP, [3])).ops
    assert ops["aten::linear"].self_us == pytest.approx(6000)
    assert ops["aten::addmm"].self_us == pytest.approx(10_000)
    assert ops["gloo:all_reduce"].self_us == pytest.approx(34_000)
    assert not any(name.startswith("ProfilerStep") for name in ops)


def test_operators_of_one_moment_nest_in_the_order_of_their_lengths() -> None:
    events = [at(0, 10, "aten::mm"), at(0, 10, "ProfilerStep#3"), at(0, 4, "aten::copy_")]
    ops = summarize(trace(events, [3])).ops
    assert ops["aten::mm"].self_us + ops["aten::copy_"].self_us == pytest.approx(10_000)


def test_without_steps_the_whole_recording_counts() -> None:
    summary = summarize(trace([at(5, 7, "aten::mm"), at(9, 10, "aten::mm")], []))
    assert summary.step_ms == pytest.approx(5)
    assert summary.by_kind["compute"] == pytest.approx(3)
    assert summary.by_kind["other"] == pytest.approx(2)


def test_a_gpu_is_computing_sending_alone_or_idle() -> None:
    gpu = {"pid": 0, "cat": "kernel"}
    kernels = [
        at(10, 40, "sgemm", 7, **gpu),
        at(30, 60, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 13, **gpu),
    ]
    summary = summarize(trace([at(0, 100, "ProfilerStep#3"), *kernels], [3]))
    assert summary.gpu == pytest.approx({"compute": 30, "communication": 20, "idle": 50})
    assert summary.communication_ms == pytest.approx(30)


def test_an_empty_recording_is_summed_up_as_nothing() -> None:
    summary = summarize(trace([], []))
    assert summary.step_ms == 0
    assert not summary.ops
