"""The board of one cell, from its first record to the picture it leaves.

A cell that logs nothing never loads matplotlib, numpy or ipywidgets: all of it is imported when
the first record has come, by the board's thread where there is one.

Threads: all but `so_far` belongs to the main thread; live.py has the board's thread.
"""

import base64
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

from nbdist.client.board import palette, verdict_block
from nbdist.client.board.drawn.picture import halved
from nbdist.client.board.live.actions import CellActions
from nbdist.client.board.live.live import LiveBoard
from nbdist.client.board.past import Past, caption
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.client.output.slots import Display, Slots

if TYPE_CHECKING:
    from nbdist.client.metrics.analysis.cell_analysis import CellAnalysis
    from nbdist.client.metrics.telemetry import Telemetry

Outcome = Literal["finished", "failed", "interrupted"]
Drawn = TypeVar("Drawn")

_log = logging.getLogger("nbdist.board")


class Board:
    """Live plots of one cell.

    Args:
        info: The cell.
        telemetry: Its records.
        slots: Where to show; used by `open`.
        static: Show nothing while the cell runs (`NBDIST_STATIC=1`).
        theme: "light" or "dark" paint that background; "auto" is readable on both.
        name: Which of its views it shows, one of `board.VIEWS`.
        insight: What is known of steps and collectives beyond the records; None without.
        pictures: Whether the front end shows pictures and widgets; found out when None. Without
            them (a terminal) the board is its caption.
        actions: What the buttons of the live board do; None shows none.
    """

    def __init__(
        self,
        info: CellInfo,
        telemetry: "Telemetry",
        slots: Slots,
        static: bool = False,
        theme: str = "auto",
        *,
        name: str = "overview",
        insight: "CellAnalysis | None" = None,
        pictures: bool | None = None,
        actions: CellActions | None = None,
    ) -> None:
        self._info, self._telemetry, self._slots = info, telemetry, slots
        self._name, self._insight, self._actions = name, insight, actions
        self._theme = palette.theme_named(theme)
        self.past: Past | None = None  # once it is finished, and had records that could be read
        self._pictures = _in_a_kernel() if pictures is None else pictures
        self._is_static, self._is_live = static, self._pictures and not static
        self._live: LiveBoard | None = None
        self._began = time.monotonic()
        self._is_open = self._is_finished = False
        self._left: Display | None = None  # the picture that stays

    @property
    def wants_to_open(self) -> bool:
        """Return whether `open` has something to show that is not shown yet.

        Costs a microsecond. The first call after the first record starts the board's thread;
        it says True some tenths of a second later, when its first words are there.
        """
        if not self._is_live or self._is_open or self._is_finished:
            return False
        if self._live is None:
            if self._telemetry.first_record.is_set():
                records = self._telemetry, self._info, self._insight
                self._live = LiveBoard(*records, self._theme, self._name, self._actions)
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
            _log.error("The board could not be shown; training continues", exc_info=error)

    def finish(self, outcome: Outcome, *, is_seen_again: bool = False) -> list[Display]:
        """End the live board and return what stays, [] without records: picture and caption.

        Their text is the same live and static, and the same for every run of the same cell. Below
        them are the verdicts with what to do, where there are any, a terminal's too; not in
        static mode, for they hold numbers: there the picture's head names the ranks.
        `is_seen_again`: `show_again` will follow.
        """
        self._is_finished = True
        if not self._telemetry.first_record.is_set():
            return []
        has_stopped = self._live.stop() if self._live is not None else True
        if self._live is not None:
            self._name = self._live.name  # the view that the person has chosen
        if not has_stopped:
            _log.error("The board's drawing thread did not stop; its picture is omitted")
        self.past = self._look_back(outcome)
        sentence = f"Training on {len(self._info.ranks)} ranks, {outcome}."
        if self.past is not None:
            sentence = self.past.caption(self._name)
        displays = [caption(sentence)]
        if has_stopped and self._pictures and (picture := self._drawn()):
            displays.insert(0, picture)
        verdicts = self.past.scene.analysis.verdicts if self.past is not None else ()
        if verdicts and not self._is_static:
            displays.append(verdict_block.display(verdicts))
        if self._live is not None:
            try:
                self._live.close(is_seen_again=is_seen_again)
            except Exception as error:
                _log.error("The live board could not be closed", exc_info=error)
        return displays

    def show_again(self, left: Sequence[Display]) -> None:
        """Show what the cell has left in pages that were opened while it ran. Never raises."""
        try:
            if self._live is not None:
                self._live.show_again(left)
        except Exception as error:
            _log.error("A page that was opened again could not be updated", exc_info=error)

    def shows_end(self) -> bool:
        """Return whether the caller is the first to show what the cell has left."""
        return self._live is None or self._live.shows_end()

    def so_far(self) -> Past | None:
        """Return the board of the cell that runs; None before its first record. Any thread."""
        if self._is_finished or not self._telemetry.first_record.is_set():
            return None
        past = self._look_back("running")
        elapsed_s = self._live.elapsed_s if self._live else time.monotonic() - self._began
        return None if past is None else replace(past, elapsed_s=elapsed_s)

    def picture(self) -> bytes | None:
        """Return the overview, a PNG, for a run's page; None where there is nothing.

        Its pixels are CSS pixels: MLflow shows a picture at its own size.

        Always the overview, so that runs compare, whichever view the cell has shown. Drawn once, in
        0.1 to 0.5 s; to be called after `finish`.
        """
        if self._left is not None and self._name == "overview":
            return base64.b64decode(self._left.data["image/png"])
        past = self._drawable()
        return _tried(lambda: halved(past.png("overview"), past.theme)) if past else None

    def _drawn(self) -> Display | None:
        past = self._drawable()
        self._left = _tried(lambda: past.picture(self._name, with_table=True)) if past else None
        return self._left

    def _drawable(self) -> Past | None:
        return self.past if self.past is not None and self.past.scene.panels else None

    def _look_back(self, outcome: str) -> Past | None:
        from nbdist.client.board.scene.look import look

        try:
            known = self._insight.now() if self._insight is not None else None
            scene = look(self._telemetry, self._info, known)
            paused_at = None
            if outcome == "running" and self._actions is not None:
                paused_at = self._actions.halts.paused_at
            scene = replace(scene, outcome=outcome, paused_at=paused_at)
            return Past(scene, self._theme, records=self._telemetry)
        except Exception as error:
            _log.error("The board could not read the records", exc_info=error)
            return None


def _tried(draw: Callable[[], Drawn]) -> Drawn | None:
    try:
        return draw()
    except Exception as error:
        _log.error("The board's picture could not be drawn", exc_info=error)
        return None


def _in_a_kernel() -> bool:
    if "IPython" not in sys.modules:  # a script: IPython takes 0.3 s to import
        return False
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
