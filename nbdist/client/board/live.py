"""Draw the board while the cell runs: one thread, a few widgets.

The thread loads what it draws with and makes the first frame before anything is shown, so the
main thread waits for neither. Widgets are made and closed on the main thread; in between only
the drawing thread touches them. ipywidgets' `Image`, `HTML`, `IntProgress` and boxes only: they
are the ones that every front end brings along.

A frame is drawn when records have come since the last, at most every `PERIOD_S`, and never
more often than keeps the thread below a tenth of one core, for the ranks need the cores.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from nbdist.client.board import sentences, text
from nbdist.client.board.tables import to_html
from nbdist.client.board.views import VIEWS
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.client.output.result import Display
from nbdist.client.output.slots import Slot, Slots

if TYPE_CHECKING:
    from nbdist.client.board.palette import Theme
    from nbdist.client.board.scene import Scene
    from nbdist.client.metrics.analysis.cell_analysis import CellAnalysis
    from nbdist.client.metrics.telemetry import Telemetry

PERIOD_S = 0.3
SHARE = 0.1  # most of one core that drawing may take
TABLE_S = 0.6
SPEAK_S = 5.0  # a screen reader that is told more often never falls silent
STOP_S = 10.0  # the first use of matplotlib on a machine builds its font cache: seconds

_log = logging.getLogger("nbdist.board")


class LiveBoard:
    """The live board of one cell. Made when its first record has come.

    Args:
        telemetry: The cell's records.
        info: The cell.
        insight: What is known beyond the records; None without.
        theme: Colours of text and background.
        name: Which of the board's views is shown.

    Attributes:
        ready: Set when `show` has something to show: the first frame, or why there is none.
        failure: What stopped the drawing, None while all is well.
    """

    def __init__(
        self,
        telemetry: "Telemetry",
        info: CellInfo,
        insight: "CellAnalysis | None",
        theme: "Theme",
        name: str,
    ) -> None:
        self.ready = threading.Event()
        self.failure: Exception | None = None
        self._telemetry, self._info, self._insight = telemetry, info, insight
        self._theme, self._name, self._view = theme, name, VIEWS[name]
        self._stop, self._shown = threading.Event(), threading.Event()
        self._began = time.monotonic()
        self._first: tuple[Scene, bytes] | None = None
        self._widgets: dict[str, Any] = {}
        self._slot: Slot | None = None
        self._table_at = self._spoke_at = -SPEAK_S
        self._thread = threading.Thread(target=self._run, name="nbdist-board", daemon=True)
        self._thread.start()

    def show(self, slots: Slots) -> None:
        """Put the board into the cell's output. Main thread, once, after `ready`."""
        if self._first is None:
            self._slot = slots.open(Display({"text/plain": _aside(self.failure)}))
            return
        scene, png = self._first
        self._widgets = _make_widgets(png, self._painter.width)
        self._show_words(scene)
        self._slot = slots.open(self._widgets["box"])
        self._shown.set()

    def stop(self) -> bool:
        """End the thread; return whether it ended within `STOP_S`. Main thread."""
        self._stop.set()
        self._shown.set()
        self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def close(self, last: Display | None) -> None:
        """Show `last` in the board's place, then let go of the widgets. Main thread."""
        if self._slot is not None and last is not None:
            self._slot.update(last)  # first, so that the output does not collapse in between
        for widget in self._widgets.values():
            # A widget's layout and style are widgets too, which nobody else closes.
            for part in (getattr(widget, "style", None), widget.layout, widget):
                if part is not None:
                    part.close()
        self._widgets = {}

    def _run(self) -> None:
        try:
            self._load()
            self.ready.set()
            self._shown.wait()
            drawn, cost_s = -1, 0.0
            while not self._stop.wait(max(PERIOD_S, cost_s / SHARE)):
                count = self._telemetry.count
                if count != drawn:
                    began = time.perf_counter()
                    self._draw()
                    drawn, cost_s = count, time.perf_counter() - began
        except Exception as error:
            self._step_aside(error)
        finally:
            self.ready.set()

    def _load(self) -> None:
        import ipywidgets  # type: ignore[import-untyped]  # noqa: F401  # so that `show` is quick

        from nbdist.client.board.figure import Painter
        from nbdist.client.board.look import look

        self._read = look
        self._painter = Painter(self._theme, name=self._name)
        scene = self._look()
        self._first = scene, self._painter.frame(scene)

    def _look(self) -> "Scene":
        known = self._insight.now() if self._insight is not None else None
        return self._read(self._telemetry, self._info, known, name=self._name)

    def _draw(self) -> None:
        scene = self._look()
        self._widgets["image"].value = self._painter.frame(scene)
        self._show_words(scene)

    def _show_words(self, scene: "Scene") -> None:
        now = time.monotonic()
        bar = self._widgets["bar"]
        if scene.total:
            bar.max, bar.value = scene.total, scene.first_step
        bar.layout.display = "" if scene.total else "none"
        self._widgets["progress"].value = text.plain(text.progress(scene, now - self._began))
        if now - self._table_at >= TABLE_S:
            self._table_at = now
            table = self._view.table(scene)
            self._widgets["table"].value = to_html(table) if table.rows else ""
            said = sentences.verdicts(scene)
            is_told = scene.analysis.verdicts or self._view.TELLS_VERDICTS
            self._widgets["verdicts"].value = text.plain(" ".join(said)) if is_told else ""
        if now - self._spoke_at >= SPEAK_S:
            self._spoke_at = now
            self._widgets["status"].value = text.spoken(self._spoken(scene))

    def _spoken(self, scene: "Scene") -> str:
        said = [self._view.sentence(scene)]
        if not self._view.TELLS_VERDICTS:
            said += [verdict.sentence for verdict in scene.analysis.verdicts]
        return " ".join(said)

    def _step_aside(self, error: Exception) -> None:
        self.failure = error
        _log.error("The board stopped; training continues", exc_info=error)
        if not self._widgets:
            self._first = None  # `show` says it
            return
        try:
            self._widgets["progress"].value = text.alert(_aside(error))
        except Exception as second:
            _log.warning("The board could not show that it stopped: %r", second)


def _aside(error: Exception | None) -> str:
    return f"The board stopped ({type(error).__name__}: {error}); training continues."


def _make_widgets(png: bytes, width: int) -> dict[str, Any]:
    """Return the board's widgets by name; "box" holds the others."""
    import ipywidgets

    image = ipywidgets.Image(value=png, format="png", width=width)
    image.layout.max_width = "100%"
    image.layout.object_fit = "contain"
    image.layout.height = "auto"
    bar = ipywidgets.IntProgress(value=0, min=0, max=1)
    bar.layout.width = "240px"
    progress, verdicts = ipywidgets.HTML(), ipywidgets.HTML()
    table, status = ipywidgets.HTML(), ipywidgets.HTML()
    # Heard, not seen: it is told seldom, and would seem to contradict the table above it.
    status.layout.height = status.layout.margin = "0"
    status.layout.overflow = "hidden"
    row = ipywidgets.HBox([bar, progress])
    row.layout.align_items = "center"
    box = ipywidgets.VBox([row, verdicts, image, table, status])
    return {
        "box": box,
        "row": row,
        "bar": bar,
        "progress": progress,
        "verdicts": verdicts,
        "image": image,
        "table": table,
        "status": status,
    }
