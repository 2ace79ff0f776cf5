"""What is known of a cell's steps and collectives, as plain values.

Milliseconds and bytes throughout. *Recent* are the last `RECENT` steps. Ranks are global.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RECENT = 50
LEFT_OUT = 2  # first steps: they connect, and the second of DDP agrees on its buckets

PARTS = ("compute", "hidden", "transfer", "waiting", "data", "optimizer", "other")
"""What a step is made of, in the order in which it is stacked; the parts sum to the step.

`compute`: forward and backward, alone. `hidden`: the same, while collectives were under way.
`transfer`: blocked in a collective that moved. `waiting`: blocked in one in which a rank was
missing. `data`: until the loader gave a batch. `optimizer`: in its step. `other`: the rest of the
loop, such as evaluation, logging, zero_grad.
"""

Cause = Literal[
    "data",
    "batch",
    "experts",
    "forward",
    "backward",
    "starved",
    "idle",
    "optimizer",
    "other",
    "link",
]


@dataclass(frozen=True, slots=True)
class RankStep:
    """What a rank's recent steps are made of, their mean; `parts` by the names of `PARTS`.

    Where communication was not measured it has no part of its own: `compute` holds it.

    `waits_for` is the rank it waited for longest, with the milliseconds a step; None without one.
    """

    rank: int
    step_ms: float
    parts: Mapping[str, float]
    waits_for: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """One step, when the collectives of all its ranks have been put beside each other.

    `waiting_ms` and `transfer_ms` by rank; they sum to the rank's exposed communication.
    `skew_ms` is the greatest between the first and the last arrival at a collective of this step,
    `last` the rank that came last there; None where no collective was seen on all its ranks.
    """

    step: int
    waiting_ms: Mapping[int, float]
    transfer_ms: Mapping[int, float]
    skew_ms: float | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Alike collectives of recent steps: one line of the table.

    `count` and `bytes` (what one rank puts in) a step; means in milliseconds of those that were
    seen on all their ranks: `skew_ms` between first and last arrival, `waiting_ms` of the ranks
    that waited for the last one, `queue_ms` between launch and begin, `transfer_ms` from when it
    had arrived and begun on all ranks to the end. `last` is the rank that most often came last,
    with its share of the cases. `algbw` and `busbw` in bytes per second, as in nccl-tests'
    PERFORMANCE.md; None without bytes.
    """

    kind: str
    title: str
    ranks: tuple[int, ...]
    line: str
    dtype: str
    bytes: int
    count: float
    skew_ms: float | None
    waiting_ms: float | None
    queue_ms: float | None
    transfer_ms: float | None
    last: tuple[int, float] | None
    algbw: float | None
    busbw: float | None


@dataclass(frozen=True, slots=True)
class Span:
    """One collective in a lane of the time line; moments in milliseconds from the line's begin.

    `arrived_ms` is when its last rank launched it, None when that is not known. `unit` names the
    parameters of FSDP2 that it carries; those that it gathered were freed at `freed_ms`.
    """

    row: int  # its place in `Analysis.table`
    launch_ms: float
    begin_ms: float
    end_ms: float
    arrived_ms: float | None
    unit: str = ""
    freed_ms: float | None = None


@dataclass(frozen=True, slots=True)
class TimelineLane:
    """A rank's collectives over the last steps, and when its main thread was `blocked`."""

    rank: int
    spans: tuple[Span, ...]
    blocked: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class TimeLine:
    """The last steps on one clock; `steps` are (number, begin, end) as the first rank had them."""

    length_ms: float
    steps: tuple[tuple[int, float, float], ...]
    lanes: tuple[TimelineLane, ...]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that makes the others slow, and why.

    `share` is how much slower than its peers it is, 0.38 for 38 %; `sentence` says all of it, with
    the numbers behind it. `within` is what the rank does in the part that is its cause, where that
    is known: nothing ("idle"), or it waits for a core ("starved").
    """

    rank: int
    cause: Cause
    share: float
    sentence: str
    since_step: int
    within: Cause | None = None


@dataclass(frozen=True, slots=True)
class Analysis:
    """All that is known now. `clock_error_ms` bounds the error between two ranks' moments.

    `explained_until` is the last step whose collectives were compared; `left_out` counts
    collectives whose times were not recorded, for there were too many. `links` holds, by the rank
    that sends and the one that receives, bytes per second while there was something to send.
    `own_ms` is each rank's mean own work, over the steps that the verdicts are about. Once
    the cell is over, `later_ranks` and `later_table` are `ranks` and `table` without its first
    `LEFT_OUT` steps.
    """

    ranks: tuple[RankStep, ...] = ()
    table: tuple[CollectiveRow, ...] = ()
    line: TimeLine | None = None
    verdicts: tuple[Straggler, ...] = ()
    clock_error_ms: float = 0.0
    explained_until: int = 0
    left_out: int = 0
    links: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    own_ms: Mapping[int, float] = field(default_factory=dict)
    later_ranks: tuple[RankStep, ...] = ()
    later_table: tuple[CollectiveRow, ...] = ()
