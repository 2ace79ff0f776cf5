"""Hosts of Slurm: an allocation that lives as long as the keeper, and one `srun` a node.

`salloc` holds the allocation while its command reads from the keeper. Each node has its own `srun`,
hence its own channel: no node waits for another one's input, lines of several nodes are never
mixed, and the `srun` of a node that fails ends by itself and says why.

Nothing listens for it and no secret is needed: munge authenticates, and stdin's end ends all.
"""

import contextlib
import os
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

from nbdist.client.cluster.launchers import slurm_queue, slurm_words
from nbdist.client.cluster.launchers.base import SLURM, LaunchOptions
from nbdist.client.cluster.launchers.hosts.host import Channel
from nbdist.client.cluster.launchers.hosts.host_lines import names_of_this_machine
from nbdist.client.cluster.launchers.hosts.hosts import HostsLauncher
from nbdist.client.cluster.launchers.hosts.task_script import task_script
from nbdist.client.cluster.launchers.slurm_words import Options
from nbdist.client.cluster.network import has_curve, require_trust
from nbdist.shared.errors import StartError

_LOOK_S: Final = 1.0  # between two looks at the queue
_SUBMIT_S: Final = 60.0  # for salloc to name its job
_RUNS: Final = "RUNNING"


def make_launcher(logs: Path, asked: LaunchOptions[Options]) -> "SlurmLauncher":
    """Return a launcher that waits in the queue already.

    Raises:
        StartError: The network is not trusted, or this machine knows no Slurm.
        UsageError: An option makes no sense.
    """
    if missing := [name for name in ("salloc", "srun", "squeue") if shutil.which(name) is None]:
        raise StartError(
            f"{missing[0]} is not on this machine.", do="start on a login node of Slurm's."
        )
    require_trust(
        "Ranks of several nodes meet over the network",
        "between nodes",
        trust_network=asked.trust_network,
        has_curve=has_curve(),
    )
    return SlurmLauncher(logs, slurm_words.read_wish(asked, os.environ))


class SlurmLauncher(HostsLauncher):
    """Processes on the nodes of one job."""

    def __init__(self, log_folder: Path, wish: slurm_words.Wish) -> None:
        """Ask for the allocation; returns at once.

        Args:
            log_folder: Where logs go (0700).
            wish: What is asked for.
        """
        super().__init__(log_folder, ())
        self._wish = wish
        self._job = "" if wish.allocates else os.environ["SLURM_JOB_ID"]
        self._ended: dict[str, Any] | None = None  # how salloc ended
        self._log = log_folder / f"slurm-{secrets.token_hex(4)}.log"
        if wish.allocates:
            name = slurm_words.job_name(_notebook(), secrets.token_hex(3))
            self._keeper.open(
                SLURM,
                [*_without_job(), *slurm_words.allocate(name, wish)],
                {},
                self._log,
                cancel=["scancel", f"--name={name}", f"--user={os.getuid()}"],
            )

    def meet(self, asked: str) -> str:
        """Wait until the job runs, then meet its nodes; see `Launcher.meet`."""
        if self._wish.allocates:
            self._job = self._wait_for_job()
        nodes = slurm_queue.nodes_of(self._job)
        here = names_of_this_machine()
        # Rank 0 is the notebook's neighbour where there is one.
        nodes.sort(key=lambda node: node not in here)
        self.open([self._channel(node, self._wish.slots_of(len(nodes))) for node in nodes])
        return super().meet(asked)

    def _channel(self, node: str, slots: int) -> Channel:
        # Lines of the person's choose the Python.
        python = "python" if self._wish.before else sys.executable
        script = task_script(python, self._wish.before)
        command = [*_without_job(), *slurm_words.on_node(self._job, node, script)]
        return Channel(node, slots, command, explain=self._explain)

    def _wait_for_job(self) -> str:
        """Return the id of the job once it runs, and show until then what it waits for.

        Raises:
            StartError: Slurm refuses it, or it will never start.
        """
        line = slurm_queue.Line()
        deadline = time.monotonic() + _SUBMIT_S
        try:
            while True:
                self._require_not_ended()
                job = slurm_queue.job_in(self._log)
                if not job and time.monotonic() > deadline:
                    raise StartError(f"salloc did not name a job within {_SUBMIT_S:.0f} s.")
                seen = self._look(job, line) if job else None
                if seen is not None:
                    if seen[0] == _RUNS:
                        return job
                    if never := slurm_words.never_starts(seen[1]):
                        raise StartError(
                            f"Job {job} would never start: {never} ({seen[1]}).",
                            do="ask for less: --nodes, --time, --partition; sinfo shows what "
                            "there is.",
                        )
                    line.show(slurm_words.waiting_line(job, *seen))
                with self._hosts.news:
                    self._hosts.news.wait_for(lambda: self._ended, _LOOK_S if job else 0.05)
        finally:
            line.end()

    def _look(self, job: str, line: slurm_queue.Line) -> tuple[str, str, str] | None:
        """Ask Slurm of the job; while it does not answer, salloc keeps the place in the queue."""
        try:
            return slurm_queue.look(job)
        except slurm_queue.SilentController:
            line.show(f"job {job}: Slurm's controller does not answer")
            return None

    def rest(self) -> list[str]:
        """Leave neither ranks nor a job; see `Launcher.rest`."""
        said = super().rest()
        if self._wish.allocates and self._job and slurm_queue.is_unknown(self._job):
            said.append(
                f"Job {self._job} may still hold its nodes, for Slurm's controller does not "
                f"answer: scancel {self._job} once it is back."
            )
        return said

    def _require_not_ended(self) -> None:
        if self._ended is not None:
            why, do = slurm_words.explain(self._ended["status"], self._ended["said"])
            raise StartError(f"Slurm gave no nodes: {why}.", do=f"{do}.")

    def _explain(self, status: int, said: str) -> tuple[str, str]:
        """Return why a node's `srun` ended. salloc may report what ended all of them."""
        by_salloc = ""
        with contextlib.suppress(FileNotFoundError):  # the notebook may run within the job
            by_salloc = self._log.read_text(errors="replace")
        known = slurm_words.meaning(said) or slurm_words.meaning(by_salloc)
        return known or slurm_words.explain(status, said)

    def notice_of(self, host: str, number: str) -> str:
        """Return what Slurm means by it: SIGURG is asked for, SIGTERM comes before its SIGKILL."""
        if number == "SIGURG":
            return f"The time of job {self._job} is over in {slurm_words.NOTICE_S} s."
        return f"Slurm ends job {self._job}."

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("channel") == SLURM:
            with self._hosts.news:
                self._ended = event
                self._hosts.news.notify_all()
        else:
            super()._take(event)


def _without_job() -> list[str]:
    """Return what drops the variables of a job that the notebook runs in: they are options, too."""
    mine = [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]
    return ["env", *(word for name in mine for word in ("-u", name))]


def _notebook() -> str:
    return Path(os.environ.get("JPY_SESSION_NAME", "") or Path.cwd()).stem
