"""The board of a cell that runs: one thread sends its pages what is new, five times a second.

The thread loads what it needs before anything is shown, so the main thread waits for nothing.
Points go as they come; words, which are worked out each time, about once a second, and never
so often that they take more than `SHARE` of a core: the ranks need the cores. Nothing is drawn.

What is below the widget is for the file, and for front ends where it does not live (`kept.py`).
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from nbdist.client.board import text
from nbdist.client.board.live import kept
from nbdist.client.board.live.actions import AT_A_STEP, CellActions
from nbdist.client.board.live.seen import End, Views
from nbdist.client.board.views import VIEWS
from nbdist.client.metrics import usage
from nbdist.client.metrics.telemetry import IDLE_S, CellInfo
from nbdist.client.output.slots import Display, Slot, Slots, cell_id
from nbdist.shared.background import CoreWaits, lower_thread, pause_s

if TYPE_CHECKING:
    from nbdist.client.board.live.points import Points, PointStream
    from nbdist.client.board.live.widget import BoardWidget
    from nbdist.client.board.palette import Theme
    from nbdist.client.board.scene.scene import Scene
    from nbdist.client.metrics.analysis.cell_analysis import CellAnalysis
    from nbdist.client.metrics.telemetry import Telemetry

PERIOD_S = 0.2
WORDS_S = 1.0
SHARE = 0.004  # most of one core that words may take
KEEP_S = 10.0  # between words that a saved file may hold: the page sends and saves each
CLEARED_S = 1.0  # without any view, after which the cell's outputs are known to be cleared
GOODBYE_S = 1.0  # in which the page that has sent the cell says that it shows what was left
STOP_S = 10.0

_log = logging.getLogger("nbdist.board")


class LiveBoard:
    """The live board of one cell. Made when its first record has come.

    Args:
        telemetry: The cell's records.
        info: The cell.
        insight: What is known beyond the records; None without.
        theme: Colours of text and background.
        name: Which of the board's views is shown first.
        actions: What its buttons do; None shows none.

    Attributes:
        name: The view that was chosen last.
        ready: Set when `show` has something to show: the first words, or why there are none.
        failure: What stopped it, None while all is well.
    """

    def __init__(
        self,
        telemetry: "Telemetry",
        info: CellInfo,
        insight: "CellAnalysis | None",
        theme: "Theme",
        name: str,
        actions: CellActions | None = None,
    ) -> None:
        self.ready = threading.Event()
        self.failure: Exception | None = None
        self.name = name
        self._telemetry, self._info, self._insight = telemetry, info, insight
        self._theme, self._actions = theme, actions
        self._stop, self._shown = threading.Event(), threading.Event()
        self._at_step = threading.Lock()  # held while something waits for the end of a step
        self._began = time.monotonic()
        self._words: dict[str, Any] = {}
        self._texts: list[dict[str, Any]] = []
        self._views, self._end = Views(), End()
        self._id = uuid4().hex
        self._cell: str | None = None  # of the notebook
        self._stream: PointStream | None = None
        self._widget: BoardWidget | None = None
        self._slots: Slots | None = None
        self._kept: Slot | None = None
        self._kept_at = 0.0
        self._thread = threading.Thread(target=self._run, name="nbdist-board", daemon=True)
        self._thread.start()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began

    def show(self, slots: Slots) -> None:
        """Put the board into the cell's output. Main thread, once, after `ready`."""
        if self.failure is not None:
            slots.open(Display({"text/plain": _aside(self.failure)}))
            return
        from nbdist.client.board.live.widget import BoardWidget
        from nbdist.client.board.live.words import frame_of

        self._slots, self._cell = slots, cell_id()
        frame = frame_of(self._info.ranks, self._theme, self.name)
        frame["has_actions"] = self._actions is not None
        self._widget = BoardWidget(self._id, frame, self._history, self._hear)
        slots.open(self._widget, {"text/plain": kept.WAITING}, stays=True)
        self._kept = slots.open(self._to_keep(), stays=True)
        self._kept_at = time.monotonic()
        self._shown.set()

    def stop(self) -> bool:
        """End the thread; return whether it ended within `STOP_S`. Main thread."""
        self._stop.set()
        self._shown.set()
        self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def close(self, *, is_seen_again: bool = False) -> None:
        """Let go of the widget, or keep it for pages that were opened while the cell ran.

        Main thread, once, after `stop`.
        """
        if self._widget is not None and not is_seen_again:
            self._widget.close()
            self._widget = None

    def show_again(self, left: Sequence[Display]) -> None:
        """Show all that the cell has left in the widget that `close` has spared. Main thread.

        The page that has sent the cell shows it already, if it is still there: then the board has
        gone from it. Otherwise a page that was opened meanwhile may take it into the cell.
        """
        if self._widget is not None:
            self._end.is_shown_within(GOODBYE_S)
            self._end.left = _plain(left)
            self._widget.send({"kind": "left", "left": self._end.left})

    def shows_end(self) -> bool:
        """Return whether the caller is the first to show what the cell has left. Main thread."""
        return self._end.shown()

    @usage.counts
    def _run(self) -> None:
        lower_thread()
        try:
            self._load()
            self.ready.set()
            self._shown.wait()
            self._follow()
        except Exception as error:
            self._step_aside(error)
        finally:
            self.ready.set()

    def _load(self) -> None:
        from nbdist.client.board.live.explained import ExplainedLines
        from nbdist.client.board.live.points import PointStream
        from nbdist.client.board.live.widget import view_of  # and `show` is quick
        from nbdist.client.board.live.words import words_of
        from nbdist.client.board.scene.look import look

        self._read, self._say, self._view_of = look, words_of, view_of
        explained = ExplainedLines(self._telemetry.detail)
        if self._insight is not None:
            self._insight.subscribe(explained.add)
        self._stream = PointStream(self._telemetry, explained)
        self._words = self._words_now()

    def _follow(self) -> None:
        """Send what comes until the cell ends."""
        assert self._stream is not None
        if self._widget is None:
            return
        waits, due = CoreWaits(), 0.0
        while not self._stop.wait(PERIOD_S):
            if self._slots is not None and self._views.were_cleared(CLEARED_S):
                self._slots.show_anew()
            points = self._stream.take()
            if points is not None:
                self._widget.send_points("points", points)
            if time.monotonic() < due or not (points is not None or self._is_quiet()):
                continue
            began = time.thread_time()
            self._send_words()
            worked_s = time.thread_time() - began
            due = time.monotonic() + pause_s(WORDS_S, worked_s, SHARE, waits.share())

    def _is_quiet(self) -> bool:
        """Return whether no step has come for so long that words say it, renewed each second."""
        return time.monotonic() - self._telemetry.trained_s > IDLE_S

    def _send_words(self) -> None:
        assert self._widget is not None
        self._words = self._words_now()
        self._widget.send({"kind": "words", "words": self._words})
        if self._kept is not None and time.monotonic() - self._kept_at >= KEEP_S:
            self._kept.update(self._to_keep())
            self._kept_at = time.monotonic()

    def _words_now(self) -> dict[str, Any]:
        scene = self._look()
        return self._say(scene, text.progress(scene, self.elapsed_s))

    def _look(self) -> "Scene":
        known = self._insight.now() if self._insight is not None else None
        paused_at = self._actions.halts.paused_at if self._actions is not None else None
        scene = self._read(self._telemetry, self._info, known, histories=False)
        return replace(scene, paused_at=paused_at)

    def _to_keep(self) -> Display:
        lines = [self._words["progress"], self._words["sentences"][self.name]]
        lines += [verdict for verdict in self._verdicts() if verdict not in lines]
        return kept.kept(lines, self._id, time.strftime("%H:%M:%S"))

    def _verdicts(self) -> list[str]:
        verdicts = self._insight.now().verdicts if self._insight is not None else ()
        return [verdict.sentence for verdict in verdicts]

    def _history(self) -> "tuple[dict[str, Any], Points]":
        """Return what a page that opens now is given. Any thread."""
        assert self._stream is not None
        state: dict[str, Any] = {"words": self._words, "texts": self._texts, "view": self.name}
        state["left"] = self._end.left
        state["place"] = self._place()
        return state, self._stream.whole()

    def _place(self) -> dict[str, Any] | None:
        """Return what belongs into the notebook's cell, for pages whose file has it not."""
        if self._cell is None or (self._stop.is_set() and not self._end.ask()):
            return None
        left = self._end.left
        running = Display({**self._view_of(self._id), "text/plain": kept.WAITING}), self._to_keep()
        return {
            "cell": self._cell,
            "board": self._id,
            "outputs": _plain(running) if left is None else left,
            "is_last": left is not None,
        }

    def _hear(self, said: dict[str, Any]) -> None:
        """Take what a page says. A subshell's thread, or the main one when the cell has ended."""
        widget, stream = self._widget, self._stream
        if widget is None or stream is None:
            return
        match said:
            case {"kind": "hello", "page": str(page)}:
                self._views.hello(page)
                widget.send({"kind": "heard"})
                if self._slots is not None:
                    self._slots.show_in(self._show_texts)
            case {"kind": "goodbye", "page": str(page)}:
                self._views.goodbye(page)
                if self._stop.is_set():
                    self._end.shown()
            case {"kind": "takes", "page": page} if (place := self._place()) is not None:
                widget.send({"kind": "place", "page": page, "place": place})
            case {"kind": "taken in"}:
                self._end.shown()
            case {"kind": "whole"}:
                widget.send_points("points", stream.whole())
            case {"kind": "range"}:
                widget.send_range(stream, said)
            case {"kind": "step", "step": int(step)}:
                widget.send({"kind": "step", "step": step, "line": self._line_of(step)})
            case {"kind": "view", "name": str(name)} if name in VIEWS:
                self.name = name
            case {"kind": "ask"} if self._actions is not None and not self._stop.is_set():
                widget.send({"kind": "taken"})
                self._take(widget, self._actions, said)

    def _take(self, widget: "BoardWidget", actions: CellActions, said: dict[str, Any]) -> None:
        """Answer on a thread: what waits for a step must not keep an interrupt waiting.

        One such waits at a time: in a queue a second could come to a later cell.
        """
        is_at_step = said.get("what") in AT_A_STEP
        if is_at_step and not self._at_step.acquire(blocking=False):
            widget.send({"kind": "remark", "text": "What was asked before still waits for a step."})
            return

        def answer() -> None:
            try:
                given = actions.answer(said)
            finally:
                if is_at_step:  # before the page hears, which may ask at once for the next
                    self._at_step.release()
            widget.send(given | {"page": said.get("page")})

        threading.Thread(target=answer, name="nbdist-ask", daemon=True).start()

    def _line_of(self, step: int) -> dict[str, Any] | None:
        """Return the time line of one step, of as many ranks as are seen; None where not kept."""
        from nbdist.client.board.live.words import line_words
        from nbdist.client.board.scene.lanes import MOST_LANES

        line = self._insight.line_of(step) if self._insight is not None else None
        if line is None or self._insight is None:
            return None
        seen = line.lanes[:MOST_LANES]
        return line_words(line, seen, self._insight.now().clock_error_ms)

    def _show_texts(self, displays: Sequence[Display]) -> None:
        """Show in the board what the cell prints meanwhile. Any thread."""
        self._texts = _plain(displays)
        if self._widget is not None:
            self._widget.send({"kind": "texts", "texts": self._texts})

    def _step_aside(self, error: Exception) -> None:
        self.failure = error
        _log.error("The board stopped; training continues", exc_info=error)
        if self._widget is None:
            return  # `show` says it
        try:
            self._widget.send({"kind": "remark", "text": _aside(error)})
        except Exception as second:
            _log.warning("The board could not show that it stopped: %r", second)


def _aside(error: Exception) -> str:
    return f"The board stopped ({type(error).__name__}: {error}); training continues."


def _plain(displays: Sequence[Display]) -> list[dict[str, Any]]:
    return [{"data": display.data, "metadata": display.metadata} for display in displays]
