"""The buttons of a board whose cell runs: its views, stacks, cost, and interrupts.

JupyterLab from 4.4 on sends what is clicked over a subshell of ipykernel 7: handlers run on that
one's thread, while the main one waits for the cell. Other front ends send it to the main shell,
where it is heard when the cell has ended: its widget is closed by then, so nothing happens. Where
no subshell has come after `SUBSHELL_S`, a line beside the buttons says so.

Threads: made and closed on the main one; handlers run on a subshell's, `nbdist-buttons` is a timer.
The drawing thread reads `wanted`, and it alone touches the painter.
"""

import html
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist.client.board import text
from nbdist.client.board.controls import choice_of_views
from nbdist.shared.errors import NBDistError

ALL = -1  # the choice of all ranks
SUBSHELL_S = 5.0  # JupyterLab makes its subshell when it sees the first widget
UNHEARD = (
    "This front end's clicks are heard when the cell has ended. In a terminal: nbdist board, "
    "nbdist stacks."
)
_ANSWER_STYLE = "font-size: 12px; line-height: 1.4; max-height: 24em; overflow: auto; margin: 0"

_log = logging.getLogger("nbdist.board")


@dataclass(frozen=True, slots=True)
class CellActions:
    """What the buttons of a running cell do. Each is called on any thread, and may wait for ranks.

    Attributes:
        stacks: Returns where the ranks are.
        cost: Returns what watching costs.
        interrupt: Interrupts one rank, or with None the cell; returns what there is to say. It
            reaches no other cell, however late it is called.
    """

    stacks: Callable[[], str]
    cost: Callable[[], str]
    interrupt: Callable[[int | None], str]


class LiveControls:
    """The buttons of one live board.

    Args:
        actions: What they do.
        ranks: Of the cell.
        name: The view that is shown first.
        on_view: Called when another view was chosen.

    Attributes:
        bar: The buttons, to be shown above the board.
        panel: What was asked for; hidden until then, to be shown below the board.
    """

    def __init__(
        self,
        actions: CellActions,
        ranks: Sequence[int],
        name: str,
        on_view: Callable[[], None],
    ) -> None:
        import ipywidgets  # type: ignore[import-untyped]

        self._actions, self._on_view = actions, on_view
        self._wanted = name
        self._lock = threading.Lock()
        self._is_closed = False
        self._views = choice_of_views(name)
        stacks = _button("Stacks", "Show where each rank is now")
        cost = _button("Cost", "Show what watching costs this training")
        stop = _button("Interrupt", "End this cell: an interrupt on all ranks, or on one")
        self._ranks = ipywidgets.Dropdown(
            options=[("all ranks", ALL), *((f"rank {rank}", rank) for rank in ranks)],
            value=ALL,
            tooltip="Which ranks are interrupted",
        )
        self._ranks.layout.width = "auto"
        self._said = ipywidgets.HTML()
        acts = ipywidgets.HBox([stacks, cost, stop, self._ranks, self._said])
        acts.layout.flex_flow = "row wrap"
        self.bar = ipywidgets.VBox([self._views, acts])
        self._answer_html = ipywidgets.HTML()
        close = _button("Close", "Hide this")
        self.panel = ipywidgets.VBox([self._answer_html, close])
        self.panel.layout.display = "none"
        self.panel.layout.align_items = "flex-start"
        self._widgets = [self._views, stacks, cost, stop, self._ranks, self._said, acts]
        self._widgets += [self.bar, self._answer_html, close, self.panel]
        for widget in (self._views, stacks, cost, stop, self._ranks, close):
            _hear_at_once(widget)
        self._views.observe(self._choose, "value")
        stacks.on_click(lambda _: self._ask("Stacks", actions.stacks))
        cost.on_click(lambda _: self._ask("Cost of watching", actions.cost))
        stop.on_click(self._interrupt)
        close.on_click(lambda _: self._show(""))
        self._timer = threading.Timer(SUBSHELL_S, self._look_for_subshells)
        self._timer.name, self._timer.daemon = "nbdist-buttons", True
        self._timer.start()

    @property
    def wanted(self) -> str:
        """The view that was chosen last. Any thread."""
        return self._wanted

    def close(self) -> None:
        """Let go of the widgets: the cell has ended."""
        with self._lock:
            self._is_closed = True
            self._timer.cancel()
            for widget in self._widgets:
                # A widget's layout and style are widgets too, which must be closed, too.
                for part in (getattr(widget, "style", None), widget.layout, widget):
                    if part is not None:
                        part.close()

    def _choose(self, change: Any) -> None:
        self._wanted = str(change["new"])
        self._say("")
        self._on_view()

    def _ask(self, title: str, action: Callable[[], str]) -> None:
        self._show(text.spoken("Asking the ranks ...", is_seen=True))
        self._say("")
        said = _answer(action)
        at = time.strftime("%H:%M:%S")
        head = text.spoken(f"{title} at {at}", is_seen=True)
        self._show(f'{head}<pre style="{_ANSWER_STYLE}">{html.escape(said)}</pre>')

    def _interrupt(self, _: object) -> None:
        rank = None if self._ranks.value == ALL else int(self._ranks.value)
        self._say(_answer(lambda: self._actions.interrupt(rank)))

    def _look_for_subshells(self) -> None:
        from ipykernel.subshell import SubshellThread

        if not any(isinstance(thread, SubshellThread) for thread in threading.enumerate()):
            self._say(UNHEARD)

    def _say(self, said: str) -> None:
        with self._lock:
            if not self._is_closed:
                self._said.value = text.spoken(said, is_seen=True) if said else ""

    def _show(self, answer: str) -> None:
        with self._lock:
            if not self._is_closed:
                self._answer_html.value = answer
                self.panel.layout.display = "" if answer else "none"


def _answer(action: Callable[[], str]) -> str:
    try:
        return action()
    except NBDistError as error:
        return str(error)
    except Exception as error:
        _log.exception("A button of the board failed")
        return f"It failed: {type(error).__name__}: {error}"


def _button(name: str, tooltip: str) -> Any:
    import ipywidgets

    button = ipywidgets.Button(description=name, tooltip=tooltip)
    button.layout.width = "auto"
    return button


class _AnsweredAnywhere:
    """A comm as the kernel's manager needs it: its messages are handled on the shell they name.

    ipykernel's comm would have each handled on the shell on which the comm has last spoken: a
    widget that was made in a cell would hear nothing until that cell ends (seen in ipykernel 7.4).
    """

    def __init__(self, comm: Any, manager: Any) -> None:
        self.comm_id, self.handle_msg = comm.comm_id, comm.handle_msg
        self._comm, self._manager = comm, manager
        manager.register_comm(self)

    def handle_close(self, message: Any) -> None:
        """Hear that the front end has closed it, and the manager forgotten it."""
        # The widget will close it too, and have it forgotten once more.
        self._manager.register_comm(self._comm)
        self._comm.handle_close(message)


def _hear_at_once(widget: Any) -> None:
    import comm

    _AnsweredAnywhere(widget.comm, comm.get_comm_manager())
