"""Wait in Slurm's queue, in one line that is updated; and ask Slurm which nodes a job has."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nbdist.client.cluster.launchers import slurm_words
from nbdist.shared.errors import StartError

_ASK_S = 10.0
_GRANTED = re.compile(r"(?:job allocation|[Jj]ob) (\d+)")


class SilentController(StartError):
    """Slurm's controller does not answer: it may be back in a moment."""


class Line:
    """A line of output that is overwritten by the next one."""

    def __init__(self) -> None:
        """Begin with nothing shown."""
        self._shown = ""

    def show(self, text: str) -> None:
        """Show `text` in place of what is shown."""
        if text != self._shown:
            sys.stdout.write("\r" + text.ljust(len(self._shown)))
            sys.stdout.flush()
            self._shown = text

    def end(self) -> None:
        """Begin a new line for what follows."""
        if self._shown:
            sys.stdout.write("\n")
            sys.stdout.flush()


def job_in(log: Path) -> str:
    """Return the id of the job that salloc names on its standard error; "" before it does."""
    try:
        found = _GRANTED.search(log.read_text(errors="replace"))
    except FileNotFoundError:
        return ""
    return found[1] if found else ""


def look(job: str) -> tuple[str, str, str] | None:
    """Return a job's state, the reason why it waits and its expected start; None if it is gone.

    Raises:
        StartError: Slurm does not answer.
    """
    asked = ["squeue", "--noheader", f"--jobs={job}", "--format=%T|%r|%S"]
    shown = _ask(asked, also="Invalid job id").strip()
    if not shown:
        return None
    state, reason, start = shown.splitlines()[0].split("|")
    return state, reason, start


def is_unknown(job: str) -> bool:
    """Return whether Slurm's controller does not answer, and the job's state is unknown."""
    try:
        look(job)
    except SilentController:
        return True
    return False


def nodes_of(job: str) -> list[str]:
    """Return the names of a job's nodes, in Slurm's order, which `SLURM_NODEID` counts.

    Raises:
        StartError: Slurm does not answer, or has no such job.
    """
    nodes = _ask(["squeue", "--noheader", f"--jobs={job}", "--format=%N"]).strip()
    if not nodes:
        raise StartError(f"Slurm has no running job {job}.", do="squeue --me lists yours.")
    return _ask(["scontrol", "show", "hostnames", nodes]).split()


def _ask(command: Sequence[str], also: str = "\0") -> str:
    """Return the output of a Slurm command; "" where it fails with the message `also`."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise StartError(
            f"{command[0]} is not on this machine.", do="start on a login node of Slurm's."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SilentController(
            f"Slurm's controller did not answer {command[0]} within {_ASK_S:.0f} s.",
            do="sinfo shows when it is back.",
        ) from error
    if done.returncode and slurm_words.is_silence(done.stderr):
        why, do = slurm_words.explain(done.returncode, done.stderr)
        raise SilentController(f"{command[0]} failed: {why}.", do=f"{do}.")
    if done.returncode and also not in done.stderr:
        why, do = slurm_words.explain(done.returncode, done.stderr)
        raise StartError(f"{command[0]} failed: {why}.", do=f"{do}.")
    return done.stdout
