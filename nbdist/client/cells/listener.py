"""Hear one rank during a cell: sort its messages, keep its reply.

Threads: `on_message` runs on ipyparallel's IO thread, `died` on the launcher's; the rest is
read on the main thread.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.client.output.live_text import LiveText
from nbdist.client.output.slots import Display
from nbdist.shared import wire
from nbdist.shared.processes.ended import Ended

if TYPE_CHECKING:
    from nbdist.client.cluster.connection import Message


@dataclass(frozen=True, slots=True)
class CellFailure:
    """An exception on a rank, from its reply.

    `at` is `time.monotonic()` when the notebook heard of it.
    """

    ename: str
    evalue: str
    traceback: tuple[str, ...]
    at: float


class RankListener:
    """One rank's part of one cell. `failure` and `death` say what went wrong, if anything.

    `heard_at` is `time.monotonic()` of the rank's last message that comes of what the cell does.
    """

    def __init__(
        self,
        rank: int,
        text: LiveText,
        on_records: Callable[[wire.Batch], None],
        on_news: Callable[[], None],
    ) -> None:
        """Begin to listen.

        Args:
            rank: Whose messages these are.
            text: Gets what the rank prints and displays.
            on_records: Gets each batch of records.
            on_news: Called when the rank has replied or died.
        """
        self.rank = rank
        self.replied = False
        self.summary = wire.CellEnd()
        self.failure: CellFailure | None = None
        self.death: Ended | None = None
        self.died_at = 0.0
        self.heard_at = time.monotonic()
        self.idle = threading.Event()
        self._text = text
        self._on_records = on_records
        self._on_news = on_news

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be waited for: the rank has replied, or died."""
        return self.replied or self.death is not None

    def on_message(self, message: "Message") -> None:
        """Take one message that answers the cell."""
        content = message.content
        if message.kind == wire.RECORDS:
            self._on_batch(wire.Batch.from_wire(content))
            return
        self.heard_at = time.monotonic()
        if message.reply:
            self._on_reply(content)
        elif message.kind == wire.OUTPUT:
            self._text.receive(self.rank, content)
        elif message.kind in ("display_data", "execute_result"):
            self._text.show(
                self.rank,
                Display(content["data"], content.get("metadata", {})),
                value=message.kind == "execute_result",
                display_id=content.get("transient", {}).get("display_id"),
            )
        elif message.kind == "update_display_data":
            display = Display(content["data"], content.get("metadata", {}))
            self._text.update(self.rank, content["transient"]["display_id"], display)
        elif message.kind == "clear_output":
            self._text.clear(self.rank, wait=content.get("wait", False))
        elif message.kind == "status" and content["execution_state"] == "idle":
            self.idle.set()

    def _on_batch(self, batch: wire.Batch) -> None:
        if any(record.kind not in wire.KINDS_OF_ITSELF for record in batch.records):
            self.heard_at = time.monotonic()
        self._on_records(batch)

    def died(self, ended: Ended) -> None:
        """Note that the rank's process has ended."""
        if not self.replied:
            self.death = ended
            self.died_at = time.monotonic()
        self.idle.set()
        self._on_news()

    def _on_reply(self, content: dict[str, Any]) -> None:
        now = time.monotonic()
        if content["status"] == "error":
            traceback = tuple(content.get("traceback", ()))
            self.failure = CellFailure(content["ename"], content["evalue"], traceback, now)
        elif content["status"] != "ok":
            self.failure = CellFailure("Aborted", "the rank dropped the cell", (), now)
        if wire.CELL_KEY in content:
            self.summary = wire.CellEnd.from_wire(content[wire.CELL_KEY])
        if content.get(wire.SILENT_KEY):
            self.idle.set()  # no output is on its way, and nothing will end it
        self.replied = True
        self._on_news()
