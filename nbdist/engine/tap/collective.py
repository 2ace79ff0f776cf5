"""One collective or message of this rank, from its launch to its end."""

from typing import Any

from nbdist.engine.kernel import location
from nbdist.engine.tap.counters import GroupCounters

MESSAGES = ("send", "recv")  # kinds that go from one rank to one other
WAKING_NS = 50_000  # until a thread that is woken on another core runs


class LaunchedCollective:
    """A collective this rank has launched.

    Attributes:
        start_ns: The rank called it.
        handed_ns: It was handed to the backend: what was prepared before is not the operation.
        returned_ns: The backend's function came back.
        begin_ns: A worker of the backend took it up; 0 until that is known.
        end_ns: The operation was over; 0 until that is known.
        is_sampled: Its begin and end are recorded.
        is_waited_for: Its operator was synchronous, and has waited for its end.
        dtype: Position in `collective_check.DTYPES`.
        tag: Of a message; 0 otherwise.
        unit: The parameters of FSDP2 that it carries, in words; "" otherwise.
        freed_ns: What it had gathered of them was freed; 0 until then.
        tag_number: Its number among those to or from its peer with its tag; `seq` otherwise.
    """

    __slots__ = (
        *("begin_ns", "book", "bytes", "dtype", "end_ns", "freed_ns", "future", "handed_ns"),
        *("is_sampled", "is_waited_for"),
        *("kind", "number", "outputs", "peer", "place", "returned_ns"),
        *("seq", "start_ns", "tag", "tag_number", "unit", "work"),
    )

    def __init__(
        self,
        kind: str,
        book: GroupCounters,
        seq: int,
        size: int,
        start_ns: int,
        place: location.Place | None,
        peer: int | None,
    ) -> None:
        self.kind = kind
        self.book = book
        self.seq = self.tag_number = seq
        self.tag = 0
        self.bytes = size
        self.start_ns = self.handed_ns = self.returned_ns = start_ns
        self.begin_ns = self.end_ns = self.freed_ns = 0
        self.unit = ""
        self.place = place
        self.peer = peer
        self.is_sampled = self.is_waited_for = False
        self.dtype = 0
        self.number = 0  # of all of this rank
        # Known until its end has been seen, for they hold the tensors.
        self.work: Any = None
        self.future: Any = None  # None: torch gives none of a send or recv
        self.outputs: Any = None

    @property
    def is_message(self) -> bool:
        """Return whether it goes from one rank to one other; gloo does not queue those."""
        return self.kind in MESSAGES

    @property
    def ready_ns(self) -> int:
        """Return when it could be taken up: a message at once, another by a worker that wakes."""
        if self.is_message or self.returned_ns < self.handed_ns + WAKING_NS:
            return self.returned_ns
        return self.handed_ns + WAKING_NS  # the worker ran, and its caller had to wait

    def is_over(self) -> bool:
        """Return whether it is known to be over; of a message, only a wait shows it."""
        future, work = self.future, self.work
        if future is not None:
            return bool(future.done())
        return work is not None and bool(work.is_completed())

    def forget(self) -> None:
        """Release the tensors."""
        self.work = self.future = self.outputs = None
