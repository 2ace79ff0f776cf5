"""Decide what ranks do that a fault left one step apart. Pure: reports in, decisions out.

A *unit* is one wrapped model with the optimizers that hold its parameters. After a fault one rank
may have finished the step that another lost. *Replicated* units are made equal by copying from the
most advanced rank; *sharded* ones, of which no rank has a second copy, go back together to a
snapshot that all of them hold, or are refused. What ranks trained in the same turns (generator and
discriminator) goes back to the same turn, so that its batches are trained on again by all of it.
What follows the steps beside them is `follow`'s.
Ranks that train *apart* (local SGD) go back in the same way, each to its own; where they cannot,
they are made equal: all models are as good. Ranks that train on their own have no unit, and are
left alone.

What of two ranks is the same is known by its name (`identity`), agreed when it was made. Of what is
not on all ranks of a unit nothing is copied: a model is left as it is, and an optimizer that has
stepped steps no more, because its steps may not agree. Both are said.

Every rank decides by itself, from the same reports, and so all decide the same.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from nbdist.shared.text import begin_with_ranks, counted, name_ranks

Kind = Literal["replicated", "sharded", "apart"]
Steps = tuple[int, ...]  # of each optimizer, the newest first

LONG_AGO_S = 1e9  # an infinity that JSON has


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What one rank says of one unit.

    Attributes:
        kind: Whether each rank holds all of it, a part, or a model of its own for a while.
        name: For people, such as `GPT`.
        ranks: Global ranks that train it together.
        identity: Its name, equal on all of them, and on no other unit; empty where it has none.
        steps: Made since the optimizers were.
        parts: The names of the optimizers that `steps` is of.
        model: The name of the replicated model that it trains, if it trains one.
        is_torn: An optimizer's step was begun and not ended, and has changed something.
        is_settled: It is refused already.
        is_told: It was said that other ranks do not hold it.
        snapshots: The optimizers' steps at each that the rank holds, newest first, and ages in s.
        turns: In which each of them was taken, as the rank counts turns.
        is_alike: Whether options are the same on all ranks: not in pipelines.
        copies: Of a sharded unit, the ranks that hold the same part of it as this one.
        idle_s: Since its optimizers' last step in the cell that ended, in s.
    """

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    identity: str
    steps: Steps
    parts: tuple[str, ...] = ()
    model: str = ""
    is_torn: bool = False
    is_settled: bool = False
    is_told: bool = False
    snapshots: tuple[tuple[Steps, float], ...] = ()
    turns: tuple[int, ...] = ()
    is_alike: bool = True
    copies: tuple[int, ...] = ()
    idle_s: float = LONG_AGO_S


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one unit.

    Attributes:
        places: Of each rank that has the unit: its number among that rank's reports.
        action: What its ranks do. "forbid": optimizers that are not in `parts` step no more.
            "tell": nothing; what died comes from a living rank, with the clone.
        steps: What every rank has made afterwards.
        parts: The optimizers that all its ranks have, in the order of `steps`.
        source: Who is copied from, when copied.
        behind: Who copies.
        line: What is said of it; also the reason when refused.
        lost: Steps that had been made and must be made again.
        is_level: Whether the ranks that live all stand at the same whole step.
        given: Who gets its part, and from whose memory, when rolled back: pairs of ranks.
        identity: The unit's.
        could: Of what is rolled back, all steps to which it could go.
        is_idle: It is rolled back, and the last cell has not trained it.
    """

    places: Mapping[int, int]
    action: Literal["copy", "roll back", "refuse", "leave", "forbid", "tell"]
    steps: Steps
    parts: tuple[str, ...]
    line: str
    source: int = -1
    behind: tuple[int, ...] = field(default=())
    lost: int = 0
    is_level: bool = False
    given: tuple[tuple[int, int], ...] = ()
    identity: str = ""
    could: tuple[Steps, ...] = ()
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What lies in a peer's memory of a rank that died.

    Attributes:
        holder: The peer, a living rank.
        snapshots: By the units' identities: steps and ages in s, newest first.
    """

    holder: int
    snapshots: Mapping[str, Sequence[tuple[Steps, float]]]


def to_json(reports: Sequence[ModelReport]) -> str:
    """Return the text in which a rank's reports travel."""
    return json.dumps([asdict(report) for report in reports])


def from_json(text: str | bytes) -> list[ModelReport]:
    """Return the reports that `to_json` wrote."""
    return [
        ModelReport(
            kind=item["kind"],
            name=item["name"],
            ranks=tuple(item["ranks"]),
            identity=item["identity"],
            steps=tuple(item["steps"]),
            parts=tuple(item["parts"]),
            model=item["model"],
            is_torn=item["is_torn"],
            is_settled=item["is_settled"],
            is_told=item["is_told"],
            snapshots=tuple((tuple(steps), age) for steps, age in item["snapshots"]),
            turns=tuple(item["turns"]),
            is_alike=item["is_alike"],
            copies=tuple(item["copies"]),
            idle_s=item["idle_s"],
        )
        for item in json.loads(text)
    ]


def decide(
    reports: Mapping[int, Sequence[ModelReport]],
    replacements: Iterable[int],
    kept: Mapping[int, Kept] | None = None,
) -> list[Decision]:
    """Return what is to be done, in an order that all ranks share; nothing for units that agree.

    Args:
        reports: Of every rank, its units in the order in which they were made.
        replacements: Ranks whose processes are new: they hold nothing yet.
        kept: By new rank, what lies in a peer's memory.
    """
    new = set(replacements)
    decisions = _decide_each(reports, new, kept)
    if together := _at_one_turn(decisions, reports):
        decisions = _decide_each(_only(reports, together), new, kept, together)
    return [_tell_who_stays(decision, decisions, reports) for decision in decisions]


def _decide_each(
    reports: Mapping[int, Sequence[ModelReport]],
    new: set[int],
    kept: Mapping[int, Kept] | None,
    together: Collection[tuple[int, int]] = (),
) -> list[Decision]:
    """Return what each unit needs; what is in `together` (rank, place) goes back if it is equal."""
    decisions = []
    for places in _matched(reports):
        of_unit = {rank: reports[rank][place] for rank, place in places.items()}
        some = next(iter(of_unit.values()))
        lost = sorted(new & set(some.ranks))
        if any(report.is_settled for report in of_unit.values()):
            continue
        if not reports.keys() >= set(some.ranks):
            continue  # made for ranks that there are no more: the scale has said so
        if some.kind == "sharded" and (gone := _without_copy(of_unit, lost)):
            is_whole = set(some.ranks) <= new | set(of_unit)
            found = _give_back(places, _shared(of_unit), gone, kept or {}) if is_whole else None
            decisions.append(found or _refuse_lost(places, of_unit, gone, kept))
        elif missing := sorted(set(some.ranks) - new - set(of_unit)):
            decisions += _leave(places, of_unit, missing, reports)
        else:
            decisions += _forbid_strangers(places, of_unit)
            shared = _shared(of_unit)
            if not _is_equal(shared):
                decisions.append(_DECIDE[some.kind](places, shared))
            elif set(places.items()) <= set(together):
                decisions += _go_with_it(places, shared)
            if some.kind == "sharded" and lost:
                decisions.append(_tell_of_copies(places, of_unit, lost))
    return decisions


def _at_one_turn(
    decisions: Sequence[Decision], reports: Mapping[int, Sequence[ModelReport]]
) -> dict[tuple[int, int], Steps]:
    """Return the snapshots, by (rank, place), of the newest turn to which all can go together.

    All: what goes back anyway, and what the same ranks trained beside it. Empty: nothing goes back,
    or there is no such turn.
    """
    decided = {pair for d in decisions for pair in d.places.items()}
    units = [
        (d.places, d.could)
        for d in decisions
        if d.action == "roll back" and not d.is_idle and _is_sharded(d.places, reports)
    ]
    if not units:
        return {}
    first, could = units[0]
    for places in _matched(reports):
        of_unit = {rank: reports[rank][place] for rank, place in places.items()}
        is_beside = set(places) == set(first) and not _is_idle(of_unit)
        if is_beside and _is_sharded(places, reports) and not decided & set(places.items()):
            units.append((places, tuple(_common(of_unit))))
    for steps in sorted(could, key=sum, reverse=True):
        turns = {rank: _turns(reports[rank][place]).get(steps, -1) for rank, place in first.items()}
        found = [_in_turn(places, could, turns, reports) for places, could in units]
        if all(found):
            return {pair: its for one in found for pair, its in one.items()}
    return {}


def _in_turn(
    places: Mapping[int, int],
    could: Iterable[Steps],
    turns: Mapping[int, int],
    reports: Mapping[int, Sequence[ModelReport]],
) -> dict[tuple[int, int], Steps]:
    """Return a unit's snapshots, by (rank, place), of these turns; empty if it has none."""
    for steps in could:
        if all(_turns(reports[r][at]).get(steps) == turns.get(r) for r, at in places.items()):
            return dict.fromkeys(places.items(), steps)
    return {}


def _turns(report: ModelReport) -> dict[Steps, int]:
    """Return in which turn each snapshot was taken."""
    return {steps: turn for (steps, _), turn in zip(report.snapshots, report.turns, strict=False)}


def _is_sharded(places: Mapping[int, int], reports: Mapping[int, Sequence[ModelReport]]) -> bool:
    return all(reports[rank][place].kind == "sharded" for rank, place in places.items())


def _is_idle(of_unit: Mapping[int, ModelReport]) -> bool:
    """Return whether the last cell has not trained a unit, on no rank."""
    return all(report.idle_s >= LONG_AGO_S for report in of_unit.values())


def _only(
    reports: Mapping[int, Sequence[ModelReport]], chosen: Mapping[tuple[int, int], Steps]
) -> dict[int, list[ModelReport]]:
    """Return the reports with no other snapshots than these."""

    def one(rank: int, place: int, report: ModelReport) -> ModelReport:
        if (steps := chosen.get((rank, place))) is None:
            return report
        return replace(report, snapshots=((steps, dict(report.snapshots)[steps]),), turns=())

    return {
        rank: [one(rank, place, report) for place, report in enumerate(units)]
        for rank, units in reports.items()
    }


def _tell_who_stays(
    decision: Decision, decisions: Sequence[Decision], reports: Mapping[int, Sequence[ModelReport]]
) -> Decision:
    """Say what was trained since the snapshot that a unit goes back to, and does not go back."""
    if decision.action != "roll back":
        return decision
    moved = {
        (rank, place)
        for other in decisions
        if other.action in ("roll back", "refuse", "forbid")
        for rank, place in other.places.items()
    }
    rank, own = next(iter(decision.places.items()))
    age = dict(reports[rank][own].snapshots).get(decision.steps, 0.0)
    staying = [
        f"{report.name} at step {_made(report):,}"
        for place, report in enumerate(reports[rank])
        if (rank, place) not in moved
        and report.identity
        and report.idle_s < age
        and _made(report) != max(decision.steps)  # it stands where this one goes
    ]
    if not staying:
        return decision
    line = (
        f"{decision.line} What was trained since then and stays as it is, {', '.join(staying)}, "
        "is trained on those batches again."
    )
    return replace(decision, line=line)


def has_unmatched(
    reports: Mapping[int, Sequence[ModelReport]], replacements: Iterable[int]
) -> bool:
    """Return whether a rank holds a unit that its partners do not: garbage, most of the time."""
    new = set(replacements)
    return any(
        set(reports[rank][place].ranks) - new != set(places)
        for places in _matched(reports)
        for rank, place in places.items()
    )


def _matched(reports: Mapping[int, Sequence[ModelReport]]) -> list[dict[int, int]]:
    """Return each unit as rank -> place, by the names that their ranks have agreed on."""
    units: dict[tuple[object, ...], dict[int, int]] = {}
    for rank in sorted(reports):
        for place, report in enumerate(reports[rank]):
            alone = (rank, place) if not report.identity else None
            key = (report.kind, report.ranks, report.identity, alone)
            # Two of one name on a rank: which of them its peers mean is not known.
            there = units.setdefault(key, {})
            if rank in there:
                units[*key, rank, place] = {rank: place}
            else:
                there[rank] = place
    return list(units.values())


def _leave(
    places: Mapping[int, int],
    of_unit: Mapping[int, ModelReport],
    missing: list[int],
    reports: Mapping[int, Sequence[ModelReport]],
) -> list[Decision]:
    """Copy nothing of a unit that some of its ranks do not hold; stop an optimizer of shards."""
    some = next(iter(of_unit.values()))
    if any(report.is_told for report in of_unit.values()):
        return []
    known = [report.model for rank in missing for report in reports[rank]]
    if some.kind == "replicated" and some.model and some.model in known:
        return []  # they train it by an optimizer whose states were lost here
    holders, others = begin_with_ranks(sorted(of_unit)), name_ranks(missing)
    holds = "holds" if len(of_unit) == 1 else "hold"
    does = "does" if len(missing) == 1 else "do"
    if some.kind == "sharded":
        if not any(map(_has_stepped, of_unit.values())):
            return []
        line = (
            f"{holders} {holds} an optimizer of {some.name} that {others} {does} not: it cannot "
            "step any more, because its parts may not fit together."
        )
        return [Decision(places, "forbid", some.steps, (), line)]
    line = (
        f"{holders} {holds} {some.name}, wrapped for {name_ranks(some.ranks)}, and {others} {does} "
        "not: it was left as it is."
    )
    return [Decision(places, "leave", some.steps, some.parts, line)]


def _forbid_strangers(
    places: Mapping[int, int], of_unit: Mapping[int, ModelReport]
) -> list[Decision]:
    """Stop optimizers that have stepped and are not on all ranks of their model."""
    parts = _common_parts(of_unit)
    holders = [
        rank
        for rank, report in sorted(of_unit.items())
        if any(
            made for part, made in zip(report.parts, report.steps, strict=True) if part not in parts
        )
    ]
    some = next(iter(of_unit.values()))
    if some.kind != "replicated" or not holders:
        return []
    holds = "holds" if len(holders) == 1 else "hold"
    line = (
        f"{begin_with_ranks(holders)} {holds} an optimizer of {some.name} that not all of "
        f"{name_ranks(some.ranks)} do: it cannot step any more, for it is not known "
        "whether its steps agree."
    )
    return [Decision(places, "forbid", some.steps, parts, line)]


def _shared(of_unit: Mapping[int, ModelReport]) -> dict[int, ModelReport]:
    """Return the reports of a unit with what all of its ranks have, in one order."""
    parts = _common_parts(of_unit)

    def only(report: ModelReport) -> ModelReport:
        made = dict(zip(report.parts, report.steps, strict=True))
        return replace(report, parts=parts, steps=tuple(made[part] for part in parts))

    return {rank: only(report) for rank, report in of_unit.items()}


def _common_parts(of_unit: Mapping[int, ModelReport]) -> tuple[str, ...]:
    """Return the names that all ranks report once, in the order of the first."""
    every = [report.parts for report in of_unit.values()]
    return tuple(p for p in every[0] if p and all(parts.count(p) == 1 for parts in every))


def _has_stepped(report: ModelReport) -> bool:
    return report.is_torn or any(report.steps)


def _is_equal(of_unit: Mapping[int, ModelReport]) -> bool:
    is_torn = any(report.is_torn for report in of_unit.values())
    return not is_torn and len({report.steps for report in of_unit.values()}) == 1


def _copy(places: Mapping[int, int], of_unit: Mapping[int, ModelReport]) -> Decision:
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
            f"Every rank was interrupted in the middle of an optimizer step of {best.name}: "
            f"{name_ranks(behind)} copied it from rank {source}, where a part of the parameters "
            "has made that step."
        )
    else:
        verb = "it" if len(behind) == 1 else "they"
        line = (
            f"{begin_with_ranks(behind)} had lost step {_made(best):,}: {verb} copied the "
            f"model ({best.name}) and its optimizer from rank {source}."
        )
    return Decision(places, "copy", best.steps, best.parts, line, source, behind)


def _roll_back(
    places: Mapping[int, int],
    of_unit: Mapping[int, ModelReport],
    common: Sequence[Steps] | None = None,
) -> Decision:
    # Who has begun most has seen all that belongs to the step of a snapshot.
    source = max(of_unit, key=lambda rank: (_begun(of_unit[rank]), -rank))
    best = of_unit[source]
    common = _common(of_unit) if common is None else common
    if not common:
        line = (
            f"The ranks that hold {best.name} are one step apart ({_spread(of_unit)}), and no "
            "snapshot is common to all of them: its parts do not fit together any more."
        )
        return Decision(places, "refuse", best.steps, best.parts, line, lost=_made(best))
    steps = max(common, key=sum)
    age = max(dict(report.snapshots)[steps] for report in of_unit.values())
    count = max(map(_made, of_unit.values())) - max(steps)
    apart = "at different steps" if best.kind == "apart" else "one step apart"
    why = f"The ranks that hold {best.name} were {apart}"
    if _is_equal(of_unit):
        why = f"{best.name[0].upper()}{best.name[1:]} was trained in the same steps"
    line = (
        f"{why}: rolled back {counted(count, 'step')}, to step {max(steps):,} (snapshot "
        f"{age:.0f} s old)."
    )
    back = Decision(places, "roll back", steps, best.parts, line, source, lost=count)
    return replace(back, could=tuple(common), is_idle=_is_idle(of_unit))


def _go_with_it(places: Mapping[int, int], of_unit: Mapping[int, ModelReport]) -> list[Decision]:
    """Go back beside what was trained in the same turns; it may stand there still."""
    back = _roll_back(places, of_unit)
    return [back] if any(report.steps != back.steps for report in of_unit.values()) else []


def _common(of_unit: Mapping[int, ModelReport]) -> list[Steps]:
    """Return the steps at which all ranks hold a snapshot."""
    held = [dict(report.snapshots) for report in of_unit.values()]
    return [steps for steps in held[0] if all(steps in other for other in held)]


def _settle_apart(places: Mapping[int, int], of_unit: Mapping[int, ModelReport]) -> Decision:
    """Go back together, or start over from the most advanced rank's model."""
    if _common(of_unit):
        return _roll_back(places, of_unit)
    made = _copy(places, of_unit)
    line = (
        f"The ranks that train {of_unit[made.source].name} apart were at different steps "
        f"({_spread(of_unit)}), and no snapshot is common to all of them: "
        f"{name_ranks(made.behind)} copied the model and its optimizer from rank {made.source}. "
        "Training is valid, but differs from an undisturbed run."
    )
    return replace(made, line=line)


_DECIDE: Mapping[Kind, Callable[[Mapping[int, int], Mapping[int, ModelReport]], Decision]] = {
    "replicated": _copy,
    "sharded": _roll_back,
    "apart": _settle_apart,
}


def _without_copy(of_unit: Mapping[int, ModelReport], lost: list[int]) -> list[int]:
    """Return the lost ranks whose part of a unit no living rank holds."""
    held = {rank for report in of_unit.values() for rank in report.copies}
    return [rank for rank in lost if rank not in held]


def _give_back(
    places: Mapping[int, int],
    of_unit: Mapping[int, ModelReport],
    gone: list[int],
    kept: Mapping[int, Kept],
) -> Decision | None:
    """Go back to a step that all living ranks hold, and peers for those that died; None if none."""
    some = next(iter(of_unit.values()))
    if any(rank not in kept for rank in gone):
        return None
    of_dead = {
        rank: replace(some, snapshots=tuple(kept[rank].snapshots.get(some.identity, ())))
        for rank in gone
    }
    common = _common({**of_unit, **of_dead})
    if not common:
        return None
    back = _roll_back(places, of_unit, common)
    given = tuple((rank, kept[rank].holder) for rank in gone)
    took = ", ".join(f"rank {rank}'s part from rank {holder}" for rank, holder in given)
    line = (
        f"{begin_with_ranks(gone)} died with a part of {some.name}, which lay in a peer's memory: "
        f"all ranks went back {counted(back.lost, 'step')}, to step {max(back.steps):,}, and took "
        f"{took}."
    )
    return replace(back, line=line, given=given, identity=some.identity)


def _tell_of_copies(
    places: Mapping[int, int], of_unit: Mapping[int, ModelReport], lost: list[int]
) -> Decision:
    """Say from which rank each lost rank's part comes, in the clone that follows."""
    some = next(iter(of_unit.values()))
    took = ", ".join(
        f"rank {rank}'s from rank {min(r for r, said in of_unit.items() if rank in said.copies)}"
        for rank in lost
    )
    line = f"The part of {some.name} that died was copied from a rank that holds the same: {took}."
    return Decision(places, "tell", some.steps, some.parts, line)


def _refuse_lost(
    places: Mapping[int, int],
    of_unit: Mapping[int, ModelReport],
    lost: list[int],
    kept: Mapping[int, Kept] | None,
) -> Decision:
    newest = max(of_unit.values(), key=lambda report: sum(report.steps))
    name = newest.name
    line = f"{begin_with_ranks(lost)} died with a part of {name}, of which there is no second copy."
    if kept is not None:
        line = f"{line[:-1]}: no living peer has one of a step that all ranks can go back to."
    level = _is_equal(of_unit)
    return Decision(
        places,
        "refuse",
        newest.steps,
        newest.parts,
        line,
        lost=_made(newest),
        is_level=level,
        identity=newest.identity,
    )


def _made(report: ModelReport) -> int:
    """Return the number of steps for people: of the optimizer that has made most."""
    return max(report.steps, default=0)


def _begun(report: ModelReport) -> tuple[int, int]:
    """Return how far a rank has come: in steps of the first optimizer, then of all."""
    return _made(report) + report.is_torn, sum(report.steps)


def _spread(of_unit: Mapping[int, ModelReport]) -> str:
    by_step: dict[str, list[int]] = {}
    for rank, report in sorted(of_unit.items()):
        torn = " and a part" if report.is_torn else ""
        by_step.setdefault(f"{_made(report)}{torn}", []).append(rank)
    return ", ".join(f"{name_ranks(ranks)} at step {step}" for step, ranks in by_step.items())
