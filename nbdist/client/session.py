"""One cluster of ranks as the notebook uses it: start, run, push, pull, status, stop.

The state machine: a session is running from `start` to `stop`; while a cell runs, another is
refused. There is one current session a kernel (`current()`); the magics are a thin layer over it.
"""

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType
from typing import Any

from nbdist import payload, plain
from nbdist.client import syntax
from nbdist.client.cells import CellRequest, CellRun
from nbdist.client.cluster import Cluster, Options, describe_status
from nbdist.client.launchers.local import LocalLauncher
from nbdist.client.result import CellResult
from nbdist.client.show import Showing
from nbdist.client.status import Status
from nbdist.errors import (
    ClusterError,
    Interrupted,
    NBDistError,
    StartError,
    TransferError,
    UsageError,
)
from nbdist.ranks import name_ranks, parse_ranks

log = logging.getLogger(__name__)

_WARM_TIMEOUT_S = 120.0
_TRANSFER_TIMEOUT_S = 600.0
_INTERRUPT_TIMEOUT_S = 3.0


class Session:
    """A running cluster. Made by `nbdist.start`; also a context manager that stops it."""

    def __init__(self, cluster: Cluster, showing: Showing, describe: str) -> None:
        """Take over a started cluster; `describe` is one line about it."""
        self.describe = describe
        self.last: CellResult | None = None
        self._cluster = cluster
        self._showing = showing
        self._stopped_at: float | None = None
        self._cells = 0
        self._busy = threading.Lock()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        assert self._cluster.options is not None
        return self._cluster.options.n

    @property
    def is_running(self) -> bool:
        """Whether the session has not been stopped."""
        return self._stopped_at is None

    def run(
        self,
        code: str,
        ranks: str = "all",
        *,
        timeout_s: float | None = None,
        params: Mapping[str, Any] | None = None,
        run_name: str | None = None,
        resume: bool = False,
        track: bool = True,
        show: bool = False,
    ) -> CellResult:
        """Run a cell on the ranks and wait until all have settled.

        Args:
            code: What a notebook cell may hold: statements, magics, `!cmd`, top-level await.
            ranks: `all`, `0`, `0,2` or `1-3`.
            timeout_s: Interrupt the cell after so many seconds; None lets it run.
            params: Names set on the ranks before the cell runs, and logged with the run.
            run_name: Name of the MLflow run, should the cell train.
            resume: Continue the newest run of that name.
            track: Whether a training is tracked in MLflow.
            show: Show output, board and errors as `%%distributed` does.

        Returns:
            Output, value and error of each rank.

        Raises:
            CellSyntaxError: The code does not compile; it ran nowhere.
            ClusterError: The session is stopped, busy or has lost a rank.
            RankError: The code failed on a rank.
            UsageError: `ranks` names no ranks, or a parameter is not plain.
            KeyboardInterrupt: The cell was interrupted; all ranks have settled.
        """
        chosen = self._ready_ranks(ranks)
        for name, value in (params or {}).items():
            if not plain.is_plain(value):
                raise UsageError(
                    f"-p {name} takes None, bool, numbers, text, and lists, tuples and dicts of "
                    f"these, up to 64 KiB, not a {type(value).__name__}; %dist push takes anything."
                )
        syntax.check(code)
        if not self._busy.acquire(blocking=False):
            raise ClusterError(
                "A cell is still running on the ranks.", do="wait for it, or interrupt the kernel."
            )
        try:
            self._cells += 1
            request = CellRequest(code, chosen, self._cells, timeout_s, params or {})
            shown = self._showing.begin(
                request, self._cluster, run_name, resume=resume, track=track, show=show
            )
            outcome = CellRun(
                self._cluster, request, shown.slots, shown.telemetry, shown.tick
            ).run()
            self.last = outcome.result()
            shown.end(outcome)
        finally:
            self._busy.release()
        if outcome.error is not None:
            raise outcome.error
        return self.last

    def push(self, values: Mapping[str, Any], ranks: str = "all") -> None:
        """Set names on the ranks to these values. Arrays and tensors travel as raw buffers.

        Raises:
            TransferError: A value cannot be pickled; nothing was set.
        """
        chosen = self._ready_ranks(ranks)
        for name in values:
            if not name.isidentifier():
                raise UsageError(f"{name!r} is not a name that Python allows.")
        try:
            buffers = payload.pack(list(values.values()))
        except TransferError as error:
            raise _name_culprit(values) or error from error
        names = list(values)
        futures = {
            rank: self._cluster.request(rank, "transfer.push", buffers=buffers, names=names)
            for rank in chosen
        }
        self._wait(futures, "push")

    def pull(self, name: str, ranks: str = "all") -> list[Any]:
        """Return the value of a name, one entry a rank; tensors arrive on the CPU.

        Raises:
            TransferError: A rank has no such name, or its value cannot be pickled.
        """
        chosen = self._ready_ranks(ranks, saving=True)
        futures = {
            rank: self._cluster.request(rank, "transfer.pull", buffers=[], name=name)
            for rank in chosen
        }
        answers = self._wait(futures, "pull")
        return [payload.unpack(buffers) for _, buffers in answers.values()]

    def status(self) -> Status:
        """Return what every rank is doing now; answered also while a cell runs."""
        if not self.is_running:
            return Status.stopped(self._stopped_text())
        return Status.ask(self._cluster, self.describe, running=self._busy.locked())

    def stacks(self, ranks: str = "all") -> dict[int, dict[str, str]]:
        """Return each rank's Python stacks by thread; answered also while a cell runs."""
        chosen = self._ready_ranks(ranks)
        return self._cluster.request_all(chosen, "control.stacks", timeout_s=10.0, busy=True)

    def show_board(self) -> None:
        """Display the board's picture of the last cell that trained.

        Raises:
            ClusterError: No cell has trained yet.
        """
        self._showing.show_board()

    def restart(self, ranks: str = "all") -> None:
        """Give these ranks new processes; the other ranks keep what they hold.

        After the controller or the store has ended, all ranks are made anew.

        Raises:
            ClusterError: A cell runs, or more ranks than these must be replaced.
            StartError: A process did not come up.
        """
        self._require_running()
        chosen = parse_ranks(ranks, self.world_size)
        if self._cluster.broken and len(chosen) < self.world_size:
            raise self._cluster.broken_error()
        others = sorted(set(self._cluster.dead()) - set(chosen))
        if others:
            both = ",".join(map(str, sorted({*chosen, *others})))
            raise ClusterError(
                f"{_sentence(name_ranks(others))} {_be(others)} dead too, and the group needs all "
                "ranks.",
                do=f"%dist restart -r {both}",
            )
        if not self._busy.acquire(blocking=False):
            raise ClusterError("A cell is still running on the ranks.", do="interrupt it first.")
        try:
            self._cluster.restart(chosen)
        except BaseException:
            if not self._cluster.is_up:
                self.stop()
            raise
        finally:
            self._busy.release()

    def stop(self) -> None:
        """End all ranks; what they held is gone. A second call does nothing."""
        if self._stopped_at is None:
            self._stopped_at = time.time()
            self._cluster.stop()
            atexit.unregister(self.stop)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<nbdist session: {self.describe if self.is_running else self._stopped_text()}>"

    def _require_running(self) -> None:
        if not self.is_running:
            raise ClusterError(
                "No engines are running, so this ran nowhere.",
                why=self._stopped_text(),
                do="%dist start, then run the cell again.",
            )

    def _stopped_text(self) -> str:
        at = time.strftime("%H:%M", time.localtime(self._stopped_at))
        return f"the cluster was stopped at {at}."

    def _ready_ranks(self, ranks: str, *, saving: bool = False) -> tuple[int, ...]:
        """Return the ranks to use, or raise one error that says what to do.

        Args:
            ranks: As in `run`.
            saving: What ranks hold is to be saved, which a broken cluster allows if it can.
        """
        self._require_running()
        if self._cluster.broken and not (saving and self._cluster.reachable):
            raise self._cluster.broken_error()
        chosen = parse_ranks(ranks, self.world_size)
        dead = sorted(set(self._cluster.dead()) & set(chosen))
        if dead:
            causes = {describe_status(self._cluster.ranks[r].exit_status or 0) for r in dead}
            raise ClusterError(
                f"{_sentence(name_ranks(dead))} {_be(dead)} not running any more, so this ran "
                "nowhere.",
                why=f"{', '.join(sorted(causes))}. The other ranks keep their variables.",
                do=f"%dist restart -r {','.join(map(str, dead))}",
            )
        return chosen

    def _wait(self, futures: Mapping[int, Any], what: str) -> dict[int, Any]:
        try:
            return self._answers(futures, what, _TRANSFER_TIMEOUT_S)
        except KeyboardInterrupt:
            for rank, future in futures.items():
                if not future.done():
                    self._cluster.signal(rank, signal.SIGINT)
            try:
                self._answers(futures, what, _INTERRUPT_TIMEOUT_S)
            except NBDistError as error:
                log.info("%s", error)
            raise Interrupted(f"The {what} was stopped.") from None

    def _answers(self, futures: Mapping[int, Any], what: str, timeout_s: float) -> dict[int, Any]:
        answers = {}
        deadline = time.monotonic() + timeout_s
        for rank, future in futures.items():
            try:
                answers[rank] = future.result(max(0.0, deadline - time.monotonic()))
            except FutureTimeoutError:
                raise TransferError(
                    f"rank {rank} did not answer the {what} in {timeout_s:.0f} s."
                ) from None
            except ClusterError:
                raise
            except Exception as error:
                raise TransferError(f"{what} failed: {error}") from error
        return answers


def _name_culprit(values: Mapping[str, Any]) -> TransferError | None:
    """Return the error of the first value that cannot travel by itself, with its name."""
    for name, value in values.items():
        try:
            payload.pack(value)
        except TransferError as error:
            return TransferError(f"{name}: {error.what}", do=error.do)
    return None


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


_current: Session | None = None
_launcher: LocalLauncher | None = None
_ui: tuple[str, Any] | None = None


def current() -> Session:
    """Return the kernel's session.

    Raises:
        ClusterError: None has been started.
    """
    if _current is None:
        raise ClusterError(
            "No engines are running, so this ran nowhere.",
            why="no cluster has been started in this notebook.",
            do="%dist start, then run the cell again.",
        )
    return _current


def status() -> Status:
    """Return the status of the kernel's session, also when there is none."""
    if _current is None:
        return Status.stopped("no cluster has been started in this notebook.")
    return _current.status()


def open_ui() -> str:
    """Start the MLflow UI on loopback, once a kernel, and return a line with its link."""
    global _ui
    from nbdist.client import tracking

    if _ui is None or (_ui[1] is not None and _ui[1].poll() is not None):
        guard = [sys.executable, "-m", "nbdist.lifeline", str(os.getpid())]
        _ui = tracking.start_ui(project_folder(), wrap=guard)
    return f"MLflow shows the runs at {_ui[0]}"


def start(
    n: int | None = None,
    *,
    launcher: str = "local",
    device: str | None = None,
    backend: str | None = None,
    timeout: float = 1800.0,
    threads: int | None = None,
    tracking_uri: str | None = None,
    tap: str = "full",
    theme: str = "auto",
    say: Callable[[str], None] | None = None,
) -> Session:
    """Start a cluster of ranks on this machine and form their process group.

    Args:
        n: Number of ranks; by default the number of GPUs, else 2.
        launcher: `local`.
        device: `cpu` or `cuda`; by default `cuda` where there are GPUs.
        backend: `gloo` or `nccl`; by default what the device calls for.
        timeout: Longest wait inside one collective, in seconds.
        threads: CPU threads of each rank; by default the cores divided by the ranks.
        tracking_uri: MLflow server; by default `MLFLOW_TRACKING_URI`, else a file beside the
            notebook.
        tap: How much is measured of each collective: `off`, `counts` or `full`.
        theme: The board's background: `light`, `dark`, or `auto`, readable on both.
        say: Gets a line about what is unusual (no forking); `print` by default.

    Raises:
        ClusterError: A cluster is running already.
        StartError: It could not be started; nothing is left behind.
        UsageError: A word or a number makes no sense.
    """
    global _current
    if launcher != "local":
        raise UsageError(f"launcher is 'local' in this version, not {launcher!r}.")
    if _current is not None and _current.is_running:
        raise ClusterError(
            f"A cluster is running already: {_current.describe}.",
            do="%dist stop first, or %dist restart for new processes.",
        )
    folder = project_folder()
    logs = _log_folder(folder)
    parent = _warm_launcher(logs)
    cluster = Cluster(parent, logs)
    try:
        cluster.prepare()
        ready = parent.ready(_WARM_TIMEOUT_S)
        if not ready["forks"] and sys.platform == "linux":
            (say or print)(f"Starting fresh interpreters, which takes longer: {ready['why']}.")
        options = choose_options(n, ready["gpus"], device, backend, threads, timeout, tap)
    except BaseException:
        cluster.stop()
        raise
    cluster.start(options)
    describe = f"{options.n} ranks on {options.device}, {options.backend}"
    _current = Session(cluster, Showing(folder, tracking_uri, theme), describe)
    atexit.register(_current.stop)
    return _current


def choose_options(
    n: int | None,
    gpus: int,
    device: str | None,
    backend: str | None,
    threads: int | None,
    timeout: float,
    tap: str,
) -> Options:
    """Fill in what was not asked for, and refuse what cannot be.

    Args:
        n: Ranks asked for.
        gpus: GPUs this machine has.
        device: As in `start`, like the rest.
        backend: See `device`.
        threads: See `device`.
        timeout: See `device`.
        tap: See `device`.

    Raises:
        StartError: More ranks than GPUs, with the choice offered.
        UsageError: A word or a number makes no sense.
    """
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device is cpu or cuda, not {device!r}.")
    if backend not in (None, "gloo", "nccl"):
        raise UsageError(f"--backend is gloo or nccl, not {backend!r}.")
    if tap not in ("off", "counts", "full"):
        raise UsageError(f"tap is off, counts or full, not {tap!r}.")
    device = device or ("cuda" if gpus else "cpu")
    n = n if n is not None else (gpus if device == "cuda" and gpus else 2)
    if n < 1:
        raise UsageError(f"-n is the number of ranks, at least 1, not {n}.")
    if timeout <= 0:
        raise UsageError(f"--timeout is a number of seconds above 0, not {timeout:g}.")
    if device == "cuda" and gpus < n:
        raise StartError(
            f"{n} ranks need {n} GPUs, and this machine has {gpus}.",
            why="with nccl each rank has a GPU of its own.",
            do=(f"%dist start -n {gpus}   or   " if gpus else "")
            + f"%dist start -n {n} --device cpu",
        )
    if backend == "nccl" and device == "cpu":
        raise UsageError("--backend nccl needs --device cuda; on the CPU it is gloo.")
    backend = backend or ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = threads if threads is not None else max(1, (cores or 1) // n)
    if threads < 1:
        raise UsageError(f"--threads is at least 1, not {threads}.")
    return Options(n, device, backend, threads, timeout, tap)


def project_folder() -> Path:
    """Return `.nbdist` beside the notebook (0700, ignored by git), making it if need be.

    Raises:
        StartError: The notebook's folder cannot be written to.
    """
    folder = Path.cwd() / ".nbdist"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        ignore = folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")
    except OSError as error:
        raise _folder_error(folder, error) from error
    return folder


def _log_folder(folder: Path) -> Path:
    logs = folder / "logs" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    try:
        # One by one: `parents=True` would make the folder in between readable to all.
        for part in (logs.parent, logs):
            part.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _folder_error(logs, error) from error
    return logs


def _folder_error(folder: Path, error: OSError) -> StartError:
    return StartError(
        f"{folder} cannot be made, where logs, runs and checkpoints are kept.",
        why=error.strerror or str(error),
        do="free space, change the permissions, or %cd to a folder of yours.",
    )


def _warm_launcher(logs: Path) -> LocalLauncher:
    """Return this kernel's launcher: the parent is started once and kept for later starts."""
    global _launcher
    if _launcher is None or not _launcher.alive:
        _launcher = LocalLauncher(logs)
        atexit.register(_launcher.close)
    _launcher.logs = logs
    return _launcher
