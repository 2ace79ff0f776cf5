"""Compare runs: what differs between them, and who wins, if anybody does. Pure.

Losses are compared over the same steps (`curves`). Error bars are two standard errors over the
ranks or over these steps, whichever is larger: what a run's figure might as well have been with
other batches, or another machine under a rank. They say nothing of another seed. Two runs whose
bars overlap have no clear winner.
"""

import html
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.client.metrics.analysis.values import RECENT
from nbdist.client.metrics.recent import percent
from nbdist.client.tracking.curves import StepRange, has_steps, loss_over, window_of
from nbdist.client.tracking.past.tables import html_table, number, text_table, used_columns, whole

WHAT_RECENT_IS = f"Speed and comm %: the last {RECENT} measured steps, without a cell's first step."
_MOST_DIFFERENT = 8
_MOST_NAMED = 4
_WHAT_BARS_ARE = (
    "± is two standard errors, over the ranks or over these steps, whichever is larger; "
    "another seed may differ by more."
)
# Facts of which a run has another one each time, and which explain nothing.
_NO_REASON = frozenset({"sample", "samples_seen", "proof"})


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run and its error bar, half its length; None for one rank, which has none."""

    value: float
    error: float | None

    def __str__(self) -> str:
        if self.error is None:
            return _exact(self.value)
        return f"{_exact(self.value)} ± {_exact(float(f'{self.error:.2g}'))}"

    def overlaps(self, other: "Figure") -> bool:
        """Return whether the error bars of two figures touch."""
        return abs(self.value - other.value) <= (self.error or 0.0) + (other.error or 0.0)


@dataclass(frozen=True, slots=True)
class Entry:
    """One run in a comparison. `facts` are all that might differ; `curve` is as in `curves`."""

    name: str
    state: str
    steps: int
    facts: Mapping[str, str]
    loss: Figure | None
    throughput: Figure | None
    step_ms: float | None = None
    comm_pct: float | None = None
    logged: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Some runs beside each other; prints as text, shows as a table with what it says."""

    entries: tuple[Entry, ...]

    @property
    def window(self) -> StepRange | None:
        """The steps that losses are compared over; None when no run has kept any."""
        return window_of(e.curve for e in self.entries if e.state != "failed" or self._all_failed)

    @property
    def losses(self) -> tuple[Figure | None, ...]:
        """Each run's loss, over `window`."""
        window = self.window
        return tuple(_loss(entry, window) for entry in self.entries)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Who wins, in words."""
        # What failed has lost, whatever its loss was by then.
        stood = [e for e in zip(self.entries, self.losses, strict=True) if e[0].state != "failed"]
        losses = [(entry.name, loss) for entry, loss in stood if loss is not None]
        speeds = [(e.name, e.throughput) for e, _ in stood if e.throughput is not None]
        window = self.window
        unsure = any(loss is not None and loss.error is None for _, loss in stood)
        if window is not None and unsure and len(losses) > 1:
            said = f"No clear winner in loss: {window} is too little data."
        else:
            said = judge(losses, "the lowest loss", "loss", lowest=True)
        faster = judge(speeds, "the most samples/s", "samples/s", lowest=False)
        return tuple(sentence for sentence in (said, faster) if sentence)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures are."""
        window, notes = self.window, []
        if window is not None and any(loss is not None for loss in self.losses):
            ends = {int(e.curve[-1][0]) for e in self.entries if has_steps(e.curve)}
            all_made = f"; {window.last} is the last step all runs reached"
            notes.append(f"Loss is {window}{all_made if max(ends) > window.last else ''}.")
            if any(end < window.last for end in ends):
                notes.append("A failed run that stopped earlier shows its own last steps.")
        if any(e.step_ms is not None or e.throughput is not None for e in self.entries):
            notes.append(WHAT_RECENT_IS)
        figures = [*self.losses, *(entry.throughput for entry in self.entries)]
        if any(figure is not None and figure.error is not None for figure in figures):
            notes.append(_WHAT_BARS_ARE)
        return tuple(notes)

    @property
    def _all_failed(self) -> bool:
        return all(entry.state == "failed" for entry in self.entries)

    def __str__(self) -> str:
        return "\n".join([*text_table(*self.cells()), *self.sentences, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        said = "".join(
            f"<p>{html.escape(sentence)}</p>" for sentence in (*self.sentences, *self.notes)
        )
        return html_table(*self.cells()) + said

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the table's header and rows as texts."""
        differs = what_differs([entry.facts for entry in self.entries])[:_MOST_DIFFERENT]
        logged = list(dict.fromkeys(k for e in self.entries for k in e.logged if k != "loss"))
        loss_name = "loss" if self.window is None else "mean loss"
        # What was logged stands as it was logged last.
        header = ["run", *differs, "state", "steps", loss_name, "step ms", "comm %", "samples/s"]
        header += [f"last {key}" for key in logged]
        rows = []
        for entry, loss in zip(self.entries, self.losses, strict=True):
            row = [entry.name, *(entry.facts.get(key, "") for key in differs), entry.state]
            row += [str(entry.steps or ""), str(loss or ""), number(entry.step_ms)]
            row += [whole(entry.comm_pct), str(entry.throughput or "")]
            rows.append(row + [number(entry.logged.get(key)) for key in logged])
        return used_columns(header, rows)


def rows_of(entries: Sequence[Entry]) -> list[dict[str, object]]:
    """Return one row a run for a program to read: facts, state, figures and their errors."""
    rows: list[dict[str, object]] = []
    for entry, loss in zip(entries, Comparison(tuple(entries)).losses, strict=True):
        row: dict[str, object] = {"run": entry.name, **entry.facts, "state": entry.state}
        row["steps"] = entry.steps
        for name, figure in (("loss", loss), ("samples_per_s", entry.throughput)):
            row[name] = figure.value if figure else None
            row[f"{name}_error"] = figure.error if figure else None
        row |= {"step_ms": entry.step_ms, "comm_pct": entry.comm_pct}
        rows.append(row)
    return rows


def what_differs(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of facts that are not the same in all runs, in the order they come."""
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    return [
        name
        for name in names
        if name not in _NO_REASON and len({of_run.get(name) for of_run in facts}) > 1
    ]


def mean_over_ranks(by_rank: Mapping[str, float | None]) -> Figure | None:
    """Return the mean of the ranks' figures; None when no rank has one that is a number."""
    known = _known(by_rank.values())
    if not known:
        return None
    return Figure(statistics.fmean(known), _error(known))


def sum_over_ranks(by_rank: Mapping[str, float | None]) -> Figure | None:
    """Return the sum of the ranks' figures; None when no rank has one."""
    mean = mean_over_ranks(by_rank)
    if mean is None:
        return None
    n = len(_known(by_rank.values()))
    return Figure(n * mean.value, None if mean.error is None else n * mean.error)


def judge(figures: Sequence[tuple[str, Figure]], best: str, what: str, *, lowest: bool) -> str:
    """Return who wins in a sentence; empty for less than two runs.

    Args:
        figures: With the runs' names.
        best: What the winner has, such as "the lowest loss".
        what: The figure's name.
        lowest: Whether less is better.
    """
    if len(figures) < 2:
        return ""
    ordered = sorted(figures, key=lambda item: item[1].value, reverse=not lowest)
    (name, first), (second_name, second) = ordered[:2]
    unsure = [item for item in ordered[1:] if first.overlaps(item[1])]
    if unsure:
        return f"No clear winner in {what}: {_undecided([ordered[0], *unsure])}."
    sentence = f"{name} has {best}: {first}, against {second} of {second_name}."
    if first.error is None or second.error is None:
        sentence += " One rank has no error bar, so the uncertainty is unknown."
    return sentence


def entry_of(
    name: str,
    state: str,
    steps: int,
    facts: Mapping[str, str],
    curves: Mapping[str, Any],
    logged: Mapping[str, float] | None = None,
) -> Entry:
    """Return a run's entry, made from what `curves` keeps of it."""
    end = curves.get("end", {})
    speed = sum_over_ranks(end.get("samples_per_s", {}))
    # Ranks that wait for each other are equally slow, so the spread over steps adds up.
    over_steps = sum(_known(end.get("samples_per_s_error", {}).values()))
    return Entry(
        name,
        state,
        steps,
        facts,
        mean_over_ranks(end.get("loss", {})),
        None if speed is None else Figure(speed.value, _larger(speed, over_steps)),
        _mean(end.get("step_ms", {}).values()),
        _comm_pct(end),
        logged or {},
        curves.get("loss", ()),
    )


def _exact(value: float) -> str:
    """Return a figure with a digit more than the board gives: its error bar tells which count."""
    # No exponent before it saves room: 17,430 reads better than 1.743e+04.
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _comm_pct(end: Mapping[str, Mapping[str, float | None]]) -> float | None:
    comm, steps = end.get("comm_ms", {}), end.get("step_ms", {})
    timed = [rank for rank in comm if steps.get(rank)]
    return percent(_known(map(comm.get, timed)), _known(map(steps.get, timed)))


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def _undecided(figures: Sequence[tuple[str, Figure]]) -> str:
    """Return why none of these wins: they are equal, or it cannot be determined."""
    (_, first), left = figures[0], len(figures) - _MOST_NAMED
    more = f" and {left} more" if left > 0 else ""
    if all(figure.value == first.value for _, figure in figures):
        return f"{_listed([name for name, _ in figures[:_MOST_NAMED]], more)} are equal ({first})"
    named = [f"{name} ({figure})" for name, figure in figures[:_MOST_NAMED]]
    return f"the error bars of {_listed(named, more)} overlap"


def _listed(texts: Sequence[str], more: str) -> str:
    if more:
        return ", ".join(texts) + more
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def _loss(entry: Entry, window: StepRange | None) -> Figure | None:
    """Return a run's loss over a window, or what is known of its end where it has no steps."""
    if window is None or not has_steps(entry.curve):
        return entry.loss
    found = loss_over(entry.curve, window)
    if found is None:
        return None
    value, over_steps = found
    return Figure(value, _larger(entry.loss, over_steps))


def _larger(figure: Figure | None, over_steps: float | None) -> float | None:
    """Return the larger of the errors over ranks and over steps; None when neither tells any."""
    over_ranks = figure.error if figure is not None else None
    # Ranks with the same batches agree but for rounding: that is no measure of chance.
    if figure is not None and over_ranks is not None and over_ranks <= 1e-6 * abs(figure.value):
        over_ranks = None
    return max((error for error in (over_ranks, over_steps) if error), default=None)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _error(known: Sequence[float]) -> float | None:
    if len(known) < 2:
        return None
    return 2 * statistics.stdev(known) / math.sqrt(len(known))
