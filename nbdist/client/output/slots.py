"""The outputs of one cell: what shows while it runs, and what it leaves in the file.

While a cell runs, slots hold live text and the live board. At its end the final displays take
their places, in order, so that the saved notebook holds exactly the finals: the same outputs as
in static mode (`NBDIST_STATIC=1`), where nothing is shown before the end.

Threads: `open` and `update` may be called from any thread; one lock makes sure that no late
update overwrites a final. `settle` and the making of `Slots` belong to the main thread.
"""

import contextvars
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def is_live() -> bool:
    """Return whether displays can be updated here: in a kernel, and not `NBDIST_STATIC=1`."""
    return os.environ.get("NBDIST_STATIC") != "1" and kernel_shell() is not None


def kernel_shell() -> Any | None:
    """Return IPython's shell in a kernel; None in a terminal and in a plain script."""
    shell = _shell()
    return shell if hasattr(shell, "kernel") else None


def owns_cell() -> bool:
    """Return whether the notebook's cell that runs is a `%%distributed`: all it shows is ours.

    A cell of Python may have printed before it came to `Session.run`. Main thread.
    """
    return str(_request("content").get("code", "")).lstrip().startswith("%%distributed")


def is_attended() -> bool:
    """Return whether the front end says that someone may answer: nbclient and its kind do not.

    Main thread, or a subshell's, of the cell that runs there.
    """
    return bool(_request("content").get("allow_stdin", True))


def cell_id() -> str | None:
    """Return the id of the notebook's cell that runs, where its front end tells. Main thread."""
    return _request("metadata").get("cellId")


def _request(part: str) -> dict[str, Any]:
    parent: dict[str, Any] = getattr(kernel_shell(), "get_parent", dict)() or {}
    found: dict[str, Any] = parent.get(part, {})
    return found


@dataclass(frozen=True, slots=True)
class Display:
    """One output of a cell in Jupyter's form: a mime bundle and its metadata."""

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)


class Slot:
    """One output that changes while the cell runs. Made by `Slots.open`.

    `shown` is what it shows now, None where nothing is live; `moves` tells whether `show_in` takes
    that to another place.
    """

    def __init__(self, slots: "Slots", display_id: str) -> None:
        self._slots = slots
        self.display_id = display_id
        self.shown: Display | None = None
        self.moves = False
        self.is_published = True

    def update(self, display: Display) -> None:
        """Show `display` in this place; does nothing in static mode or after `settle`."""
        self._slots._update(self, display)


class Slots:
    """The slots of one cell, in the order in which they were opened.

    Args:
        live: Whether to show anything before the end; found out by `is_live` when None.
        above: What the notebook's cell shows above these already, and must show again after it
            was cleared.
        warns: Whether warnings show before the end where nothing is live.
    """

    def __init__(
        self, live: bool | None = None, above: Sequence[Display] = (), *, warns: bool = False
    ) -> None:
        self.live = is_live() if live is None else live
        self._above = above
        self._warns = warns
        self._lock = threading.Lock()
        self._open: list[Slot] = []
        self._elsewhere: Callable[[Sequence[Display]], None] | None = None
        self._passing: str | None = None  # the display id of what is shown until anything else is
        self._settled = False
        # Which cell an output belongs to, ipykernel keeps in context variables. A thread without
        # them would take the newest message's: of a click, or of a page that is opened, in a
        # subshell, whose outputs front ends drop.
        self._cell = contextvars.copy_context()

    def open(
        self, shown: Any, beside: Mapping[str, Any] | None = None, *, stays: bool = False
    ) -> Slot:
        """Show a `Display`, or any object that IPython can display (a widget), from now on.

        Args:
            shown: What to show.
            beside: Of an object: more forms of it, for front ends that cannot show its own.
            stays: Whether `show_in` leaves it where it is.
        """
        slot = Slot(self, uuid.uuid4().hex)
        with self._lock:
            if self.live and not self._settled:
                is_display = isinstance(shown, Display)
                slot.moves = is_display and not stays
                slot.shown = shown if is_display else _as_display(shown, beside or {})
                if slot.moves and self._elsewhere is not None:
                    slot.is_published = False
                    self._open.append(slot)
                    self._show_elsewhere()
                    return slot
                if is_display:
                    place, self._passing = self._passing, None
                    slot.display_id = place or slot.display_id
                    self._publish(slot.shown, slot.display_id, update=place is not None)
                else:
                    # Not an update: some front ends do not show a widget that comes in one.
                    self._clear_passing(wait=True)
                    self._publish(slot.shown, slot.display_id, update=False)
                self._open.append(slot)
        return slot

    def show_passing(self, display: Display) -> None:
        """Show something until anything else is shown or the cell ends; it leaves no trace.

        Only for a cell of the notebook that shows nothing but these slots: where a widget or
        nothing follows, its output is cleared. Does nothing where anything is shown already.
        """
        with self._lock:
            is_empty = not (self._open or self._above or self._passing or self._settled)
            if self.live and is_empty:
                self._passing = uuid.uuid4().hex
                self._publish(display, self._passing, update=False)

    def show_in(self, elsewhere: Callable[[Sequence[Display]], None]) -> None:
        """Hand what is shown here, and what comes, to another place: a board that pages find again.

        Jupyter drops the outputs of a cell whose page was opened again. Any thread; `elsewhere` is
        called under a lock and must not wait.
        """
        with self._lock:
            if not self.live or self._settled or self._elsewhere is not None:
                return
            self._elsewhere = elsewhere
            for slot in self._open:
                if slot.moves:
                    self._publish(Display({"text/plain": ""}), slot.display_id, update=True)
            self._show_elsewhere()

    def _show_elsewhere(self) -> None:
        assert self._elsewhere is not None
        moved = [slot.shown for slot in self._open if slot.moves]
        self._elsewhere([shown for shown in moved if shown is not None])

    def show_anew(self) -> None:
        """Show all of it once more: a page has cleared the cell's outputs, and updates find none.

        Any thread.
        """
        with self._lock:
            if not self.live or self._settled:
                return
            self._elsewhere = None
            for slot in self._open:
                if slot.shown is not None:
                    slot.display_id, slot.is_published = uuid.uuid4().hex, True
                    self._publish(slot.shown, slot.display_id, update=False)

    def _update(self, slot: Slot, display: Display) -> None:
        with self._lock:
            if not self.live or self._settled:
                return
            slot.shown = display
            if slot.moves and self._elsewhere is not None:
                self._show_elsewhere()
            else:
                self._publish(display, slot.display_id, update=True)

    def warn(self, display: Display) -> None:
        """Show what cannot wait for the end, where nothing is live; any thread."""
        with self._lock:
            if self._warns and not self.live and not self._settled:
                self._publish(display, None, update=False)

    def settle(self, finals: Sequence[Display]) -> None:
        """Put `finals` into the open slots in order, and display those that remain.

        Later calls of `open`, `update` and `settle` on these slots show nothing.
        """
        with self._lock:
            if self._settled:
                return
            self._settled = True
            if not self._open and not finals:
                self._clear_passing(wait=False)
            places = self._published
            if self._passing is not None:
                places = [Slot(self, self._passing)]
            if len(places) > len(finals):
                # A slot can be given new content but not taken away: clear all. `wait` avoids
                # a flicker, and must not be asked for when nothing follows to end the wait.
                finals = [*self._above, *finals]
                _clear(wait=bool(finals))
                places = []
            for index, display in enumerate(finals):
                if index < len(places):
                    self._publish(display, places[index].display_id, update=True)
                else:
                    self._publish(display, None, update=False)

    @property
    def _published(self) -> list[Slot]:
        """The slots that have an output of the cell's."""
        return [slot for slot in self._open if slot.is_published]

    def _publish(self, display: Display, display_id: str | None, *, update: bool) -> None:
        self._cell.copy().run(_publish, display, display_id, update=update)

    def _clear_passing(self, *, wait: bool) -> None:
        """Take away what is to pass, with the output that holds nothing else."""
        if self._passing is not None:
            self._passing = None
            self._cell.copy().run(_clear, wait=wait)
            for display in self._above:
                self._publish(display, None, update=False)


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _publish(display: Display, display_id: str | None, *, update: bool) -> None:
    shell = _shell()
    if shell is None:  # a plain script: `nbdist.start` and `session.run` work there too
        print(display.data.get("text/plain", ""))
        return
    transient = {} if display_id is None else {"display_id": display_id}
    shell.display_pub.publish(
        data=display.data, metadata=display.metadata, transient=transient, update=update
    )


def _as_display(shown: object, beside: Mapping[str, Any]) -> Display:
    data, metadata = _shell().display_formatter.format(shown)
    return Display({**data, **beside}, metadata)


def _clear(*, wait: bool) -> None:
    from IPython.display import clear_output

    clear_output(wait=wait)
