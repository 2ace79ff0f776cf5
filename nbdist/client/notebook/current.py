"""The objects that a kernel has one of: the current session, the warmed parent, the MLflow UI.

`nbdist.start` and `nbdist.current` live here; the magics are a thin layer over both.
"""

import atexit
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.client.cells.cell_context import CellContext
from nbdist.client.cells.interrupts import Interrupts, hold_interrupts
from nbdist.client.cells.status import Status
from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.folders import current_folder, log_folder, project_folder, say_where
from nbdist.client.cluster.launchers.base import (
    DETACHABLE,
    LOCAL,
    Launcher,
    LaunchOptions,
    MakeLauncher,
    find_launcher,
)
from nbdist.client.cluster.network import choose_address, has_curve, look_at_interfaces
from nbdist.client.cluster.open_files import require_files_to_start
from nbdist.client.metrics.changes import Change
from nbdist.client.notebook.log_file import log_to
from nbdist.client.notebook.start_options import StartOptions, read_options, takes_options
from nbdist.client.session.session import Session
from nbdist.client.session.terminal_requests import TerminalRequests
from nbdist.client.tracking.settings import require_store
from nbdist.doctor.findings import Finding
from nbdist.shared import background, gpu_errors, side
from nbdist.shared.errors import ClusterError, UsageError
from nbdist.shared.options import ClusterOptions, choose_options, cores_note, sharing_note
from nbdist.shared.processes.detached import name_for

if TYPE_CHECKING:
    from nbdist.client.metrics.numerics.layouts import LayoutDiff
    from nbdist.client.metrics.numerics.runs import RunDiff
    from nbdist.client.tracking.past.compare import Comparison
    from nbdist.client.tracking.past.runs import RunsTable
    from nbdist.client.tracking.run import Tracker
    from nbdist.doctor.findings import Finding

log = logging.getLogger(__name__)

# Gloo may give wrong numbers where sizes differ: a notice says what is not compared.
_NOT_COMPARED = (
    "Collectives between hosts are not compared before they are sent; "
    '%config NBDist.check = "store" before the start does so, for some round trips each.'
)
# Imported beside the parent's import of torch, for they take half a second: ipyparallel, with
# which the start continues, and numpy, which the first cell asks for.
_NEEDED_NEXT = ("nbdist.client.cluster.connection", "nbdist.client.tracking.run")

_NVIDIA = Path("/dev/nvidia0")  # of this machine, whether its driver works or not

_current: Session | None = None
_place: Path | None = None  # where the current session was started: its runs are there
_launcher: Launcher | None = None
_launcher_for: tuple[str, Any] = ("", None)  # its name and options: others need another one
_uis: "dict[tuple[Path, str | None], tuple[str, subprocess.Popen[bytes] | None]]" = {}


def current() -> Session:
    """Return the kernel's session.

    Raises:
        ClusterError: None has been started, or this is a rank.
    """
    if _current is None:
        if os.environ.get("TORCHELASTIC_RUN_ID") == "nbdist":  # what ranks have; no engine here
            raise ClusterError(
                f"nbdist.current() is for the notebook, and this is rank {os.environ['RANK']}.",
                why="the session that controls all ranks runs in the notebook's kernel",
                do="call it in an ordinary cell; in a %%distributed cell use rank, "
                "world_size, device and dist",
            )
        raise ClusterError(
            "No ranks are running, so nothing was run.",
            why="no cluster has been started in this notebook.",
            do="%dist start, then run the cell again.",
        )
    return _current


def is_running() -> bool:
    """Return whether the kernel has a session that was not stopped."""
    return _current is not None and _current.is_running


def status() -> Status:
    """Return the status of the kernel's session, also when there is none."""
    if _current is None:
        return Status.stopped("no cluster has been started in this notebook.")
    return _current.status()


def health() -> "list[Finding]":
    """Return what the doctor says of the kernel's session; nothing when none runs."""
    if _current is None or not _current.is_running:
        return []
    return judge(_current.status(), _current.broken, _current.events)


def runs() -> "RunsTable":
    """Return this notebook's runs, newest first."""
    from nbdist.client.tracking.past.runs import runs_table

    tracker = _tracker()
    return runs_table(tracker.folder, tracker.experiment)


def show_board(view: str | None, run: str | None, theme: str, opens_on: str) -> None:
    """Display a board: of this kernel's session, or without one of a run of another day.

    Args:
        view: Which of its views; None shows the one that boards open on.
        run: A run's name or number; None is the last training of this kernel.
        theme: Without a session: the board's background.
        opens_on: Without a session: the view that boards open on.

    Raises:
        ClusterError: No cell has trained yet.
        TrackingError: The run has no board.
        UsageError: There is no such run.
    """
    if _current is not None:
        _current.show_board(view, run=run)
    else:
        showing = CellContext(project_folder(current_folder()), None, theme, opens_on)
        showing.show_board(view, run)


def compare(words: Sequence[str]) -> "Comparison":
    """Return the runs that these names and row numbers mean, beside each other.

    Raises:
        UsageError: A word names no run.
    """
    from nbdist.client.tracking.past.runs import compare, select

    tracker = _tracker()
    return compare(tracker.folder, select(tracker.folder, tracker.experiment, words))


def diff(one: str, other: str) -> "LayoutDiff | RunDiff":
    """Return where two runs part, or two layouts of the newest model.

    Raises:
        ClusterError: They are layouts, and no ranks are running.
        LayoutError: A layout does not fit the model or the ranks.
        UsageError: There is no such run, nothing is kept of what it has computed, or one is a
            layout and the other a run.
    """
    from nbdist.client.metrics.numerics.layouts import is_layout
    from nbdist.client.tracking.past.recorded import diff

    kinds = [is_layout(one), is_layout(other)]
    if all(kinds):
        return current().diff(one, other)
    if any(kinds):
        raise UsageError(
            f"{one if kinds[0] else other} is a layout, and {other if kinds[0] else one} is none.",
            do="%dist diff with two layouts, or with two runs",
        )
    tracker = _tracker()
    return diff(tracker.folder, tracker.experiment, one, other)


def sync() -> str:
    """Send what MLflow has not taken yet; return the outcome in one sentence."""
    from nbdist.client.tracking.shipping.shipper import sync

    tracker = _tracker()
    return sync(tracker.folder, credentials=tracker.credentials)


def open_ui() -> str:
    """Start the MLflow UI on loopback, once for a place of runs, and return a line with its link.

    The link opens on the charts of this notebook's runs; with a tracking server it is the
    address of that server, and nothing is started.
    """
    from nbdist.client.tracking.shipping.ui import start_ui, view_page

    tracker = _tracker()
    place = tracker.folder, tracker.whole_uri
    link, server = _uis.get(place, ("", None))
    if server is not None and server.poll() is None:
        # It runs already; there may be runs now where there were none.
        address = link.partition("/#")[0]
        page = view_page(tracker.folder, tracker.uri, tracker.experiment)
        return _shown_at(f"{address}{page}", is_ours=True)
    guard = [sys.executable, "-m", "nbdist.shared.processes.lifeline", str(os.getpid())]
    link, server = start_ui(*place, tracker.experiment, wrap=guard)
    _uis[place] = link, server
    return _shown_at(link, is_ours=server is not None)


def _shown_at(link: str, *, is_ours: bool) -> str:
    """Return a line with the link, and for a server of ours one on who can open it."""
    from nbdist.client.tracking.shipping.ui import OPEN_TO_ALL

    return f"MLflow shows the runs at {link}" + (f"\n{OPEN_TO_ALL}" if is_ours else "")


def _tracker() -> "Tracker":
    """Return a tracker that knows where the current session's runs go; it starts nothing."""
    from nbdist.client.tracking.run import Tracker

    return Tracker(
        project_folder(_place or current_folder()),
        _current.tracking_uri if _current is not None else None,
    )


def checkpoints_folder() -> str:
    """Return the folder of checkpoints without a name, as cells of the ranks have it."""
    from nbdist.client.tracking.provenance import notebook_name

    folder = project_folder(_place or current_folder())
    return str(folder.absolute() / "checkpoints" / notebook_name())


@takes_options
def start(n: int | None = None, **given: Any) -> Session:
    """Start a cluster of ranks, on this machine or on several, and form their process group.

    Raises:
        ClusterError: A cluster is already running.
        StartError: It could not be started; nothing is left behind.
        UsageError: A word or a number makes no sense, the launcher has no such option, or this is a
            rank.
    """
    side.require_notebook("nbdist.start")
    asked = _under_test(read_options({"n": n, **given}))
    say = asked.say or print
    make_launcher = find_launcher(asked.launcher)
    _require_none_running()
    require_store(asked.tracking_uri)
    name = _name_to_detach(asked.detach, asked.launcher)
    require_files_to_start()
    address = _choose_address(asked)
    # With a GPU for each rank: wrong words are refused before anything is started.
    choose_options(asked.n or 1, **asked.of_cluster, address=address)
    place = current_folder()
    folder = project_folder(place)
    if sentence := say_where(folder, place):
        say(sentence)
    logs = log_folder(folder)
    log_to(logs / "notebook.log")
    running: Cluster | Session | None = None
    try:
        # Interrupted in between, a process or a folder with keys would be left without an owner.
        with hold_interrupts():
            parent = _launcher_for_start(asked, make_launcher, logs, is_detached=bool(name))
            running = cluster = Cluster(parent, logs)
        _start_ranks(cluster, parent, asked, address, say)
        with hold_interrupts():
            showing = CellContext(folder, asked.tracking_uri, asked.theme, asked.view, asked.checks)
            running = session = Session(cluster, showing, str(cluster.options))
            if name:
                session.detach(name, str(place or folder))
                keep(parent)
            take_over(session, place)
    except BaseException:
        with Interrupts():  # a second interrupt would leave ranks that no one can stop
            if running is not None:
                running.stop()
        raise
    return session


def _require_none_running() -> None:
    if _current is not None and _current.is_running:
        raise ClusterError(
            f"A cluster is already running: {_current.describe}.",
            do="%dist stop first, or %dist restart for new processes.",
        )


def _choose_address(asked: StartOptions) -> str:
    return choose_address(
        asked.interface,
        look_at_interfaces(),
        trust_network=asked.trust_network,
        has_curve=has_curve(),
    )


def _start_ranks(
    cluster: Cluster,
    launcher: Launcher,
    asked: StartOptions,
    address: str,
    say: Callable[[str], None],
) -> None:
    """Start the ranks and form their group, and say what the person is to know of it."""
    address = launcher.meet(address)
    with hold_interrupts():
        cluster.prepare(address)
        for module in _NEEDED_NEXT:
            importlib.import_module(module)
    ready = launcher.ready(say)
    for sentence in _notes_on(ready, asked):
        say(sentence)
    cluster.start(_options_for(ready, asked, address, say))


def _notes_on(ready: Mapping[str, Any], asked: StartOptions) -> Iterator[str]:
    """Yield what to know of how these ranks start; `ready` as of `Launcher.ready`."""
    if not ready["forks"] and sys.platform == "linux":
        yield f"Starting new interpreters, which takes longer: {ready['why']}."
    yield from ready.get("notes", ())
    if asked.check == "shared" and ready.get("hosts", 1) > 1:
        yield _NOT_COMPARED


def _options_for(
    ready: Mapping[str, Any], asked: StartOptions, address: str, say: Callable[[str], None]
) -> ClusterOptions:
    """Return the options for what the launcher found, and say what they make of its GPUs."""
    known = ("slots", "gpus_each", "threads_a_rank", "no_gpu")
    found = {name: ready[name] for name in known if name in ready}
    options = choose_options(ready["gpus"], **asked.of_cluster, address=address, **found)
    if sentence := sharing_note(options, ready["gpus"]):
        say(sentence)
    if asked.launcher == LOCAL and (sentence := cores_note(options, background.cores())):
        say(sentence)
    if asked.device is None and options.device == "cpu" and _NVIDIA.exists():
        say(_on_cpu(found.get("no_gpu", "")))
    return options


def _on_cpu(no_gpu: str) -> str:
    """Return the sentence about a GPU that is there and cannot be used."""
    known = gpu_errors.explain(no_gpu)
    why = known.why if known else f"{no_gpu}."
    return f"Ranks run on the CPU, though there is a GPU. {why}"


def _under_test(asked: StartOptions) -> StartOptions:
    """Return what a start is asked for; `pytest --nbdist` wants CPU ranks that end with the test.

    `NBDIST_TEST_RANKS` holds their number, or words that leave it as the notebook says.
    """
    ranks = os.environ.get("NBDIST_TEST_RANKS")
    if ranks is None or asked.launcher != LOCAL:
        return asked
    n = int(ranks) if ranks.isdecimal() else asked.n
    return replace(asked, n=n, device="cpu", detach=False)


def _name_to_detach(detach: bool | str, launcher: str) -> str:
    """Return the name of a cluster that is to outlive this kernel; none where it is not."""
    if detach is False:
        return ""
    if not isinstance(detach, bool | str):
        raise UsageError(f"detach is True or a name, not {detach!r}.")
    if launcher not in DETACHABLE:
        raise UsageError(
            f"detach does not go with launcher {launcher}: what it has been given ends with "
            "this notebook's kernel.",
            do="let the notebook itself run on (in a job, in tmux), use --launcher ssh for hosts "
            "that you may log in to, or keep the training by %%distributed --checkpoint every=100",
        )
    from nbdist.client.tracking.provenance import notebook_name

    return name_for(detach, notebook_name())


def keep(launcher: Launcher, name: str = "") -> None:
    """Have a launcher for this kernel's cluster alone, and leave what it has started at its end.

    Args:
        launcher: Of a detached cluster.
        name: Where it is not this kernel's launcher by now, what it is called.
    """
    global _launcher, _launcher_for
    if launcher is not _launcher:
        if _launcher is not None:
            _launcher.close()
            atexit.unregister(_launcher.close)
        _launcher, _launcher_for = launcher, (name, None)
    atexit.unregister(launcher.close)


def _judge(session: Session, assertion: str) -> str:
    # Imported by who asks: no start waits for it.
    from nbdist.client.expect.expect import expect

    return expect(session, assertion)


def _note_sent(code: str, values: Mapping[str, Any], ranks: str) -> None:
    # Notebooks have imported it; no start of a program waits for it.
    from nbdist.client.notebook import export_command

    export_command.note_sent(code, values, ranks)


def _note_trained(losses: Mapping[int, float], changes: Sequence[Change]) -> None:
    from nbdist.client.notebook import export_command

    export_command.note_trained(losses, changes)


def take_over(session: Session, place: Path | None) -> None:
    """Make this the kernel's session; `place` is the folder where its runs are."""
    global _current, _place
    _current, _place = session, place
    side.session_began()
    session.at_stop(side.session_ended)
    session.judge_by(_judge)
    session.note_sent(_note_sent)
    session.note_trained(_note_trained)
    atexit.register(session.stop if session.detached is None else session.leave)
    _answer_terminals(session, place)


def _answer_terminals(session: Session, place: Path | None) -> None:
    """Let this user's terminals ask the session; where they cannot, it continues without them."""
    from nbdist.client.tracking.provenance import notebook_path

    try:
        path = notebook_path()
        requests = TerminalRequests(session, place, path.name if path is not None else "")
        session.at_stop(requests.close)
    except OSError as error:
        log.warning("nbdist status in a terminal will not find this cluster: %s", error)


def _launcher_for_start(
    asked: StartOptions, make: MakeLauncher, logs: Path, *, is_detached: bool
) -> Launcher:
    """Return the launcher that a start asks for; of ranks here that outlive the kernel, another."""
    name = asked.launcher
    if is_detached and name == LOCAL:
        from nbdist.client.cluster.launchers.detached import local_launcher

        name, make = f"{LOCAL}, detached", local_launcher
    return _warm_launcher(name, LaunchOptions(asked.own, asked.n, asked.trust_network), make, logs)


def _warm_launcher(
    name: str, asked: LaunchOptions[Any], make: MakeLauncher, logs: Path
) -> Launcher:
    """Return this kernel's launcher: it is made once and kept for later starts."""
    global _launcher, _launcher_for
    if _launcher is None or not _launcher.alive or _launcher_for != (name, asked.own):
        if _launcher is not None:
            _launcher.close()
            atexit.unregister(_launcher.close)
        _launcher, _launcher_for = make(logs, asked), (name, asked.own)
        atexit.register(_launcher.close)
    _launcher.logs = logs
    return _launcher


def judge(status: Status, broken: str | None, events: Path) -> list[Finding]:
    """Return the findings about a running cluster.

    Args:
        status: Of its ranks.
        broken: What has happened to all of it, if something has.
        events: The file of its events.
    """
    dead = [line for line in status.ranks if line.is_dead]
    silent = [line.rank for line in status.ranks if line.is_silent]
    found = []
    if broken:
        found.append(Finding("cluster", broken, True, "%dist restart"))
    for line in dead:
        fix = f"%dist restart -r {line.rank}"
        found.append(Finding("cluster", f"rank {line.rank} is {line.state}", True, fix))
    if silent:
        names = ",".join(map(str, silent))
        says = f"rank {names} does not respond: it is stopped, or its machine is swapping"
        found.append(
            Finding("cluster", says, True, f"kill -CONT its pid, or %dist restart -r {names}")
        )
    if not found:
        found.append(Finding("cluster", f"{len(status.ranks)} ranks, all of them respond"))
    return [*found, Finding("events", f"{events}    (attach to bug reports)")]
