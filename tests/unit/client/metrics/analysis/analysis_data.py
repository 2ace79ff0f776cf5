"""Steps of ranks that never ran, told in the form in which real ones are."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nbdist.shared.packed import TICK_NS, Calls, Packer, Template
from nbdist.shared.wire import Record

MS = 1_000_000


class OneClock:
    """All ranks read one clock, but for those that are `ahead_ns`."""

    def __init__(self, **ahead_ns: int) -> None:
        self.error_ns = 0
        self._ahead_ns = {int(rank.removeprefix("rank")): ns for rank, ns in ahead_ns.items()}

    def offset_ns(self, rank: int, moment_ns: int) -> int | None:
        return -self._ahead_ns.get(rank, 0)


@dataclass
class Rank:
    """What one rank tells. Moments in milliseconds of its clock."""

    rank: int
    seq: int = 0
    known: dict[Template, int] = field(default_factory=dict)

    def tell(
        self,
        step: int,
        calls: Sequence[tuple[Template, int, float, float, float]],
        waits: Sequence[tuple[float, float]] = (),
        base_ms: float = 0.0,
        skipped: int = 0,
        end_ms: float = 0.0,
    ) -> Record:
        """Return the record of a step's calls: template, number, launch, begin and end."""
        packer = Packer(int(base_ms * MS))
        new = {}
        for template, number, *moments in calls:
            if template not in self.known:
                self.known[template] = len(self.known)
                new[self.known[template]] = template
            packer.call(self.known[template], number, [round(m * MS) for m in moments])
        for begin, end in waits:
            packer.wait(round(begin * MS), round(end * MS))
        self.seq += 1
        told = Calls(packer.base_ns, new, packer.calls, packer.waits, skipped, round(end_ms * MS))
        return Record(self.rank, self.seq, "calls", step, 0, {}, told)


def template(
    kind: str = "all_reduce",
    ranks: tuple[int, ...] = (0, 1),
    group: str = "0",
    bytes: int = 4_000_000,
    line: str = "cell 7, line 3",
    peer: int | None = None,
) -> Template:
    return Template(kind, group, "the default group", ranks, bytes, "float32", line, peer)


def one_tick_ms() -> float:
    """Moments are told in ticks: two may each be off by one."""
    return TICK_NS / MS
