"""What a training sends in its usual step, and how long a step takes: figures to compare runs by.

Steps differ: the first connects, the second of DDP agrees on its buckets, one in a hundred is
followed by an evaluation. The *usual* step is the most frequent one, by the collectives it launches
and the bytes it puts in, which each step tells exactly. Which collectives these are is known of the
steps whose collectives are all recorded.

Threads: `receive` runs on ipyparallel's IO thread, `of_rank` and `figures` after the cell.
Bounds: `MOST_FORMS` kinds of steps are told apart on a rank, `MOST_OPEN` steps wait for a record.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from nbdist.shared.collectives import sent_bytes
from nbdist.shared.errors import UsageError
from nbdist.shared.packed import CALL, Calls, Template
from nbdist.shared.wire import Record

MOST_FORMS = 256
MOST_OPEN = 64
UNTOLD = "collectives"  # stands for the kinds where ranks tell numbers alone (tap "counts")

_Form = tuple[float, float]  # collectives and bytes put in, of one step


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step takes where its ranks have a core each.

    `ms` is the lower quartile of the steps' times, of each without what a rank waited for a core.
    `noise` is how far the middle one is above it, as a share; `starved` the share of all steps in
    which ranks waited for a core. `steps` is how many were measured.
    """

    ms: float
    noise: float
    starved: float
    steps: int


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One training, in the figures that another run of its name must have, too.

    Attributes:
        world_size: Ranks that trained.
        steps: That they made.
        kinds: Of each rank, in order, the collectives of its usual step by kind.
        in_all: Of each rank, the collectives of all steps but the first.
        bytes: On the wire in the usual step, the mean of the ranks; None where it is not known.
        time: Of a step; None where too few were measured.
    """

    world_size: int
    steps: int
    kinds: tuple[Mapping[str, int], ...]
    in_all: tuple[int, ...]
    bytes: float | None
    time: StepTime | None


@dataclass(slots=True)
class _OfRank:
    """What one rank has reported."""

    forms: Counter[_Form] = field(default_factory=Counter)
    kinds: dict[_Form, Mapping[str, int]] = field(default_factory=dict)
    sent: dict[_Form, float | None] = field(default_factory=dict)
    templates: dict[int, Template] = field(default_factory=dict)
    open_steps: dict[int, _Form] = field(default_factory=dict)
    open_calls: dict[int, Counter[int]] = field(default_factory=dict)
    steps: int = 0
    in_all: int = 0


class UsualSteps:
    """One cell's steps, as far as they have come."""

    def __init__(self, info: CellInfo) -> None:
        """Begin with nothing known."""
        is_nccl = "nccl" in info.backend and any(d.startswith("cuda") for d in info.devices)
        self._backend = "nccl" if is_nccl else "gloo"
        self._ranks = {rank: _OfRank() for rank in info.ranks}

    def receive(self, records: list[Record]) -> None:
        """Take in what ranks tell."""
        for record in records:
            of_rank = self._ranks.get(record.rank)
            if of_rank is None:
                continue
            if record.kind == "step":
                self._take_step(of_rank, record)
            elif record.kind == "calls" and record.detail is not None:
                self._take_calls(of_rank, record.step, record.detail)

    def _take_step(self, of_rank: _OfRank, record: Record) -> None:
        of_rank.steps += 1
        form = record.values.get("collectives"), record.values.get("bytes", 0.0)
        if record.step < 2 or form[0] is None:
            return
        known = (form[0], form[1])
        of_rank.in_all += int(known[0])
        if known in of_rank.forms or len(of_rank.forms) < MOST_FORMS:
            of_rank.forms[known] += 1
        self._match(of_rank, record.step, known, of_rank.open_calls.pop(record.step, None))

    def _take_calls(self, of_rank: _OfRank, step: int, calls: Calls) -> None:
        of_rank.templates |= calls.new
        counts = Counter(calls.calls[:: len(CALL)])
        self._match(of_rank, step, of_rank.open_steps.pop(step, None), counts)

    def _match(
        self, of_rank: _OfRank, step: int, form: _Form | None, counts: Counter[int] | None
    ) -> None:
        """Learn what a form is made of once both records of a step have come."""
        if form is None or counts is None:
            waiting: dict[int, _Form] | dict[int, Counter[int]]
            if form is not None and form not in of_rank.kinds:
                of_rank.open_steps[step] = form
                waiting = of_rank.open_steps
            elif counts is not None:
                of_rank.open_calls[step] = counts
                waiting = of_rank.open_calls
            else:
                return
            while len(waiting) > MOST_OPEN:
                del waiting[next(iter(waiting))]
            return
        if form in of_rank.kinds or counts.total() != form[0]:
            return  # known, or not all of its collectives were recorded
        if not counts.keys() <= of_rank.templates.keys():
            return
        kinds: Counter[str] = Counter()
        for number, count in counts.items():
            kinds[of_rank.templates[number].kind] += count
        of_rank.kinds[form] = dict(sorted(kinds.items()))
        of_rank.sent[form] = self._sent(of_rank.templates, counts)

    def _sent(self, templates: Mapping[int, Template], counts: Counter[int]) -> float | None:
        total = 0.0
        for number, count in counts.items():
            one = templates[number]
            try:
                total += count * sent_bytes(one.kind, one.bytes, len(one.ranks), self._backend)
            except UsageError:  # a kind of which it is not known what is sent
                return None
        return total

    def figures(self, telemetry: Telemetry) -> RunFigures | None:
        """Return the training's figures; None where no rank has made a step."""
        stepped = [of_rank for of_rank in self._ranks.values() if of_rank.steps]
        if not stepped:
            return None
        usual = [of_rank.forms.most_common(1) for of_rank in stepped]
        forms = [form[0][0] if form else (0.0, 0.0) for form in usual]
        kinds = tuple(
            of_rank.kinds.get(form, {UNTOLD: int(form[0])} if form[0] else {})
            for of_rank, form in zip(stepped, forms, strict=True)
        )
        sent = [
            of_rank.sent.get(form, None if form[0] else 0.0)
            for of_rank, form in zip(stepped, forms, strict=True)
        ]
        known = [nbytes for nbytes in sent if nbytes is not None]
        return RunFigures(
            world_size=len(self._ranks),
            steps=max(of_rank.steps for of_rank in stepped),
            kinds=kinds,
            in_all=tuple(of_rank.in_all for of_rank in stepped),
            bytes=sum(known) / len(known) if len(known) == len(sent) else None,
            time=step_time(telemetry),
        )


def step_time(telemetry: Telemetry) -> StepTime | None:
    """Return how long a step takes, of the measured ones but the first; None of fewer than two.

    Ranks go in step: one that waited for a core made the others wait, and the shortest time that a
    rank needed beside its own wait is that of all.
    """
    import numpy as np  # here: a notebook that only starts does not wait for it

    times = {
        rank: dict(zip(series.steps[: series.n], series.values[: series.n], strict=True))
        for rank, series in telemetry.series("step_s").items()
    }
    waits = {
        rank: dict(zip(series.steps[: series.n], series.values[: series.n], strict=True))
        for rank, series in telemetry.series("starved_s").items()
    }
    known = [*times.values(), *waits.values()]  # only measured steps tell waits
    common = [step for step in (known[0] if known else ()) if all(step in of for of in known)]
    chosen = sorted(common)[1:]
    if len(chosen) < 2:
        return None
    whole = np.array([[of_rank[step] for step in chosen] for of_rank in times.values()])
    quiet = whole.copy()
    for row, rank in enumerate(times):
        if rank in waits:  # where the system reports them
            quiet[row] -= [waits[rank][step] for step in chosen]
    # Two clocks that are read one after the other: a wait can look longer than its step.
    each = np.maximum(quiet.min(axis=0), 1e-6)
    low, middle = np.quantile(each, (0.25, 0.5)) * 1e3
    share = max(0.0, float(1 - each.sum() / whole.min(axis=0).sum()))
    return StepTime(float(low), float(middle / low - 1), share, len(chosen))
