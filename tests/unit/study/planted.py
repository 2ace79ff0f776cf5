"""Worlds whose steps follow the model, with parts that are known."""

from nbdist.study.links import Link
from nbdist.study.scaling import Call, Kind, World, late_s, on_ranks, traffic
from nbdist.study.step_time import StepTime, split_communication

LINK = Link(0.0005, 100e6)
PARALLEL_S, FIXED_S, SKEW_S, OVERLAP = 0.08, 0.02, 0.002, 0.5
CALLS = (Call("all_reduce", 1_000_000, 1, 3), Call("broadcast", 1000, 1, 1))


def planted(n: int, kind: Kind, *, link: Link = LINK) -> World:
    """Return a world of n ranks: 80 ms of parallel work of one, 20 ms that more do not shorten."""
    share = 1 / n if kind == "strong" else 1.0
    calls = on_ranks(CALLS, 1, n)
    work_s = FIXED_S + PARALLEL_S * share
    compute_s = 0.9 * work_s
    exposed, hidden = split_communication(
        compute_s, {"dp": link.time_s(traffic(calls, "gloo"))}, OVERLAP
    )
    time = StepTime(
        compute_s, exposed, hidden, loader_s=0.004 * share, skew_s=SKEW_S * late_s(n),
        serial_s=0.1 * work_s,
    )  # fmt: skip
    samples = 64 if kind == "strong" else 64 * n
    return World(
        n, time, 0.001, 10, samples, calls, latency_s=link.latency_s if n > 1 else 0.0,
        own_s=tuple(work_s for _ in range(n)),
    )  # fmt: skip
