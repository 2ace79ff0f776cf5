"""`%dist chaos`: make ranks fail on purpose, on a schedule, while cells run; report the outcome.

The schedule follows from a plan and its seed alone. Its clock runs while a cell does, from the
cell's beginning until its ranks are ready again, so that a fault may also strike a recovery.

Threads: one, `nbdist-chaos`, from `start` until the schedule is done, `stop`, or the cluster's
stop; a rank that it holds still is let go before it ends.
"""

import itertools
import logging
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.events import read_events
from nbdist.client.session.chaos_report import ChaosReport, report
from nbdist.shared.text import name_ranks

log = logging.getLogger(__name__)

_HOLD_S = 1.0
_STOP_TIMEOUT_S = 5.0
_SLOW_STOPPED_S = 0.08
_SLOW_RUNNING_S = 0.02


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """A schedule of faults: one of `kinds`, on one of `ranks`, `every_s` seconds of running cells.

    It ends after `for_s` seconds or `faults` faults; with neither, at `%dist chaos off`.
    """

    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    every_s: float = 5.0
    for_s: float | None = None
    faults: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault; `at_s` counts seconds of running cells."""

    at_s: float
    kind: str
    rank: int


def schedule(plan: ChaosPlan) -> Iterator[Fault]:
    """Return the faults of a plan in order, the same ones each time."""
    choose = random.Random(plan.seed)
    for number in itertools.count(1) if plan.faults is None else range(1, plan.faults + 1):
        at_s = number * plan.every_s
        if plan.for_s is not None and at_s > plan.for_s:
            return
        yield Fault(at_s, choose.choice(plan.kinds), choose.choice(plan.ranks))


class Stopwatch:
    """Seconds during which cells ran, with a wait until there were so many. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._before_s = 0.0
        self._began: float | None = None
        self._is_over = False

    def cell_begun(self) -> None:
        """Let the seconds run."""
        with self._changed:
            if self._began is None:
                self._began = time.monotonic()
            self._changed.notify_all()

    def cell_ended(self) -> None:
        """Hold them, until the next cell."""
        with self._changed:
            self._before_s = self._seconds()
            self._began = None
            self._changed.notify_all()

    def end(self) -> None:
        """End every wait, now and later."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_until(self, seconds: float) -> bool:
        """Wait until cells have run so long; return False when `end` has been called."""
        with self._changed:
            while not self._is_over:
                left = seconds - self._seconds()
                if self._began is None:
                    self._changed.wait()
                elif left > 0:
                    self._changed.wait(left)
                else:
                    return True
            return False

    def wait_for(self, seconds: float) -> bool:
        """Wait so many seconds of the clock on the wall; return False when `end` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, seconds)
            return not self._is_over

    def _seconds(self) -> float:
        return self._before_s + (0.0 if self._began is None else time.monotonic() - self._began)


class Chaos:
    """The faults of one plan in one cluster."""

    def __init__(self, cluster: Cluster, plan: ChaosPlan) -> None:
        """Prepare; no fault happens before `start`."""
        self.plan = plan
        self._since_s = cluster.events.seconds
        self._cluster = cluster
        self._watch = Stopwatch()
        self._unlisten = cluster.events.listen(self._on_event)
        self._thread = threading.Thread(target=self._run, name="nbdist-chaos", daemon=True)

    @property
    def is_armed(self) -> bool:
        """Whether more faults will happen."""
        return self._thread.is_alive()

    def __str__(self) -> str:
        plan = self.plan
        what = f"{', '.join(plan.kinds)} on {name_ranks(plan.ranks)}, every {plan.every_s:g} s"
        armed = "active while cells run" if self.is_armed else "over"
        return f"Chaos:     {what}, seed {plan.seed}; {armed}\n{self.report()}"

    def start(self) -> None:
        """Begin with the next cell."""
        self._cluster.events.note(
            "chaos begun",
            kinds=list(self.plan.kinds),
            ranks=list(self.plan.ranks),
            every_s=self.plan.every_s,
            seed=self.plan.seed,
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the schedule; a rank that is held still continues. A second call does nothing."""
        self._watch.end()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)
            if self._thread.is_alive():
                log.error("%%dist chaos did not end within %.0f s", _STOP_TIMEOUT_S)

    def report(self) -> ChaosReport:
        """Return the outcome so far."""
        return report(read_events(self._cluster.events.path, self._since_s))

    def _on_event(self, event: str) -> None:
        if event == "cell begun":
            self._watch.cell_begun()
        elif event == "cell ended":
            self._watch.cell_ended()
        elif event == "stop":
            self._watch.end()

    def _run(self) -> None:
        try:
            for fault in schedule(self.plan):
                if not self._watch.wait_until(fault.at_s):
                    break
                self._strike(fault)
        except Exception:
            log.exception("%%dist chaos has ended by an error of its own")
        finally:
            self._unlisten()
            self._cluster.events.note("chaos ended")

    def _strike(self, fault: Fault) -> None:
        rank = fault.rank
        if rank not in self._cluster.living():
            self._cluster.events.note("fault missed", fault.kind, rank=rank)
            return
        self._cluster.events.note("fault", fault.kind, rank=rank)
        if fault.kind == "kill":
            self._cluster.kill(rank)
        elif fault.kind == "interrupt":
            self._cluster.requests.ask(rank, "chaos.interrupt", busy=True)
        elif fault.kind == "raise":
            self._cluster.requests.ask(rank, "chaos.fail", busy=True)
        elif fault.kind == "stop":
            self._hold(rank, _HOLD_S)
        else:
            assert fault.kind == "slow", fault.kind
            until = time.monotonic() + _HOLD_S
            while time.monotonic() < until and self._hold(rank, _SLOW_STOPPED_S):
                self._watch.wait_for(_SLOW_RUNNING_S)

    def _hold(self, rank: int, seconds: float) -> bool:
        self._cluster.signal(rank, signal.SIGSTOP)
        try:
            return self._watch.wait_for(seconds)
        finally:
            self._cluster.signal(rank, signal.SIGCONT)
