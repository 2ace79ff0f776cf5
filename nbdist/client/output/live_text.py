"""The live text of a cell: the last lines of every rank, while the cell runs.

`receive` and `show` are called on ipyparallel's IO thread and only remember; a thread
of its own writes the slot, at once for the first text and then at most every `INTERVAL_S`. Each
update costs the same however much has been printed: only each rank's last lines are merged.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from nbdist.client.output.merge import Item, OutputLine, Shown, kind_of, render, text_of
from nbdist.client.output.slots import Display, Slot, Slots
from nbdist.client.output.terminal import RankOutput

INTERVAL_S: Final = 0.1
TAIL_LINES: Final = 30

_log = logging.getLogger(__name__)


class LiveText:
    """The output of the ranks of one cell, collected and, in a live notebook, shown as text.

    Args:
        slots: Where the text is shown; in static mode nothing is shown and no thread runs.
        ranks: The ranks that were asked.
    """

    def __init__(self, slots: Slots, ranks: Sequence[int]) -> None:
        """Gather from now on; the thread starts with the first text."""
        self.outputs = {rank: RankOutput() for rank in ranks}
        self._slots = slots
        self._note: str | None = None
        self._drawn_note: str | None = None
        self._slot: Slot | None = None
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def receive(self, rank: int, content: dict[str, Any]) -> None:
        """Take one output message of `rank` (`nbdist.engine.kernel.output.stdio`); any thread."""
        with self._lock:
            self.outputs[rank].receive(content)
        self._touch()

    def show(
        self, rank: int, display: Display, *, value: bool = False, display_id: str | None = None
    ) -> None:
        """Take what `rank` displayed; any thread."""
        with self._lock:
            self.outputs[rank].show(display, value=value, display_id=display_id)
        self._touch()

    def update(self, rank: int, display_id: str, display: Display) -> None:
        """Take an `update_display_data` of `rank`; any thread."""
        with self._lock:
            self.outputs[rank].update(display_id, display)
        self._touch()

    def clear(self, rank: int, *, wait: bool) -> None:
        """Take a `clear_output` of `rank`; any thread."""
        with self._lock:
            self.outputs[rank].clear(wait=wait)
        self._touch()

    def note(self, note: str | None) -> None:
        """Show this block below everything, in place of the one before; None takes it away.

        It is not part of what the cell leaves behind.
        """
        if note != self._note:
            with self._lock:
                self._note = note
            self._touch()

    def tell(self, line: str) -> None:
        """Show a line that stays, where nothing is live; nothing in a cell that is not shown."""
        self._slots.warn(Display({"text/plain": line}))

    def has_shown(self, note: str) -> bool:
        """Return whether this note was the last one drawn; True where none ever is."""
        is_drawing = self._thread is not None and self._thread.is_alive()
        return not self._slots.live or note == self._drawn_note or not is_drawing

    def items(self) -> dict[int, list[Item]]:
        """Return all that has been shown, for `merge.render`."""
        with self._lock:
            return {rank: output.items() for rank, output in self.outputs.items()}

    def close(self) -> None:
        """Stop updating. What was gathered stays; more may still be gathered."""
        with self._lock:
            self._closed.set()
            self._changed.set()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=5)

    def _touch(self) -> None:
        if not self._slots.live or self._closed.is_set():
            return
        self._changed.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed.is_set():
                    self._thread = threading.Thread(
                        target=self._run, name="nbdist-live-text", daemon=True
                    )
                    self._thread.start()

    def _run(self) -> None:
        pause = 0.0
        while not self._closed.wait(pause):
            self._changed.wait()
            self._changed.clear()
            if self._closed.is_set():
                return
            started = time.monotonic()
            try:
                self._draw()
            except Exception:
                # The final text does not depend on this thread, and training less so.
                _log.exception("Live text stopped; the cell's output still appears at its end.")
                return
            # On a slow machine at most half of the time goes into drawing.
            pause = max(INTERVAL_S, time.monotonic() - started)

    def _draw(self) -> None:
        with self._lock:
            tails = {rank: _tail(output) for rank, output in self.outputs.items()}
            note = self._note
        shown = render(tails, max_lines=TAIL_LINES * 4)
        if not shown and note is None and self._slot is None:
            return
        text = [page.data["text/plain"] for page in shown[:1]]
        display = Display({"text/plain": "\n".join([*text, *([note] if note else [])])})
        self._drawn_note = note  # before it is seen, for who sees it may act on it at once
        if self._slot is None:
            self._slot = self._slots.open(display)
        else:
            self._slot.update(display)


def _tail(output: RankOutput) -> list[Item]:
    """Return the last lines; of a rich display only its name, for the slot holds text."""
    items: list[Item] = []
    for item in output.items()[-TAIL_LINES:]:
        if isinstance(item, Shown) and text_of(item) is None:
            item = OutputLine(f"[{kind_of(item.display)}]")
        items.append(item)
    return items
