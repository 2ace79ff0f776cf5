"""Decide what ranks do that a fault left one step apart. Pure: reports in, decisions out.

A *unit* is one wrapped model with the optimizers that hold its parameters. After a fault one rank
may have finished the step that another lost. *Replicated* units are made equal by copying from the
most advanced rank; *sharded* ones, of which no rank has a second copy, go back together to a
snapshot that all of them hold, or are refused. Ranks that train *apart* (local SGD) go back in the
same way, each to its own; where they cannot, they are made equal: all models are as good. Ranks
that train on their own have no unit, and are left alone.

Every rank decides by itself, from the same reports, and so all decide the same.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from nbdist.ranks import begin_with_ranks, name_ranks

Kind = Literal["replicated", "sharded", "apart"]
Steps = tuple[int, ...]  # of each optimizer, then of each scheduler; the newest first


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank says of one unit.

    Attributes:
        kind: Whether each rank holds all of it, a part, or a model of its own for a while.
        name: For people, such as `GPT`.
        ranks: Global ranks that train it together.
        signature: Equal on all of them, and on no other model.
        steps: Made since the optimizers were.
        is_torn: An optimizer's step was begun and not ended, and has changed something.
        snapshots: `steps` at each snapshot the rank holds, newest first, each with its age in s.
    """

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    signature: str
    steps: Steps
    is_torn: bool = False
    snapshots: tuple[tuple[Steps, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one unit.

    Attributes:
        places: Of each rank that has the unit: its number among that rank's reports.
        action: What its ranks do.
        steps: What every rank has made afterwards.
        source: Who is copied from, when copied.
        behind: Who copies.
        line: What is said of it; also the reason when refused.
        lost: Steps that had been made and must be made again.
        is_level: Whether the ranks that live all stand at the same whole step.
    """

    places: Mapping[int, int]
    action: Literal["copy", "roll back", "refuse"]
    steps: Steps
    line: str
    source: int = -1
    behind: tuple[int, ...] = field(default=())
    lost: int = 0
    is_level: bool = False


def to_json(reports: Sequence[Report]) -> str:
    """Return the text in which a rank's reports travel."""
    return json.dumps([asdict(report) for report in reports])


def from_json(text: str | bytes) -> list[Report]:
    """Return the reports that `to_json` wrote."""
    return [
        Report(
            kind=item["kind"],
            name=item["name"],
            ranks=tuple(item["ranks"]),
            signature=item["signature"],
            steps=tuple(item["steps"]),
            is_torn=item["is_torn"],
            snapshots=tuple((tuple(steps), age) for steps, age in item["snapshots"]),
        )
        for item in json.loads(text)
    ]


def decide(reports: Mapping[int, Sequence[Report]], newcomers: Iterable[int]) -> list[Decision]:
    """Return what is to be done, in an order that all ranks share; nothing for units that agree.

    Args:
        reports: Of every rank, its units in the order in which they were made.
        newcomers: Ranks whose processes are new: they hold nothing yet.
    """
    new = set(newcomers)
    decisions = []
    for places in _matched(reports):
        of_unit = {rank: reports[rank][place] for rank, place in places.items()}
        some = next(iter(of_unit.values()))
        lost = sorted(new & set(some.ranks))
        if some.kind == "sharded" and lost:
            decisions.append(_refuse_lost(places, of_unit, lost))
        elif set(some.ranks) - new != set(of_unit):
            continue  # made on some ranks only: nobody can train it
        elif not _is_equal(of_unit):
            decisions.append(_DECIDE[some.kind](places, of_unit))
    return decisions


def has_unmatched(reports: Mapping[int, Sequence[Report]], newcomers: Iterable[int]) -> bool:
    """Return whether a rank holds a unit that its partners do not: garbage, most of the time."""
    new = set(newcomers)
    return any(
        set(reports[rank][place].ranks) - new != set(places)
        for places in _matched(reports)
        for rank, place in places.items()
    )


def _matched(reports: Mapping[int, Sequence[Report]]) -> list[dict[int, int]]:
    """Return each unit as rank -> place, those made last matched first.

    Of units that look alike, a rank may still hold old ones that another has let go.
    """
    units: dict[tuple[object, ...], dict[int, int]] = {}
    for rank in sorted(reports):
        seen: dict[tuple[object, ...], int] = {}
        for place in reversed(range(len(reports[rank]))):
            report = reports[rank][place]
            alike = (report.kind, report.ranks, report.signature)
            nth = seen[alike] = seen.get(alike, 0) + 1
            units.setdefault((*alike, nth), {})[rank] = place
    return list(units.values())


def _is_equal(of_unit: Mapping[int, Report]) -> bool:
    is_torn = any(report.is_torn for report in of_unit.values())
    return not is_torn and len({report.steps for report in of_unit.values()}) == 1


def _copy(places: Mapping[int, int], of_unit: Mapping[int, Report]) -> Decision:
    # Whole before torn, then the most advanced, then the lowest rank.
    source = min(of_unit, key=lambda rank: (of_unit[rank].is_torn, -sum(of_unit[rank].steps), rank))
    best = of_unit[source]
    behind = tuple(
        rank
        for rank, report in sorted(of_unit.items())
        if rank != source and (report.is_torn or best.is_torn or report.steps != best.steps)
    )
    if best.is_torn:
        line = (
            f"Every rank was interrupted in the midst of an optimizer step of {best.name}: "
            f"{name_ranks(behind)} copied it from rank {source}, where a part of the parameters "
            "has made that step."
        )
    else:
        verb = "it" if len(behind) == 1 else "they"
        line = (
            f"{begin_with_ranks(behind)} had lost step {_number(best.steps)}: {verb} copied the "
            f"model ({best.name}) and its optimizer from rank {source}."
        )
    return Decision(places, "copy", best.steps, line, source, behind)


def _roll_back(places: Mapping[int, int], of_unit: Mapping[int, Report]) -> Decision:
    newest = max((report.steps for report in of_unit.values()), key=sum)
    name = next(iter(of_unit.values())).name
    is_apart = next(iter(of_unit.values())).kind == "apart"
    common = _common(of_unit)
    if not common:
        line = (
            f"The ranks that hold {name} are one step apart ({_spread(of_unit)}), and no snapshot "
            "is common to all of them: its parts do not fit together any more."
        )
        return Decision(places, "refuse", newest, line, lost=_number(newest))
    steps = max(common, key=sum)
    age = max(dict(report.snapshots)[steps] for report in of_unit.values())
    count = _number(newest) - _number(steps)
    apart = "at different steps" if is_apart else "one step apart"
    line = (
        f"The ranks that hold {name} were {apart}: rolled back {count} "
        f"step{'' if count == 1 else 's'}, to step {_number(steps)} (snapshot {age:.0f} s old)."
    )
    return Decision(places, "roll back", steps, line, lost=count)


def _common(of_unit: Mapping[int, Report]) -> list[Steps]:
    """Return the steps at which all ranks hold a snapshot."""
    held = [dict(report.snapshots) for report in of_unit.values()]
    return [steps for steps in held[0] if all(steps in other for other in held)]


def _settle_apart(places: Mapping[int, int], of_unit: Mapping[int, Report]) -> Decision:
    """Go back together, or begin anew from the most advanced rank's model."""
    if _common(of_unit):
        return _roll_back(places, of_unit)
    made = _copy(places, of_unit)
    line = (
        f"The ranks that train {of_unit[made.source].name} apart were at different steps "
        f"({_spread(of_unit)}), and no snapshot is common to all of them: "
        f"{name_ranks(made.behind)} copied the model and its optimizer from rank {made.source}. "
        "Training is sound, and not what it would have been."
    )
    return replace(made, line=line)


_DECIDE: Mapping[Kind, Callable[[Mapping[int, int], Mapping[int, Report]], Decision]] = {
    "replicated": _copy,
    "sharded": _roll_back,
    "apart": _settle_apart,
}


def _refuse_lost(
    places: Mapping[int, int], of_unit: Mapping[int, Report], lost: list[int]
) -> Decision:
    newest = max((report.steps for report in of_unit.values()), key=sum)
    name = next(iter(of_unit.values())).name
    line = f"{begin_with_ranks(lost)} died with a part of {name}, of which there is no second copy."
    level = _is_equal(of_unit)
    return Decision(places, "refuse", newest, line, lost=_number(newest), is_level=level)


def _number(steps: Steps) -> int:
    """Return the step's number for people: of the optimizer that has made most."""
    return max(steps, default=0)


def _spread(of_unit: Mapping[int, Report]) -> str:
    by_step: dict[str, list[int]] = {}
    for rank, report in sorted(of_unit.items()):
        torn = " and a part" if report.is_torn else ""
        by_step.setdefault(f"{_number(report.steps)}{torn}", []).append(rank)
    return ", ".join(f"{name_ranks(ranks)} at step {step}" for step, ranks in by_step.items())
