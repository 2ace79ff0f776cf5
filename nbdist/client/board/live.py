"""Draw the board while the cell runs: one thread, a few widgets.

The thread loads what it draws with and makes the first frame before anything is shown, so the
main thread waits for neither. Widgets are made and closed on the main thread; in between only
the drawing thread touches them. ipywidgets' `Image`, `HTML`, `IntProgress` and boxes only: they
are the ones that every front end brings along.

A frame is drawn when records have come since the last, at most every `PERIOD_S`, and never
more often than keeps the thread below 1 % of one core, for the ranks need the cores. Where the
thread waits for a core, a frame comes after `background.LONGEST_S` at the latest; words come each
second.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbdist.client.board import kept, sentences, text, verdict_block
from nbdist.client.board.live_controls import CellActions, LiveControls
from nbdist.client.board.measures import WIDE
from nbdist.client.board.picture import AUTO_CLASS, LIVE_WIDTH, ON_PAGES
from nbdist.client.board.tables import to_html
from nbdist.client.board.views import VIEWS
from nbdist.client.metrics import usage
from nbdist.client.metrics.telemetry import IDLE_S, CellInfo
from nbdist.client.output.slots import Display, Slot, Slots
from nbdist.shared.background import CoreWaits, lower_thread, pause_s

if TYPE_CHECKING:
    from nbdist.client.board.palette import Theme
    from nbdist.client.board.scene import Scene
    from nbdist.client.metrics.analysis.cell_analysis import CellAnalysis
    from nbdist.client.metrics.telemetry import Telemetry

PERIOD_S = 0.5
SHARE = 0.01  # most of one core that drawing may take
TABLE_S = 0.6
WORDS_S = 1.0  # between words at most, however seldom a frame is
STALE_S = 2.0  # from this age on words say of which step the picture is
KEEP_S = 10.0  # between pictures that a saved file may hold: the page sends and saves each
SPEAK_S = 5.0  # a screen reader that gets text more often never falls silent
STOP_S = 10.0  # the first use of matplotlib on a machine builds its font cache: seconds

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
        actions: CellActions | None = None,
    ) -> None:
        self.ready = threading.Event()
        self.failure: Exception | None = None
        self._telemetry, self._info, self._insight = telemetry, info, insight
        self._theme, self._name, self._view = theme, name, VIEWS[name]
        self._actions = actions
        self._controls: LiveControls | None = None
        self._stop, self._shown = threading.Event(), threading.Event()
        self._wake = threading.Event()  # set with `_stop`, and when a view was chosen
        self._began = time.monotonic()
        self._first: tuple[Scene, bytes] | None = None
        self._pictured = 0, 0.0  # the step of the picture that is seen, and since when
        self._widgets: dict[str, Any] = {}
        self._slot: Slot | None = None
        self._kept: Slot | None = None
        self._left: Any = None  # the widget that shows what a cell has left
        self._kept_at = 0.0
        self._table_at = self._spoke_at = -SPEAK_S
        self._thread = threading.Thread(target=self._run, name="nbdist-board", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The view that is shown now."""
        return self._name

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began

    def show(self, slots: Slots) -> None:
        """Put the board into the cell's output. Main thread, once, after `ready`."""
        if self._first is None:
            self._slot = slots.open(Display({"text/plain": _aside(self.failure)}))
            return
        scene, png = self._first
        self._pictured = scene.first_step, time.monotonic()
        self._widgets = _make_widgets(png, self._theme)
        self._show_words(scene)
        if self._actions is not None:
            self._controls = LiveControls(
                self._actions, self._info.ranks, self._name, self._wake.set
            )
            box = self._widgets["box"]
            box.children = (self._controls.bar, *box.children, self._controls.panel)
        self._slot = slots.open(self._widgets["box"], {"text/plain": kept.WAITING})
        self._kept = slots.open(self._to_keep(scene, png))
        self._kept_at = time.monotonic()
        self._shown.set()

    def stop(self) -> bool:
        """End the thread; return whether it ended within `STOP_S`. Main thread."""
        self._stop.set()
        self._shown.set()
        self._wake.set()
        self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def close(self, finals: Sequence[Display], *, is_seen_again: bool = False) -> None:
        """Show `finals` in the board's places, then let go of the widgets. Main thread.

        Where `is_seen_again` the outermost stays: `show_again` fills it, in pages that were opened
        meanwhile and hear nothing of the places.
        """
        # First, so that the output does not collapse in between.
        for slot, final in zip((self._slot, self._kept), finals, strict=False):
            if slot is not None:
                slot.update(final)
        if is_seen_again and self._widgets:
            self._left = self._widgets.pop("box")
            self._left.children = ()
        for widget in self._widgets.values():
            # A widget's layout and style are widgets too, which must be closed, too.
            for part in (getattr(widget, "style", None), widget.layout, widget):
                if part is not None:
                    part.close()
        self._widgets = {}
        if self._controls is not None:
            self._controls.close()

    def show_again(self, left: Sequence[Display]) -> None:
        """Show all that the cell has left in the widget that `close` has spared. Main thread."""
        if self._left is not None:
            import ipywidgets  # type: ignore[import-untyped]

            outputs = [
                {"output_type": "display_data", "data": d.data, "metadata": d.metadata}
                for d in left
            ]
            hides = ipywidgets.HTML(kept.HIDES_OTHERS)
            hides.layout.display = "none"
            self._left.add_class(kept.AGAIN_CLASS)
            self._left.children = [ipywidgets.Output(outputs=tuple(outputs)), hides]

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

    def _follow(self) -> None:
        """Draw what comes until the cell ends; words more often than pictures."""
        waits, drawn, due = CoreWaits(), -1, 0.0
        rest_s = PERIOD_S
        while not self._has_ended(min(rest_s, WORDS_S)):
            count, began = self._telemetry.count, time.thread_time()
            rest_s = PERIOD_S
            if self._controls is not None and self._controls.wanted != self._name:
                self._change_view(self._controls.wanted)
                drawn, due = -1, 0.0
            if count == drawn and not self._is_quiet():
                continue
            if count == drawn:
                self._show_words(self._look())
                rest_s = WORDS_S  # a picture may long be due, of which nothing new has come
                continue
            if time.monotonic() < due:
                self._show_words(self._look())
            else:
                self._draw()
                worked_s = time.thread_time() - began
                drawn = count
                due = time.monotonic() + pause_s(PERIOD_S, worked_s, SHARE, waits.share())
            rest_s = max(0.0, due - time.monotonic())

    def _is_quiet(self) -> bool:
        """Return whether no step has come for so long that words say it, renewed each second."""
        return time.monotonic() - self._telemetry.trained_s > IDLE_S

    def _has_ended(self, rest_s: float) -> bool:
        """Rest until a view is chosen; return whether the cell has ended."""
        self._wake.wait(rest_s)
        self._wake.clear()
        return self._stop.is_set()

    def _change_view(self, name: str) -> None:
        from nbdist.client.board.figure import Painter

        self._name, self._view = name, VIEWS[name]
        self._painter = Painter(self._theme, name=name)
        self._table_at = self._spoke_at = -SPEAK_S

    def _load(self) -> None:
        import ipywidgets  # noqa: F401  # so that `show` is quick

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
        self._show_words(scene)  # first: where the cores are full, a frame takes seconds
        png = self._painter.frame(scene)
        self._widgets["image"].value = png
        self._pictured = scene.first_step, time.monotonic()
        self._widgets["progress"].value = text.plain(self._progress(scene))
        if self._kept is not None and time.monotonic() - self._kept_at >= KEEP_S:
            self._kept.update(self._to_keep(scene, png))
            self._kept_at = time.monotonic()

    def _to_keep(self, scene: "Scene", png: bytes) -> Display:
        said = f"{self._progress(scene)}\n{self._spoken(scene)}"
        return kept.kept(said, png, self._theme, time.strftime("%H:%M:%S"))

    def _show_words(self, scene: "Scene") -> None:
        now = time.monotonic()
        bar = self._widgets["bar"]
        if scene.epoch is not None:
            bar.max, bar.value = scene.epoch.steps, scene.epoch.done
        bar.layout.display = "" if scene.epoch is not None else "none"
        self._widgets["progress"].value = text.plain(self._progress(scene))
        if now - self._table_at >= TABLE_S:
            self._table_at = now
            table = self._view.table(scene)
            self._widgets["table"].value = to_html(table) if table.rows else ""
            block = verdict_block.to_html(scene.analysis.verdicts)
            if not block and self._view.SHOWS_VERDICTS:
                block = text.plain(" ".join(sentences.verdicts(scene)))
            self._widgets["verdicts"].value = block
        if now - self._spoke_at >= SPEAK_S:
            self._spoke_at = now
            self._widgets["status"].value = text.spoken(self._spoken(scene))

    def _progress(self, scene: "Scene") -> str:
        now = time.monotonic()
        step, since = self._pictured
        return text.progress(scene, now - self._began, step if now - since > STALE_S else None)

    def _spoken(self, scene: "Scene") -> str:
        said = [self._view.sentence(scene)]
        if not self._view.SHOWS_VERDICTS:
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


def _make_widgets(png: bytes, theme: "Theme") -> dict[str, Any]:
    """Return the board's widgets by name; "box" holds the others."""
    import ipywidgets

    image = ipywidgets.Image(value=png, format="png", width=WIDE)
    image.layout.width, image.layout.max_width = LIVE_WIDTH, "none"
    image.layout.object_fit = "contain"
    image.layout.height = "auto"
    bar = ipywidgets.IntProgress(value=0, min=0, max=1)
    bar.layout.width = "240px"
    progress, verdicts = ipywidgets.HTML(), ipywidgets.HTML()
    table, status = ipywidgets.HTML(), ipywidgets.HTML()
    hides = ipywidgets.HTML(kept.LIVE_STYLE + ON_PAGES)
    hides.layout.display = "none"
    # Heard, not seen: it is updated seldom, and would seem to contradict the table above it.
    status.layout.height = status.layout.margin = "0"
    status.layout.overflow = "hidden"
    row = ipywidgets.HBox([bar, progress])
    row.layout.align_items = "center"
    box = ipywidgets.VBox([row, verdicts, image, table, status, hides])
    box.add_class(kept.LIVE_CLASS)
    if theme.background is None:
        box.add_class(AUTO_CLASS)
    return {
        "box": box,
        "row": row,
        "bar": bar,
        "progress": progress,
        "verdicts": verdicts,
        "image": image,
        "table": table,
        "status": status,
        "hides": hides,
    }
