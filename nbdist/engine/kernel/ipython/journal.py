"""Keep the messages of a cell, and its reply, for a notebook that attaches later.

Only in a detached cluster (`%dist start --detach`): the notebook that sent the cell may be gone
when it ends. Another one asks for what it has missed (`report`), and recognizes messages that it
receives twice by their ids. Records have a separate ring (`records.py`).

Bounded: of windows of text the newest of each number stays, as in the notebook (`stdio.py`); beyond
`MOST_BYTES` the oldest messages are dropped, and counted.

Threads: `begin` and `end` on the main one; `add` on the sending one; `report` on the control
thread.
"""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from nbdist.shared import wire

MOST_BYTES: Final = 16 << 20


class Journal:
    """The messages of one cell, and its reply; empty where no notebook can attach later."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Begin without a cell."""
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._message = ""
        self._forget()

    def _forget(self) -> None:
        self._sent: deque[tuple[str, str, dict[str, Any], int]] = deque()
        self._bytes = 0
        self._dropped = 0
        self._reply: dict[str, Any] | None = None

    def begin(self, message: str, *, keeps: bool) -> None:
        """Begin with the cell that came as `message`; keep nothing of it unless it `keeps`."""
        with self._lock:
            self._forget()
            self._message = message if keeps else ""

    def add(self, sent: Mapping[str, Any]) -> None:
        """Keep a message that was sent on iopub, if it is displayed."""
        kind, content = sent["msg_type"], sent["content"]
        if not self._message or kind not in wire.SHOWN:
            return
        with self._lock:
            if (window := content.get("window")) is not None and self._sent:
                _, last_kind, last, size = self._sent[-1]
                if last_kind == kind and last.get("window") == window:
                    self._sent.pop()
                    self._bytes -= size
            size = _size(content)
            self._sent.append((sent["header"]["msg_id"], kind, content, size))
            self._bytes += size
            while self._bytes > self._most_bytes and len(self._sent) > 1:
                self._bytes -= self._sent.popleft()[3]
                self._dropped += 1

    def end(self, reply: dict[str, Any]) -> None:
        """Keep the cell's reply."""
        if self._message:
            self._reply = reply

    def report(self, message: str, *, whole: bool) -> dict[str, Any]:
        """Return what is known about the cell that came as `message`.

        Keys: `known` (it is the newest cell), `reply` (None while it runs), `dropped` (messages
        that were dropped). With `whole` also `sent`: id, type and content of each message, in
        order.
        """
        with self._lock:
            if not message or message != self._message:
                return {"known": False, "reply": None, "dropped": 0, "sent": []}
            sent = [[of, kind, content] for of, kind, content, _ in self._sent] if whole else []
            return {"known": True, "reply": self._reply, "dropped": self._dropped, "sent": sent}


def _size(content: Mapping[str, Any]) -> int:
    """Return the approximate bytes of a message's texts and pictures."""
    texts = [text for _, text in content.get("parts", ())]
    texts += [value for value in content.get("data", {}).values() if isinstance(value, str)]
    return 64 + sum(map(len, texts))
