"""Say who is slow, and why: one sentence for each, or silence.

*A rank* is slow when its own work (`work`) is 20 % above its peers' median over the last 50 steps,
or the last second where that is more, and in each fifth of them: in most steps, or on average, as
by an evaluation every few steps. For lack of a core it is so only where that lasts for seconds and
the others do not lack one: else the machine is full. Where its peers wait for cores, what makes it
late by no more than they wait must last for seconds too. Peers are all ranks; in a pipeline, whose
stages differ by nature, those that share a group with it in which it sends no messages, such as its
data-parallel mates: without one, a stage is not judged.

*A link* is slow (`links`) when it carries less than half of what the others do for the time that it
was busy, about as little in each of at least four samples and 50 steps, and the step would gain by
a fifth, for which both its ends wait: that the other end reads late the kernel counts as busy too.
Links that carry little a step are not judged: their times are those of the ranks that answer.

Nothing is said of load that is the same on all ranks, nor of what passes sooner.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nbdist.client.metrics.analysis import links, sentences, work
from nbdist.client.metrics.analysis.values import Straggler
from nbdist.shared.packed import Template
from nbdist.shared.wire import Record

EVERY_S = 1.0  # what takes 50 steps to be known need not be asked more often

_log = logging.getLogger("nbdist.analysis")


class StragglerReport:
    """What a judge says: `newest`, the `rates` of links, each rank's `own_ms`.

    They are renewed every `EVERY_S`. When it fails, that is logged and nothing more is said;
    whoever asks goes on. One thread.
    """

    def __init__(self) -> None:
        self.newest: tuple[Straggler, ...] = ()
        self.rates: Mapping[int, Mapping[int, float]] = {}
        self.own_ms: Mapping[int, float] = {}
        self._judge: StragglerDetector | None = StragglerDetector()
        self._next_s = float("-inf")

    def take(self, records: Sequence[Record], now_s: float, *, is_last: bool) -> None:
        """Take in records of any ranks, each rank's in their order; `is_last`: none will come."""
        if self._judge is None:
            return
        try:
            for record in records:
                self._judge.add(record)
            if is_last or now_s >= self._next_s:
                self._next_s = now_s + EVERY_S
                self.newest, self.rates = self._judge.verdicts(), self._judge.rates()
                self.own_ms = self._judge.own_ms
        except Exception:
            self._judge, self.newest, self.rates, self.own_ms = None, (), {}, {}
            _log.exception("The search for stragglers stopped for this cell")


class StragglerDetector:
    """One cell's evidence and what follows from it. One thread.

    `own_ms` is each rank's mean own work over the steps of which verdicts were asked last.
    """

    def __init__(self) -> None:
        self.own_ms: Mapping[int, float] = {}
        self._rows = work.StepRows()
        self._links = links.LinkSamples()
        self._traffic: dict[int, _Traffic] = {}
        self._since: dict[tuple[int, str], int] = {}

    def add(self, record: Record) -> None:
        """Take in a record of any rank; each rank's come in their order."""
        if record.kind == "step":
            self._rows.add(record)
        elif record.kind == "links":
            self._links.add(record)
        elif record.detail is not None:
            traffic = self._traffic.setdefault(record.rank, _Traffic())
            for template in record.detail.new.values():
                traffic.add(template)

    def rates(self) -> dict[int, dict[int, float]]:
        """Return what links carry, in bytes per second, by sending and receiving rank."""
        return self._links.rates()

    def verdicts(self) -> tuple[Straggler, ...]:
        """Return who is slow now, the slowest first."""
        window = self._rows.window()
        if window is None:
            return ()
        self.own_ms = window.own_ms()
        found = [self._of_work(slow) for slow in self._slow(window)]
        found.append(self._of_link(window))
        known = sorted((v for v in found if v is not None), key=lambda v: -v.share)
        self._since = {(v.rank, v.cause): v.since_step for v in known}
        return tuple(known)

    def _slow(self, window: work.StepWindow) -> list[work.Slow]:
        """Return who is slow by its own work; what may come of too few cores, where it lasts."""
        peers = self._peers(window.ranks)
        found = work.find(window, peers)
        if not any(slow.may_pass for slow in found):
            return found
        longer = self._rows.window(work.STARVED_S)
        lasting = [] if longer is None else work.find(longer, peers)
        lasts = {(slow.rank, slow.cause) for slow in lasting}
        return [slow for slow in found if not slow.may_pass or (slow.rank, slow.cause) in lasts]

    def _of_work(self, slow: work.Slow) -> Straggler | None:
        since = self._since.get((slow.rank, slow.cause), slow.since_step)
        sentence = sentences.of_work(slow)
        return Straggler(slow.rank, slow.cause, slow.share, sentence, since, sentences.within(slow))

    def _of_link(self, window: work.StepWindow) -> Straggler | None:
        slow = self._links.find()
        if slow is None:
            return None
        step_s = window.median_s("step")
        # No rank waits for what is hidden behind backward. An end that hardly waits is the
        # one that reads late.
        lost_s = min(slow.lost_s, *(window.typical_s("comm", rank) for rank in slow.link))
        share = lost_s / max(step_s - lost_s, 1e-9)
        # An end that lacks a core lets its link wait: gloo's thread as well as the main one.
        starved_s = max(window.mean_s("starved", rank) for rank in slow.link)
        if share < work.SLOWER or starved_s > work.LEAST_OF * lost_s:
            return None
        since = self._since.get((slow.rank, "link"), slow.since_step)
        return Straggler(slow.rank, "link", share, sentences.of_link(slow), since)

    def _peers(self, ranks: tuple[int, ...]) -> Mapping[int, set[int]]:
        """Return whom each rank's work is compared with."""
        partners = {rank: self._traffic.get(rank, _Traffic()).partners for rank in ranks}
        if not any(partners.values()):
            return {rank: set(ranks) for rank in ranks}
        return {
            rank: {
                peer
                for group in self._traffic.get(rank, _Traffic()).groups
                if not partners[rank] & set(group)
                for peer in group
            }
            for rank in ranks
        }


@dataclass(slots=True)
class _Traffic:
    """With whom a rank exchanges: `partners` of messages, `groups` of collectives."""

    partners: set[int] = field(default_factory=set)
    groups: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, template: Template) -> None:
        if template.peer is not None:
            self.partners.add(template.peer)
        else:
            self.groups.add(template.ranks)
