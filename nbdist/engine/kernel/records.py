"""Number this rank's records and publish them in batches while the cell runs.

A record gets its `seq` when it is made; `seq` counts without gaps for as long as the rank lives.
A thread publishes what is new every 500 ms, the first record after a pause at once. The newest
records stay in a ring, so that the client can ask again for what the push has lost.

The ring holds `RING_POINTS` values: 60 s of an eighth of 20 000 values a second. At worst, with
records of one value each, that is some 60 MB; it fills only when that much is recorded. A record
that leaves the ring before it was published is lost for good: it is counted, and the fact
`records_lost` says so.

Threads: every method may be called on any thread. `publish` is called on the publishing thread
and on the one that calls `flush`, one at a time.

Forks: a child (a DataLoader's worker) has the ring but no thread, and must not speak for the
rank. There `add` and `flush` do nothing.
"""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from nbdist.shared.packed import Calls
from nbdist.shared.wire import Batch, Record

SAMPLE_S = 1.0  # between samples while there is no record
INTERVAL_S = 0.5  # a message costs a rank about a millisecond, however little is in it
RING_POINTS = 150_000
MAX_ROWS = 1000  # per message: keeps the notebook's IO thread responsive while it parses

_log = logging.getLogger("nbdist.records")


class Recorder:
    """One rank's records."""

    def __init__(self, rank: int, publish: Callable[[dict[str, Any]], None]) -> None:
        """Start the publishing thread.

        Args:
            rank: This rank.
            publish: Sends one `wire.Batch.to_wire()` to the client. What it raises is logged
                once; the records stay in the ring and are sent when the client asks.
        """
        self._rank = rank
        self._publish = publish
        self._ring: deque[Record] = deque()
        self._points = 0  # values in the ring
        self._next_seq = 0
        self._sent = 0  # records below this seq have been published
        self._lost = 0
        self._facts: dict[str, str] = {}
        self._news: dict[str, str] = {}  # facts not yet sent to the client of this cell
        self._publish_failed = False
        self._is_forked = False
        self._is_woken = False  # the state of `_wake`, without a call
        self._samples: list[Callable[[], None]] = []
        self._is_in_cell = False
        self._make_locks()
        self._thread = self._start_thread()
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _after_fork(reference()))

    def before_publishing(self, *samples: Callable[[], None]) -> None:
        """Call `samples` on the publishing thread, to add more records: from a cell's first on.

        They are called before records are published, and each `SAMPLE_S` while there are none. One
        that raises is logged and never called again.
        """
        self._samples = list(samples)

    @property
    def next_seq(self) -> int:
        """The number the next record will get."""
        return self._next_seq

    @property
    def facts(self) -> dict[str, str]:
        """The facts reported about the run so far."""
        with self._lock:
            return dict(self._facts)

    def add(
        self, kind: str, step: int, values: dict[str, float], detail: Calls | None = None
    ) -> None:
        """Make one record; `values` now belongs to the recorder. Costs a few microseconds."""
        if self._is_forked:
            return
        now_ns = time.time_ns()
        with self._lock:
            record = Record(self._rank, self._next_seq, kind, step, now_ns, values, detail)
            self._ring.append(record)
            self._next_seq += 1
            self._points += len(values) or 1 if detail is None else _size(record)
            while self._points > RING_POINTS and len(self._ring) > 1:
                oldest = self._ring.popleft()
                self._points -= _size(oldest)
                if oldest.seq >= self._sent:
                    self._sent = oldest.seq + 1
                    self._lost += 1
                    self._set_fact("records_lost", str(self._lost))
        if not self._is_woken:
            self._is_woken = True
            self._wake.set()

    def fact(self, **texts: str) -> None:
        """Report short texts about the run to the client; they are sent with the next records."""
        with self._lock:
            for name, text in texts.items():
                self._set_fact(name, text)

    def forget(self, *names: str) -> None:
        """Stop reporting these facts: facts of an earlier cell do not apply to this one."""
        with self._lock:
            for name in names:
                self._facts.pop(name, None)
                self._news.pop(name, None)

    def begin_cell(self) -> int:
        """Return the first `seq` of the cell that begins; all facts will be sent again."""
        with self._lock:
            self._news = dict(self._facts)
            self._is_in_cell = True
            return self._next_seq

    def flush(self) -> int:
        """Publish everything made so far, then return `next_seq`. Called before a cell's reply."""
        if not self._is_forked:
            self._is_in_cell = False
            if not self._thread.is_alive():
                _log.error("The thread that publishes records had ended; it is started again")
                self._thread = self._start_thread()
            self._publish_new()
        return self._next_seq

    def resend(self, first: int, next: int) -> list[dict[str, Any]]:
        """Return the records of `range(first, next)` that the ring still has, as wire batches."""
        with self._lock:
            wanted = [record for record in self._ring if first <= record.seq < next]
        return [batch.to_wire() for batch in self._batches(wanted, {})]

    def close(self) -> None:
        """Publish what is left and end the thread."""
        self._stop.set()
        self._wake.set()
        if not self._is_forked:
            self._thread.join(5)
            self._publish_new()

    def _set_fact(self, name: str, text: str) -> None:
        if self._facts.get(name) != text:
            self._facts[name] = text
            self._news[name] = text

    def _run(self) -> None:
        """Publish until closed: the publishing thread."""
        pause_s = None  # a cell without records never wakes this thread
        while not self._stop.is_set():
            self._wake.wait(pause_s)
            # Cleared before publishing: a record made meanwhile sets it again.
            self._wake.clear()
            self._is_woken = False
            self._take_sample()
            self._publish_new()
            self._stop.wait(INTERVAL_S)
            pause_s = SAMPLE_S if self._is_in_cell else None

    def _take_sample(self) -> None:
        samples = self._samples  # the main thread may put another list there meanwhile
        for sample in list(samples):
            try:
                sample()
            except Exception:
                samples.remove(sample)
                _log.exception("A sampler of records failed, and is left out from now on")

    def _publish_new(self) -> None:
        with self._publishing:
            with self._lock:
                waiting = self._next_seq - self._sent
                fresh = list(islice(reversed(self._ring), waiting))[::-1]
                self._sent = self._next_seq
                news = self._news
                if fresh:
                    self._news = {}
            for batch in self._batches(fresh, news):
                try:
                    self._publish(batch.to_wire())
                except Exception:
                    self._on_publish_error(batch)

    def _on_publish_error(self, batch: Batch) -> None:
        with self._lock:
            self._news = {**batch.facts, **self._news}
        if not self._publish_failed:
            self._publish_failed = True
            _log.exception("Records could not be published; they stay in the ring")

    def _batches(self, records: list[Record], facts: dict[str, str]) -> list[Batch]:
        return [
            Batch(self._rank, tuple(records[i : i + MAX_ROWS]), facts if i == 0 else {})
            for i in range(0, len(records), MAX_ROWS)
        ]

    def _make_locks(self) -> None:
        self._lock = threading.Lock()  # the fields; held for microseconds
        self._publishing = threading.Lock()  # one batch after the other, in order
        self._wake = threading.Event()
        self._is_woken = False
        self._stop = threading.Event()

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="nbdist-records", daemon=True)
        thread.start()
        return thread


def _size(record: Record) -> int:
    """Return the values that a record counts for; one takes some 64 bytes, a packed one 4."""
    packed = 0 if record.detail is None else len(record.detail.calls) + len(record.detail.waits)
    return len(record.values) + packed // 16 or 1


def _after_fork(recorder: Recorder | None) -> None:
    if recorder is not None:
        recorder._is_forked = True
        recorder._make_locks()  # another thread may have held them in that instant
