"""Say what each rank does in a cell that is merely slow: pure text.

The same words stand in the cell's quiet note, in `%dist status`, in `%dist stacks` and in the
error of a `--timeout`.
"""

import re
from collections.abc import Mapping, Sequence

from nbdist.client.faults.rank_state import (
    PAUSED,
    Inactive,
    RankState,
    Wait,
    missing_in,
    waiters,
)
from nbdist.shared import origins
from nbdist.shared.text import begin_with_ranks, name_ranks

_CELL_FRAME = re.compile(rf'^( *)File "{origins.CELL_FILE}"', re.MULTILINE)


def describe(rank: int, said: Mapping[int, RankState], gone: Mapping[int, Inactive]) -> str:
    """Return what one rank does, e.g. `waiting 14 s in barrier #2 (group 0) for rank 1`.

    Args:
        rank: Which one.
        said: What each rank said; this one did.
        gone: The ranks that launch nothing more.
    """
    doing = said[rank]
    if doing.word == PAUSED:
        return f"paused at step {doing.step}"
    if doing.wait is None:
        return doing.word + doing.place
    peers = missing_in(rank, said, gone, frozenset({*said, *gone}))
    of = f" for {name_ranks(peers)}" if peers else ""
    return f"waiting {doing.wait.seconds:.0f} s in {doing.wait}{of}"


def clauses(
    said: Mapping[int, RankState],
    running: Sequence[int],
    gone: Mapping[int, Inactive],
    silent: Mapping[int, str],
) -> str:
    """Return what the running ranks do, in one sentence without its end; equal ones together.

    Args:
        said: What each rank said last.
        running: The ranks that run the cell.
        gone: The ranks that launch nothing more in it.
        silent: Ranks that do not answer, with a word about why where it is known.
    """
    world = frozenset({*said, *gone, *running})
    others: dict[str, list[int]] = {}
    waiting: dict[tuple[str, frozenset[int]], list[int]] = {}
    for rank in running:
        doing = said.get(rank)
        if rank in silent or doing is None:
            why = f": {silent[rank]}" if silent.get(rank) else ""
            others.setdefault(f"not answer{why}", []).append(rank)
        elif doing.wait is not None:
            peers = missing_in(rank, said, gone, world)
            waiting.setdefault((str(doing.wait), peers), []).append(rank)
        else:
            verb = {
                "loading data": f"load data{doing.place}",
                "idle": f"begin{doing.place}",
                PAUSED: f"pause at step {doing.step}",
            }.get(doing.word, f"compute{doing.place}")
            others.setdefault(verb, []).append(rank)
    parts = [f"{name_ranks(ranks)} {_conjugate(verb, ranks)}" for verb, ranks in others.items()]
    subjects = frozenset(next(iter(others.values()))) if len(others) == 1 else frozenset[int]()
    for (where, peers), ranks in waiting.items():
        it = "it" if len(peers) == 1 else "them"
        whom = f" for {it if peers == subjects else name_ranks(peers)}" if peers else ""
        parts.append(f"{waiters(frozenset(ranks))}{whom} in {where}")
    return "; ".join(parts)


def _conjugate(verb: str, ranks: Sequence[int]) -> str:
    """Return the verb for one rank or several: `compute in f` becomes `computes in f`."""
    first, _, rest = verb.partition(" ")
    if first == "not":
        return f"{'does' if len(ranks) == 1 else 'do'} {verb}"
    if len(ranks) == 1:
        first += "s"
    return f"{first} {rest}".rstrip()


def paused_note(step: int) -> str:
    """Return what a cell shows whose ranks are paused."""
    return (
        f"Paused after step {step}. It goes on by %dist continue in another console, or "
        "nbdist continue in a terminal."
    )


def quiet_note(
    quiet_s: float,
    said: Mapping[int, RankState],
    running: Sequence[int],
    gone: Mapping[int, Inactive],
    silent: Mapping[int, str],
) -> str:
    """Return the block that a cell shows when nothing has moved for a while."""
    return (
        f"No progress for {quiet_s:.0f} s: {clauses(said, running, gone, silent)}. "
        "Interrupt the kernel (■) to stop; variables are kept."
    )


def after_failure(
    culprits: Mapping[int, Inactive], computing: Sequence[int], flowing: Mapping[int, Wait]
) -> str:
    """Return the line about what others do when a rank has failed or died.

    Args:
        culprits: Those that did.
        computing: Ranks that still compute.
        flowing: Ranks with waits of which bytes flow.
    """
    groups: dict[Inactive, list[int]] = {}
    for rank, how in sorted(culprits.items()):
        groups.setdefault(how, []).append(rank)
    parts = [
        ", ".join(
            f"{name_ranks(ranks)} {how.predicate(len(ranks))}" for how, ranks in groups.items()
        )
    ]
    if computing:
        one = len(computing) == 1
        ran = next(iter(culprits.values())).ran
        parts.append(
            f"{name_ranks(computing)} still {'computes' if one else 'compute'} and "
            f"{'stops' if one else 'stop'} at {'its' if one else 'their'} next collective or "
            f"{ran.name}'s end"
        )
    waits: dict[str, list[int]] = {}
    for rank, wait in flowing.items():
        waits.setdefault(str(wait), []).append(rank)
    for where, ranks in waits.items():
        still = "still sends or receives" if len(ranks) == 1 else "still send or receive"
        parts.append(f"{name_ranks(ranks)} {still} in {where}")
    return f"{'; '.join(parts)}."


def not_stopped(said: Mapping[int, RankState], running: Sequence[int]) -> str:
    """Return the line about ranks that an interrupt has not stopped, and what a second one does."""
    places: dict[str, list[int]] = {}
    for rank in running:
        place = said[rank].place if rank in said else ""
        places.setdefault(f"busy{place}" if place else "inside one long call", []).append(rank)
    busy = [f"{begin_with_ranks(ranks, be=True)} still {place}." for place, ranks in places.items()]
    it = "it" if len(running) == 1 else "them"
    return (
        f"{' '.join(busy)} Wait, or interrupt again to kill {it}: variables that no other rank "
        "holds are lost then."
    )


def readable_stack(text: str) -> str:
    """Return a main thread's stack from the cell's first line on, cells named as such.

    The frames before it only run cells. Where no cell runs, the stack is returned as it is.
    """
    first = _CELL_FRAME.search(text)
    return _CELL_FRAME.sub(r"\1cell", text[first.start() :] if first else text).rstrip()
