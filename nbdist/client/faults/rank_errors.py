"""Say what failed on which ranks: root cause first, each cause once, consequences in one line.

Pure: what the ranks replied goes in, one `RankError` comes out.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from nbdist.client.faults import failure_advice
from nbdist.client.faults.advice import A_CELL, Advice, AdviceKind, WhatRan
from nbdist.client.faults.failure_advice import DO
from nbdist.client.faults.failures import (
    MAX_MESSAGE_CHARS,
    Death,
    Failure,
    Group,
    causes_of,
    collective_of,
    end_of,
    first_line,
    follows,
    group_failures,
    is_ours,
    place_of,
    plain,
    uses_what_is_lost,
)
from nbdist.shared import errors, gpu_errors, origins
from nbdist.shared.errors import RankError
from nbdist.shared.text import name_ranks

MAX_GROUPS: Final = 4  # shown with traceback
MAX_TRACEBACK_LINES: Final = 60
MAX_SUMMARY_CHARS: Final = 200
# A cell in a text that was written elsewhere, by a DataLoader's worker: it is in no file.
_CELL_FRAME: Final = re.compile(rf'^( *)File "{origins.CELL_FILE}"', re.MULTILINE)
# How torch hands over what a worker raised.
_CAUGHT: Final = re.compile(r"Caught (\w+) (in [^\n]+)\.\nOriginal Traceback ")


def rank_error(
    failures: Sequence[Failure],
    *,
    asked: Sequence[int],
    deaths: Sequence[Death] = (),
    where: Mapping[int, str] | None = None,
    notes: Sequence[str] = (),
    because: str = "",
    do: Advice | None = None,
    otherwise: Advice | None = None,
    in_loops: bool = False,
    ran: WhatRan = A_CELL,
    replaced: Collection[int] = (),
) -> RankError:
    """Return the one error that a failed cell raises in the notebook.

    Args:
        failures: One for each rank whose code raised.
        asked: All ranks that ran the cell.
        deaths: Ranks whose process ended.
        where: For a rank, its host and device, such as `node-b, cuda:0`; shown in brackets.
        notes: Sentences about what was done since, such as that the group was re-created.
        because: Why ranks were freed although none had failed; what they raise then is no news.
        do: What to do next; found from the failures when None.
        otherwise: What to do next where errors of CUDA or NCCL do not tell.
        in_loops: Whether loops over loaders have trained in the cell.
        ran: What ran: the cell, or which script.
        replaced: Ranks that have new processes since.
    """
    dead = {death.rank for death in deaths}
    raised = [failure for failure in failures if failure.rank not in dead]
    causes, followed = causes_of(raised, deaths, is_explained=bool(because))
    groups = group_failures(causes)
    summed = summaries(groups, where)
    if (mismatch := _mismatch(groups)) is not None:
        # Which ranks raise it, and which are freed instead, is a matter of microseconds.
        lines = [_message(mismatch), *notes]
    else:
        lines = [because or _headline(groups, followed, len(asked)), *summed, *notes]
    of_gpu = failure_advice.of_gpu(groups, asked, ran, replaced=replaced)
    advice = do or of_gpu or otherwise or failure_advice.of_failures(groups, ran)
    next_step = advice.text
    is_lost = advice.is_about_losses or any(uses_what_is_lost(f.ename) for f in raised)
    is_lost = is_lost or failure_advice.without_gpu(groups) - set(replaced) >= set(asked)
    if in_loops and not is_lost and advice.kind is not AdviceKind.RETRY:
        next_step = f"{next_step.rstrip('.')}. {ran.loops()}"
    told = _tracebacks(groups, next_step)
    # Empty lines set tracebacks apart; one error of nbdist's has none, and reads as it does alone.
    is_own = len(groups) == 1 and hasattr(errors, getattr(groups[0].first, "ename", ""))
    told = list(filter(None, told)) if is_own else [*told, ""] if told else []
    table = {f.rank: (f.ename, f.evalue) for f in raised}
    table |= {death.rank: ("Died", str(death.ended)) for death in deaths}
    return RankError(
        "\n".join([*lines, *told]),
        why=" ".join(dict.fromkeys(g.first.gpu.why for g in groups if g.first.gpu)),
        do=next_step,
        failures=table,
        causes=tuple(_cause(group, where or {}) for group in groups) or (because,),
    )


def beside_interrupt(
    failures: Iterable[Failure],
    deaths: Iterable[Death],
    *,
    killed: Iterable[int],
    at: float,
) -> list[Group]:
    """Return what failed of itself in a cell that was interrupted.

    Args:
        failures: One for each rank whose code raised.
        deaths: Ranks whose process ended.
        killed: Those that a second interrupt has ended.
        at: When it was interrupted, on the clock of `order`: what is raised later may follow.
    """
    raised = [f for f in failures if f.order < at and not follows(f)]
    ended = [death for death in deaths if death.rank not in set(killed)]
    return group_failures([*raised, *ended])


def interrupted(
    groups: Sequence[Group],
    *,
    asked: int,
    killed: Sequence[int] = (),
    where: Mapping[int, str] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the text of the KeyboardInterrupt that ends a cell.

    Args:
        groups: What failed of itself (`beside_interrupt`): the live text that told it goes.
        asked: How many ranks ran the cell.
        killed: Ranks that did not stop, and that a second interrupt has ended.
        where: For a rank, its host and device.
        notes: What was done since.
    """
    said = ["All ranks have stopped."]
    if killed:
        it = "it" if len(killed) == 1 else "them"
        said.append(f"{_who(killed).capitalize()} killed, because the interrupt did not stop {it}.")
    if not groups:
        return " ".join([*said, *notes])
    failed = sum(len(group.ranks) for group in groups)
    own = "itself" if failed == 1 else "themselves"
    said.append(f"{failed} of {asked} failed by {own}, not by the interrupt:")
    lines = [" ".join(said), *summaries(groups, where), *([" ".join(notes)] if notes else ())]
    for group in groups[:MAX_GROUPS]:
        lines += _traceback(group)
    return "\n".join(lines)


def summaries(groups: Iterable[Group], where: Mapping[int, str] | None = None) -> list[str]:
    """Return one indented line a group; `where` as in `rank_error`."""
    return [_summary(group, where or {}) for group in groups]


def _mismatch(groups: Sequence[Group]) -> Failure | None:
    """Return the mismatch, where that is all that failed."""
    first = groups[0].first if len(groups) == 1 else None
    return first if isinstance(first, Failure) and first.ename == "MismatchError" else None


def _headline(groups: Sequence[Group], followed: Sequence[Failure], asked: int) -> str:
    failed = [rank for group in groups for rank in group.ranks]
    parts = [f"{len(failed)} of {asked} ranks failed" if asked > 1 else f"rank {failed[0]} failed"]
    freed = [f for f in followed if f.ename != "KeyboardInterrupt"]
    stopped = [f.rank for f in followed if f not in freed]
    by_place: dict[str, list[int]] = {}
    for failure in freed:
        by_place.setdefault(collective_of(failure), []).append(failure.rank)
    for place, ranks in sorted(by_place.items(), key=lambda entry: min(entry[1])):
        parts.append(f"{_who(ranks)} released while waiting in {place}")
    if stopped:
        parts.append(f"{_who(stopped)} interrupted")
    return "; ".join(parts) + "."


def _who(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'}"


def _summary(group: Group, where: Mapping[int, str]) -> str:
    first = group.first
    label = name_ranks(group.ranks)
    if len(group.ranks) == 1 and first.rank in where:
        label += f" ({where[first.rank]})"
    if isinstance(first, Death):
        return f"  {label} died: {end_of(first)}"
    if first.ename == "SystemExit":
        code = first.evalue if first.evalue not in ("", "None") else ""
        error = f"called sys.exit({code})"
    else:
        message = _message(first)
        error = f"{first.ename}: {message}" if message else first.ename
    return "  " + "  ".join(part for part in (label, place_of(first), error) if part)


def _cause(group: Group, where: Mapping[int, str]) -> str:
    """Return the summary by which one attempt at a cell is compared with the next."""
    first = group.first
    if isinstance(first, Death):
        group = Group(replace(first, ended=first.ended.unmeasured()), group.ranks)
    return _summary(group, where).strip()


def _message(failure: Failure) -> str:
    """Return what happened, in a line."""
    message = _short(_told(failure.evalue.strip()), MAX_SUMMARY_CHARS)
    if failure.gpu and failure.gpu.said not in message:
        message += f": {failure.gpu.said}"
    return message


def _told(text: str) -> str:
    """Return the line of an exception's text that tells what happened: mostly its first."""
    caught = _CAUGHT.match(text)
    if caught is None:
        return first_line(text)
    last = text.rpartition("\n")[2][:MAX_MESSAGE_CHARS]
    return f"{last.removeprefix(f'{caught[1]}: ')} ({caught[2]})"


def _tracebacks(groups: Sequence[Group], next_step: str) -> list[str]:
    """Return the traceback of each group, without what is said as advice at the end."""
    lines: list[str] = []
    for group in groups[:MAX_GROUPS]:
        told = [line for line in _traceback(group) if not _is_said(line, next_step)]
        lines += told if any(told) else []
    if len(groups) > MAX_GROUPS:
        lines += ["", f"The tracebacks of {len(groups) - MAX_GROUPS} more groups are omitted."]
    return lines


def _is_said(line: str, next_step: str) -> bool:
    """Return whether a line is the advice that the error ends with."""
    return line.startswith(DO) and f"{DO}{next_step}".startswith(line.rstrip("."))


def _traceback(group: Group) -> list[str]:
    first = group.first
    if isinstance(first, Death):
        words = [_short(_CELL_FRAME.sub(r"\1cell", plain(line)), 200) for line in first.words]
        return ["", f"{name_ranks([first.rank])} wrote last:", *words] if words else []
    if first.ename == "SystemExit" or not first.traceback:
        return []
    if hasattr(errors, first.ename):
        # nbdist's own errors say what, why and do; their frames are nbdist's, and say nothing.
        what, *rest = first.evalue.strip().split("\n")
        unsaid = rest if len(what) <= MAX_SUMMARY_CHARS else [what, *rest]
        return ["", *unsaid] if unsaid else []
    frames = [frame for frame in first.traceback if not is_ours(frame)]
    # IPython opens with a rule and a line that repeats the name; the heading says it already.
    while frames and _is_heading(first_line(frames[0])):
        frames.pop(0)
    frames = [_CELL_FRAME.sub(r"\1cell", frame) for frame in frames]
    lines = [_short(line, MAX_MESSAGE_CHARS) for frame in frames for line in frame.split("\n")]
    lines = list(gpu_errors.without_repeated_advice(lines, explained=first.gpu is not None))
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) > MAX_TRACEBACK_LINES:
        head = MAX_TRACEBACK_LINES // 3
        tail = MAX_TRACEBACK_LINES - head - 1
        gone = len(lines) - head - tail
        lines = [*lines[:head], f"… {gone:,} lines not shown", *lines[-tail:]]
    of = "" if len(group.ranks) == 1 else f" (traceback from rank {first.rank})"
    return ["", f"{name_ranks(group.ranks)}{of}:", *lines]


def _is_heading(head: str) -> bool:
    first = head.strip()
    return (first != "" and set(first) <= {"-"}) or first.endswith(
        "Traceback (most recent call last)"
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} characters more)"
