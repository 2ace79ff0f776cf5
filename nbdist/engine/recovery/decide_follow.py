"""Decide what becomes of what follows the steps. Pure: reports in, decisions out.

After models and optimizers stand at one step, ranks that train together may have come differently
far in its *turn*: one has made the scheduler's step, another was on its way there. What follows is
copied from the rank that had come furthest. Where no rank had made all that is due, the step is
*half done*, which is said: nothing can make up for code that did not run. Where no optimizer had
stepped in the turn, numbers go back to where it began, with the batch that they counted.

Every rank decides by itself, from the same reports, and so all decide the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.engine.steps.followers.grown_lists import is_length, list_of
from nbdist.engine.steps.followers.progress import Progress
from nbdist.shared.text import begin_with_ranks, counted, name_ranks

Numbers = Mapping[str, Any]
_MOST_NAMES = 6


@dataclass(frozen=True, slots=True)
class FollowReport:
    """What one rank says, when its models stand where they shall.

    Attributes:
        ranks: Those that train the cell's models together with it; () if it trains none.
        step: At which they stand.
        names: Of the models, for people.
        is_alike: Whether what follows is the same on all of them: not in pipelines.
        has_copied: It had lost a step, and copied it.
        is_back: A unit of it went back to a snapshot.
        is_whole: All that belongs to the step it went back to is back, too.
        progress: Of the turn that the fault has ended.
        cut: What follows and holds a part that no other rank has.
        continues: The cell trains what was there before it: run again, it does not start over.
    """

    ranks: tuple[int, ...] = ()
    step: int = 0
    names: tuple[str, ...] = ()
    is_alike: bool = True
    has_copied: bool = False
    is_back: bool = False
    is_whole: bool = True
    progress: Progress = field(default_factory=Progress)
    cut: tuple[str, ...] = ()
    continues: bool = True

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "FollowReport":
        """Return the report whose `asdict` travelled as JSON."""
        fields = _with_tuples(plain)
        return FollowReport(**{**fields, "progress": Progress(**fields["progress"])})


def _with_tuples(value: Any) -> Any:
    """Return a value with tuples again where JSON has made lists of them."""
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    if isinstance(value, dict):
        return {name: _with_tuples(one) for name, one in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class Following:
    """What becomes of what follows the steps of some ranks.

    Attributes:
        source: The rank that is copied from; -1: none.
        behind: Who copies.
        names: What they copy, numbers aside.
        numbers: What numbers become where they are copied.
        put_back: By rank, the numbers that go back to where the turn began.
        lacking: By rank, what of the step is not done there.
        is_unknown: Whether all of it is done cannot be known, or ranks count differently.
        lines: For people.
    """

    source: int = -1
    behind: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    numbers: Numbers = field(default_factory=dict)
    put_back: Mapping[int, Numbers] = field(default_factory=dict)
    lacking: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    is_unknown: bool = False
    lines: tuple[str, ...] = ()


def decide(reports: Mapping[int, FollowReport]) -> list[Following]:
    """Return what is to be done, for each set of ranks that train together, and for the others."""
    together = [_settle({rank: reports[rank] for rank in ranks}) for ranks in _together(reports)]
    idle = {r: _changed(report.progress) for r, report in reports.items() if not report.ranks}
    put_back = {rank: numbers for rank, numbers in idle.items() if numbers}
    if not put_back:
        return together
    return [Following(put_back=put_back, lines=tuple(_numbers_line(put_back))), *together]


def _together(reports: Mapping[int, FollowReport]) -> list[list[int]]:
    """Return the sets of ranks that models connect, of those that report."""
    sets: list[set[int]] = []
    for rank, report in sorted(reports.items()):
        if not report.ranks:
            continue
        joined = {rank} | (set(report.ranks) & set(reports))
        apart = [one for one in sets if not one & joined]
        sets = [*apart, joined.union(*(one for one in sets if one & joined))]
    return [sorted(r for r in one if reports[r].ranks) for one in sets]


def _settle(reports: Mapping[int, FollowReport]) -> Following:
    if any(report.is_back for report in reports.values()):
        return _after_going_back(reports)
    source = min(reports, key=lambda rank: _order(rank, reports[rank]))
    best = reports[source].progress
    behind = tuple(
        rank
        for rank, report in sorted(reports.items())
        if rank != source and _place(report) != _place(reports[source])
    )
    is_alike = all(report.is_alike for report in reports.values())
    is_copied = bool(behind) and is_alike
    names = _copied(reports, source, behind) if is_copied else ()
    numbers = _numbers(reports, source, behind) if is_copied else {}
    lacking = {
        rank: _lacks(report, best, {*names, *numbers}) if rank in behind else best.lacking
        for rank, report in reports.items()
    }
    put_back = {
        rank: _changed(report.progress)
        for rank, report in reports.items()
        if rank not in behind and not report.progress.has_stepped
    }
    uneven = {} if behind else _uneven({rank: r.progress for rank, r in reports.items()})
    lines = [
        *_copied_line(reports, source, behind, names, numbers),
        *_uneven_lines(uneven),
        *_numbers_line(put_back),
        *_ahead_line(reports, behind),
        *_half_lines(reports, lacking),
        *_unknown_line(reports, best),
        *_unfinished_line(reports, _left(reports)),
    ]
    return Following(
        source,
        behind,
        names,
        numbers,
        put_back,
        _without_lengths(lacking),
        bool(best.unknown) or bool(uneven),
        tuple(lines),
    )


def _order(rank: int, report: FollowReport) -> tuple[bool, bool, int, int, int]:
    """Return what puts ranks in order, the one that came furthest first."""
    progress = report.progress
    left = len(progress.lacking), len(progress.unknown)
    return report.has_copied, progress.has_stepped, *left, rank


def _place(report: FollowReport) -> tuple[Any, ...]:
    """Return what is equal on ranks that came equally far."""
    progress = report.progress
    return report.has_copied, progress.has_stepped, progress.lacking, progress.unknown


def _numbers(
    reports: Mapping[int, FollowReport], source: int, behind: Sequence[int]
) -> dict[str, Any]:
    """Return what numbers become on ranks that copy: those that were equal before the step."""
    best = reports[source].progress
    before = best.began if best.has_stepped else best.before
    after = best.now if best.has_stepped else best.began
    return {
        name: after[name]
        for name, value in before.items()
        if name in best.did
        and name in after
        and not is_length(name)
        and all(reports[r].progress.began.get(name) == value for r in behind)
    }


def _uneven(progress: Mapping[int, Progress]) -> dict[str, dict[int, int]]:
    """Return the counters, by rank, that were equal as a turn began in which ranks have stepped.

    Ranks stand at different places of a loop without a loader, or each counts its own, as hits of
    its samples: in a training's first turn nothing tells these apart, nor which value is right.
    """
    first, *others = progress.values()
    if not others or not all(one.has_stepped for one in progress.values()):
        return {}
    whole_numbers = {
        rank: {n: v for n, v in one.now.items() if type(v) is int and not is_length(n)}
        for rank, one in progress.items()
    }
    return {
        name: {rank: now[name] for rank, now in whole_numbers.items()}
        for name, value in first.began.items()
        if all(one.began.get(name) == value for one in others)
        and all(name in now for now in whole_numbers.values())
        and len({now[name] for now in whole_numbers.values()}) > 1
    }


def _copied(
    reports: Mapping[int, FollowReport], source: int, behind: Sequence[int]
) -> tuple[str, ...]:
    """Return what ranks copy: all that moved with the step, and of which others have no part."""
    cut = {name for rank in (source, *behind) for name in reports[rank].cut}
    best = reports[source].progress
    return tuple(name for name in best.did if best.kinds.get(name) and name not in cut)


def _lacks(report: FollowReport, best: Progress, copied: set[str]) -> tuple[str, ...]:
    """Return what a rank that copies lacks all the same."""
    progress = report.progress
    due = set(progress.lacking) | set(best.lacking)
    if report.has_copied:  # it had done nothing of what comes after the step
        due |= {n for n in best.did if best.kinds.get(n) or _is_still(progress, n)}
    return tuple(sorted((due - copied) | set(best.lacking)))


def _is_still(progress: Progress, name: str) -> bool:
    """Return whether a counter stands as when the turn began."""
    value = progress.began.get(name)
    return type(value) is int and progress.now.get(name) == value


def _changed(progress: Progress) -> dict[str, Any]:
    """Return the numbers that the turn has moved, as they were when it began."""
    return {n: progress.began[n] for n in progress.ahead if n in progress.began}


def _after_going_back(reports: Mapping[int, FollowReport]) -> Following:
    """Copy what follows from a rank that knows all of the step of the snapshot."""
    whole = [rank for rank, report in sorted(reports.items()) if report.is_whole]
    behind = tuple(rank for rank in sorted(reports) if rank not in whole)
    if not behind:
        return Following()
    if not whole or not all(report.is_alike for report in reports.values()):
        lost = {
            rank: (*sorted(reports[rank].progress.kinds), *reports[rank].progress.written)
            for rank in behind
        }
        lines = (*_half_lines(reports, lost), *_unfinished_line(reports, behind))
        return Following(lacking=_without_lengths(lost), lines=lines)
    source = whole[0]
    cut = {name for report in reports.values() for name in report.cut}
    kinds = reports[source].progress.kinds
    names = tuple(name for name, kind in kinds.items() if kind and name not in cut)
    lacking = {
        rank: (*sorted(cut & set(kinds)), *reports[rank].progress.written) for rank in behind
    }
    lines = (*_half_lines(reports, lacking), *_unfinished_line(reports, behind))
    return Following(source, behind, names, {}, {}, lacking, lines=lines)


# ---- Words --------------------------------------------------------------------------------------


def _copied_line(
    reports: Mapping[int, FollowReport],
    source: int,
    behind: Sequence[int],
    names: Sequence[str],
    numbers: Numbers,
) -> list[str]:
    behind_in = [reports[rank].progress for rank in behind]
    lacked = {name for one in behind_in for name in (*one.lacking, *one.unknown)}
    has_lost = any(reports[rank].has_copied for rank in behind)
    kinds = reports[source].progress.kinds
    taken = [name for name in (*names, *sorted(numbers)) if has_lost or name in lacked]
    if not taken:
        return []
    return [
        f"{begin_with_ranks(behind)} took {_listed(taken, kinds)} from rank {source}, "
        f"where step {reports[source].step:,} was followed by all that belongs to it."
        if not (reports[source].progress.lacking or reports[source].progress.unknown)
        else f"{begin_with_ranks(behind)} took {_listed(taken, kinds)} from rank {source}."
    ]


def _uneven_lines(uneven: Mapping[str, Mapping[int, int]]) -> list[str]:
    if not uneven:
        return []
    apart = []
    for name, by_rank in list(uneven.items())[:_MOST_NAMES]:
        by_value: dict[int, list[int]] = {}
        for rank, value in by_rank.items():
            by_value.setdefault(value, []).append(rank)
        parts = [f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items()]
        apart.append(f"{name} is {' and '.join(parts)}")
    it = "it" if len(uneven) == 1 else "them"
    line = (
        f"Equal when the step began, and not now: {', '.join(apart)}. Where ranks count together, "
        f"set {it} to one value in a cell of its own, or nbdist.restore() a checkpoint; then "
        "%dist retry."
    )
    return [line]


def _numbers_line(put_back: Mapping[int, Numbers]) -> list[str]:
    some = {n: v for numbers in reversed([*put_back.values()]) for n, v in numbers.items()}
    lists = {list_of(name): some.pop(name) for name in list(some) if is_length(name)}
    lines = []
    if some:
        values = ", ".join(f"{n} = {v!r}" for n, v in sorted(some.items())[:_MOST_NAMES])
        lines.append(f"Counted back with the batch that is lost: {values}.")
    if lists:
        some_lists = sorted(lists.items())[:_MOST_NAMES]
        lengths = ", ".join(f"{name} to {counted(length, 'item')}" for name, length in some_lists)
        lines.append(
            f"When the cell is run again, lists go back with the batch that is lost: {lengths}."
        )
    return lines


def _ahead_line(reports: Mapping[int, FollowReport], behind: Sequence[int]) -> list[str]:
    ahead: dict[str, str] = {}
    for rank, report in reports.items():
        if rank not in behind:
            kinds = report.progress.kinds
            ahead |= {n: kinds.get(n, "") for n in report.progress.ahead if kinds.get(n)}
    if not ahead:
        return []
    step = max(report.step for report in reports.values())
    moves = "moves" if len(ahead) == 1 else "move"
    line = (
        f"{_listed(sorted(ahead), ahead)} had moved since step {step:,} and cannot be put back: "
        f"with the batch that comes again {'it' if len(ahead) == 1 else 'they'} {moves} twice."
    )
    return [line]


def _half_lines(
    reports: Mapping[int, FollowReport], lacking: Mapping[int, Sequence[str]]
) -> list[str]:
    if not any(report.continues for report in reports.values()):
        return []  # a second run makes all of it
    by_names: dict[tuple[str, ...], list[int]] = {}
    for rank, names in sorted(_without_lengths(lacking).items()):
        if names:
            by_names.setdefault(tuple(names), []).append(rank)
    lines = [_half_line(reports, names, ranks) for names, ranks in by_names.items()]
    return lines + _short_lists(reports, lacking)


def _without_lengths(lacking: Mapping[int, Sequence[str]]) -> dict[int, tuple[str, ...]]:
    """Return what is lacking but items of lists: nothing that is computed follows from them."""
    return {r: tuple(n for n in names if not is_length(n)) for r, names in lacking.items()}


def _short_lists(
    reports: Mapping[int, FollowReport], lacking: Mapping[int, Sequence[str]]
) -> list[str]:
    """Return what is said of lists to which a step that was made has not added what it adds."""
    by_lists: dict[tuple[str, ...], list[int]] = {}
    for rank, names in sorted(lacking.items()):
        if lists := tuple(list_of(name) for name in names if is_length(name)):
            by_lists.setdefault(lists, []).append(rank)
    step = max(report.step for report in reports.values())
    return [
        f"On {name_ranks(ranks)} nothing was added to {_listed(lists, {})} in step {step:,}."
        for lists, ranks in by_lists.items()
    ]


def _half_line(
    reports: Mapping[int, FollowReport], lacking: Sequence[str], ranks: Sequence[int]
) -> str:
    kinds = {n: kind for r in reports.values() for n, kind in r.progress.kinds.items()}
    step = max(report.step for report in reports.values())
    models = ", ".join(sorted({n for report in reports.values() for n in report.names}))
    does = "has not followed it" if len(lacking) == 1 else "have not followed it"
    is_everywhere = len(ranks) == len(reports)  # a new rank gets what it lacks, too
    where = sorted({r for one in reports.values() for r in one.ranks}) if is_everywhere else ranks
    half = (
        f"Step {step:,} of {models} is half done on {name_ranks(where)}: {_listed(lacking, kinds)} "
        f"{does}."
    )
    unmade = {n for report in reports.values() for n in report.progress.optimizers} & set(lacking)
    if unmade:
        return (
            f"{half} The gradients of {_listed(sorted(unmade), kinds)} went with the fault. Where "
            "their backward comes after the step that was made, do the rest of the loop's body, "
            "that backward included, in a cell of its own; else nbdist.restore() a checkpoint. "
            "Then %dist retry."
        )
    option = "" if is_everywhere else f" (%%distributed -r {','.join(map(str, ranks))})"
    return (
        f"{half} Do what the loop does with {'it' if len(lacking) == 1 else 'them'} after a step "
        f"in a cell of its own{option}, or nbdist.restore() a checkpoint; then %dist retry."
    )


def _unknown_line(reports: Mapping[int, FollowReport], best: Progress) -> list[str]:
    if not best.unknown or not any(report.continues for report in reports.values()):
        return []
    step = max(report.step for report in reports.values())
    models = ", ".join(sorted({n for report in reports.values() for n in report.names}))
    line = (
        f"Whether {_listed(best.unknown, best.kinds)} had followed step {step:,} of {models} is "
        "not known, for no step before it shows that. What the loop does with "
        f"{'it' if len(best.unknown) == 1 else 'them'} after the optimizer's step, do in a cell of "
        "its own; then %dist retry."
    )
    return [line]


def _left(reports: Mapping[int, FollowReport]) -> list[int]:
    """Return the ranks that a fault has stopped between a step and the next batch."""
    return [r for r, one in sorted(reports.items()) if one.has_copied or one.progress.is_open]


def _unfinished_line(reports: Mapping[int, FollowReport], left: Sequence[int]) -> list[str]:
    """Return what is said of ranks that have not come from a step to the next batch.

    What nothing leads to cannot be found, and so cannot be named as lacking: its kinds are.
    """
    if not left or not any(report.continues for report in reports.values()):
        return []
    step = max(report.step for report in reports.values())
    beyond = sorted({name for rank in left for name in reports[rank].progress.beyond})
    kinds = [
        "random numbers drawn there",
        "a function's own variables",
        "dicts and lists made there",
    ]
    line = (
        f"On {name_ranks(left)} the code between the optimizer's step {step:,} and the next batch "
        f"did not run to its end: {_listed([*kinds, *beyond], {})} are as the fault has left them."
    )
    return [line]


def _listed(names: Sequence[str], kinds: Mapping[str, str]) -> str:
    """Return names with their classes, as a list for people."""
    listed = [f"{n} ({kinds[n]})" if kinds.get(n) not in (None, "", n) else n for n in names]
    if len(listed) > _MOST_NAMES:
        listed = [*listed[:_MOST_NAMES], f"{len(names) - _MOST_NAMES} more"]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
