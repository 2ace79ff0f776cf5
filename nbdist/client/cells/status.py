"""What `%dist status` and `%dist stacks` show of each rank, also while a cell runs.

Ranks are asked on their control threads; one that does not answer is named, and stops nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.faults.describe import describe, readable_stack
from nbdist.client.faults.notes import process_word
from nbdist.client.faults.rank_state import RankState
from nbdist.shared.text import aligned, name_bytes

_ANSWER_TIMEOUT_S = 5.0

_COLUMNS = ("rank", "host", "device", "pid", "state", "step", "memory", "last collective")
# Columns where any rank has something to say there.
_GPU = {
    "allocated_bytes": "GPU allocated",
    "reserved_bytes": "reserved",
    "peak_bytes": "peak",
    "device_bytes": "in use by all",
    "device_total_bytes": "of",
}
_SNAPSHOT = "snapshot"  # of sharded state, in memory


@dataclass(frozen=True, slots=True)
class RankLine:
    """One rank's line. `state` is what it does, `dead: ...`, or `not answering`, for people.

    `memory_bytes` is the process' own; `gpu` has that of its GPU, by the names of `wire.Record`.
    """

    rank: int
    host: str
    device: str
    pid: int
    state: str
    step: int = 0
    memory_bytes: int = 0
    last_collective: str = ""
    snapshot: str = ""
    gpu: Mapping[str, float] = field(default_factory=dict)
    is_dead: bool = False
    is_silent: bool = False

    def cells(self) -> tuple[str, ...]:
        """Return the line's words, in the order of the table's columns."""
        memory = name_bytes(self.memory_bytes) if self.memory_bytes else ""
        of_gpu = (name_bytes(self.gpu[key]) if key in self.gpu else "" for key in _GPU)
        step = f"{self.step:,}"
        words = (self.rank, self.host, self.device, self.pid, self.state, step, memory)
        return (*map(str, words), self.last_collective, *of_gpu, self.snapshot)


@dataclass(frozen=True, slots=True)
class Status:
    """All ranks, with one sentence about the cluster. Prints as a table."""

    summary: str
    ranks: tuple[RankLine, ...] = ()
    hint: str = ""

    @classmethod
    def stopped(cls, why: str) -> "Status":
        """Return the status of a cluster that is not running."""
        return cls(f"No ranks are running: {why}")

    @classmethod
    def ask(cls, cluster: Cluster, describe: str) -> "Status":
        """Ask every living rank; dead ones are named with their cause."""
        answers = _states(cluster)
        words = _words(cluster, answers)
        lines = []
        for rank, state in sorted(cluster.ranks.items()):
            place = (rank, state.host, state.device, state.pid)
            is_silent = state.alive and rank not in answers
            line = RankLine(*place, words[rank], is_dead=not state.alive, is_silent=is_silent)
            lines.append(_line(line, answers[rank]) if rank in answers else line)
        trouble = cluster.broken or cluster.dead()
        hints = [why] if (why := _refused(answers)) else []
        if trouble:
            hints.append(f"What led to this is in {cluster.events.path}")
        return cls(cluster.broken or describe, tuple(lines), "\n".join(hints))

    def __str__(self) -> str:
        if not self.ranks:
            return self.summary
        head, lines = (*_COLUMNS, *_GPU.values(), _SNAPSHOT), [line.cells() for line in self.ranks]
        shown = [at for at in range(len(head)) if head[at] in _COLUMNS or any(w[at] for w in lines)]
        rows = [tuple(row[at] for at in shown) for row in (head, *lines)]
        return "\n".join([self.summary, *aligned(rows), self.hint]).rstrip()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Stacks(Mapping[int, dict[str, str]]):
    """Each rank's stacks by the thread's name. Prints as people read it: one rank after another.

    `words` say what each rank does; a rank that did not answer has such a line and no stacks.
    """

    words: Mapping[int, str]
    by_rank: Mapping[int, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def ask(cls, cluster: Cluster, ranks: Sequence[int]) -> "Stacks":
        """Ask these ranks where they are, and all of them what they do."""
        said = _states(cluster)
        stacks = answers(
            {
                rank: cluster.requests.ask(rank, "control.stacks", busy=True)
                for rank in ranks
                if rank in said
            }
        )
        words = _words(cluster, said)
        return cls({rank: words[rank] for rank in ranks}, stacks)

    def __getitem__(self, rank: int) -> dict[str, str]:
        return self.by_rank[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_rank)

    def __len__(self) -> int:
        return len(self.by_rank)

    def __str__(self) -> str:
        blocks = []
        for rank, word in self.words.items():
            blocks.append(f"rank {rank}: {word}")
            threads = self.by_rank.get(rank, {})
            shown = {name: text for name, text in threads.items() if name.startswith("MainThread")}
            for name, text in shown.items():
                if text != "idle":
                    blocks += [f"  {name[12:]} frames:"] if name != "MainThread" else []
                    blocks.append(readable_stack(text))
        return "\n".join(blocks)

    def __repr__(self) -> str:
        return str(self)


def _states(cluster: Cluster) -> dict[int, Any]:
    """Ask every living rank what it does."""
    ask = cluster.requests.ask
    return answers({rank: ask(rank, "control.state", busy=True) for rank in cluster.living()})


def answers(futures: Mapping[int, "Future[Any]"]) -> dict[int, Any]:
    """Return the answers that come in time."""
    done, _ = wait(futures.values(), _ANSWER_TIMEOUT_S)
    return {
        rank: future.result()
        for rank, future in futures.items()
        if future in done and future.exception() is None
    }


def _words(cluster: Cluster, answers: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return what every rank of the cluster does, in a few words."""
    said = {rank: RankState.from_wire(answer) for rank, answer in answers.items()}
    words = {}
    for rank, state in sorted(cluster.ranks.items()):
        if not state.alive:
            words[rank] = f"dead: {state.ended}"
        elif rank in said:
            words[rank] = describe(rank, said, {})
        else:
            why = process_word(state)
            words[rank] = "not answering" + (f": {why}" if why else "")
    return words


def _line(line: RankLine, answer: Mapping[str, Any]) -> RankLine:
    return replace(
        line,
        step=answer["step"],
        memory_bytes=answer["rss_bytes"],
        gpu=answer["gpu"],
        last_collective=answer["last"] or "",
        snapshot=describe_snapshot(answer.get("snapshot")),
    )


def describe_snapshot(said: Mapping[str, Any] | None) -> str:
    """Return `step 412, 8 s old, 1.2 GB`, `refused`, or nothing where none is needed."""
    if said is None:
        return ""
    if "refused" in said:
        return "refused"
    return f"step {said['step']:,}, {said['age_s']:.0f} s old, {name_bytes(said['bytes'])}"


def _refused(answers: Mapping[int, Mapping[str, Any]]) -> str:
    """Return why snapshots are refused: of one rank, for all have the same reason."""
    said = (answer.get("snapshot") or {} for answer in answers.values())
    return next((str(one["refused"]) for one in said if "refused" in one), "")
