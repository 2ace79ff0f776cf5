"""Show one cell: live text, board, tracked run, and what stays in the notebook.

Board and tracker are made with each cell and stay silent until its first record; a cell that
does not train leaves no trace of either. Whatever fails here is logged and steps aside: the
cell's own outcome comes first.
"""

import atexit
import html
import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.client.board import VIEWS
from nbdist.client.board.cell_board import Board
from nbdist.client.board.controls import show_past
from nbdist.client.board.interactive import show_interactive
from nbdist.client.board.live_controls import CellActions
from nbdist.client.board.palette import theme_named
from nbdist.client.board.past import Past, caption
from nbdist.client.cells.interrupts import Interrupts
from nbdist.client.cells.request import CellAttempt
from nbdist.client.cells.run import Outcome
from nbdist.client.cluster.cluster import Cluster
from nbdist.client.faults.rank_errors import should_go_on
from nbdist.client.metrics.analysis.cell_analysis import CellAnalysis
from nbdist.client.metrics.analysis.clocks import Clocks
from nbdist.client.metrics.analysis.values import Verdict
from nbdist.client.metrics.checks.batch_growth import Trained
from nbdist.client.metrics.checks.checks import CellChecks
from nbdist.client.metrics.profile.gather import Profiled
from nbdist.client.metrics.profile.words import HOW_TO_OPEN
from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from nbdist.client.output import merge
from nbdist.client.output.pages import Pages, pages
from nbdist.client.output.result import Display
from nbdist.client.output.slots import Slots, owns_cell
from nbdist.client.session.cost_meter import CostMeter
from nbdist.client.session.status import Stacks
from nbdist.errors import ClusterError, TrackingError
from nbdist.ranks import name_ranks

if TYPE_CHECKING:
    from nbdist.client.tracking.run import TrackedRun, Tracker
    from nbdist.client.tracking.study import Study

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0
_EXPLAIN_TIMEOUT_S = 2.0
_MOST_CELLS = 500
_SIGN_OF_LIFE_S = 0.35  # ticks are 0.1 s apart: it is seen within 0.5 s


class Showing:
    """What a session's cells have in common: where runs go, how things look."""

    def __init__(
        self,
        folder: Path,
        tracking_uri: str | None = None,
        theme: str = "auto",
        view: str = "overview",
    ) -> None:
        """Remember; nothing is made before a cell trains.

        Args:
            folder: `.nbdist` beside the notebook.
            tracking_uri: Where runs go; see `nbdist.start`.
            theme: `light`, `dark` or `auto`, for the board.
            view: Which of `board.VIEWS` the boards of cells open on.
        """
        self.folder = folder
        self.tracking_uri = tracking_uri
        self._theme = theme
        self.view = view
        self._last_board: Past | None = None
        self._running: Board | None = None  # of the cell that runs
        self._running_run: TrackedRun | None = None
        # Rank to its process and how far that one's records have come: what a rank had made
        # before a cell is no part of it, and a new process counts from zero again.
        self._heard: dict[int, tuple[int, int]] = {}
        self._pids: dict[int, int] = {}
        self._clocks: Clocks | None = None
        self.cost_meter = CostMeter()
        self.insight: CellAnalysis | None = None  # of the newest cell
        self.checks: CellChecks | None = None  # of the newest cell
        self._trained: CellAnalysis | None = (
            None  # of the newest cell that made steps, and has ended
        )
        self._cells: deque[CellInfo] = deque(maxlen=_MOST_CELLS)  # a run keeps what led to it

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Who stands out in the newest cell that makes steps; any thread."""
        for insight in (self.insight, self._trained):
            if insight is not None and insight.now().ranks:
                return insight.now().verdicts
        return ()

    @property
    def alarms(self) -> tuple[str, ...]:
        """What goes wrong in the training of the newest cell."""
        return () if self.checks is None else self.checks.found

    def show_board(
        self, view: str | None = None, run: str | None = None, *, interactive: bool = False
    ) -> None:
        """Display a board; with buttons where they can work.

        Args:
            view: Which of the board's views; None shows the one that boards open on.
            run: A run of this notebook, by name or number. None is the training that runs, else
                the last one of this kernel.
            interactive: Show what can be hovered over, where plotly is installed.

        Raises:
            ClusterError: No cell has trained yet.
            TrackingError: The run has no board.
            UsageError: There is no such run.
        """
        past = self.board(view) if run is None else self._board_of(run, view)
        if interactive:
            show_interactive(past, view, self.view)
        else:
            show_past(past, view or self.view)

    def board(self, view: str | None = None) -> Past:
        """Return the board of the running or last training; any thread.

        Args:
            view: The one that is asked for: an error says how boards open on it.

        Raises:
            ClusterError: No cell has trained yet.
        """
        running = self._running  # may end meanwhile, where another thread asks
        board = (running.so_far() if running is not None else None) or self._last_board
        if board is None:
            raise _no_board_yet(view)
        return board

    def _board_of(self, word: str, view: str | None) -> Past:
        from nbdist.client.board.scene_file import from_bytes
        from nbdist.client.tracking.boards import find_run, kept_board

        tracker, running = self._tracking(), self._running
        # A word beside a view can only be a run's.
        row = find_run(tracker.folder, tracker.experiment, word, () if view else tuple(VIEWS))
        so_far = running.so_far() if running is not None and row.key == self._run_key() else None
        if so_far is not None:
            return so_far
        kept = kept_board(tracker.folder, tracker.experiment, row)
        try:
            scene = from_bytes(kept)
        except ValueError as error:
            log.warning("the board of run %s cannot be read: %s", row.name, error)
            raise TrackingError(
                f"The board of run {row.name} cannot be read.",
                why="its file is damaged, or another version of nbdist wrote it",
                do="%dist ui shows what was recorded",
            ) from None
        # Each cell that goes on with a run leaves a board of its own steps.
        is_all = scene.last_step >= row.steps
        of = "" if is_all else f" (its newest cell, {scene.last_step:,} of {row.steps:,} steps)"
        return Past(scene, theme_named(self._theme), run=row.name + of)

    def _run_key(self) -> str | None:
        """Return the key of the run that is being written; None without one."""
        return None if self._running_run is None else self._running_run.key

    def meter_cost(self, telemetry: Telemetry) -> None:
        """Count what is spent from here on: a cell has begun to train."""
        self.cost_meter.begin(telemetry, set(self._pids.values()))

    def remember_records(self, outcome: Outcome) -> None:
        """Note how far each rank's records have come, and what was explained of them."""
        if self.insight is not None and self.insight.now().ranks:
            self._trained = self.insight
        for rank, collector in outcome.collectors.items():
            if collector.replied:
                self._heard[rank] = (self._pids[rank], collector.summary.next_seq)

    def follow_board(self, board: Board, run: "TrackedRun | None" = None) -> None:
        """Let `show_board` show a cell's board while it runs, also by the name of its run."""
        self._running, self._running_run = board, run

    def remember_board(self, past: Past | None) -> None:
        """Keep a cell's board for `show_board`; a cell without one replaces nothing."""
        self._last_board = past or self._last_board
        self._running = self._running_run = None

    def begin(
        self,
        attempt: CellAttempt,
        cluster: Cluster,
        *,
        interrupts: Interrupts,
        continues: str | None,
        above: Sequence[Display],
    ) -> "ShownCell":
        """Return the showing of one attempt that is about to be sent.

        `interrupts` are the attempt's; `continues` is the `ShownCell.run_key` of the attempt that
        it repeats, `above` what is shown already in the same cell of the notebook.
        """
        request = attempt.request
        assert cluster.options is not None
        info = CellInfo(
            number=request.prompt or attempt.number,
            source=request.code,
            ranks=request.ranks,
            world_size=cluster.options.n,
            backend=cluster.options.backend,
            devices=tuple(cluster.ranks[rank].device for rank in request.ranks),
            run_name=request.run_name,
            resume=request.resume,
            continues=continues,
            study=request.study,
            track=request.track,
            params=dict(request.params),
        )
        pids = {rank: state.pid for rank, state in cluster.ranks.items()}
        telemetry = Telemetry(
            {r: seq for r, (pid, seq) in self._heard.items() if pids.get(r) == pid}
        )
        self._pids = pids
        clocks = self._clocks_of(cluster, pids)
        insight = CellAnalysis(info, clocks)
        telemetry.subscribe(insight.receive)
        checks = CellChecks(info, _trained)
        telemetry.subscribe(checks.receive)
        before = tuple(self._cells)
        run = self._tracking().follow(info, telemetry, insight, before) if request.track else None
        if not request.call:
            self.insight, self.checks = insight, checks
            self._cells.append(info)
        return ShownCell(
            self,
            info,
            telemetry,
            insight,
            clocks,
            checks,
            run,
            above,
            show=request.show,
            look=(self._theme, self.view),
            actions=self._actions(cluster, request.ranks, interrupts),
        )

    def _actions(
        self, cluster: Cluster, ranks: Sequence[int], interrupts: Interrupts
    ) -> CellActions:
        """Return what the buttons of a cell's board do."""

        def interrupt(rank: int | None) -> str:
            if not interrupts.ask(rank):
                return "The cell has ended: nothing was interrupted."
            return "Interrupting all ranks." if rank is None else f"Interrupting rank {rank}."

        return CellActions(
            stacks=lambda: str(Stacks.ask(cluster, ranks)),
            cost=lambda: str(self.cost_meter.cost(cluster)),
            interrupt=interrupt,
        )

    def _clocks_of(self, cluster: Cluster, pids: Mapping[int, int]) -> Clocks:
        if self._clocks is None:
            requests = cluster.requests
            self._clocks = Clocks(lambda rank: requests.ask(rank, "clock.read", busy=True))
        self._clocks.begin(pids)
        return self._clocks

    def begin_study(self, name: str, source: str, values: Mapping[str, Sequence[Any]]) -> "Study":
        """Return the run under which those of a sweep's cells are nested; see `Tracker`."""
        return self._tracking().begin_study(name, source, values)

    def require_run(self, name: str) -> None:
        """Check that a cell can go on with the run of that name; raises UsageError."""
        from nbdist.client.tracking.runs import require_run

        tracker = self._tracking()
        require_run(tracker.folder, tracker.experiment, name)

    def _tracking(self) -> "Tracker":
        from nbdist.client.tracking.run import Tracker

        place = (self.folder, self.tracking_uri)
        if place not in _trackers:
            _trackers[place] = Tracker(*place)
        return _trackers[place]


def _no_board_yet(view: str | None) -> ClusterError:
    """Return what is said where no cell has trained; who asks for a view may want to set it."""
    opens = f'; %config NBDist.view = "{view}" lets its board open on this view' if view else ""
    return ClusterError(
        "There is no board yet in this kernel.",
        why="a board opens when a cell takes its first optimizer step, or calls nbdist.log",
        do=f"train something in a %%distributed cell{opens}; %dist board RUN shows an earlier run",
    )


# One a kernel, also after `%dist stop`: more ranks often come with a new start.
_trained: deque[Trained] = deque(maxlen=_MOST_CELLS)
# One a kernel and place, also after `%dist stop`: its process goes on sending what is spooled.
_trackers: dict[tuple[Path, str | None], "Tracker"] = {}


def _close_trackers() -> None:
    for tracker in _trackers.values():
        tracker.close(_CLOSE_TIMEOUT_S)


atexit.register(_close_trackers)


class ShownCell:
    """One cell's slots, telemetry, insight, board and run. Main thread only."""

    def __init__(
        self,
        showing: Showing,
        info: CellInfo,
        telemetry: Telemetry,
        insight: CellAnalysis,
        clocks: Clocks,
        checks: CellChecks,
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
            info: The cell.
            telemetry: Gets its records.
            insight: Explains them.
            clocks: Of the ranks.
            checks: Notice what goes wrong in its training.
            run: Its run, which begins with the first record; None when it is not tracked.
            above: What the notebook's cell shows already.
            show: Whether to show anything; a script reads the result instead.
            look: The board's theme and view.
            actions: What the board's buttons do.
        """
        self._sign_at = time.monotonic() + _SIGN_OF_LIFE_S if show and owns_cell() else math.inf
        self.telemetry = telemetry
        self.insight = insight
        self.left = list(above)  # all that stays in the notebook's cell
        self.run_key: str | None = None
        self.slots = Slots(None if show else False, self.left, tells=show)
        self._showing = showing
        self._ranks = info.ranks
        self._clocks = clocks
        self._checks = checks
        self._run = run
        self._show = show
        static = os.environ.get("NBDIST_STATIC") == "1" or not show
        theme, view = look
        self._pages = pages() if self.slots.live else None
        if self._pages is not None:
            self._pages.begin(goes_on=bool(above))
        shown = info, telemetry, self.slots, static, theme
        self._board = Board(*shown, name=view, insight=insight, actions=actions)
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
        for line in self._checks.lines():
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
            self._checks.lines(is_last=True)
            if self._show:
                said = [*map(_text, self._checks.found), *_notices(outcome)]
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
                goes_on = should_go_on(outcome.error)
                self._pages.end(goes_on=goes_on)
                if was_reopened and not goes_on:
                    self._show_again(self._pages, outcome.error)

    def _show_again(self, of_kernel: Pages, error: BaseException | None) -> None:
        """Show what is left to pages that were opened meanwhile, and to the file, in the next cell.

        Jupyter drops the outputs of a cell that another page has sent.
        """
        left = [*self.left, *([_text(f"{type(error).__name__}: {error}")] if error else [])]
        self._board.show_again(left)
        since = (
            "The page was opened again while the last %%distributed cell ran. "
            "If its output is not above, this is it:"
        )
        of_kernel.show_next(lambda: Slots(live=False).settle([caption(since), *left]))

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
    from nbdist.client.board.scene_file import to_bytes

    try:
        return to_bytes(past.scene)
    except Exception:
        log.exception("The board could not be kept")
        return None


def _notices(outcome: Outcome) -> list[Display]:
    """Return what there is to say beside the output.

    What ranks say, once, for they say the same in other numbers; and what was repaired after a
    cell that went well: an error tells it itself.
    """
    said = next(filter(None, (c.summary.notices for c in outcome.collectors.values())), ())
    repaired = outcome.repaired.lines if outcome.error is None else ()
    return [_text(line) for line in (*said, *repaired)]


def _text(line: str) -> Display:
    return Display({"text/plain": line})


def _shown(profiled: Profiled | None) -> list[Display]:
    """Return what stays of a profile: where the trace lies; its numbers only where all is live."""
    if profiled is None:
        return []
    if profiled.trace is None:
        return [Display({"text/plain": profiled.said})]
    if os.environ.get("NBDIST_STATIC") == "1":
        # The folder's name holds the time of the start, and the table times.
        said = f"{profiled.said} The trace is {_in_any_run(profiled.trace)}: {HOW_TO_OPEN}."
        said += " nbdist.current().profile.trace is its path, .text the table of where time went."
        return [Display({"text/plain": said})]
    said = f"{profiled.said} The trace is {_short_path(str(profiled.trace))}: {HOW_TO_OPEN}."
    if profiled.left_out:
        said += f" The {profiled.left_out:,} shortest slices are omitted."
    page = f"<p>{html.escape(said)}</p>{profiled.html}"
    return [Display({"text/plain": f"{said}\n\n{profiled.text}", "text/html": page})]


def _in_any_run(trace: Path) -> str:
    """Return a trace's path as it is in every run: without the folders of start and cell."""
    return _short_path(str(trace.parents[2] / "*" / "*" / trace.name))


def _short_path(path: str) -> str:
    """Return a path relative to the notebook's folder where it lies below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the notebook's folder is gone
        return path
