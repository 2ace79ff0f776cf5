"""What stands for a cluster and its connection where a test needs no process.

Each fake derives from the real class and replaces only what would reach a process, so that mypy
checks it and the rest is the real code; test_fakes.py compares the signatures.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.connection import Connection, Handler
from nbdist.client.cluster.events import EventLog
from nbdist.client.cluster.launchers.base import Launcher
from nbdist.client.cluster.process_group import Answers
from nbdist.client.cluster.processes import Started
from nbdist.client.cluster.requests import RankFailedError
from nbdist.shared.errors import ClusterError
from nbdist.shared.options import ClusterOptions
from nbdist.shared.processes.ended import Ended

PLAIN: dict[str, Any] = {"healed": [], "agreed": [], "cloned": None, "stale": []}
CUDA_ASSERT = (
    "AcceleratorError: CUDA error: device-side assert triggered\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)
CLONED: dict[str, Any] = {
    "source": 0,
    "names": ["model", "opt"],
    "placeholders": {"file": "an open file"},
    "lost": [],
    "random": {"seed": 0, "step": 41},
}


class FakeEvents(EventLog):
    """The names of events, in memory."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.noted: list[str] = []

    def note(self, event: str, cause: str = "", **facts: Any) -> None:
        self.noted.append(event)


class FakeCluster(Cluster):
    """A cluster whose processes are numbers.

    Attributes:
        replaced: The ranks that got new processes, call by call.
        has_stopped: Whether `stop` was called.
        plan: What goes wrong in each recovery: "kill 2", "cuda 1" for an assert on its GPU, another
            word for any error, "" for none.
    """

    def __init__(self, dead: Sequence[int] = (), plan: Sequence[str] = (), n: int = 3) -> None:
        # Without a launcher, a method that is not replaced here cannot reach a process.
        super().__init__(cast(Launcher, None), Path("nowhere"))
        self.events = FakeEvents()
        self.options = ClusterOptions(n=n, device="cpu", backend="gloo", threads=1)
        self.plan = list(plan)
        self.replaced: list[list[int]] = []
        self.has_stopped = False
        for rank in range(n):
            self._roster.came(rank, Started(100 + rank, host="here"))
        for rank in dead:
            self.kill(rank)

    def stop(self) -> list[str]:
        self.has_stopped = True
        return []

    def reopen(self) -> list[str]:
        return []

    def rebuild(self) -> None:
        self.broken = None
        self.replace(list(self.ranks))

    def replace(self, ranks: Sequence[int], n: int | None = None, *, crowded: bool = False) -> None:
        self.replaced.append(list(ranks))
        for rank in ranks:
            self._roster.came(rank, Started(200 + rank, host="here"))

    def recover(self, replacements: Iterable[int] = ()) -> Answers:
        trouble = self.plan.pop(0) if self.plan else ""
        if trouble.startswith("kill"):
            self.kill(int(trouble.removeprefix("kill ")))
        if trouble.startswith("cuda"):
            raise RankFailedError.of(int(trouble.removeprefix("cuda ")), CUDA_ASSERT)
        if trouble:
            raise ClusterError(f"trouble: {trouble}")
        return {
            rank: PLAIN | {"cloned": CLONED if rank in replacements else None}
            for rank in self.ranks
        }

    def kill(self, rank: int, why: str = "") -> None:
        self._roster.end(rank, Ended.from_status(-9))


class FakeConnection(Connection):
    """Keeps the handlers of what was sent, by the message's id; a test calls them as replies."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def send(
        self,
        rank: int,
        kind: str,
        content: dict[str, Any],
        handler: Handler,
        *,
        control: bool = False,
        once: bool = False,
        metadata: dict[str, Any] | None = None,
        buffers: list[Any] | None = None,
        outbox: list[Callable[[], None]] | None = None,
    ) -> str:
        message_id = f"{rank}-{len(self.handlers)}"
        self.handlers[message_id] = handler
        return message_id

    def forget(self, message_id: str) -> None:
        self.handlers.pop(message_id, None)
