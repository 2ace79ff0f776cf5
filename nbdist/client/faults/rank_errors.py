"""Say what failed on which ranks: root cause first, each cause once, consequences in one line.

Pure: what the ranks replied goes in, one `RankError` comes out. When one rank raises, its peers
sit in a collective that can never end; they are freed, and every one of them raises too. Those
errors are consequences (`is_consequence`) and tell nothing, unless nothing else failed.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PureWindowsPath  # knows both kinds of slash
from typing import Final

from nbdist.client.faults.advice import A_CELL, Advice, AdviceKind, WhatRan
from nbdist.shared import errors, gpu_errors, origins
from nbdist.shared.collectives import COLLECTIVES
from nbdist.shared.errors import RankError
from nbdist.shared.gpu_errors import GpuError
from nbdist.shared.processes.ended import Ended
from nbdist.shared.text import name_ranks

MAX_GROUPS: Final = 4  # shown with traceback
MAX_TRACEBACK_LINES: Final = 60
MAX_MESSAGE_CHARS: Final = 2000
MAX_FRAME_CHARS: Final = 20_000
MAX_SUMMARY_CHARS: Final = 200

# What a rank says when its peer, its group or the store went away: exception names, and a
# pattern for the text. The gloo and TCPStore lines were provoked on torch 2.13; those of NCCL are
# from ProcessGroupNCCL.cpp and NCCLUtils.cpp and have not been seen here.
_DISTRIBUTED: Final = (
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistError",
    "ReleasedError",  # of ours: `engine/tap/interruptible_store.py`
)
_CONSEQUENCES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"gloo/.*Connection closed by peer",
        r"gloo/.*(Connection reset by peer|Broken pipe|Connection refused)",
        r"gloo/.*Timed out waiting \d+ms for (recv|send) operation",
        r"gloo/.*Pair is not connected",
        r"Application timeout caused pair closure",
        r"Connection closed by peer \[",
        r"successfully reached monitoredBarrier, but received errors",
        r"failed to pass monitoredBarrier",
        r"Failed to (recv|send), got \d+ bytes",
        r"Connection was likely closed",
        r"wait timeout after \d+ms, keys",
        r"NCCL communicator was aborted",
        r"ncclRemoteError",
        r"remote process exited or there was a network error",
        r"this rank aborted its collectives",
        r"Watchdog caught collective operation timeout",
    )
)
# Of DataLoader, and of torch's shared memory (MapAllocator.cpp).
_NO_SHARED_MEMORY: Final = re.compile(
    r"out of shared memory|unable to (allocate|open|resize|mmap|write to)\b.*?"
    r"(shared memory|</torch_|<filename not specified>).*?(No space left|Cannot allocate)"
    r"|unable to allocate shared memory|killed by signal: Bus error",
    re.DOTALL,
)
_COLLECTIVE: Final = re.compile(
    # broadcast_object_list, all_gather_into_tensor: but reduce is not all that begins with it.
    rf"\b(({'|'.join(COLLECTIVES.keys() - {'reduce'})})\w*|reduce|i?send|i?recv|backward|wait|"
    r"init_process_group)\("
)
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
_CELL: Final = re.compile(r"Cell In\s?\[(\d+)\], line (\d+)")
_FILE: Final = re.compile(r"^\s*File (.+?):(\d+)")  # which may have spaces
# A cell in a text that was written elsewhere, by a DataLoader's worker: it is in no file.
_CELL_FRAME: Final = re.compile(rf'^( *)File "{origins.CELL_FILE}"', re.MULTILINE)
# How torch hands over what a worker raised.
_CAUGHT: Final = re.compile(r"Caught (\w+) (in [^\n]+)\.\nOriginal Traceback ")
_OURS: Final = ("nbdist", "ipyparallel", "ipykernel", "IPython")  # they carry what users write
_DO: Final = "Do:  "  # as `errors.NBDistError` prints it
_RETRY: Final = "%dist retry"
_ARROW: Final = re.compile(r"^-+> ?\d+ (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's exception, as its reply carries it.

    `order` tells which came first: a time or a count, the same clock for all ranks. `gpu` tells
    what it means, where it is an error of CUDA or NCCL.
    """

    rank: int
    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()
    order: float = 0.0
    gpu: GpuError | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """A rank whose process ended. `words` it wrote last.

    `place` is the line of the user's own at which it crashed, `gpu` as in `Failure`; where known.
    """

    rank: int
    ended: Ended
    order: float = 0.0
    words: tuple[str, ...] = ()
    place: str = ""
    gpu: GpuError | None = None


@dataclass(slots=True)
class Group:
    """Ranks that failed in the same way; `first` is the failure that is shown for all of them."""

    first: Failure | Death
    ranks: list[int] = field(default_factory=list)


def uses_what_is_lost(ename: str) -> bool:
    """Return whether an exception says that its cell uses what was lost with a rank."""
    return ename.rpartition(".")[2] in ("LostStateError", "PlaceholderError")


def _is_state(cause: "Failure | Death") -> bool:
    """Return whether a cell uses a model whose state is lost: its training starts over."""
    return isinstance(cause, Failure) and cause.ename.rpartition(".")[2] == "LostStateError"


def should_go_on(error: object) -> bool:
    """Return whether a cell that was run again started over, and has to go on instead."""
    return isinstance(error, RankError) and any(
        ename.rpartition(".")[2] == "KeptOptimizerError" for ename, _ in error.failures.values()
    )


def is_consequence(failure: Failure) -> bool:
    """Return whether this error only says that a peer, the group or the store went away."""
    name = failure.ename.rpartition(".")[2]
    return name in _DISTRIBUTED and any(
        p.search(failure.evalue[:MAX_MESSAGE_CHARS]) for p in _CONSEQUENCES
    )


def collective_of(failure: Failure) -> str:
    """Return where a freed rank waited, such as `all_reduce`, or `a collective`."""
    for frame in failure.traceback:  # from the outside in: the user's own call first
        for line in _ARROW.findall(plain(frame[:MAX_FRAME_CHARS])):
            found = _COLLECTIVE.search(line)
            if found:
                return found.group(1)
    return "a collective"


def place_of(failure: Failure) -> str:
    """Return the innermost line of the user's own: `cell 7, line 12`, `train.py, line 3`."""
    place = ""
    for frame in (*failure.traceback[:50], *failure.traceback[50:][-50:]):
        head = _head(frame)
        if cell := _CELL.search(head):
            place = f"cell {cell.group(1)}, line {cell.group(2)}"
        elif (found := _FILE.search(head)) and is_users(file := found.group(1)):
            place = f"{PureWindowsPath(file).name}, line {found.group(2)}"
    return place


def is_users(file: str) -> bool:
    """Return whether a file in a traceback is the user's: of no library, not ours, and there."""
    return not (file.startswith("<") or origins.is_library(file) or origins.is_of(file, *_OURS))


def _is_ours(frame: str) -> bool:
    """Return whether a frame of a traceback, as IPython writes it, is not worth a look."""
    found = _FILE.search(_head(frame))
    return found is not None and origins.is_of(found.group(1), *_OURS)


def _head(frame: str) -> str:
    return plain(frame.partition("\n")[0][:MAX_MESSAGE_CHARS])


def plain(text: str) -> str:
    """Return `text` without colours."""
    return _ANSI.sub("", text)


def group_failures(failures: Iterable[Failure | Death]) -> list[Group]:
    """Return failures grouped by what failed, earliest group first.

    Errors of one name at one place are of one group where their texts are equal, or equal but for
    the rank's own number and for addresses in memory.
    """
    groups: dict[tuple[str, ...], Group] = {}
    for failure in sorted(failures, key=lambda f: (f.order, f.rank)):
        keys = _keys(failure)
        group = next((groups[key] for key in keys if key in groups), None)
        if group is None:
            group = Group(failure)
        group.ranks.append(failure.rank)
        for key in keys:
            groups.setdefault(key, group)
    return list({id(group): group for group in groups.values()}.values())


def _keys(failure: Failure | Death) -> list[tuple[str, ...]]:
    """Return what must be equal, one of these, for two failures to be of one group."""
    if isinstance(failure, Death):
        return [("died", _end_of(failure))]
    if failure.ename == "MismatchError":
        # Each rank tells what it has seen of the same collective, which its first line names.
        return [(failure.ename, _head(failure.evalue))]
    place = place_of(failure)
    text = failure.evalue[:MAX_MESSAGE_CHARS]
    neutral = re.sub(r"0x[0-9a-fA-F]+", "0x…", text)
    neutral = re.sub(rf"(?<![\w.]){failure.rank}(?![\w.])", "<rank>", neutral)
    return [(failure.ename, place, "=", text), (failure.ename, place, "~", neutral)]


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
    causes: list[Failure | Death] = [f for f in raised if not _follows(f)]
    causes += deaths
    followed = [f for f in raised if _follows(f)]
    # Where no cause is known, what else would be a consequence is the news.
    if not causes and not because:
        news = [f for f in followed if not is_consequence(f)]
        causes, followed = list(news or followed), [f for f in followed if news and f not in news]
    groups = group_failures(causes)
    summed = summaries(groups, where)
    if (mismatch := _mismatch(groups)) is not None:
        # Which ranks raise it, and which are freed instead, is a matter of microseconds.
        lines = [_message(mismatch), *notes]
    else:
        lines = [because or _headline(groups, followed, len(asked)), *summed, *notes]
    spent = _without_gpu(groups) - set(replaced)
    of_gpu = _restart_advice(spent, asked, ran) if spent else _gpu_advice(groups, ran)
    advice = do or of_gpu or otherwise or _advice(groups, ran)
    next_step = advice.text
    is_lost = advice.is_about_losses or any(uses_what_is_lost(f.ename) for f in raised)
    is_lost = is_lost or spent >= set(asked)
    if in_loops and not is_lost and advice.kind is not AdviceKind.RETRY:
        next_step = f"{next_step.rstrip('.')}. {ran.loops()}"
    for group in groups[:MAX_GROUPS]:
        # What is said as advice at the end need not be said here.
        lines += [
            line
            for line in _traceback(group)
            if not (line.startswith(_DO) and f"{_DO}{next_step}".startswith(line.rstrip(".")))
        ]
    if len(groups) > MAX_GROUPS:
        lines += ["", f"The tracebacks of {len(groups) - MAX_GROUPS} more groups are omitted."]
    lines.append("")
    table = {f.rank: (f.ename, f.evalue) for f in raised}
    table |= {death.rank: ("Died", str(death.ended)) for death in deaths}
    return RankError(
        "\n".join(lines),
        why=" ".join(dict.fromkeys(g.first.gpu.why for g in groups if g.first.gpu)),
        do=next_step,
        failures=table,
        causes=tuple(summary.strip() for summary in summed) or (because,),
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
    raised = [f for f in failures if f.order < at and not _follows(f)]
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


def _follows(failure: Failure) -> bool:
    return is_consequence(failure) or failure.ename == "KeyboardInterrupt"


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
        return f"  {label} died: {_end_of(first)}"
    if first.ename == "SystemExit":
        code = first.evalue if first.evalue not in ("", "None") else ""
        error = f"called sys.exit({code})"
    else:
        message = _message(first)
        error = f"{first.ename}: {message}" if message else first.ename
    return "  " + "  ".join(part for part in (label, place_of(first), error) if part)


def _message(failure: Failure) -> str:
    """Return what happened, in a line."""
    message = _short(_told(failure.evalue.strip()), MAX_SUMMARY_CHARS)
    if failure.gpu and failure.gpu.said not in message:
        message += f": {failure.gpu.said}"
    return message


def _end_of(death: Death) -> str:
    """Return how and where a process ended, and of what: `killed by SIGABRT in cell 7, line 1`."""
    where = f" in {death.place}" if death.place else ""
    return f"{death.ended}{where}" + (f": {death.gpu.said}" if death.gpu else "")


def _told(text: str) -> str:
    """Return the line of an exception's text that tells what happened: mostly its first."""
    caught = _CAUGHT.match(text)
    if caught is None:
        return _head(text)
    last = text.rpartition("\n")[2][:MAX_MESSAGE_CHARS]
    return f"{last.removeprefix(f'{caught[1]}: ')} ({caught[2]})"


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
    frames = [frame for frame in first.traceback if not _is_ours(frame)]
    # IPython opens with a rule and a line that repeats the name; the heading says it already.
    while frames and _is_heading(_head(frames[0])):
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
        lines = [*lines[:head], f"… {gone} lines not shown", *lines[-tail:]]
    of = "" if len(group.ranks) == 1 else f" (traceback from rank {first.rank})"
    return ["", f"{name_ranks(group.ranks)}{of}:", *lines]


def _is_heading(head: str) -> bool:
    first = head.strip()
    return (first != "" and set(first) <= {"-"}) or first.endswith(
        "Traceback (most recent call last)"
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} characters more)"


def _without_gpu(groups: Iterable[Group]) -> set[int]:
    """Return the ranks that live and can make no CUDA call any more."""
    failed = [g for g in groups if isinstance(g.first, Failure) and g.first.gpu]
    return {rank for g in failed if g.first.gpu and g.first.gpu.ends_context for rank in g.ranks}


def _restart_advice(ranks: Collection[int], asked: Collection[int], ran: WhatRan) -> Advice:
    """Return what to do when these ranks need new processes."""
    _, _, chosen = name_ranks(ranks).partition(" ")
    after = "" if set(asked) > set(ranks) else ", after those that make what it uses"
    return Advice(
        AdviceKind.RESTART,
        f"%dist restart -r {chosen.replace(' ', '')}    (every CUDA call of the old process "
        f"fails), then fix {ran.name} and run it again{after}.",
    )


def _gpu_advice(groups: Iterable[Group], ran: WhatRan) -> Advice | None:
    """Return what to do about an error of CUDA or NCCL, of ranks whose processes are whole."""
    known = next((group.first.gpu for group in groups if group.first.gpu), None)
    if known is None:
        return None
    kind = AdviceKind.RETRY if known.can_retry else AdviceKind.FIX
    return Advice(kind, known.do or f"fix {ran.name} and run it again.")


def _advice(groups: Sequence[Group], ran: WhatRan) -> Advice:
    """Return what to do next, from what failed."""
    causes = [group.first for group in groups]
    if any(isinstance(c, Failure) and uses_what_is_lost(c.ename) for c in causes):
        is_state = any(_is_state(c) for c in causes)
        return ran.make_again("" if is_state else _RETRY)
    if len(groups) == 1 and isinstance(causes[0], Failure) and (own := _own_advice(causes[0])):
        return own
    if ran.words and all(_refuses_words(cause) for cause in causes):
        return ran.look_at_words
    place = place_of(causes[0]) if len(causes) == 1 and isinstance(causes[0], Failure) else ""
    return _shared_memory_advice(causes) or ran.fix(place)


def _own_advice(failure: Failure) -> Advice | None:
    """Return what an error of nbdist's says itself; a rank's reply has only its text."""
    if not hasattr(errors, failure.ename):
        return None
    own = [line for line in failure.evalue.split("\n") if line.startswith(_DO)]
    if not own:
        return None
    text = own[-1].removeprefix(_DO)
    return Advice(AdviceKind.RETRY if _RETRY in text else AdviceKind.FIX, text)


def _refuses_words(cause: Failure | Death) -> bool:
    """Return whether a script has ended as argparse ends one."""
    return isinstance(cause, Failure) and (cause.ename, cause.evalue) == ("SystemExit", "2")


def _shared_memory_advice(causes: Iterable[Failure | Death]) -> Advice | None:
    """Return what to do when /dev/shm is full: torch says so in many ways, or by a bus error."""
    if not any(_lacks_shared_memory(cause) for cause in causes):
        return None
    return Advice(
        AdviceKind.FIX,
        "/dev/shm is full; DataLoader workers pass their batches through it. Use "
        "num_workers=0 or smaller batches, delete files left in it (%dist doctor lists them), or "
        "start the container with --shm-size=1g.",
    )


def _lacks_shared_memory(cause: Failure | Death) -> bool:
    if isinstance(cause, Death):
        return False
    # Python's own error does not name the place where there is no space.
    unnamed = cause.evalue == "[Errno 28] No space left on device"
    if unnamed and any(n in f for f in cause.traceback for n in ("SemLock", "shared_memory.py")):
        return True
    return _NO_SHARED_MEMORY.search(cause.evalue) is not None
