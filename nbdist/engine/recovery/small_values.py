"""A rank's own small values, kept in its peer's memory: numbers, texts, small tensors.

A replacement rank gets the values of another rank (`clone`). Those that differed between ranks when
the last cell ended (`best = ...` of each rank) come back from the peer as they were then. What is
too large to be kept is named.

Main thread, on all ranks at once but `send`.
"""

import json
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.group import rendezvous
from nbdist.engine.recovery import name_record, send_tensors
from nbdist.engine.recovery.clone import clone, fingerprint
from nbdist.engine.recovery.snapshots import peers
from nbdist.engine.steps import keep
from nbdist.shared.text import name_ranks

MOST_BYTES = 1 << 20  # of a rank
BOX = "values"
WAIT_S = 1.0  # at a cell's end, for the peer to have them
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
Marks = dict[str, str]  # fingerprints by name
_CONTAINERS = (list, tuple, set, frozenset, dict)


@dataclass(frozen=True, slots=True)
class Value:
    """A variable as it was when a cell ended.

    Attributes:
        mark: Its fingerprint, equal on ranks where the value is.
        data: It, pickled; None where there was no room.
    """

    mark: str
    data: bytes | None


# ---- Decisions ---------------------------------------------------------------------------------


def size_of(value: Any, most: int) -> int | None:
    """Return about how many bytes a plain value takes; None where it is none.

    Args:
        value: Numbers, texts, tensors, arrays, and containers of them.
        most: No more is looked at than takes this many bytes; what is larger returns more.
    """
    kind = type(value)
    if kind in (str, bytes):
        return 8 + len(value)
    if kind in _ATOMS or isinstance(value, np.generic):
        return 16
    if kind is torch.Tensor:
        return None if value.requires_grad else 64 + int(value.nbytes)
    if kind is np.ndarray:
        return None if value.dtype.hasobject else 64 + int(value.nbytes)
    if kind not in _CONTAINERS:
        return None
    total = 16
    items = [*value.keys(), *value.values()] if kind is dict else value
    for item in items:
        if total > most:
            break
        size = size_of(item, most - total)
        if size is None:
            return None
        total += size
    return total


def pick(sizes: Mapping[str, int], most: int) -> list[str]:
    """Return the names that are kept: the small ones first, as long as there is room."""
    kept, room = [], most
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        if sizes[name] > room:
            break
        room -= sizes[name]
        kept.append(name)
    return kept


def own(before: Mapping[str, Value], of_source: Marks) -> tuple[list[str], list[str]]:
    """Return what a new rank takes back of its predecessor's values, and what was too large.

    Args:
        before: The predecessor's.
        of_source: The fingerprints, at the same moment, on the rank that it was cloned from.
    """
    differing = [name for name, one in before.items() if of_source.get(name) != one.mark]
    kept = [name for name in differing if before[name].data is not None]
    return kept, [name for name in differing if name not in kept]


def at(moments: Iterable[tuple[int, Marks]], cell: int) -> Marks:
    """Return the newest marks of a rank that are not newer than a cell."""
    earlier = [one for one in moments if one[0] <= cell]
    return max(earlier, key=lambda one: one[0])[1] if earlier else {}


# ---- On the ranks ------------------------------------------------------------------------------


class SmallValues(Component):
    """What a rank tells of its names and small values as a cell ends."""

    def __init__(self) -> None:
        self._names = name_record.WrittenNames()
        # Of this rank, by the cells that it has run last: what the values were as each ended.
        self._marks: deque[tuple[int, Marks]] = deque(maxlen=8)

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Write down this rank's names, and send its small values to its peer."""
        values = clone.written_names(keep.here.names())
        self._names.write(values)
        if peers.here.every():
            found = _collect(values)
            self._marks.append((cell.number, {name: one.mark for name, one in found.items()}))
            peers.here.offer_values(BOX, (cell.number, found))
            peers.here.wait(WAIT_S)
        return ()

    def give_back(
        self,
        replacements: Iterable[int],
        cloned: dict[str, Any] | None,
        namespace: Callable[[], dict[str, Any]],
    ) -> None:
        """Give new ranks their predecessors' own values, after the clone.

        Args:
            replacements: The new ranks.
            cloned: What this rank got or, on others, one got: `differ` and `inexact` are brought
                up to date on a new rank.
            namespace: Returns where cells run on this rank.

        Raises:
            ClusterError: A rank did not answer in time.
        """
        if not peers.here.every():
            return
        here, replacements = dist.get_rank(), list(replacements)
        # Of which cell; an older peer may hold older ones.
        held = {str(r): kept[0] for r in replacements if (kept := peers.here.get_values(r, BOX))}
        said = json.dumps({"held": held, "marks": list(self._marks)})
        heard = rendezvous.exchange("small values", said, rendezvous.FORM_TIMEOUT_S)
        reports = {rank: json.loads(text) for rank, text in heard.items()}
        for replacement in replacements:
            cells = {
                r: one["held"][str(replacement)]
                for r, one in reports.items()
                if str(replacement) in one["held"]
            }
            if not cells:
                continue
            holder = max(sorted(cells), key=lambda r: cells[r])
            if here == holder:
                send_tensors.send(peers.here.get_values(replacement, BOX), [], replacement)
            elif here == replacement:
                (cell, before), _ = send_tensors.receive(holder)
                if cloned is not None:
                    of_source = at(reports[cloned["source"]]["marks"], cell)
                    _take(before, of_source, cloned, namespace())


def _take(
    before: Mapping[str, Value],
    of_source: Marks,
    cloned: dict[str, Any],
    namespace: dict[str, Any],
) -> None:
    kept, too_large = own(before, of_source)
    for name in kept:
        data = before[name].data
        assert data is not None
        _put(namespace, name, pickle.loads(data))  # from a rank of this cluster
    cloned["differ"] = [name for name in cloned["differ"] if name not in kept]
    cloned["own"] = kept
    here = dist.get_rank()
    if too_large:
        cloned["inexact"].append(
            f"{name_ranks([here]).capitalize()} has rank {cloned['source']}'s "
            f"{', '.join(too_large)}: what it had itself was too large to be kept by a peer."
        )


def _put(namespace: dict[str, Any], name: str, value: Any) -> None:
    there: Any = namespace.get(name)
    are_tensors = type(there) is torch.Tensor and type(value) is torch.Tensor
    if are_tensors and there.shape == value.shape and there.dtype == value.dtype:
        there.copy_(value)  # whatever shares its memory goes on to do so
    else:
        namespace[name] = value


def _collect(values: Mapping[str, Any]) -> dict[str, Value]:
    sizes = {
        name: size
        for name, value in values.items()
        if (size := size_of(value, MOST_BYTES)) is not None
    }
    marks = fingerprint.of_names({name: values[name] for name in sizes})
    kept = pick({name: sizes[name] for name in marks}, MOST_BYTES)
    return {
        name: Value(mark, pickle.dumps(values[name]) if name in kept else None)
        for name, mark in marks.items()
        if mark
    }


here = SmallValues()
