"""Start, watch and end the process that sends runs to MLflow; the kernel's side of `ship`."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from nbdist.client.tracking.folder import make_private_folder, open_private
from nbdist.client.tracking.settings import mlflow_environment
from nbdist.client.tracking.spool import SpooledRun, spooled_runs
from nbdist.shared.text import counted

_MOST_LOG_BYTES = 1_000_000
_MOST_FAILURES = 3
_COMMAND = (sys.executable, "-m", "nbdist.client.tracking.shipping.ship")


class ShippingProcess:
    """One process that sends the runs of one private folder while this kernel lives.

    Methods are called by one thread at a time: the tracker's writer while a cell runs, the main
    thread otherwise. None of them waits, except `close`.
    """

    def __init__(self, folder: Path, credentials: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._credentials = credentials
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0

    def ensure(self) -> None:
        """Start the process unless it runs; after three crashes it is left alone."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._release()
            self._failures = self._failures + 1 if code else 0
        if self._failures >= _MOST_FAILURES:
            return
        with open_log(self._folder, "tracking.log") as log:
            self._process = subprocess.Popen(
                [*_COMMAND, str(self._folder), "--kernel", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=mlflow_environment(os.environ, self._credentials),
                # Jupyter interrupts the kernel's whole process group.
                start_new_session=True,
            )

    @property
    def has_failed(self) -> bool:
        """Return whether the process crashed so often that it is not started any more."""
        return self._failures >= _MOST_FAILURES

    def close(self, timeout_s: float) -> None:
        """Let the process send what it can within `timeout_s`; it is gone when this returns."""
        if self._process is None:
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            assert self._process.stdin is not None
            self._process.stdin.write(f"{timeout_s}\n".encode())
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s + 0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._release()

    def _release(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process = None


def open_log(folder: Path, name: str) -> IO[bytes]:
    """Open a log of the private folder to append to; one that has grown large is emptied."""
    logs = make_private_folder(folder) / "logs"
    logs.mkdir(mode=0o700, exist_ok=True)
    path = logs / name
    if path.exists() and path.stat().st_size > _MOST_LOG_BYTES:
        path.unlink()
    return open_private(path)


def unsent(folder: Path) -> list[SpooledRun]:
    """Return the runs that MLflow does not have whole, newest first."""
    return [run for run in spooled_runs(folder) if run.ops.exists() and not run.state().is_done]


def wait_until_sent(folder: Path, timeout_s: float) -> bool:
    """Wait until MLflow has every ended run of `folder`; return whether it has.

    Ends early when the shipping process has said that MLflow does not answer.
    """
    deadline = time.monotonic() + timeout_s
    while waiting := [run for run in unsent(folder) if not run.is_owned()]:
        if time.monotonic() > deadline or all(run.state().trouble for run in waiting):
            return False
        time.sleep(0.05)  # a file of another process; there is no event to wait for
    return True


def sync(
    folder: Path,
    timeout_s: float = 300.0,
    *,
    prepare: bool = False,
    credentials: Mapping[str, str] | None = None,
) -> str:
    """Send what the spool still holds; return one sentence that says what came of it.

    Args:
        folder: The private folder.
        timeout_s: Longest wait; what is not sent by then stays in the spool.
        prepare: Make the folder's own database if there is none yet.
        credentials: `Tracker.credentials`.
    """
    before = [run for run in unsent(folder) if not run.is_owned()]
    if not before and not prepare:
        return "MLflow has all runs."
    with open_log(folder, "tracking.log") as log:
        process = subprocess.Popen(
            [*_COMMAND, str(folder), "--drain", *(["--prepare"] if prepare else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=mlflow_environment(os.environ, credentials),
            start_new_session=True,
        )
    output, late = b"", ""
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = f"MLflow did not accept all of it within {timeout_s:g} s"
        finally:
            # Also on an interrupt: what has been sent is written down, the rest stays.
            process.kill()
    sent = json.loads(output or b"{}").get("sent", 0)
    kept = [run for run in unsent(folder) if not run.is_owned()]
    if not kept:
        return f"{counted(len(before), 'run')} sent to MLflow ({counted(sent, 'point')})."
    why = late or _why_kept(folder, kept, has_failed=bool(process.returncode))
    return (
        f"Kept in {folder.name}/spool: {counted(len(kept), 'run')}, because {why}. "
        "%dist runs --sync tries again."
    )


def _why_kept(folder: Path, kept: Sequence[SpooledRun], *, has_failed: bool) -> str:
    """Return why MLflow does not have all of some runs after one round, which was not late."""
    if error := next((run.state().error for run in kept if run.state().error), ""):
        return f"MLflow did not accept all of it ({error})"
    if has_failed:
        return f"the process that sends has failed (see {folder.name}/logs/tracking.log)"
    return "another process is sending it"
