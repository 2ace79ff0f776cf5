"""What `%dist status` shows: one line a rank."""

from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from nbdist.client.cluster import Cluster
from nbdist.errors import ClusterError

_ANSWER_TIMEOUT_S = 5.0

_COLUMNS = ("rank", "host", "device", "pid", "state", "step", "memory", "last collective")


@dataclass(frozen=True, slots=True)
class RankLine:
    """One rank's line. `state` is idle, running, waiting in ..., dead: ..., or not answering."""

    rank: int
    host: str
    device: str
    pid: int
    state: str
    step: int = 0
    memory_bytes: int = 0
    last_collective: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the line's words, in the order of the table's columns."""
        memory = f"{self.memory_bytes / 2**20:.0f} MiB" if self.memory_bytes else ""
        words = (self.rank, self.host, self.device, self.pid, self.state, self.step, memory)
        return (*map(str, words), self.last_collective)


@dataclass(frozen=True, slots=True)
class Status:
    """All ranks, with one sentence about the cluster. Prints as a table."""

    summary: str
    ranks: tuple[RankLine, ...] = ()
    hint: str = ""

    @classmethod
    def stopped(cls, why: str) -> "Status":
        """Return the status of a cluster that is not running."""
        return cls(f"No engines are running: {why}")

    @classmethod
    def ask(cls, cluster: Cluster, describe: str, *, running: bool) -> "Status":
        """Ask every living rank on its control channel; dead ones are named with their cause."""
        futures = {
            rank: cluster.requests.ask(rank, "control.state", busy=True)
            for rank in cluster.living()
        }
        lines = []
        for rank, state in sorted(cluster.ranks.items()):
            place = (rank, state.host, state.device, state.pid)
            if state.exit_status is not None:
                lines.append(RankLine(*place, f"dead: {state.cause}"))
                continue
            try:
                answer = futures[rank].result(_ANSWER_TIMEOUT_S)
            except (FutureTimeoutError, ClusterError):
                lines.append(RankLine(*place, "not answering"))
                continue
            lines.append(_line(place, answer, running=running))
        trouble = cluster.broken or cluster.dead()
        hint = f"What led to this is in {cluster.events.path}" if trouble else ""
        return cls(cluster.broken or describe, tuple(lines), hint)

    def __str__(self) -> str:
        if not self.ranks:
            return self.summary
        rows = [_COLUMNS, *(line.cells() for line in self.ranks)]
        return "\n".join([self.summary, *_aligned(rows), self.hint]).rstrip()

    def __repr__(self) -> str:
        return str(self)


def _line(place: tuple[int, str, str, int], answer: dict[str, Any], *, running: bool) -> RankLine:
    waiting = answer["waiting"]
    state = "running" if running else "idle"
    if waiting:
        state = f"waiting in {waiting['kind']} for {waiting['seconds']:.0f} s"
    return RankLine(
        *place,
        state,
        answer["step"],
        answer["cuda_bytes"] or answer["rss_bytes"],
        answer["last"] or "",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{w:<{n}}" for w, n in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
