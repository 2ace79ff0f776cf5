"""What the cells of a session share: tracker, newest board, view, costs.

One training is explained by what ranks reported before it: how far each rank's records have come,
and what the cell before was. `ShownCell` (shown_cell.py) shows one of them.
"""

import atexit
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.client.board import VIEWS
from nbdist.client.board.cell_board import Board
from nbdist.client.board.live.actions import CellActions
from nbdist.client.board.live.past_board import show_past
from nbdist.client.board.palette import theme_named
from nbdist.client.board.past import Past
from nbdist.client.cells.cost_meter import CostMeter
from nbdist.client.cells.halts import Halts
from nbdist.client.cells.interrupts import Interrupts
from nbdist.client.cells.request import CellAttempt
from nbdist.client.cells.run import Outcome
from nbdist.client.cells.shown_cell import ShownCell
from nbdist.client.cells.status import Stacks
from nbdist.client.cells.trained_cell import HeardCell, OpenCell, TrainedCell
from nbdist.client.cluster.cluster import Cluster
from nbdist.client.metrics.analysis.cell_analysis import CellAnalysis
from nbdist.client.metrics.analysis.clocks import Clocks
from nbdist.client.metrics.analysis.values import Straggler
from nbdist.client.metrics.changes import Change
from nbdist.client.metrics.checks.cell_checks import CellChecks
from nbdist.client.metrics.checks.rule import Memory
from nbdist.client.metrics.checks.settings import Setting, states_of
from nbdist.client.metrics.checks.table import Checks, ChecksCost
from nbdist.client.metrics.detail import Detail
from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from nbdist.client.output.slots import Display
from nbdist.shared.errors import ClusterError, TrackingError
from nbdist.study.beside import Beside

if TYPE_CHECKING:
    from nbdist.client.tracking.run import TrackedRun, Tracker
    from nbdist.client.tracking.study import Study

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0
_MOST_CELLS = 500


class CellContext:
    """The settings and state that a session's cells share: where runs go, how things look."""

    def __init__(
        self,
        folder: Path,
        tracking_uri: str | None = None,
        theme: str = "auto",
        view: str = "overview",
        checks: Setting = "warn",
    ) -> None:
        """Remember; nothing is made before a cell trains.

        Args:
            folder: `.nbdist` beside the notebook.
            tracking_uri: Where runs go; see `nbdist.start`.
            theme: `light`, `dark` or `auto`, for the board.
            view: Which of `board.VIEWS` the boards of cells open on.
            checks: What rules do with what they find; see `states_of`.
        """
        self.folder = folder
        self.tracking_uri = tracking_uri
        self._theme = theme
        self.view = view
        self.states = states_of(checks)  # of rules
        self._checks_cost: ChecksCost | None = None  # of the newest training
        self._last_board: Past | None = None
        self._running: Board | None = None  # of the cell that runs
        self._running_run: TrackedRun | None = None
        # Rank to its process and how far that one's records have come: what a rank had made
        # before a cell is no part of it, and a new process counts from zero again.
        self._heard: dict[int, tuple[int, int]] = {}
        self._processes: dict[int, int] = {}  # of ranks, by their serials
        # Of ranks of this machine, now.
        self._pids_here: Callable[[], Collection[int]] = set
        self._clocks: Clocks | None = None
        self._halts: Halts | None = None
        self.cost_meter = CostMeter()
        self.insight: CellAnalysis | None = None  # of the newest cell
        self.checks: CellChecks | None = None  # of the newest cell
        self._trained: CellAnalysis | None = (
            None  # of the newest cell that made steps, and has ended
        )
        self.trained: TrainedCell | None = None  # the newest, whether it went well or not
        self.note_trained: Callable[[dict[int, float], tuple[Change, ...]], None]
        self.note_trained = lambda *_: None
        self._open: OpenCell | None = None
        self._memory = Memory()  # of the rules
        self._cells: deque[CellInfo] = deque(maxlen=_MOST_CELLS)  # a run keeps what led to it

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints without a name: one for each notebook."""
        from nbdist.client.tracking.provenance import notebook_name

        return self.folder.absolute() / "checkpoints" / notebook_name()

    @property
    def verdicts(self) -> tuple[Straggler, ...]:
        """The slow ranks of the newest cell that makes steps; any thread."""
        for insight in (self.insight, self._trained):
            if insight is not None and insight.now().ranks:
                return insight.now().verdicts
        return ()

    @property
    def alarms(self) -> tuple[str, ...]:
        """Problems in the training of the newest cell."""
        return () if self.checks is None else self.checks.found

    def show_board(self, view: str | None = None, run: str | None = None) -> None:
        """Display a board, live where widgets are.

        Args:
            view: Which of the board's views; None shows the one that boards open on.
            run: A run of this notebook, by name or number. None is the training that runs, else
                the last one of this kernel.

        Raises:
            ClusterError: No cell has trained yet.
            TrackingError: The run has no board.
            UsageError: There is no such run.
        """
        past = self.board(view) if run is None else self._board_of(run, view)
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
        from nbdist.client.board.scene.scene_file import from_bytes
        from nbdist.client.tracking.past.runs import find_run, kept_board

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
        # Each cell that continues a run leaves a board of its own steps.
        is_all = scene.last_step >= row.steps
        of = "" if is_all else f" (its newest cell, {scene.last_step:,} of {row.steps:,} steps)"
        return Past(scene, theme_named(self._theme), run=row.name + of)

    def _run_key(self) -> str | None:
        """Return the key of the run that is being written; None without one."""
        return None if self._running_run is None else self._running_run.key

    def meter_cost(self, telemetry: Telemetry) -> None:
        """Count what is spent from here on: a cell has begun to train."""
        self.cost_meter.begin(telemetry, self._pids_here)

    def remember_records(self, outcome: Outcome) -> None:
        """Note how far each rank's records have come, and what was explained of them."""
        if self.insight is not None and self.insight.now().ranks:
            self._trained = self.insight
        for rank, collector in outcome.collectors.items():
            if collector.replied:
                self._heard[rank] = (self._processes[rank], collector.summary.next_seq)

    def remember_training(self, outcome: Outcome) -> Beside | None:
        """Keep what the cell trained; it is over, and so are the checks of it."""
        if self._open is None:
            return None
        closed = self._open.close(outcome.word)
        self._open = None
        if closed is None:
            return None
        self.trained = closed
        self._note_cost_of_checks(closed)
        telemetry = closed.telemetry
        self.note_trained(telemetry.first_values("loss"), telemetry.changes)
        return closed.beside

    def rules(self) -> Checks:
        """Return the rules, with what they have found in the newest cell."""
        if self.checks is None:
            return Checks(self.states)
        of = self.checks
        return Checks(self.states, of.by_rule, of.ignored, of.failed, self._checks_cost)

    def _note_cost_of_checks(self, trained: TrainedCell) -> None:
        steps = trained.figures.steps if trained.figures is not None else 0
        if steps and self.checks is not None:
            self._checks_cost = ChecksCost(steps, 1e6 * self.checks.spent_s / steps)

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
        attached: bool = False,
    ) -> "ShownCell":
        """Return the showing of one attempt that is about to be sent.

        `interrupts` are the attempt's; `continues` is the `ShownCell.run_key` of the attempt that
        it repeats, `above` what is shown already in the same cell of the notebook. With `attached`
        another kernel has sent it, and `continues` is the run that it had begun there, if any.
        """
        request = attempt.request
        info = _info(attempt, cluster, continues, attached=attached and continues is not None)
        self._processes = processes = {rank: r.serial for rank, r in cluster.ranks.items()}
        telemetry = Telemetry(self._heard_of(processes), Detail(self.folder.absolute()))
        self._pids_here = lambda: {r.pid for r in cluster.ranks.values() if r.is_here}
        clocks = self._clocks_of(cluster, processes)
        insight = CellAnalysis(info, clocks)
        checks = CellChecks(info, self.states, request.ignore, self._memory, _memory)
        cell = HeardCell(info, telemetry, clocks, insight, checks)
        before = tuple(self._cells)
        run = self._tracking().follow(info, telemetry, insight, before) if request.track else None
        if not request.call:
            self.insight, self.checks = insight, checks
            self._open = OpenCell(cell)
            self._cells.append(info)
        return ShownCell(
            self,
            cell,
            run,
            above,
            show=request.show,
            look=(self._theme, self.view),
            actions=self._actions(cluster, request.ranks, interrupts),
        )

    def _heard_of(self, processes: Mapping[int, int]) -> dict[int, int]:
        """Return how far the records of these processes have come, by rank."""
        return {r: seq for r, (which, seq) in self._heard.items() if processes.get(r) == which}

    def _actions(
        self, cluster: Cluster, ranks: Sequence[int], interrupts: Interrupts
    ) -> CellActions:
        """Return what the buttons of a cell's board do."""

        def interrupt(rank: int | None) -> str:
            if not interrupts.ask(rank):
                return "The cell has ended: nothing was interrupted."
            return "Interrupting all ranks." if rank is None else f"Interrupting rank {rank}."

        halts = self.halts_of(cluster)
        halts.cell_begins()
        return CellActions(
            stacks=lambda: str(Stacks.ask(cluster, ranks)),
            cost=lambda: str(self.cost_meter.cost(cluster)),
            interrupt=interrupt,
            halts=halts,
        )

    def halts_of(self, cluster: Cluster) -> Halts:
        """Return what is asked of the steps of a cluster's cell: one, for one asks at a time.

        Any thread.
        """
        halts = self._halts
        if halts is None or halts.cluster is not cluster:
            halts = self._halts = Halts(cluster)
        return halts

    def _clocks_of(self, cluster: Cluster, processes: Mapping[int, int]) -> Clocks:
        if self._clocks is None:
            requests = cluster.requests
            self._clocks = Clocks(lambda rank: requests.ask(rank, "clock.read", busy=True))
        self._clocks.begin(processes)
        return self._clocks

    def begin_study(self, name: str, source: str, values: Mapping[str, Sequence[Any]]) -> "Study":
        """Return the run under which those of a sweep's cells are nested; see `Tracker`."""
        return self._tracking().begin_study(name, source, values)

    def run_of(self, number: int, kernels: Collection[int], since_s: float) -> str | None:
        """Return the key of the run that a cell has begun in another kernel; see `attached_run`."""
        from nbdist.client.tracking.begin import attached_run

        return attached_run(self.folder.absolute(), number, kernels, since_s)

    def memory(self) -> dict[str, Any]:
        """Return what `CellContext` takes, for another kernel; without the server's password."""
        from nbdist.client.tracking.settings import split_password

        uri = None if self.tracking_uri is None else split_password(self.tracking_uri)[0]
        return {
            "folder": str(self.folder.absolute()),
            "tracking_uri": uri,
            "theme": self._theme,
            "view": self.view,
            "checks": self.states,
        }

    def require_run(self, name: str) -> None:
        """Check that a cell can continue the run of that name; raises UsageError."""
        from nbdist.client.tracking.past.runs import require_run

        tracker = self._tracking()
        require_run(tracker.folder, tracker.experiment, name)

    def _tracking(self) -> "Tracker":
        return here.get(self.folder, self.tracking_uri)


def _info(
    attempt: CellAttempt, cluster: Cluster, continues: str | None, *, attached: bool
) -> CellInfo:
    """Return what board and tracker know of an attempt before it is sent."""
    request = attempt.request
    assert cluster.options is not None
    return CellInfo(
        number=attempt.start.prompt,
        source=request.code,
        ranks=request.ranks,
        world_size=cluster.options.n,
        backend=cluster.options.backend,
        devices=tuple(cluster.ranks[rank].device for rank in request.ranks),
        run_name=request.run_name,
        resume=request.resume,
        continues=continues,
        attached=attached,
        study=request.study,
        track=request.track,
        params=dict(request.params),
    )


def _no_board_yet(view: str | None) -> ClusterError:
    """Return the error where no cell has trained; it names the setting for a view."""
    opens = f'; %config NBDist.view = "{view}" lets its board open on this view' if view else ""
    return ClusterError(
        "There is no board yet in this kernel.",
        why="a board opens when a cell takes its first optimizer step, or calls nbdist.log",
        do=f"train something in a %%distributed cell{opens}; %dist board RUN shows an earlier run",
    )


_memory = Memory()  # of the rules; one a kernel, also after `%dist stop`


class Trackers:
    """The trackers of a kernel, one a place, also after `%dist stop`.

    The process of one keeps sending what is spooled.
    """

    def __init__(self) -> None:
        self._by_place: dict[tuple[Path, str | None], Tracker] = {}

    def get(self, folder: Path, uri: str | None) -> "Tracker":
        """Return the one of a place, made where there is none yet."""
        from nbdist.client.tracking.run import Tracker

        if (folder, uri) not in self._by_place:
            self._by_place[folder, uri] = Tracker(folder, uri)
        return self._by_place[folder, uri]

    def close(self) -> None:
        """Close all of them, as the kernel ends."""
        for tracker in self._by_place.values():
            tracker.close(_CLOSE_TIMEOUT_S)


here = Trackers()
atexit.register(here.close)
