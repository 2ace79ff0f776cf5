"""How measured and forecast scaling reads: a table, and what it rests on. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from nbdist.shared.text import aligned, counted, figure, name_rate
from nbdist.study.forecast import Forecast
from nbdist.study.links import Link
from nbdist.study.scaling import LOSSES, Kind, Point, World

_HEAD: Final = ("ranks", "step", "samples/s", "speed-up", "efficiency", "lost to")
_RIGHT: Final = (True, True, True, True, True, False)
_LEAST: Final = 0.005  # of a step: below it nothing is told


@dataclass(frozen=True, slots=True)
class Scaling:
    """What was measured on several numbers of ranks, and what is predicted. Prints as a table.

    Attributes:
        kind: Strong or weak.
        worlds: As measured, by their number of ranks.
        points: Of each, its speed-up and losses.
        forecasts: Over the link as measured.
        others: Over another link.
        notes: In sentences: which cell, and what limits this measurement.
        beside: Weak scaling of the same cell, where both were measured.
    """

    kind: Kind
    worlds: tuple[World, ...]
    points: tuple[Point, ...]
    forecasts: tuple[Forecast, ...] = ()
    others: tuple[Forecast, ...] = ()
    notes: tuple[str, ...] = ()
    beside: "Scaling | None" = None

    def __str__(self) -> str:
        """Return the table, the forecasts below what was measured, and the notes."""
        both = (self, self.beside) if self.beside else (self,)
        sections = [section for one in both for section in one._sections()]
        lines = iter(aligned([_HEAD, *(row for _, rows in sections for row in rows)], _RIGHT))
        head = next(lines)
        said: list[str] = []
        for title, rows in sections:
            said += [title, *([] if said else [head]), *islice(lines, len(rows))]
        return "\n".join([*said, *dict.fromkeys(note for one in both for note in one.notes)])

    __repr__ = __str__

    def _sections(self) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
        """Yield titles, each with the rows below it."""
        # One number of ranks has nothing that it is faster than.
        is_compared = len(self.points) > 1
        title = f"{self.kind.capitalize()} scaling, measured:" if is_compared else "Measured:"
        yield title, [self._measured(one, is_compared) for one in self.points]
        for forecasts in filter(None, (self.forecasts, self.others)):
            yield f"Forecast, {_named(forecasts)}:", [_predicted(one) for one in forecasts]

    def _measured(self, point: Point, is_compared: bool) -> tuple[str, ...]:
        names = {"serial": "serial part" if self.kind == "strong" else "slower computation"}
        names["cores"] = "cores shared or disturbed"
        told = [
            f"{names.get(name, name)} {_percent(point.lost[name], 1)}"
            for name in LOSSES
            if abs(point.lost[name]) >= _LEAST
        ]
        step = f"{_ms(point.step_s)} ms"
        row = _row(point.n, step, point.samples_s, point.speed_up, point.efficiency)
        return (*(row if is_compared else (*row[:3], "–", "–")), ", ".join(told))


def _predicted(one: Forecast) -> tuple[str, ...]:
    step = f"{_ms(one.step_s)} ± {_ms(one.error_s)} ms"
    time, parts = one.time, []
    for name, seconds in (
        ("communication", time.exposed_s),
        ("skew", time.skew_s),
        ("loader", time.loader_s),
    ):
        share = seconds / one.step_s
        parts += [f"{name} {_percent(share, 1)} of the step"] if share >= _LEAST else []
    return (*_row(one.n, step, one.samples_s, one.speed_up, one.efficiency), ", ".join(parts))


def _row(
    n: int, step: str, samples_s: float, speed_up: float, efficiency: float
) -> tuple[str, str, str, str, str]:
    return (
        str(n),
        step,
        figure(samples_s) if samples_s else "–",
        f"{speed_up:.2f}",
        _percent(efficiency),
    )


def _named(forecasts: Sequence[Forecast]) -> str:
    """Return what they take for granted: cores for each rank, and a link between all."""
    links = "; ".join(dict.fromkeys(_link(one.link) for one in forecasts))
    return f"each rank on cores of its own, link {links}"


def _link(link: Link) -> str:
    rate = "not told by bytes" if link.bandwidth == math.inf else name_rate(link.bandwidth)
    return f"{link.name} (latency {link.latency_s * 1e6:.0f} us, {rate})"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %".replace("-", "−")


def _ms(seconds: float) -> str:
    return figure(seconds * 1e3)


def notes_of(worlds: Sequence[World], kind: Kind, *, is_known: bool) -> tuple[str, ...]:
    """Return in sentences what was measured, and what limits it.

    Args:
        worlds: By their number of ranks.
        kind: Strong or weak.
        is_known: By samples that were counted; else weak scaling is assumed.
    """
    first = worlds[0]
    samples = counted(round(first.samples), "sample")
    if len(worlds) == 1:
        said = ["One number of ranks was measured, and is compared with none."]
    elif not is_known:
        said = ["Samples were not counted: taken for weak scaling, each rank doing as much."]
    elif kind == "strong":
        said = [f"Strong: all ranks together take {samples} a step, as the cell is."]
    else:
        each = counted(round(first.samples / first.n), "sample")
        said = [f"Weak: each rank takes {each} a step, so that the batch grows with the ranks."]
    full = [world for world in worlds if 0 < world.cores < world.n]
    for world in full:
        starved = _percent(world.starved_s / world.step_s)
        have = f"{world.n} ranks have cores for {world.cores} of them, and wait for these {starved}"
        limit = " of a step: cores limit them, and the forecast leaves them out."
        said.append(have + (limit if world.is_crowded else " of a step."))
    return tuple(said)
