"""What failed on which ranks: each cause once, and what only follows from another's.

Pure. When one rank raises, its peers sit in a collective that can never end; they are freed, and
every one of them raises too. Those errors are consequences (`is_consequence`) and tell nothing,
unless nothing else failed.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PureWindowsPath  # knows both kinds of slash
from typing import Final

from nbdist.shared import origins
from nbdist.shared.collectives import COLLECTIVES
from nbdist.shared.errors import RankError
from nbdist.shared.gpu_errors import GpuError
from nbdist.shared.processes.ended import Ended

MAX_MESSAGE_CHARS: Final = 2000
MAX_FRAME_CHARS: Final = 20_000

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
_COLLECTIVE: Final = re.compile(
    # broadcast_object_list, all_gather_into_tensor: but reduce is not all that begins with it.
    rf"\b(({'|'.join(COLLECTIVES.keys() - {'reduce'})})\w*|reduce|i?send|i?recv|backward|wait|"
    r"init_process_group)\("
)
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
_CELL: Final = re.compile(r"Cell In\s?\[(\d+)\], line (\d+)")
_FILE: Final = re.compile(r"^\s*File (.+?):(\d+)")  # which may have spaces
_AT: Final = re.compile(f"{_CELL.pattern}|{_FILE.pattern}")
_MISSING: Final = re.compile(r"name '(\w+)' is not defined")
_OURS: Final = ("nbdist", "ipyparallel", "ipykernel", "IPython")  # they carry what users write
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


def follows(failure: Failure) -> bool:
    """Return whether a rank failed because of another, or of an interrupt."""
    return is_consequence(failure) or failure.ename == "KeyboardInterrupt"


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
        first = first_line(frame)
        if cell := _CELL.search(first):
            place = f"cell {cell.group(1)}, line {cell.group(2)}"
        elif (found := _FILE.search(first)) and is_users(file := found.group(1)):
            place = f"{PureWindowsPath(file).name}, line {found.group(2)}"
    return place


def missing_name(failures: Iterable[Failure]) -> str:
    """Return the name whose lack in a cell is all that failed; "" where there is none."""
    found = {_name_missing_in_cell(failure) for failure in failures if not follows(failure)}
    return found.pop() if len(found) == 1 else ""


def _name_missing_in_cell(failure: Failure) -> str:
    missing = _MISSING.match(failure.evalue) if failure.ename == "NameError" else None
    last = next((f for f in map(first_line, reversed(failure.traceback)) if _AT.search(f)), "")
    return missing[1] if missing and _CELL.search(last) else ""


def is_users(file: str) -> bool:
    """Return whether a file in a traceback is the user's: of no library, not ours, and there."""
    return not (file.startswith("<") or origins.is_library(file) or origins.is_of(file, *_OURS))


def is_ours(frame: str) -> bool:
    """Return whether a frame of a traceback, as IPython writes it, is not worth a look."""
    found = _FILE.search(first_line(frame))
    return found is not None and origins.is_of(found.group(1), *_OURS)


def first_line(frame: str) -> str:
    """Return a frame's first line, without colours."""
    return plain(frame.partition("\n")[0][:MAX_MESSAGE_CHARS])


def plain(text: str) -> str:
    """Return `text` without colours."""
    return _ANSI.sub("", text)


def causes_of(
    raised: Sequence[Failure], deaths: Sequence[Death], *, is_explained: bool
) -> tuple[list[Failure | Death], list[Failure]]:
    """Return what failed of itself, and what followed.

    Where no cause is known, nor `is_explained` by others, what else would be a consequence is the
    news.
    """
    causes: list[Failure | Death] = [f for f in raised if not follows(f)]
    causes += deaths
    followed = [f for f in raised if follows(f)]
    if causes or is_explained:
        return causes, followed
    news = [f for f in followed if not is_consequence(f)]
    return list(news or followed), [f for f in followed if news and f not in news]


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
        return [("died", end_of(failure))]
    if failure.ename == "MismatchError":
        # Each rank tells what it has seen of the same collective, which its first line names.
        return [(failure.ename, first_line(failure.evalue))]
    place = place_of(failure)
    text = failure.evalue[:MAX_MESSAGE_CHARS]
    neutral = re.sub(r"0x[0-9a-fA-F]+", "0x…", text)
    neutral = re.sub(rf"(?<![\w.]){failure.rank}(?![\w.])", "<rank>", neutral)
    return [(failure.ename, place, "=", text), (failure.ename, place, "~", neutral)]


def end_of(death: Death) -> str:
    """Return how and where a process ended, and of what: `killed by SIGABRT in cell 7, line 1`."""
    where = f" in {death.place}" if death.place else ""
    return f"{death.ended}{where}" + (f": {death.gpu.said}" if death.gpu else "")
