"""A board of a cell that has ended, or of a run of another day, in the live form.

A page needs no kernel to change its views, to zoom or to point. Of the newest training it asks for
the points that a zoom shows: its kernel has those that were thinned. A notebook that is opened on
another day has no widget that lives, so the board gives way to its picture as soon as the next cell
runs, and when it has been shown for `IDLE_S`. Below the widget is the same picture, for front ends
without widgets, and for a file that is saved before.

Threads: made on the main thread; retired there or on `nbdist-past-board`, a timer.
"""

import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from nbdist.client.board import VIEWS
from nbdist.client.board.live.kept import below
from nbdist.client.board.past import Past, caption
from nbdist.client.output.slots import Display, Slots, is_attended, is_live, kernel_shell

if TYPE_CHECKING:
    from nbdist.client.board.live.points import Points

IDLE_S = 300.0  # JupyterLab saves by itself every 120 s after a change
_LOST = "the board of a run keeps no more"

_log = logging.getLogger("nbdist.board")


def show_past(past: Past, name: str) -> None:
    """Show one view of a board whose cell has ended.

    Live where someone can click, a picture and tables where a notebook is executed unattended, as
    by nbconvert, and else text.
    """
    shell = kernel_shell()
    if shell is None or not is_live():
        print(past.plain(name))
    elif is_attended():
        PastBoard(past, name, Slots(live=True), shell.events, IDLE_S)
    else:
        Slots(live=False).settle(_left(past, name, past.picture(name)))


def _left(past: Past, name: str, picture: Display) -> tuple[Display, Display, Display]:
    return caption(past.caption(name)), picture, past.words(name)


class Events(Protocol):
    """IPython's events: `get_ipython().events`."""

    def register(self, event: str, function: Any) -> None:
        """Call `function` whenever `event` happens."""

    def unregister(self, event: str, function: Any) -> None:
        """No longer call it."""


class PastBoard:
    """One shown board.

    Args:
        past: The board.
        name: The view that is shown first.
        slots: Where to show.
        events: Tells when the next cell begins.
        idle_s: How long it stays.
    """

    def __init__(
        self, past: Past, name: str, slots: Slots, events: Events, idle_s: float = IDLE_S
    ) -> None:
        from nbdist.client.board.live.points import behind_scene, of_scene
        from nbdist.client.board.live.widget import BoardWidget, view_of
        from nbdist.client.board.live.words import frame_of, words_of

        self._past, self._name, self._events = past, name, events
        self._picture_of = name
        self._lock = threading.Lock()
        self.is_retired = False
        scene = past.scene
        frame = frame_of(scene.ranks, past.theme, name)
        self._finer = behind_scene(past.records) if past.records is not None else None
        frame["lost"] = _LOST if self._finer is None else None
        words, points = words_of(past.seen, past.caption(name)), of_scene(scene)
        words["outcome"] = scene.outcome
        words["captions"] = {view: past.caption(view) for view in VIEWS}

        def history() -> "tuple[dict[str, Any], Points]":
            return {"words": words}, points

        board = uuid4().hex
        self._widget = BoardWidget(board, frame, history, self._hear)
        self._picture = past.picture(name)
        self._slots = (
            slots.open(Display({**view_of(board), "text/plain": past.caption(name)})),
            slots.open(below(self._picture, board)),
            slots.open(below(past.words(name), board)),
        )
        events.register("pre_run_cell", self._on_next_cell)
        self._timer = threading.Timer(idle_s, self._put_away)
        self._timer.name, self._timer.daemon = "nbdist-past-board", True
        self._timer.start()

    def retire(self) -> None:
        """Put the picture in the widget's place, and let go of it."""
        with self._lock:
            if self.is_retired:
                return
            self.is_retired = True
            self._timer.cancel()
            self._events.unregister("pre_run_cell", self._on_next_cell)
            if self._picture_of != self._name:
                self._picture = self._past.picture(self._name)
            left = _left(self._past, self._name, self._picture)
            for slot, shown in zip(self._slots, left, strict=True):
                slot.update(shown)
            self._widget.close()

    def _hear(self, said: dict[str, Any]) -> None:
        match said:
            case {"kind": "view", "name": str(name)} if name in VIEWS:
                self._name = name
            case {"kind": "range"} if self._finer is not None:
                self._widget.send_range(self._finer, said)

    def _on_next_cell(self, info: object = None) -> None:
        self._put_away()

    def _put_away(self) -> None:
        try:
            self.retire()
        except Exception as error:  # the user's cell comes first
            _log.error("The board could not be put away", exc_info=error)
