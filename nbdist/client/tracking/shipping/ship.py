"""Send what the spool holds to MLflow: `python -m nbdist.client.tracking.shipping.ship FOLDER`.

A process of its own, beside the kernel; with `--drain` it sends what is there, and ends. Importing
mlflow costs 1.5 s of work that holds the GIL (another thread waits up to 0.1 s at a stretch), and
MLflow takes its timeouts from the environment; here neither touches the kernel or the user's own
use of MLflow.

At least once: `state.json` moves on after MLflow has acknowledged, and what is sent again is
stored once, for MLflow keys a point by run, key, time, step and value.

What MLflow cannot take now stays and is tried again, later and later (up to 30 s). What it never
will take (a point already there under another spelling, a key it does not like) is searched for
by halving, left out and counted. A run that MLflow does not know any more, for its database was
deleted, is sent again from its beginning: the spool keeps all of a run until its end was sent.

The kernel holds our standard input. When that closes, the kernel has ended or wants us to: we
send what we can within a few seconds and end. A run whose kernel died ends as KILLED.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.client.tracking.folder import try_lock
from nbdist.client.tracking.settings import own_database, whole_uri
from nbdist.client.tracking.shipping import database, view
from nbdist.client.tracking.shipping.sender import (
    Deleted,
    NotTaken,
    RunSender,
    Unknown,
    calling,
    error_text,
)
from nbdist.client.tracking.spool import (
    MOST_POINTS,
    PREPARING,
    Begin,
    SpooledRun,
    SpoolState,
    forget_old,
    spooled_runs,
)
from nbdist.shared.background import CoreWaits, lower_process, pause_s

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

PERIOD_S = 0.5  # between looks into the spool, with cores to spare
# Between two batches of a run that goes on: each takes 6 ms and 0.1 for each series that it has
# points of, and 0.07 a point.
LIVE_S = 5.0
SHARE = 0.5  # of a core, while it follows a kernel
IDLE_S = 120.0  # without any run going on, we end and free 200 MB
AFTER_KERNEL_S = 4.0  # how long we outlive a kernel that died
LONGEST_PAUSE_S = 30.0
_FEWEST_POINTS = 50
_MOST_VIEWED = 50  # runs whose metrics the prepared view looks at

_log = logging.getLogger("nbdist.tracking")


class Replaced(Exception):
    """The database file that MLflow holds open here is not the one of its name any more."""


@dataclass(slots=True)
class _Server:
    """What we know of one tracking URI: its client, and why it was not reached.

    `file` is a descriptor of the database file that the client has opened, and stays open as long
    as the client: its number cannot be another file's, and closing it would free SQLite's locks.
    """

    uri: str
    client: "MlflowClient | None" = None
    file: int | None = None
    why: str = ""
    most_points: int = MOST_POINTS
    views: dict[str, str] = field(default_factory=dict)

    def connect(self) -> None:
        """Make the client."""
        self.client = _connect(self.uri)
        # mlflow's 300,000 objects stay: to look through them again and again took a fifth of the
        # time of a batch.
        gc.freeze()
        path = database.path_of(self.uri)
        if path is not None:
            with contextlib.suppress(OSError):  # gone already; the next attempt will tell
                self.file = os.open(path, os.O_RDONLY)

    def is_replaced(self) -> bool:
        """Return whether the client's database file was deleted or is another one now."""
        path = database.path_of(self.uri)
        if path is None or self.file is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self.file), path.stat())
        except FileNotFoundError:
            return True


class Shipper:
    """Sends the runs of one private folder.

    Args:
        folder: The private folder beside the notebook.
        kernel_pid: The runs this kernel is still writing are sent too; those of other living
            kernels are their own shippers' business. 0 for none.
    """

    def __init__(self, folder: Path, kernel_pid: int) -> None:
        self._folder = folder
        self._kernel_pid = kernel_pid
        self._servers: dict[str, _Server] = {}
        self._failures: Counter[str] = Counter()  # in a row, of a server or a run
        self._retry_at: dict[str, float] = {}  # likewise
        self._next_at: dict[str, float] = {}  # when more of a run is sent that goes on
        self.sent = 0

    def round(self, patient: bool = True) -> bool:
        """Send what there is; return whether a run is going on or something is left to send.

        Args:
            patient: Leave alone what failed a moment ago.

        Raises:
            Replaced: This process has to start over.
        """
        if not patient:
            self._failures.clear()
            self._retry_at.clear()
        unfinished = False
        for run in reversed(list(spooled_runs(self._folder))):
            if not run.ops.exists():
                continue  # sent long ago
            is_owned = run.is_owned()
            if is_owned and run.key.split("-")[1] != str(self._kernel_pid):
                continue
            if patient and is_owned and time.monotonic() < self._next_at.get(run.key, 0.0):
                unfinished = True
                continue
            with try_lock(run.folder / "ship.lock") as mine:
                if not mine:
                    unfinished = True
                elif run.ops.exists():
                    unfinished |= not self._ship(run, is_owned)
        return unfinished

    def _ship(self, run: SpooledRun, is_owned: bool) -> bool:
        """Send what is new in `run`; return whether it is finished."""
        state, begin = run.state(), run.begin()
        if begin is None:
            if is_owned:
                return False
            _log.warning("run %s was damaged before it began, and is not sent", run.key)
            run.ops.rename(run.ops.with_suffix(".damaged"))
            return True
        server = self._servers.setdefault(begin.uri, _Server(begin.uri))
        if self._is_early(server.uri):
            self._note(run, state, server.why)
            return False
        if self._is_early(run.key):
            return False
        if server.is_replaced():
            raise Replaced
        try:
            if why := database.trouble(server.uri):
                raise NotTaken(why)
            try:
                self._send(run, begin, state, server, is_owned)
            except Unknown as error:
                _log.warning("run %s is sent again: %s", run.key, error)
                state = state.start_over()
                run.save(state)
                self._send(run, begin, state, server, is_owned)
        except NotTaken as error:
            if server.is_replaced():
                raise Replaced from error
            server.why = self._why_down(server)
            self._retry_later(server.uri if server.why else run.key)
            self._note(run, state, server.why or str(error))
            return False
        except Deleted:
            _log.warning("run %s was deleted in MLflow: the rest is not sent", run.key)
            state.is_done = True
            run.save(state)
        self._note_taken(run, state, server)
        return state.is_done

    def _note_taken(self, run: SpooledRun, state: SpoolState, server: _Server) -> None:
        """Forget earlier failures of a run that was sent, and its content where that was all."""
        for key in (server.uri, run.key):
            self._failures.pop(key, None)
        if state.error:
            state.error = ""
            run.save(state)
        if state.is_done:
            self._next_at.pop(run.key, None)
            run.drop_content()

    def _client(self, server: _Server) -> Any:
        """Return the server's client, made on first use, one process at a time.

        Making it makes the tables of a new SQLite file; two processes that do so both fail.
        """
        if server.client is None:
            with try_lock(self._folder / "create.lock") as mine:
                if not mine:
                    raise NotTaken(PREPARING)
                if database.is_missing(self._folder, server.uri):
                    # First: once the database is there, nobody asks again whether it was missing.
                    self._forget_sent(server.uri)
                    database.make(self._folder, _connect)
                server.connect()
        return server.client

    def _forget_sent(self, uri: str) -> None:
        """Note of runs that were sent to a database before it was deleted that it has them not."""
        for run in spooled_runs(self._folder):
            state = run.state()
            if state.is_done and not state.is_lost and run.summary().get("uri") == uri:
                run.save(dataclasses.replace(state, is_lost=True))

    def prepare(self) -> None:
        """Make the folder's own database if it is not there, for the UI to open."""
        self._client(_Server(own_database(self._folder)))

    def _is_early(self, key: str) -> bool:
        """Return whether a server or a run failed a moment ago."""
        return time.monotonic() < self._retry_at.get(key, 0.0)

    def _retry_later(self, key: str) -> None:
        pause_s = min(2 ** min(self._failures[key], 9), LONGEST_PAUSE_S)
        self._failures[key] += 1
        self._retry_at[key] = time.monotonic() + pause_s

    def _why_down(self, server: _Server) -> str:
        """Return why a server takes nothing now; "" when it answers."""
        if why := database.trouble(server.uri):
            return why
        # A server that is only slow may still manage a smaller bite within its time.
        server.most_points = max(_FEWEST_POINTS, server.most_points // 2)
        try:
            client = self._client(server)
            calling(lambda: client.search_experiments(max_results=1))
        except NotTaken as error:
            return str(error)
        return ""

    def _note(self, run: SpooledRun, state: SpoolState, why: str) -> None:
        if state.error != why:
            _log.warning("run %s waits: %s", run.key, why)
            state.error = why
            run.save(state)

    def _send(
        self, run: SpooledRun, begin: Begin, state: SpoolState, server: _Server, is_owned: bool
    ) -> None:
        sender = RunSender(self._client(server), run, begin, state)
        sender.open()
        sent_before = state.sent
        while not state.is_done:
            batch = run.read(state.offset, server.most_points)
            if batch.offset == state.offset:
                break
            sender.send(batch.entries)
            state.offset = batch.offset
            if batch.damaged:
                state.refused += batch.damaged
                _log.warning("run %s has %d damaged lines", run.key, batch.damaged)
            run.save(state)
            server.most_points = min(MOST_POINTS, server.most_points * 2)
        if not state.is_done and not is_owned:
            sender.end_with_kernel()
            run.save(state)
        self.sent += state.sent - sent_before
        if state.sent > sent_before:
            self._next_at[run.key] = time.monotonic() + LIVE_S
        self._update_view(run, state, server)

    def _update_view(self, run: SpooledRun, state: SpoolState, server: _Server) -> None:
        """Prepare the charts the UI opens with; they are a comfort and never hold up a run."""
        own = run.summary()
        shown = repr([own.get(key) for key in ("ranks", "user_keys", "params")])
        if not own or server.views.get(state.experiment_id) == shown:
            return
        server.views[state.experiment_id] = shown
        newest = itertools.islice(spooled_runs(self._folder), _MOST_VIEWED)
        summaries = [run.summary() for run in newest]
        value = view.encode(
            view.view_state([s for s in summaries if s.get("experiment") == own["experiment"]])
        )
        if len(value) > view.MOST_CHARACTERS:
            return
        client = self._client(server)
        try:
            client.set_experiment_tag(state.experiment_id, view.TAG, value)
        except Exception as error:
            _log.warning("the prepared view was not stored: %s", error_text(error))


def _connect(uri: str) -> "MlflowClient":
    from mlflow.tracking import MlflowClient

    client = calling(lambda: MlflowClient(tracking_uri=whole_uri(uri, os.environ)))
    calling(lambda: client.search_experiments(max_results=1))
    return client


def _follow(folder: Path, kernel_pid: int) -> None:
    """Send what the kernel spools until it closes our input, or dies, or has long been quiet."""
    closing = threading.Event()

    def listen() -> None:
        # The one thing the kernel may write is how many seconds it grants us at its end.
        granted = sys.stdin.readline().strip()
        closing.set()
        time.sleep(float(granted) if granted else AFTER_KERNEL_S)
        # Not sys.exit: the main thread may be in a call that waits for a dead server.
        os._exit(0)

    threading.Thread(target=listen, name="nbdist-tracking-input", daemon=True).start()
    forget_old(folder)
    shipper = Shipper(folder, kernel_pid)
    quiet_since = time.monotonic()
    waits = CoreWaits()
    while True:
        began = time.thread_time()
        is_last = closing.is_set()
        if is_last or os.getppid() != kernel_pid:
            # Once more without patience: the server may just have come back.
            shipper.round(patient=False)
            return
        if shipper.round():
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > IDLE_S:
            return
        closing.wait(pause_s(PERIOD_S, time.thread_time() - began, SHARE, waits.share()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the shipping process; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m nbdist.client.tracking.shipping.ship")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernel", type=int, default=0, help="follow this kernel's runs")
    parser.add_argument("--drain", action="store_true", help="send what is there, then exit")
    parser.add_argument("--prepare", action="store_true", help="make the folder's database first")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    lower_process()  # training comes first
    os.umask(0o077)  # the database and its artifacts are for their owner
    if options.drain:
        shipper = Shipper(options.folder, 0)
        with contextlib.redirect_stdout(sys.stderr):  # MLflow prints links to its runs
            if options.prepare:
                shipper.prepare()
            shipper.round(patient=False)
        print(json.dumps({"sent": shipper.sent}))
    else:
        _follow(options.folder, options.kernel)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Replaced:
        # MLflow keeps a file open as long as its process lives.
        _log.warning("the database was deleted or replaced; starting over")
        os.execv(sys.executable, sys.orig_argv)
