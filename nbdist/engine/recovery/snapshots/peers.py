"""What a rank keeps in a peer's memory, and what it keeps there for another rank.

Every K steps (`peer_snapshots`), at a step boundary, a rank's snapshots of what is cut over ranks
go to its peer (`placement.peer_of`), on another host where there are several. When the rank dies,
its replacement gets them back from there (`restore`), and all ranks go back to that step.

A rank is never two snapshots ahead of what its peer holds: it waits, some steps before the next is
due (`must_wait`). So two of each, here and there, always have a step in common.

Main thread; what sends and receives is in `peer_wire`.
"""

import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.engine.compat.groups.torch_groups import TCPStore
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel.cost_clock import clocked
from nbdist.engine.recovery.decide import Steps
from nbdist.engine.recovery.snapshots.peer_wire import Inbox, Outbox, PeerMessage
from nbdist.engine.recovery.snapshots.saved import Saved, bytes_of, metas_of, tensors_of

WAIT_S = 30.0  # longest for what is under way; then the peer is given up until the next snapshot
_TRY_AGAIN_S = 60.0  # after a peer could not be reached
AHEAD = 2  # steps before the next snapshot at which the one before must be whole
# Snapshots that this rank has sent until those of ranks with another peer are whole there: ranks
# step together, and none is two snapshots ahead.
_UNTIL_ELSEWHERE = 2
_FIXED = "/fixed"  # the box of what no optimizer changes


# ---- Decisions ---------------------------------------------------------------------------------


def must_wait(steps: int, taken_at: int, every: int) -> bool:
    """Return whether the snapshot of step `taken_at` must be whole at the peer at `steps`."""
    return steps >= taken_at + max(0, every - AHEAD)


# ---- This rank ---------------------------------------------------------------------------------


@dataclass
class _Ends:
    """This rank's ends of the connections."""

    rank: int
    peer: int
    every: int
    client: TCPStore
    inbox: Inbox
    outbox: Outbox
    is_told: bool = False  # that snapshots are not kept
    not_before: float = 0.0  # `time.monotonic()` at which a peer is tried again
    # By box, what of the fixed parts was sent: the tensors' versions, and the number they have.
    fixed: dict[str, tuple[tuple[Any, ...], int]] = field(default_factory=dict)
    # Ranks whose peer this one is no more, and snapshots that were sent since, by box.
    strangers: set[int] = field(default_factory=set)
    offered: dict[str, int] = field(default_factory=dict)


class Peers(Component):
    """What this rank keeps with its peer, and for others; nothing until `start`."""

    def __init__(self) -> None:
        self._ends: _Ends | None = None
        self._notices: list[str] = []

    def start(
        self,
        rank: int,
        peer: int | None,
        *,
        every: int,
        host: str,
        key: bytes,
        client: TCPStore,
    ) -> None:
        """Keep what is offered in the peer's memory, from now on; 0 steps for never.

        Args:
            rank: This rank.
            peer: In whose memory; None where there is no other rank.
            every: Steps between two snapshots.
            host: The cluster's address, to listen on.
            key: The session's; both ends of a connection prove that they know it.
            client: The store, which knows where each rank listens.
        """
        self.stop()
        if not every or peer is None:
            return
        inbox = Inbox(host, key)
        self._ends = _Ends(rank, peer, every, client, inbox, Outbox(rank, key))
        client.set(_place(rank), "{} {}".format(*inbox.address))

    def stop(self) -> None:
        """Send and receive no more, and forget what is held."""
        if self._ends is not None:
            self._ends.outbox.disconnect()
            self._ends.inbox.close()
            self._ends = None

    def every(self) -> int:
        """Return the steps between two snapshots; 0 where peers keep none."""
        return 0 if self._ends is None else self._ends.every

    @clocked("peers", within="boundary")
    def offer(self, box: str, saved: Saved, tensors: Sequence[torch.Tensor]) -> None:
        """Send a snapshot to the peer; its tensors must not change until `wait`."""
        ends = self._ends
        if ends is None or not self._connect(ends):
            return
        try:
            header = pickle.dumps(saved, protocol=5)
        except Exception as error:  # of a state that somebody's own optimizer keeps
            self._tell(ends, f"it cannot be sent ({type(error).__name__}: {error})")
            return
        ends.outbox.send(box, header, [bytes_of(tensor) for tensor in tensors if tensor.nbytes])
        _forget_strangers(ends, box)

    def offer_fixed(
        self, box: str, tensors: Sequence[torch.Tensor], copied: Callable[[], list[torch.Tensor]]
    ) -> int | None:
        """Send what no optimizer changes, unless the peer has it; returns what names it in `Saved`.

        Args:
            box: That of the snapshots that belong to it.
            tensors: The live ones.
            copied: Returns copies of what lies on this rank, on the CPU.
        """
        ends = self._ends
        if ends is None or not tensors:
            return None
        self._connect(ends)  # a new peer has nothing
        versions = tuple((id(tensor), tensor._version) for tensor in tensors)
        known, number = ends.fixed.get(box, ((), 0))
        if known != versions:
            number = time.time_ns()
            ends.fixed[box] = versions, number
            copies = copied()
            saved = Saved((), time.time(), None, metas_of(copies), None, number)
            self.offer(f"{box}{_FIXED}", saved, copies)
        return number

    def offer_values(self, box: str, values: Any) -> None:
        """Send a value, pickled, which replaces the one before."""
        ends = self._ends
        if ends is not None and self._connect(ends):
            ends.outbox.send(box, pickle.dumps(values), [])
            _forget_strangers(ends, box)

    def get_values(self, rank: int, box: str) -> Any:
        """Return the newest value that is kept here for another rank; None where there is none."""
        messages = () if self._ends is None else self._ends.inbox.held(rank).get(box, ())
        return pickle.loads(messages[0].header) if messages else None

    @clocked("peers", within="boundary")
    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Wait until what was offered is whole at the peer, or cannot be.

        What takes longer than `WAIT_S` is given up, until the next snapshot.
        """
        ends = self._ends
        if ends is not None and not ends.outbox.wait(timeout_s) and timeout_s >= WAIT_S:
            self._tell(ends, f"receiving one takes longer than {WAIT_S:g} s")
            ends.outbox.disconnect()
            ends.outbox.wait(WAIT_S)

    def reconnect(self) -> None:
        """Look for the peer again: it may be another process. When a recovery begins."""
        if self._ends is not None:
            self._ends.outbox.disconnect()
            self._ends.fixed.clear()
            self._ends.not_before = 0.0

    def move(self, peers: Mapping[int, int | None]) -> None:
        """Keep snapshots with other peers from now on, where ranks have moved. In a recovery.

        What is kept here of ranks that have another peer now stays until that one has newer.

        Args:
            peers: Each rank's, the same on all ranks.
        """
        ends = self._ends
        if ends is None:
            return
        ends.strangers = {rank for rank, peer in peers.items() if peer != ends.rank}
        ends.offered.clear()
        peer = peers.get(ends.rank)
        if peer is not None and peer != ends.peer:
            ends.peer, ends.is_told = peer, False
            self.reconnect()

    def held(self) -> dict[int, dict[str, list[tuple[Steps, float]]]]:
        """Return what is kept here for others: each box's steps and ages in s, newest first."""
        if self._ends is None:
            return {}
        found: dict[int, dict[str, list[tuple[Steps, float]]]] = {}
        for rank, boxes in self._ends.inbox.all_held().items():
            for box, messages in boxes.items():
                for message in messages:
                    saved = pickle.loads(message.header)
                    is_snapshot = isinstance(saved, Saved) and not box.endswith(_FIXED)
                    if is_snapshot and _fits(boxes, box, saved):
                        age = time.time() - saved.at
                        found.setdefault(rank, {}).setdefault(box, []).append((saved.steps, age))
        return found

    def get(self, rank: int, box: str, steps: Steps) -> tuple[Saved, list[torch.Tensor]]:
        """Return a snapshot that is kept here for another rank.

        Raises:
            LookupError: There is none.
        """
        messages = () if self._ends is None else self._ends.inbox.held(rank).get(box, ())
        for message in messages:
            saved = _saved(message)
            if saved.steps == steps:
                return saved, tensors_of(saved, message.body)
        raise LookupError(f"nothing of rank {rank}'s step {steps} is kept here")

    def get_fixed(self, rank: int, box: str, saved: Saved) -> list[torch.Tensor]:
        """Return what is kept of `offer_fixed` for another rank's snapshot."""
        messages = (
            () if self._ends is None else self._ends.inbox.held(rank).get(f"{box}{_FIXED}", ())
        )
        for message in messages:
            earlier = _saved(message)
            if earlier.fixed == saved.fixed:
                return tensors_of(earlier, message.body)
        return []

    def forget_after(self, box: str, steps: Steps) -> None:
        """Drop what is kept of later steps: they are made again, perhaps otherwise."""
        if self._ends is not None:
            for rank in self._ends.inbox.all_held():
                self._ends.inbox.drop(
                    rank, lambda name, one: name == box and sum(_saved(one).steps) > sum(steps)
                )

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Return what is to be said of peers."""
        taken = tuple(self._notices)
        self._notices.clear()
        return taken

    def _connect(self, ends: _Ends) -> bool:
        if ends.outbox.is_connected:
            return True
        if time.monotonic() < ends.not_before:
            return False
        ends.fixed.clear()
        try:
            if not ends.client.check([_place(ends.peer)]):
                return False
            host, port = bytes(ends.client.get(_place(ends.peer))).decode().split()
            ends.outbox.connect((host, int(port)))
        except (OSError, ValueError, RuntimeError) as error:
            ends.not_before = time.monotonic() + _TRY_AGAIN_S
            self._tell(ends, f"it cannot be reached ({error})")
            return False
        return True

    def _tell(self, ends: _Ends, why: str) -> None:
        """Say once that snapshots are not kept."""
        if not ends.is_told:
            ends.is_told = True
            what = f"Rank {ends.rank}'s snapshots are not kept by its peer, rank {ends.peer}"
            self._notices.append(f"{what}: {why}. It is tried again.")


def _forget_strangers(ends: _Ends, box: str) -> None:
    """Drop what is kept of ranks that have another peer now, when that one has newer."""
    ends.offered[box] = ends.offered.get(box, 0) + 1
    if ends.offered[box] > _UNTIL_ELSEWHERE:
        for rank in ends.strangers:
            ends.inbox.drop(rank, lambda name, _: name.removesuffix(_FIXED) == box)


def _place(rank: int) -> str:
    return f"nbdist/where rank {rank} keeps snapshots of peers"


def _saved(message: PeerMessage) -> Saved:
    saved = pickle.loads(message.header)  # whoever sent it knows the session's key
    assert isinstance(saved, Saved)
    return saved


def _fits(boxes: dict[str, list[PeerMessage]], box: str, saved: Saved) -> bool:
    """Return whether a snapshot is whole: with the part that no optimizer changes."""
    if saved.fixed is None:
        return True
    there = boxes.get(f"{box}{_FIXED}", ())
    return any(_saved(message).fixed == saved.fixed for message in there)


here = Peers()
