"""The board of one cell, from its first record to the picture it leaves.

A cell that logs nothing never loads matplotlib, numpy or ipywidgets: all of it is imported when
the first record has come, by the drawing thread where there is one.

Threads: everything here belongs to the main thread; live.py has the drawing thread.
"""

import base64
import logging
import sys
from typing import TYPE_CHECKING, Literal

from nbdist.client.board import palette
from nbdist.client.board.live import Live, Slots
from nbdist.wire import CellInfo, Display

if TYPE_CHECKING:
    from nbdist.client.insight.insight import Insight
    from nbdist.client.telemetry import Telemetry

Outcome = Literal["finished", "failed", "interrupted"]

WIDTH = 960  # CSS pixels
SHARP = 2.0  # pixels of the lasting picture for one CSS pixel

_log = logging.getLogger("nbdist.board")


class Board:
    """Live plots of one cell.

    Args:
        info: The cell.
        telemetry: Its records.
        slots: Where to show; used by `open`.
        static: Show nothing while the cell runs (`NBDIST_STATIC=1`).
        theme: "light" or "dark" paint that background; "auto" is readable on both.
        pictures: Whether the front end shows pictures and widgets; found out when None. Without
            them (a terminal) the board is its caption.
        insight: What explains the cell's steps and collectives.
    """

    def __init__(
        self,
        info: CellInfo,
        telemetry: "Telemetry",
        slots: Slots,
        static: bool = False,
        theme: str = "auto",
        *,
        pictures: bool | None = None,
        insight: "Insight | None" = None,
    ) -> None:
        self._info, self._telemetry, self._slots = info, telemetry, slots
        self._insight = insight
        self._theme = palette.theme_named(theme)
        self._pictures = _in_a_kernel() if pictures is None else pictures
        self._is_live = self._pictures and not static
        self._live: Live | None = None
        self._is_open = self._is_finished = False
        self._png: bytes | None = None

    @property
    def wants_to_open(self) -> bool:
        """Return whether `open` has something to show that is not shown yet.

        Costs a microsecond. The first call after the first record starts the drawing thread;
        it says True some tenths of a second later, when the first frame is there.
        """
        if not self._is_live or self._is_open or self._is_finished:
            return False
        if self._live is None:
            if self._telemetry.first_record.is_set():
                self._live = Live(self._telemetry, self._info, self._theme)
            return False
        return self._live.ready.is_set()

    def open(self) -> None:
        """Show the board in the cell's output. Never raises: a board may fail, training not."""
        if self._live is None or self._is_open or self._is_finished:
            return
        self._is_open = True
        try:
            self._live.show(self._slots)
        except Exception as error:
            _log.error("The board could not be shown; training goes on", exc_info=error)

    def finish(self, outcome: Outcome) -> list[Display]:
        """End the live board and return what stays: picture and caption, [] without records.

        The text is the same live and static, and the same for every run of the same cell.
        """
        self._is_finished = True
        if not self._telemetry.first_record.is_set():
            return []
        has_stopped = self._live.stop() if self._live is not None else True
        if not has_stopped:
            _log.error("The board's drawing thread did not stop; its picture is left out")
        sentence, has_plots = self._sentence(outcome)
        displays = [_caption(sentence)]
        if has_plots and has_stopped and self._pictures and (png := self.picture()):
            displays.insert(0, _picture(png, sentence))
        if self._live is not None:
            try:
                self._live.close(displays[0])
            except Exception as error:
                _log.error("The live board could not be closed", exc_info=error)
        return displays

    def picture(self) -> bytes | None:
        """Return the lasting picture, a PNG, for a run's artifacts; None when it fails.

        Drawn once, at the first call, in 0.1 to 0.3 s; to be called after the cell has ended.
        """
        if self._png is None:
            try:
                background = self._theme.background
                self._png = render_png(self._telemetry, self._info, background=background)
            except Exception as error:
                _log.error("The board's picture could not be drawn", exc_info=error)
        return self._png

    def _sentence(self, outcome: Outcome) -> tuple[str, bool]:
        """Return the caption, and whether there is anything to plot."""
        from nbdist.client.board import text
        from nbdist.client.board.view import look

        try:
            view = look(self._telemetry, self._info)
            return text.caption(view, outcome), bool(view.panels)
        except Exception as error:
            _log.error("The board could not read the records", exc_info=error)
            return f"Training of {len(self._info.ranks)} ranks, {outcome}.", False


def render_png(
    telemetry: "Telemetry",
    info: CellInfo,
    *,
    width: int = WIDTH,
    background: str | None = None,
    scale: float = SHARP,
) -> bytes:
    """Return the picture of a run as a PNG.

    Args:
        telemetry: The run's records.
        info: The cell it ran in.
        width: In CSS pixels; the height follows from what there is to see.
        background: "#rrggbb"; None is transparent, with text that is readable on any.
        scale: Pixels for one CSS pixel.
    """
    from nbdist.client.board.figure import Painter
    from nbdist.client.board.view import look

    painter = Painter(palette.theme_on(background), width, scale, final=True)
    return painter.frame(look(telemetry, info))


def _picture(png: bytes, sentence: str) -> Display:
    data = {"image/png": base64.b64encode(png).decode("ascii"), "text/plain": sentence}
    # "width" makes a sharp screen show it sharp; no front end reads "alt" yet, some day one may.
    return Display(data, {"image/png": {"width": WIDTH, "alt": sentence}})


def _caption(sentence: str) -> Display:
    from nbdist.client.board import text

    return Display({"text/markdown": text.markdown(sentence), "text/plain": sentence})


def _in_a_kernel() -> bool:
    if "IPython" not in sys.modules:  # a script: IPython takes 0.3 s to import
        return False
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
