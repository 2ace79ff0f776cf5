"""What a change would make of a step that was recorded, and what it costs: "does it pay?". Pure.

Each line stands for the same samples: where a change makes a step hold more of them, its time is
divided. All of it is a forecast from the parts of the step as measured; what each rests on is said.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from nbdist.shared.text import aligned, counted, figure, name_bytes, name_rate
from nbdist.study.forecast import axis_of, link_of
from nbdist.study.links import Link
from nbdist.study.scaling import Call, World, late_s, on_ranks, traffic
from nbdist.study.step_time import split_communication

BUCKET: Final = 25 * 1024 * 1024  # bytes, of torch's DDP (bucket_cap_mb)
_LARGER: Final = 50 * 1024 * 1024
_EVERY: Final = 8
_TIMES: Final = 4
_USUAL: Final = 0.5  # times a step, from which on a collective is one of the usual step
_APART: Final = 10  # so much longer is a collective that tells a bandwidth beside a latency
_SPLITS: Final = ("tp", "cp", "pp", "ep")  # axes whose ranks send more than gradients
# notebooks/07_slow_networks.ipynb: digits, a small network, 2 ranks, 120 steps, one seed.
_DIGITS: Final = "on notebook 07's digits the loss was"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A change, and what it would make of the step.

    Attributes:
        change: In words.
        step_s: The new time for the same samples; None where it cannot be told, or changes nothing.
        basis: What the time rests on, or why there is none.
        costs: What it costs, in accuracy above all.
    """

    change: str
    step_s: float | None
    basis: str
    costs: str


@dataclass(frozen=True, slots=True)
class _Step:
    """A recorded step, ready to be changed."""

    world: World
    link: Link
    overlap: float  # of what computation could hide; measured
    gradients: tuple[Call, ...]  # reduced over all ranks, which compression and buckets are about

    def with_calls(
        self, calls: Sequence[Call], link: Link | None = None, overlap: float | None = None
    ) -> float:
        """Return the time of the step with other collectives, another link or overlap."""
        time, now = self.world.time, traffic(self.world.calls, self.world.backend)
        then = traffic(calls, self.world.backend)
        before_s = time.exposed_s + time.hidden_s
        predicted_s = self.link.time_s(now)
        # The measured time decides, and the model by how much it changes.
        factor = (link or self.link).time_s(then) / predicted_s if predicted_s else 1.0
        share = self.overlap if overlap is None else overlap
        exposed_s, _ = split_communication(
            time.compute_s, {axis_of(calls): before_s * factor}, share
        )
        return self.world.step_s - time.exposed_s + exposed_s

    def with_gradients(self, change: Callable[[Call], Call]) -> float:
        """Return the time of the step with each reduction of gradients changed."""
        calls = [change(one) if one in self.gradients else one for one in self.world.calls]
        return self.with_calls(calls)


def what_if(world: World, layout: str = "", link: Link | None = None) -> tuple[Outcome, ...]:
    """Return what changes would make of a recorded step.

    Args:
        world: As it was measured.
        layout: Of its model, such as "zero3" or "dp=2 tp=2"; empty where it is not known.
        link: Another one between all ranks, for a line of its own.
    """
    axes = {word.partition("=")[0] for word in layout.split()}
    total_s = world.time.exposed_s + world.time.hidden_s
    here = link_of(replace(world, latency_s=_latency_s(world.calls, world.backend)))
    could_s = min(total_s, 2 / 3 * world.time.compute_s)
    overlap = min(1.0, world.time.hidden_s / could_s) if could_s > 0 else 0.0
    gradients = tuple(
        call for call in world.calls if call.kind == "all_reduce" and call.ranks == world.n
    )
    is_sharded = bool(axes & {"fsdp", "zero2", "zero3"})  # gradients are reduce-scattered
    step = _Step(world, here, overlap, () if is_sharded else gradients)
    over = [] if link is None else [_over(step, link)]
    if axes.isdisjoint(_SPLITS):
        return (_without_straggler(world), *over, *_of_communication(step), _more_ranks(step))
    of_link = _of_communication(replace(step, gradients=()))[0]
    only = "the others are for layouts of replicas and shards only (dp, fsdp, ddp, zero1-3)"
    other = Outcome("any other change", None, f"the layout is {layout}: {only}", "")
    return (_without_straggler(world), *over, of_link, other)


def _over(step: _Step, link: Link) -> Outcome:
    sends = bool(traffic(step.world.calls, step.world.backend).nbytes)
    return Outcome(
        f"over {link.name}",
        step.with_calls(step.world.calls, link) if sends else None,
        f"latency {link.latency_s * 1e6:.0f} us, {name_rate(link.bandwidth)} ({link.source}); "
        "computation stays as it is",
        "",
    )


def _without_straggler(world: World) -> Outcome:
    if len(world.own_s) < 2:
        return Outcome("without the straggler", None, "one rank waits for nobody", "")
    *others, slowest = sorted(world.own_s)
    change = f"without the straggler: rank {world.own_s.index(slowest)}"
    middle = sorted(others)[len(others) // 2]
    if slowest - middle <= world.spread_s:
        even = f"no rank's own work is longer by more than steps differ: {_ms(world.spread_s)}"
        return Outcome("without the straggler", None, even, "")
    gain_s = min(slowest - middle, world.time.skew_s * world.n / max(1, world.n - 1))
    return Outcome(
        change,
        world.step_s - max(0.0, gain_s),
        f"its own work is {_ms(slowest)} a step, {_ms(middle)} on the middle one of the others",
        "nothing",
    )


def _of_communication(step: _Step) -> tuple[Outcome, ...]:
    world, link = step.world, step.link
    if not traffic(world.calls, world.backend).nbytes:
        return (Outcome("any change of communication", None, "this step sends nothing", ""),)
    of_link = (
        f"latency {link.latency_s * 1e6:.0f} us, {name_rate(link.bandwidth)} by its own collectives"
        if link.latency_s
        else "all of it by bandwidth, as a latency is not told by collectives of two sizes: at best"
    )
    faster = replace(link, bandwidth=2 * link.bandwidth)
    found = [
        Outcome("twice the bandwidth", step.with_calls(world.calls, faster), of_link, "nothing")
    ]
    if not step.gradients:
        none = "these are for gradients that are all_reduced over all ranks, and it has none"
        return (*found, Outcome("compression, buckets, local SGD", None, none, ""))
    waits = world.time.compute_s + world.time.serial_s + world.time.loader_s + world.time.skew_s
    sends_s = world.time.exposed_s + world.time.hidden_s
    payload = sum(call.nbytes * call.count for call in step.gradients)
    found += [
        _compressed(step),
        _overlapped(step),
        _larger_buckets(step, payload),
        Outcome(
            f"local SGD every {_EVERY}: LocalSGD(every={_EVERY})",
            waits + sends_s / _EVERY,
            f"models are sent every {_EVERY} steps, and nothing hides that",
            f"ranks drift apart: {_DIGITS} 0.296, not 0.226, and 90.2 % right, not 93.3 % "
            "(measured there)",
        ),
        Outcome(
            f"accumulate {_TIMES} batches a step",
            waits + world.time.exposed_s / _TIMES,
            f"what is exposed now, once in {_TIMES} batches",
            f"a batch of {_TIMES} times the samples: fewer updates, and another learning rate "
            "(nbdist.scale_lr)",
        ),
    ]
    return tuple(found)


def _compressed(step: _Step) -> Outcome:
    change = 'bf16 compression: Compress("bf16")'
    costs = f"gradients are rounded: {_DIGITS} 0.228, not 0.226 (measured there)"
    if not any(call.dtype in ("", "float32") for call in step.gradients):
        return Outcome(change, None, "gradients are sent in fewer than 32 bits already", costs)
    return Outcome(
        change,
        step.with_gradients(_halved),
        "half the bytes of float32 gradients; the time of rounding is not counted",
        costs,
    )


def _halved(call: Call) -> Call:
    return replace(call, nbytes=call.nbytes // 2) if call.dtype in ("", "float32") else call


def _overlapped(step: _Step) -> Outcome:
    change, costs = "overlap with the backward: ddp", "nothing"
    if step.overlap > 0.9:
        return Outcome(change, None, "what computation can hide is hidden already", costs)
    if sum(call.count for call in step.gradients) < 2:
        why = "gradients travel in one bucket, behind the backward: a smaller bucket_cap_mb cuts it"
        return Outcome(change, None, why, costs)
    best_s = step.with_calls(step.world.calls, overlap=1.0)
    basis = f"two thirds of the computation could hide it, {100 * step.overlap:.0f} % of that does"
    return Outcome(change, best_s, f"{basis}: at best", costs)


def _larger_buckets(step: _Step, payload: float) -> Outcome:
    """Return what buckets of twice torch's size make: fewer rounds, and a larger last one."""
    change = "buckets of 50 MB: bucket_cap_mb=50"
    if payload <= BUCKET:
        why = f"gradients are {name_bytes(payload)}, and fit one bucket of 25 MB"
        return Outcome(change, None, why, "nothing")
    count = math.ceil(payload / _LARGER)
    bucket = Call("all_reduce", round(payload / count), step.world.n, count)
    calls = [*(call for call in step.world.calls if call not in step.gradients), bucket]
    now = sum(call.count for call in step.gradients)
    basis = f"{count} collectives in place of {now:.0f}; a larger last one hides less, not counted"
    return Outcome(change, step.with_calls(calls), f"{basis}: at best", "memory of the buckets")


def _more_ranks(step: _Step) -> Outcome:
    world = step.world
    calls = on_ranks(world.calls, world.n, 2 * world.n)
    change = f"twice as many ranks: {2 * world.n}"
    if world.n == 1:
        why = "one rank tells nothing of links: %dist scaling measures 1 and 2"
        return Outcome(change, None, why, "")
    later_s = world.time.skew_s * (late_s(2 * world.n) / late_s(world.n) - 1)
    return Outcome(
        change,
        (step.with_calls(calls) + later_s) / 2,
        "each rank does as much as now, over the same link (between hosts it is slower)",
        "a batch of twice the samples, and twice the machines",
    )


def _latency_s(calls: Sequence[Call], backend: str) -> float:
    """Return the latency that a short and a long collective tell; 0 without two such.

    Each takes latency + bytes / bandwidth a round: two equations, two unknowns.
    """
    known = []
    for call in calls:
        sent = traffic([replace(call, count=1)], backend)
        if call.transfer_s and sent.rounds and call.count >= _USUAL:
            known.append((sent.nbytes / sent.rounds, call.transfer_s / sent.rounds))
    known.sort()
    (small, least_s), (large, most_s) = (known[0], known[-1]) if known else ((0, 0), (0, 0))
    if large < _APART * max(small, 1) or most_s <= least_s:
        return 0.0
    return max(0.0, least_s - small * (most_s - least_s) / (large - small))


def table(world: World, outcomes: Sequence[Outcome], where: str = "measured here") -> str:
    """Return the outcomes as a table, each with what it rests on; `where` the step was recorded."""
    rows = [("", "step", "gain")]
    for one in outcomes:
        gain = "" if one.step_s is None else f"{100 - 100 * one.step_s / world.step_s:+.0f} %"
        rows.append((one.change, "–" if one.step_s is None else _ms(one.step_s), gain))
    lines = aligned(rows, (False, True, True))
    ranks, steps = counted(world.n, "rank"), counted(world.steps, "step")
    said = [f"The recorded step takes {_ms(world.step_s)} on {ranks}:"]
    said[0] += f" {where}, the mean of the last {steps}."
    said += ["All others are forecasts, for the same samples:", lines[0]]
    for line, one in zip(lines[1:], outcomes, strict=True):
        said.append(line)
        said.append(f"    rests on: {one.basis}")
        said += [f"    costs: {one.costs}"] if one.costs else []
    return "\n".join(said)


def _ms(seconds: float) -> str:
    return f"{figure(seconds * 1e3)} ms"
