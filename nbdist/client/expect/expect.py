"""`%dist expect`: gather what an assertion is about, and judge it.

`NBDIST_BASELINE` says what a missing baseline means: `require` (pytest --nbdist) that the assertion
fails, `write` (--nbdist-baseline) that every comparison stores its run as the baseline. Without it,
as in a notebook, the first comparison stores the run and says so.

Main thread, between cells.
"""

import math
import os
from collections import deque
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.client.expect import judge
from nbdist.client.expect.assertion import Comparison, Phrase, parse
from nbdist.client.expect.baseline import Stored, baseline_file, machine, store_run, stored_run
from nbdist.client.metrics.usual_step import RunFigures
from nbdist.shared.errors import ClusterError, ExpectationError, TransferError, UsageError
from nbdist.shared.text import counted, figure, name_ranks

if TYPE_CHECKING:
    from nbdist.client.cells.trained_cell import TrainedCell
    from nbdist.client.metrics.telemetry import Series
    from nbdist.client.session.session import Session

NOT_JUDGED = "is not judged"
_FEWEST_STEPS = 10  # measured ones, of which a time is told


def expect(session: "Session", assertion: str) -> str:
    """Return a line that says what was found; see `Session.expect`."""
    asked = parse(assertion)
    if isinstance(asked, Comparison):
        return _judge_comparison(asked, session)
    if asked.kind == "parity":
        ok, proof = session.prove(asked.of or None)
        return judge.judge_parity(asked.text, ok=ok, proof=proof)
    trained = session.trained
    if trained is None:
        raise _nothing_trained()
    if asked.kind == "no":
        return judge.judge_alarms(asked.text, trained.alarms, trained.verdicts, trained.cut_off)
    if asked.of == "explain":
        name, nbytes = session.explained_bytes()
        now = _bytes(asked.text, _figures(asked.text, trained))
        whose = f"{name}'s layout.explain"
        return judge.judge_bytes(asked.text, now, nbytes, asked.number / 100, whose)
    return _Compared(asked, trained).judge()


def metric_names(trained: "TrainedCell | None") -> list[str]:
    """Return the names that have numbers in the newest training."""
    if trained is None:
        return []
    from nbdist.client.metrics.recent import recent_steps, values_of_run

    series = trained.telemetry.series
    names = dict.fromkeys(["loss", *trained.telemetry.keys(), *values_of_run(recent_steps(series))])
    names.pop("step_s", None)  # people know it as step_ms
    return list(names)


def _nothing_trained() -> ClusterError:
    return ClusterError(
        "There is no training yet that something could be expected of.",
        why="no cell of this session has made an optimizer step, or called nbdist.log",
        do="run the %%distributed cell that trains, then %dist expect",
    )


# -- comparisons


def _judge_comparison(asked: Comparison, session: "Session") -> str:
    trained = session.trained
    values: dict[str, Sequence[object]] = {}
    said: list[str] = []
    do = ""
    for key in asked.names:
        over, name = key.split()
        if (found := _metric(over, name, trained)) is not None:
            values[key], words = found
            do = "%dist board shows how it came to be"
        else:
            _refuse_over(over, name, trained)
            pulled = _pull(name, session, trained)
            values[key], words = _of_ranks(name, pulled, may_be_text=asked.has_text)
        said.append(words)
    if trained is not None and trained.cut_off:
        said.append(f"of a run that {trained.cut_off}")
    return judge.judge_comparison(asked, values, "; ".join(dict.fromkeys(said)), do)


def _metric(
    over: str, name: str, trained: "TrainedCell | None"
) -> tuple[Sequence[float], str] | None:
    """Return a metric's number, or one a rank, and what it is in words; None: there is none."""
    if trained is None:
        return None
    from nbdist.client.metrics.recent import losses, recent_steps, values_of_run

    of_telemetry = trained.telemetry.series
    series = losses(of_telemetry) if name == "loss" else of_telemetry(name)
    known = {rank: one for rank, one in series.items() if one.n}
    if known:
        return _over(over, name, known)
    number = values_of_run(recent_steps(of_telemetry)).get(name)
    if number is None:
        return None
    if over not in ("final", "mean"):
        raise UsageError(f"{over} {name} is not known: {name} is one number of a run.")
    return [number], f"{name} is {_written(number)}"


def _over(over: str, name: str, known: "dict[int, Series]") -> tuple[Sequence[float], str]:
    from nbdist.client.metrics.recent import last_values

    step, last = last_values(known)
    newest = [series.values[series.n - 1] for series in known.values()]
    first = [series.values[0] for series in known.values()]
    every = [value for series in known.values() for value in series.values[: series.n]]
    if over == "each":
        words = ", ".join(
            f"{_written(value)} on rank {rank}" for rank, value in zip(known, newest, strict=True)
        )
        return newest, f"{name} is {words}"
    # A NaN that `min` and `max` would pass over is what must be seen.
    is_odd = any(math.isnan(value) for value in every)
    number = {
        "final": _mean(list(last.values())),
        "first": _mean(first),
        "mean": _mean(every),
        "min": math.nan if is_odd else min(every),
        "max": math.nan if is_odd else max(every),
        "spread": max(newest) - min(newest),
    }[over]
    if over == "final":
        who = f"{len(last)} ranks" if len(last) == len(known) else name_ranks(last)
        of = f", the mean of {who}" if len(last) > 1 else f", of {who}" if len(known) > 1 else ""
        return [number], f"{name} is {_written(number)} at step {step:,}{of}"
    return [number], f"{over} {name} is {_written(number)}"


def _refuse_over(over: str, name: str, trained: "TrainedCell | None") -> None:
    if over not in ("final", "each"):
        raise UsageError(
            f"{over} {name}: {name} is no metric of the newest training, which has "
            f"{', '.join(metric_names(trained)) or 'none'}."
        )


def _pull(name: str, session: "Session", trained: "TrainedCell | None") -> list[Any]:
    """Return what a variable is on each rank."""
    try:
        return session.pull(name)
    except TransferError as error:
        if trained is None:
            raise _nothing_trained() from error
        if name in ("last", "baseline"):
            raise UsageError(
                f"{name} is another run of that name: collectives, bytes and step are compared "
                "with it; of a metric, first(loss) is known."
            ) from error
        known = metric_names(trained)
        close = get_close_matches(name, known, n=1, cutoff=0.7)  # step is step_ms
        hint = f"did you mean {close[0]}?" if close else f"the metrics are {', '.join(known)}."
        raise UsageError(
            f"{name} is neither a metric of the newest training nor a variable of the ranks; {hint}"
        ) from error


def _of_ranks(
    name: str, pulled: Sequence[Any], *, may_be_text: bool
) -> tuple[Sequence[object], str]:
    """Return a variable's value on each rank, and what they are in words.

    What is neither a number nor a text is None: it equals no text.
    """
    numbers = [_number(value) for value in pulled]
    if None in numbers and not may_be_text:
        raise UsageError(
            f"%dist expect compares numbers, and {name} is a "
            f"{type(pulled[numbers.index(None)]).__name__}; compute a number of it in a "
            "%%distributed cell."
        )
    both = list(zip(numbers, pulled, strict=True))
    values = [value if isinstance(value, str) else number for number, value in both]
    shown = [f"{value!r:.60}" if number is None else _written(number) for number, value in both]
    if len({*zip(map(str, values), shown, strict=True)}) == 1:
        return values, f"{name} is {shown[0]} on all ranks"
    return values, f"{name} is " + ", ".join(f"{one} on rank {r}" for r, one in enumerate(shown))


def _number(value: Any) -> float | None:
    """Return a value as a number, also of an array of one element; None where it is none."""
    value = getattr(value, "detach", lambda: value)()  # a tensor of a graph warns otherwise
    size = getattr(value, "numel", lambda: getattr(value, "size", 1))()
    try:
        return float(value) if size == 1 and not isinstance(value, str) else None
    except (TypeError, ValueError):
        return None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values)


def _written(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    if number.is_integer() and abs(number) < 1e15:
        return f"{int(number):,}"
    return figure(number) if math.isfinite(number) else str(number)


# -- other runs


def _figures(text: str, trained: "TrainedCell") -> RunFigures:
    if trained.figures is None:
        raise ClusterError(
            f"{text}: the newest training has made no optimizer step.",
            do="expect it of the cell that trains, before another one logs numbers",
        )
    return trained.figures


def _bytes(text: str, figures: RunFigures) -> float:
    if figures.bytes is None:
        raise ClusterError(
            f"{text}: it is not known what this training sends.",
            why="no step was seen whose collectives were all recorded, or one of an unknown kind",
            do="%config NBDist.tap = 'full' before %dist start",
        )
    return figures.bytes


class Baselines:
    """The baselines that a kernel has stored, and where."""

    def __init__(self) -> None:
        self._made: deque[tuple[Path, RunFigures]] = deque(maxlen=500)

    def add(self, file: Path, run: RunFigures) -> None:
        """Note a run that is the baseline in a file from here on."""
        self._made.append((file, run))

    def has(self, file: Path, run: RunFigures) -> bool:
        """Return whether this very run is the baseline there."""
        return any(where == file and made is run for where, made in self._made)


here = Baselines()


class _Compared:
    """The newest training beside another run of its name."""

    def __init__(self, asked: Phrase, trained: "TrainedCell") -> None:
        if trained.info.run_name is None:
            raise UsageError(
                f"%dist expect {asked.text} compares runs of one name, and the newest training has "
                "none: give it one, %%distributed --run NAME."
            )
        self._asked = asked
        self._text = asked.text
        self._name = trained.info.run_name
        self._now = _figures(asked.text, trained)
        self._before = None if asked.of == "baseline" else trained.before
        self._cut_off = trained.cut_off
        self._file = baseline_file()
        self._mode = os.environ.get("NBDIST_BASELINE", "")

    def judge(self) -> str:
        """Compare; stores a baseline where one is to be made."""
        if self._before is not None:
            return self._told(self._before, f"the run of {self._name} before")
        if self._mode == "write":
            return self._store("stored anew")
        if here.has(self._file, self._now):
            return judge.found(
                self._text,
                f"nothing was compared, for this run is the baseline in {self._file.name}",
            )
        stored = self._stored()
        if stored is None:
            return self._store("there was none of this name on as many ranks")
        if self._asked.kind == "step" and stored.figures.time is None:
            return self._of_another_machine(stored)
        return self._told(stored.figures, "the baseline")

    def _told(self, other: RunFigures, whose: str) -> str:
        """Compare, and say so where the run was not made to its end."""
        found = self._beside(other, whose)
        return f"{found.rstrip('.')}; of a run that {self._cut_off}." if self._cut_off else found

    def _beside(self, other: RunFigures, whose: str) -> str:
        text, number, now = self._text, self._asked.number, self._now
        if self._asked.kind == "collectives":
            return judge.judge_collectives(text, now, other, whose)
        if self._asked.kind == "bytes":
            sent = _bytes(text, now), _bytes(text, other)
            return judge.judge_bytes(text, *sent, number / 100, whose)
        is_short = now.time is None or now.time.steps < _FEWEST_STEPS
        if is_short or now.time is None or other.time is None:
            raise UsageError(
                f"%dist expect {text}: a time is told of {_FEWEST_STEPS} steps or more, and "
                f"{'this training' if is_short else whose} measured fewer.",
                do="train longer, or once more while less else runs",
            )
        return judge.judge_step(text, now.time, other.time, number, whose)

    def _stored(self) -> Stored | None:
        stored = stored_run(self._file, self._name, self._now.world_size)
        if stored is None and self._mode == "require":
            raise ExpectationError(
                f"{self._text} cannot be judged: {self._file.name} has no run {self._name} on "
                f"{counted(self._now.world_size, 'rank')}.",
                why="tests compare with a baseline that is kept beside the notebook",
                do="pytest --nbdist --nbdist-baseline makes it; commit the file",
            )
        return stored

    def _of_another_machine(self, stored: Stored) -> str:
        if self._mode != "require":
            return self._store(
                f"its times were those of {', '.join(stored.machines) or 'no machine'}"
            )
        return (
            f"{self._text} {NOT_JUDGED}: {self._file.name} has times of "
            f"{', '.join(stored.machines) or 'no machine'}, and this is {machine()}; "
            "pytest --nbdist --nbdist-baseline adds them."
        )

    def _store(self, why: str) -> str:
        if self._cut_off:
            raise ExpectationError(
                f"{self._text} cannot be judged: nothing was compared, and a run that "
                f"{self._cut_off} becomes no baseline.",
                do="run it to its end",
            )
        store_run(self._file, self._name, self._now)
        here.add(self._file, self._now)
        return judge.found(
            self._text,
            f"nothing was compared, and this run is the baseline in {self._file.name} from here "
            f"on ({why})",
        )
