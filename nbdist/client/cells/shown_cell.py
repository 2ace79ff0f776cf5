"""Show one cell: live text, board, tracked run, and what stays in the notebook.

Board and tracker are made with each cell and stay silent until its first record; a cell that
does not train leaves no trace of either. Whatever fails here is logged and steps aside: the
outcome of the cell comes first.
"""

import logging
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nbdist.client.board.cell_board import Board
from nbdist.client.board.live.actions import CellActions
from nbdist.client.board.past import Past, caption
from nbdist.client.cells.cost_meter import CostMeter
from nbdist.client.cells.run import Outcome
from nbdist.client.cells.trained_cell import HeardCell
from nbdist.client.faults.failures import should_go_on
from nbdist.client.metrics.analysis.clocks import Clocks
from nbdist.client.metrics.emulated import kept_up
from nbdist.client.metrics.profile.gather import Profiled
from nbdist.client.metrics.profile.words import HOW_TO_OPEN
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.client.output import merge, pages
from nbdist.client.output.pages import Pages
from nbdist.client.output.slots import Display, Slots, owns_cell
from nbdist.shared.text import name_ranks
from nbdist.study.beside import Beside

if TYPE_CHECKING:
    from nbdist.client.tracking.run import TrackedRun

log = logging.getLogger(__name__)

_EXPLAIN_TIMEOUT_S = 2.0
_NUMBERS = re.compile(r"\d[\d,.]*")
_SIGN_OF_LIFE_S = 0.35  # ticks come every 0.1 s: it is seen within 0.5 s


class Surroundings(Protocol):
    """The part of a session that a shown cell uses."""

    @property
    def cost_meter(self) -> CostMeter:
        """Counts what watching costs."""

    def meter_cost(self, telemetry: Telemetry) -> None:
        """The cell has begun to train."""

    def follow_board(self, board: Board, run: "TrackedRun | None" = None) -> None:
        """Its board may be asked for while it runs."""

    def remember_records(self, outcome: Outcome) -> None:
        """All of its records have been read."""

    def remember_board(self, past: Past | None) -> None:
        """Its board is whole, if it had one."""

    def remember_training(self, outcome: Outcome) -> Beside | None:
        """It is over, and so are the checks of its training; return its estimate, beside it."""


class ShownCell:
    """One cell's slots, telemetry, insight, board and run. Main thread only."""

    def __init__(
        self,
        showing: Surroundings,
        cell: HeardCell,
        run: "TrackedRun | None",
        above: Sequence[Display],
        *,
        show: bool,
        look: tuple[str, str],
        actions: CellActions,
    ) -> None:
        """Make all of it; nothing is visible yet.

        Args:
            showing: What it shares with the session's other cells.
            cell: The cell, and what hears its records.
            run: Its run, which begins with the first record; None when it is not tracked.
            above: What the notebook's cell shows already.
            show: Whether to show anything; a script reads the result instead.
            look: The board's theme and view.
            actions: What the board's buttons do.
        """
        self._sign_at = time.monotonic() + _SIGN_OF_LIFE_S if show and owns_cell() else math.inf
        self.telemetry = cell.telemetry
        self.insight = cell.insight
        self.left = list(above)  # all that stays in the notebook's cell
        self.run_key: str | None = None
        self.slots = Slots(None if show else False, self.left, warns=show)
        self._showing = showing
        self._ranks = cell.info.ranks
        self._clocks = cell.clocks
        self.checks = cell.checks
        self._run = run
        self._beside: Beside | None = None
        self._show = show
        static = os.environ.get("NBDIST_STATIC") == "1" or not show
        theme, view = look
        self._pages = pages.here.get() if self.slots.live else None
        if self._pages is not None:
            self._pages.begin(continues=bool(above))
        shown = cell.info, cell.telemetry, self.slots, static, theme
        self._board = Board(*shown, name=view, insight=cell.insight, actions=actions)
        showing.follow_board(self._board, run)

    def say(self, notice: str) -> None:
        """Show a line that stays, before the cell itself shows anything; an empty one is none."""
        if notice and self._show:
            self._leave([Display({"text/plain": notice})])

    def tick(self) -> None:
        """Open the board once the cell trains. Called a few times a second."""
        if self._board.wants_to_open:
            self._board.open()
        if time.monotonic() >= self._sign_at:
            self._sign_at = math.inf
            where = name_ranks(self._ranks)
            self.slots.show_passing(
                _text(f"Running on {where}. A board opens at the first training step.")
            )
        if self.telemetry.first_record.is_set():
            self._showing.meter_cost(self.telemetry)
        for line in self.checks.lines():
            self.slots.open(_text(line))

    def clocks_after_all(self) -> Clocks:
        """Return the ranks' clocks as they are known when all records have been explained."""
        self.insight.finish(_EXPLAIN_TIMEOUT_S)  # its thread reads them until then
        self._clocks.refresh(self._ranks)
        return self._clocks

    def end(self, outcome: Outcome, profiled: Profiled | None = None) -> None:
        """Put what stays into the cell's output: board, text, profile, a line about the run."""
        self.insight.finish(_EXPLAIN_TIMEOUT_S)  # board and run end with what it has found
        self._showing.remember_records(outcome)
        self._showing.cost_meter.end(self.telemetry)
        was_reopened = self._pages is not None and self._pages.opened
        try:
            board = self._board.finish(outcome.word, is_seen_again=was_reopened)
            self._showing.remember_board(self._board.past)
            self.checks.lines(is_last=True)
            self._beside = self._showing.remember_training(outcome)
            if self._show:
                # An error of a rule says its sentence itself.
                found = [
                    one for one in self.checks.found if one != getattr(outcome.error, "what", "")
                ]
                said = [*map(_text, [*found, *self._emulated()]), *_notices(outcome)]
                if self._beside is not None:
                    said.append(_text(self._beside.sentence))
                finals = [*board, *self._texts(outcome), *said, *_shown(profiled)]
                if should_go_on(outcome.error):
                    finals = []  # it is run once more, and shows the same again
                self.slots.settle(finals)
                self.left += finals
        except Exception:
            log.exception("The cell's output could not be shown whole")
        finally:
            self._end_run(outcome, profiled)
            if self._pages is not None:
                continues = should_go_on(outcome.error)
                self._pages.end(continues=continues)
                if was_reopened and not continues:
                    self._show_again(self._pages, outcome.error)

    def _show_again(self, of_kernel: Pages, error: BaseException | None) -> None:
        """Show what is left to pages that were opened meanwhile, and have the file hold it once.

        Jupyter drops the outputs of a cell that another page has sent. Where neither that page is
        still there nor another takes them into the cell, the next cell shows them.
        """
        left = [*self.left, *([_text(f"{type(error).__name__}: {error}")] if error else [])]
        self._board.show_again(left)
        since = (
            "The page was opened again while the last %%distributed cell ran. "
            "If its output is not above, this is it:"
        )

        def show() -> None:
            if self._board.shows_end():
                Slots(live=False).settle([caption(since), *left])

        of_kernel.show_next(show)

    def _emulated(self) -> list[str]:
        told = self.telemetry
        return kept_up(told.machine, told.emulated, self.insight.now().table)

    def _texts(self, outcome: Outcome) -> list[Display]:
        collectors = outcome.collectors
        failed = {rank for rank, c in collectors.items() if c.failure or c.death}
        whole = sorted(
            {c.summary.output_file for c in collectors.values() if c.summary.output_file}
        )
        places = ", ".join(_short_path(path) for path in whole)
        if any(c.summary.cut_bytes and not c.summary.output_file for c in collectors.values()):
            places = "nowhere, because the disk of the logs is full"
        return merge.render(
            outcome.text.items(),
            failed=failed,
            show="nbdist.current().last[{rank}].show()",
            whole=places,
        )

    def _end_run(self, outcome: Outcome, profiled: Profiled | None) -> None:
        if self._run is None:
            return
        has_trained = self.telemetry.first_record.is_set()
        link = self._run.finish(
            outcome.word,
            error=str(outcome.error) if outcome.error is not None else None,
            picture=self._board.picture() if has_trained else None,
            files=profiled.artifacts if profiled is not None else {},
            board=_to_keep(self._board.past),
            beside=self._beside,
        )
        if link is None:
            return
        self.run_key = link.folder.name
        if self._show:
            self._leave([caption(link.text)])

    def _leave(self, displays: list[Display]) -> None:
        Slots(live=False).settle(displays)
        self.left += displays


def _to_keep(past: Past | None) -> bytes | None:
    """Return what a board is drawn from on another day; None where there is nothing to keep."""
    if past is None:
        return None
    from nbdist.client.board.scene.scene_file import to_bytes

    try:
        return to_bytes(past.scene)
    except Exception:
        log.exception("The board could not be kept")
        return None


def _notices(outcome: Outcome) -> list[Display]:
    """Return the notices beside the output.

    Each sentence once, that of the lowest rank where ranks say it with other numbers; and what was
    repaired after a cell that succeeded: an error says so itself.
    """
    said: dict[str, str] = {}
    for collector in outcome.collectors.values():
        for line in collector.summary.notices:
            said.setdefault(_NUMBERS.sub("", line), line)
    repaired = outcome.repaired.lines if outcome.error is None else ()
    return [_text(line) for line in (*said.values(), *repaired)]


def _text(line: str) -> Display:
    return Display({"text/plain": line})


def _shown(profiled: Profiled | None) -> list[Display]:
    """Return what stays of a profile: the path of the trace."""
    if profiled is None:
        return []
    if profiled.trace is None:
        return [_text(profiled.said)]
    if os.environ.get("NBDIST_STATIC") == "1":
        # The folder's name holds the time of the start.
        said = f"{profiled.said} The trace is {_in_any_run(profiled.trace)}: {HOW_TO_OPEN}."
        said += " nbdist.current().profile.trace is its path."
        return [_text(said)]
    said = f"{profiled.said} The trace is {_short_path(str(profiled.trace))}: {HOW_TO_OPEN}."
    if profiled.left_out:
        said += f" The {profiled.left_out:,} shortest slices are omitted."
    return [_text(said)]


def _in_any_run(trace: Path) -> str:
    """Return a trace's path as it is in every run: without the folders of start and cell."""
    return _short_path(str(trace.parents[2] / "*" / "*" / trace.name))


def _short_path(path: str) -> str:
    """Return a path relative to the notebook's folder where it is below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the notebook's folder is gone
        return path
