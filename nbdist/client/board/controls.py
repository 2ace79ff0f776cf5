"""Buttons that choose the view of a board whose cell has ended.

They work between cells; live_controls.py has those of a cell that runs. A notebook that is opened
on another day has no widget that lives, so picture and table are ordinary outputs beside the
buttons, and the buttons give way to the caption as soon as the next cell runs, and when no one has
used them for `IDLE_S`. A notebook that is saved before that keeps dead buttons, beside a whole
picture and table: JupyterLab saves what it shows. Front ends without widgets show a line in their
place.

Threads: made on the main thread; retired there or on `nbdist-buttons`, a timer. Front ends may
have clicks handled on another.
"""

import logging
import threading
from typing import Any, Protocol

from nbdist.client.board import VIEWS, text
from nbdist.client.board import past as past_module
from nbdist.client.board.past import Past
from nbdist.client.output.slots import Display, Slot, Slots, is_live, kernel_shell

IDLE_S = 300.0  # JupyterLab saves by itself every 120 s after a change
VIEW_TYPE = "application/vnd.jupyter.widget-view+json"
INSTEAD = "Run %dist board again to get its buttons."

_log = logging.getLogger("nbdist.board")


def choice_of_views(name: str) -> Any:
    """Return a widget in one row whose `value` is the chosen view's name; `name` is chosen now.

    A radio group and not ToggleButtons: those look pressed and have no `aria-pressed`, so a screen
    reader cannot tell which view is shown. Browsers announce which radio button is checked.
    """
    import ipywidgets  # type: ignore[import-untyped]

    choice = ipywidgets.RadioButtons(
        options=[(each.capitalize(), each) for each in VIEWS],
        value=name,
        tooltip="\n".join(f"{each}: {view.HELP}" for each, view in VIEWS.items()),
        orientation="horizontal",
    )
    choice.layout.width = "auto"
    return choice


def show_past(past: Past, name: str) -> None:
    """Show one view of a board whose cell has ended: with buttons where widgets live, else text."""
    shell = kernel_shell()
    if shell is not None and is_live():
        Controls(past, name, Slots(live=True), shell.events, IDLE_S)
    else:
        print(past.plain(name))


class Events(Protocol):
    """IPython's events: `get_ipython().events`."""

    def register(self, event: str, function: Any) -> None:
        """Call `function` whenever `event` happens."""

    def unregister(self, event: str, function: Any) -> None:
        """No longer call it."""


class Controls:
    """One shown board with its buttons.

    Args:
        past: The board.
        name: The view that is shown first.
        slots: Where to show.
        events: Tells when the next cell begins.
        idle_s: How long the buttons stay without being used.

    Attributes:
        box: The widgets, the buttons first; closed when they are retired.
    """

    def __init__(
        self,
        past: Past,
        name: str,
        slots: "Slots",
        events: Events,
        idle_s: float = IDLE_S,
    ) -> None:
        import ipywidgets

        self._past, self._name, self._events = past, name, events
        self._lock = threading.Lock()
        self._is_retired = False
        self._smoothing: int | None = None
        self._views = choice_of_views(name)
        self._slider = ipywidgets.IntSlider(
            value=0,
            min=0,
            max=100,
            description="Smoothing",
            tooltip="Steps in the running mean of the loss; 0 chooses by itself",
            continuous_update=False,
        )
        self._slider.layout.display = "" if VIEWS[name].HAS_SMOOTHING else "none"
        self._at_work = ipywidgets.HTML()
        self.box = ipywidgets.VBox([self._views, self._slider, self._at_work])
        self._bar: Slot = slots.open(_displayed(self.box))
        self._picture: Slot = slots.open(self._drawn())
        self._words: Slot = slots.open(past.words(name))
        self._views.observe(self._choose, "value")
        self._slider.observe(self._smooth, "value")
        events.register("pre_run_cell", self._on_next_cell)
        self._idle_s = idle_s
        self._timer = self._started_timer()

    @property
    def is_retired(self) -> bool:
        """Return whether the buttons have given way to the caption."""
        return self._is_retired and self.box.comm is None

    def retire(self) -> None:
        """Put the caption in the buttons' place, and let go of the widgets."""
        with self._lock:
            if self._is_retired:
                return
            self._is_retired = True
            self._timer.cancel()
            self._events.unregister("pre_run_cell", self._on_next_cell)
            self._bar.update(past_module.caption(self._past.caption(self._name)))
            for widget in (self._views, self._slider, self._at_work, self.box):
                # A widget's layout and style are widgets too, which must be closed, too.
                for part in (getattr(widget, "style", None), widget.layout, widget):
                    if part is not None:
                        part.close()

    def _choose(self, change: Any) -> None:
        self._show(str(change["new"]))

    def _smooth(self, change: Any) -> None:
        self._smoothing = int(change["new"]) or None
        self._show(self._name)

    def _show(self, name: str) -> None:
        with self._lock:
            if self._is_retired:
                return
            self._timer.cancel()
            self._timer = self._started_timer()
            self._name = name
            self._slider.layout.display = "" if VIEWS[name].HAS_SMOOTHING else "none"
            # A picture takes up to a second: until then the old one is shown under the new choice.
            self._at_work.value = text.spoken(f"Drawing {name} …", is_seen=True)
            try:
                self._picture.update(self._drawn())
                self._words.update(self._past.words(name))
            except Exception as error:
                _log.error("The board could not show its view %s", name, exc_info=error)
            finally:
                self._at_work.value = ""

    def _drawn(self) -> Display:
        return self._past.picture(self._name, self._smoothing, beside_words=True)

    def _started_timer(self) -> threading.Timer:
        timer = threading.Timer(self._idle_s, self._put_away)
        timer.name, timer.daemon = "nbdist-buttons", True
        timer.start()
        return timer

    def _on_next_cell(self, info: object = None) -> None:
        self._put_away()

    def _put_away(self) -> None:
        try:
            self.retire()
        except Exception as error:  # the user's cell comes first
            _log.error("The board's buttons could not be removed", exc_info=error)


def _displayed(widget: Any) -> Display:
    """Return what shows `widget`, and where there are no widgets a line that says how to get it."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    html = text.plain(INSTEAD)
    return Display({VIEW_TYPE: view, "text/html": html, "text/plain": INSTEAD})
