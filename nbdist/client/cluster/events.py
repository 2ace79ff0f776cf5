"""The events of one cluster: a file of JSON lines that can be attached to a bug report.

A line has the time, the seconds since the cluster was made (a clock that never jumps), the event,
its cause in words, and plain facts. Never a cell's source, a value or an error's message: they
may hold secrets. The file is its owner's alone (0600) and bounded: when it has grown to
`MAX_BYTES` it becomes `events.1.jsonl`, and a new one begins.

Threads: `note` may be called from any of them.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 20


class EventLog:
    """The events of one cluster, in the order in which they were noted."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Begin to count the seconds; the file is made by the first event."""
        self.path = path
        self._max_bytes = max_bytes
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._complained = False
        self._listeners: list[Callable[[str], None]] = []

    @property
    def seconds(self) -> float:
        """Seconds since the cluster was made, by the clock of the lines' `s`."""
        return time.monotonic() - self._began

    def note(self, event: str, cause: str = "", **facts: Any) -> None:
        """Write one event; a log that cannot be written stops nothing.

        Args:
            event: What happened, in a word or two: `rank failed`.
            cause: Why, in words; left out when empty.
            **facts: Numbers, short texts, and lists of them.
        """
        try:
            with self._lock:
                self._write(event, cause, facts)
        except Exception:
            if not self._complained:
                self._complained = True
                log.exception("Events can no longer be written to %s", self.path)
        for listener in list(self._listeners):
            listener(event)

    def listen(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call `listener` with each event's name; returns how to stop that.

        It is called on the thread that notes the event, and must neither wait nor raise.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _write(self, event: str, cause: str, facts: dict[str, Any]) -> None:
        at = datetime.now().astimezone().isoformat(timespec="milliseconds")
        entry = {"time": at, "s": round(self.seconds, 3), "event": event}
        if cause:
            entry["cause"] = cause
        line = json.dumps(entry | facts, default=_name_of_type, ensure_ascii=False)
        # Opened for each line: events are rare, and so nothing is left open when a cluster ends.
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode(errors="replace") + b"\n")
            is_full = os.fstat(file).st_size >= self._max_bytes
        finally:
            os.close(file)
        if is_full:
            self.path.replace(older_part(self.path))


def older_part(path: Path) -> Path:
    """Return where the lines before those of `path` are, if there have been so many."""
    return path.with_suffix(f".1{path.suffix}")


def read_events(path: Path, since_s: float = 0.0) -> list[dict[str, Any]]:
    """Return the events since `since_s`, oldest first; a line cut by a full disk is left out."""
    events = []
    for part in (older_part(path), path):
        try:
            lines = part.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event["s"] >= since_s:
                events.append(event)
    return events


def _name_of_type(value: object) -> str:
    # Not its repr, which may hold private data.
    return type(value).__name__
