"""What `nbdist.advise` returns, and its words."""

from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.client.advice.paste import lines
from nbdist.shared.text import aligned, counted, figure, name_bytes
from nbdist.study import advice
from nbdist.study.advice import Candidate, Choice, Dropped, Job
from nbdist.study.machine import Machine
from nbdist.study.prices import (
    Price,
    checkpoint_interval_s,
    lost_share,
    seconds_between_failures,
)

_WARMUP_SHARE = 0.05  # of a run's steps
_WARMUP_STEPS = 100  # of a run that nobody knows the length of
_MOST_WARMUP_STEPS = 2000
_SHOWN, _LISTED = 5, 6


@dataclass(frozen=True, slots=True)
class Advice:
    """Which layout to train with, and why. Prints as a table; `code` is what to paste.

    Attributes:
        choice: The best, the others and the dropped.
        job: The facts of the training.
        machine: On which it is to run.
        price: Of a device, if one is known.
        names: Of the model's function, the loss, and the optimizer's class, for `code`; with dots
            where torch has them.
        reference_batch: Samples of the batch that was given.
        saving_s: Seconds that a checkpoint takes.
        measured_s: Of a step of the best, where it was run.
    """

    choice: Choice
    job: Job
    machine: Machine
    price: Price | None
    names: tuple[str, str | None, str]
    reference_batch: int
    saving_s: float = 60.0
    measured_s: float | None = None

    @property
    def best(self) -> Candidate | None:
        """What is advised; None where nothing fits."""
        return self.choice.best

    @property
    def layout(self) -> str | None:
        """The best layout, as `nbdist.parallelize` takes it."""
        return self.best.spread.layout if self.best else None

    @property
    def precision(self) -> str:
        """The dtype that it computes in: "bf16", "fp16" or "fp32"."""
        return advice.precision_of(self.machine)

    @property
    def warmup_steps(self) -> int:
        """Steps in which the rate rises."""
        if not self.job.samples:
            return _WARMUP_STEPS
        steps = round(_WARMUP_SHARE * self.job.samples / self.job.global_batch)
        return min(max(1, steps), _MOST_WARMUP_STEPS)

    @property
    def code(self) -> str:
        """The advised training, for a `%%distributed` cell; empty where nothing fits."""
        if self.best is None:
            return ""
        model, loss, optimizer = self.names
        return lines(
            self.best,
            model=model,
            loss=loss,
            optimizer=optimizer,
            precision=self.precision,
            global_batch=self.job.global_batch,
            reference_batch=self.reference_batch,
            rule=advice.rule_of(self.job),
            warmup_steps=self.warmup_steps,
        )

    def cost_of(self, one: Candidate, samples: float) -> float | None:
        """Return what so many samples cost; None without a price."""
        if self.price is None:
            return None
        seconds = samples / one.samples_s(self.job)
        return self.price.of(seconds, one.spread.world_size)

    def __str__(self) -> str:
        """Return the verdict, a table of the best, why the others were dropped, and the code."""
        batch = f"{counted(self.job.global_batch, 'sample')} a step"
        found = [
            self._verdict(),
            *self._is_slower(),
            "",
            f"{self.machine}, {batch}, {self.precision}:",
        ]
        found += [f"  {line}" for line in self._table()]
        found += _dropped(self.choice.dropped)
        found += ["", self._rests_on()]
        if self.best is None:
            return "\n".join(found)
        if self.measured_s is not None:
            predicted, measured = self.best.time.total_s, self.measured_s
            found.append(
                f"A step of the best was measured here{self._emulated}: {_time(measured)}, "
                f"predicted {_time(predicted)} ({measured / predicted:.2f} times that)."
            )
        found += [*self._money(), self._rate(), ""]
        place = f"a %%distributed cell on {counted(self.best.spread.world_size, 'rank')}"
        loss = "" if self.names[1] else "; outputs that have no loss need one: loss= here"
        found.append(
            f"For {place}, in which {', '.join(self._own_names)} and lr are defined "
            f"(this notebook's names are not known there{loss}):"
        )
        return "\n".join([*found, "", *(f"    {line}" for line in self.code.splitlines())])

    __repr__ = __str__

    @property
    def _own_names(self) -> list[str]:
        """What `code` uses, and neither torch nor nbdist has; without `lr`."""
        return [*dict.fromkeys(n for n in self.names if n and "." not in n), "dataset"]

    @property
    def _is_one(self) -> bool:
        return self.best is not None and self.best.spread.world_size == 1

    def _verdict(self) -> str:
        choice, best = self.choice, self.best
        if best is None:
            return _nothing_fits(self.choice.dropped, self.machine)
        if self._is_one:
            why = {
                "only one": "there is one device, and the training fits on it",
                "short": "one device ends the run in "
                f"{_time(self.job.samples / best.samples_s(self.job))}",
                "not worth it": f"{counted(self.machine.world_size, 'device')} would be only "
                f"{choice.gain:.2f} times as fast as one",
            }.get(choice.why, "the training fits on one device, and no layout is faster")
            return f"You do not need distributed training: {why} (predicted)."
        gain = f", {choice.gain:.1f} times as fast as one device" if choice.gain else ""
        why = "the fastest that fits"
        if choice.why == "simplest":
            why = f"the simplest of those within {advice.MARGIN - 1:.0%} of the fastest"
        ranks, world = best.spread.world_size, self.machine.world_size
        on = f"on {ranks} ranks" if ranks == world else f"on {ranks} of the {world} ranks"
        return f"Train with {_words(best)} {on}: {why}{gain} (predicted)."

    @property
    def _emulated(self) -> str:
        return ", emulated" if "emulated" in self.machine.accelerator.name else ""

    def _is_slower(self) -> list[str]:
        """Return a sentence where one device is predicted to be faster than what was measured."""
        one = next((o for o in self.choice.others if o.spread.world_size == 1), None)
        if one is None or self.measured_s is None or self.measured_s <= one.time.total_s:
            return []
        measured, alone = _time(self.measured_s), _time(one.time.total_s)
        said = "Measured, it is slower than one device is predicted to be"
        return [f"{said}: {measured} a step, and {alone}."]

    def _table(self) -> list[str]:
        others = self.choice.others
        alone = [one for one in others[_SHOWN:] if one.spread.world_size == 1]
        shown = [*([self.best] if self.best else []), *others[:_SHOWN], *alone]
        if not shown:
            return []
        heads = ["layout", "ranks", "samples a rank", "memory", "a step", "samples/s"]
        heads += [f"{self.price.currency} per 1k"] if self.price else []
        rows = [[*heads, "of it waits for", ""]]
        for one in shown:
            cost = self.cost_of(one, 1000)
            source = "" if one.is_estimated else "by formulas alone"
            rows.append(
                [
                    _words(one),
                    str(one.spread.world_size),
                    str(one.micro_batch * (one.parts if one.spread.pp > 1 else 1)),
                    name_bytes(one.peak),
                    _time(one.time.total_s),
                    figure(one.samples_s(self.job)),
                    *([] if cost is None else [figure(cost)]),
                    _waits(one),
                    source,
                ]
            )
        sides = [False] + [True] * (len(heads) - 1) + [False, False]
        return aligned(rows, sides)

    def _rests_on(self) -> str:
        device = self.machine.accelerator
        has_ep = self.best is not None and self.best.spread.ep > 1
        evenly = " Experts: each is taken to get as many tokens." if has_ep else ""
        return (
            f"All figures are predicted. Time: a step is taken to reach {device.step_share:.0%} of "
            f"the peak of {device.name} (measured on models: 33 to 52 % of a GPU's), so it may be "
            "a third off; the order of layouts depends less on that. Memory: "
            f"{advice.HEADROOM:.0%} of a device stays free. Python: {1e6 * advice.LAUNCH_S:.0f} us "
            f"a kernel are assumed, beside the device.{evenly}"
        )

    def _money(self) -> list[str]:
        best = self.best
        assert best is not None
        found = []
        if self.price is not None:
            run = self.cost_of(best, self.job.samples) if self.job.samples else None
            whole = f"The run costs {self.price.words(run)}. " if run is not None else ""
            source = self.price.source or "your table"
            found.append(f"{whole}Price: {self.price.words(self.price.per_hour)} a device and hour")
            found[-1] += f" ({source}; list prices change)."
        between = seconds_between_failures(best.spread.world_size)
        every = checkpoint_interval_s(self.saving_s, between)
        if self.job.samples and self.job.samples / best.samples_s(self.job) < every:
            return found  # the run ends before its first checkpoint
        lost = lost_share(every, self.saving_s, between)
        found.append(
            f"Save every {_time(every)}, if a checkpoint takes {_time(self.saving_s)}: at Llama "
            f"3's rate of failures, one in {_time(between)}, {lost:.1%} of the time is lost."
        )
        return found

    def _rate(self) -> str:
        rule, batch = advice.rule_of(self.job), self.job.global_batch
        if batch == self.reference_batch:
            return "The batch is the one that you gave, so the learning rate stays as it is."
        name = "square root" if rule == "sqrt" else rule
        return (
            f"The learning rate follows the batch by the {name} rule, from {self.reference_batch} "
            f"to {batch} samples, with {counted(self.warmup_steps, 'step')} of warm-up."
        )


def _words(one: Candidate) -> str:
    return ", ".join(one.words)


def _waits(one: Candidate) -> str:
    parts = {
        "messages": one.time.exposed_s,
        "stages": one.time.bubble_s,
        "Python": one.time.serial_s,
    }
    shares = {what: seconds / one.time.total_s for what, seconds in parts.items()}
    return ", ".join(f"{what} {share:.0%}" for what, share in shares.items() if share >= 0.005)


def _dropped(every: Sequence[Dropped]) -> list[str]:
    found = [
        f"  {one.name}: needs {name_bytes(one.needs)} of {name_bytes(one.has)} at the least"
        for one in every
        if one.kind == "memory"
    ]
    found += [f"  {one.name}: refused: {one.said}" for one in every if one.kind == "refused"]
    slower = sorted((one.needs, one.name) for one in every if one.kind == "slower")
    names = ", ".join(f"{name} ({times:.1f})" for times, name in slower[:_LISTED])
    more = f" and {len(slower) - _LISTED} more" if len(slower) > _LISTED else ""
    if names:
        found.append(f"  not estimated, times as long as the fastest by formulas: {names}{more}")
    return found


def _nothing_fits(dropped: tuple[Dropped, ...], machine: Machine) -> str:
    large = [one for one in dropped if one.kind == "memory"]
    if not large:
        return f"No layout trains this on {machine}."
    least = min(large, key=lambda one: one.needs)
    times = least.needs / least.has
    return (
        f"Nothing fits: {least.name}, the leanest, needs {times:.1f} times the memory (predicted). "
        "More or larger devices, adapters (LoRA), or nbdist.Offload() may do."
    )


def _time(seconds: float) -> str:
    for unit, worth in (("days", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= worth:
            return f"{figure(seconds / worth)} {unit}"
    return f"{figure(1e3 * seconds)} ms"
