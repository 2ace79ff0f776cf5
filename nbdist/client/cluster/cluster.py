"""The processes of one cluster: started together, stopped together, replaced one by one.

Owns a private folder (0700) with ipyparallel's connection files, and the keys `controller`,
`store` and `rank r` of a launcher. Knows which ranks are alive; knows nothing of cells.

Threads: `_on_exit` runs on the launcher's thread; everything else on the caller's.
"""

import dataclasses
import logging
import os
import platform
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.client.cluster.controller import ControllerFolder
from nbdist.client.cluster.events import EventLog
from nbdist.client.cluster.folders import (
    current_folder,
    fix_for_start,
    last_lines,
    living_logs,
    work_folders,
)
from nbdist.client.cluster.launchers.base import Launcher
from nbdist.client.cluster.memory import ClusterMemory
from nbdist.client.cluster.network import check_connection
from nbdist.client.cluster.open_files import require_files_to_start
from nbdist.client.cluster.patience import sleeping_s
from nbdist.client.cluster.process_group import Answers, ProcessGroup
from nbdist.client.cluster.processes import Processes, RankProcess, Started
from nbdist.client.cluster.requests import Requests
from nbdist.shared import gpu_errors
from nbdist.shared.errors import ClusterError, StartError
from nbdist.shared.options import ClusterOptions
from nbdist.shared.placement import keep_numbers
from nbdist.shared.processes.ended import Ended
from nbdist.shared.text import begin_with_ranks, name_ranks

if TYPE_CHECKING:
    from nbdist.client.cluster.connection import Connection

log = logging.getLogger(__name__)

# One that ends is noticed at once: this is for one that hangs.
_START_TIMEOUT_S = 600.0
_REQUEST_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 5.0
_NEWS_TIMEOUT_S = 2.0  # between a controller's end and when it is known
_AT_ONCE_S = 10.0  # between ranks that died of one cause: a host that goes, a full memory
_PORT_TAKEN = "Address already in use"
# Their versions are what a bug report is asked for first.
_STANDS_ON = ("nbdist", "torch", "ipyparallel", "ipykernel", "ipython", "pyzmq")


class Cluster:
    """A controller, a store and engines, started together and stopped together."""

    def __init__(self, launcher: Launcher, logs: Path) -> None:
        self.options: ClusterOptions | None = None
        self.events = EventLog(logs / "events.jsonl")
        self._broken: str | None = None
        self.reachable = True
        self._launcher = launcher
        self.logs = logs
        self._place = current_folder()
        self._connection: Connection | None = None
        self._folder: ControllerFolder | None = None
        self._roster = Processes()
        self.requests = Requests()
        self.group = ProcessGroup(
            self.requests, self.events, self.living, self._wake, self._sleeping_s
        )
        self._death_callbacks: list[Callable[[int, Ended], None]] = []
        self._deaths_s: list[float] = []  # when ranks died, by the events' clock
        self._stopping = False
        self.memory: ClusterMemory | None = None  # of a cluster that may outlive this kernel
        self.notice = ""  # that hosts leave soon, in words

    # -- starting and stopping

    def prepare(self, address: str) -> None:
        """Start the controller, on `address`; it comes up beside the parent's import of torch."""
        self._stopping = False
        self.notice = ""
        self._launcher.on_exit(self._on_exit)
        self._launcher.on_notice(self._take_notice)
        self._start_controller(address)

    def _start_controller(self, address: str) -> None:
        self.broken, self.reachable = None, True
        self._find_logs()
        if self._folder is not None:
            self._folder.remove()
        self._folder = ControllerFolder()
        self._launch("controller", "controller", self._folder.spec(address))

    def start(self, options: ClusterOptions) -> None:
        """Start `options.n` ranks and form their group; stops everything again on failure.

        Raises:
            StartError: A process ended or did not come up in time.
        """
        self.options = options
        self.events.note("start", **asdict(options), **_surroundings())
        try:
            try:
                self._bring_up(options)
            except Exception as error:
                if not self._lost_a_port(error):
                    raise
                self._clear()
                self.prepare(options.address)
                self._bring_up(options)
        except BaseException as error:
            cause = self._why_not_started(error)
            self.events.note("start failed", type(cause).__name__)
            self.stop()
            if cause is error:
                raise
            raise cause from error

    def _bring_up(self, options: ClusterOptions) -> None:
        store = self._launch("store", "store", {"address": options.address})
        self._connect()
        store_port = store.result(_START_TIMEOUT_S).port or 0
        self.group.places = {}
        self._find_places(options.n)
        self._start_ranks(range(options.n))
        self._learn(self.group.begin(options, store_port))

    def _lost_a_port(self, error: Exception) -> bool:
        """Whether a start failed because another process was faster than the controller.

        It looks for free ports, and takes them a moment later.
        """
        # Its connection file goes before the parent reports that it has ended.
        deadline = time.monotonic() + _NEWS_TIMEOUT_S
        while self.reachable and not isinstance(error, StartError) and time.monotonic() < deadline:
            time.sleep(0.01)
        log = self.logs / "controller.log"
        if self.reachable or not log.exists():
            return False
        return _PORT_TAKEN in log.read_text(errors="replace")

    def _clear(self) -> None:
        self._end_all()
        self._roster.remove(list(self.ranks))

    def _why_not_started(self, error: BaseException) -> BaseException:
        """Return the error that caused the others: the end of a process, where there was one."""
        if isinstance(error, StartError) or not isinstance(error, Exception):
            return error
        try:
            self._check_alive()
        except StartError as death:
            return death
        known = gpu_errors.explain(str(error))
        means = f"{known.why}\n     " if known else ""
        return StartError(
            "The ranks could not create their group.",
            why=f"{means}{error}\n     The logs are in {self.logs}.",
            do=fix_for_start(str(error)),
        )

    def stop(self) -> list[str]:
        """End ranks, store and controller; of the launcher, what the next start needs stays.

        Returns:
            What may run on, in sentences; see `Launcher.rest`.
        """
        self._end_all()
        return self._launcher.rest()

    # -- detached

    def detach(self, name: str, facts: Mapping[str, Any]) -> None:
        """Let it outlive this kernel, by that name; the keeper shows `facts` to those who ask.

        Raises:
            StartError: The name is taken, or its keeper cannot be found by it.
        """
        from nbdist.client.cluster.launchers.hosts.hosts import HostsLauncher

        assert isinstance(self._launcher, HostsLauncher)
        self._launcher.detach(name, facts)
        self.events.note("detached")
        self.remember_in(ClusterMemory(name, self.facts, self._launcher.remember))

    def remember_in(self, memory: ClusterMemory) -> None:
        """Report changes to the next kernel, through `memory`."""
        self.memory = memory
        memory.changed()

    def facts(self) -> dict[str, Any] | None:
        """Return what `adopt` makes a cluster of: JSON-like; None once it is stopped."""
        from nbdist.client.cluster.launchers.hosts.hosts import HostsLauncher

        if self._folder is None or self.options is None:
            return None
        assert isinstance(self._launcher, HostsLauncher)
        return {
            "options": asdict(self.options),
            "logs": str(self.logs),
            "place": None if self._place is None else str(self._place),
            "folder": self._folder.path,
            "group": self.group.memory(),
            "ranks": [asdict(state) for state in self.ranks.values()],
            "launcher": self._launcher.memory(),
        }

    def adopt(self, facts: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        """Take over the processes of a cluster that another kernel has left.

        Args:
            facts: What it has left; see `ClusterMemory`.
            changes: What the keeper reported on attaching; see `HostsLauncher.adopt`.

        Raises:
            ClusterError: The controller has ended, or does not answer.
        """
        from nbdist.client.cluster.launchers.hosts.hosts import HostsLauncher
        from nbdist.client.cluster.launchers.ssh import explain

        assert isinstance(self._launcher, HostsLauncher)
        self.options = ClusterOptions(**facts["options"])
        self._place = None if facts["place"] is None else Path(facts["place"])
        self._roster.adopt(facts["ranks"])
        self.group.adopt(facts["group"], ())
        self._launcher.on_exit(self._on_exit)
        self._launcher.adopt(facts["launcher"], changes, explain)
        end_it = "nbdist stop NAME in a terminal, then start a new cluster."
        if not self.reachable:
            raise ClusterError(self.broken or "", do=end_it)
        try:
            self._folder = ControllerFolder.adopt(facts["folder"])
            self._open_connection()
        except (OSError, TimeoutError) as error:
            raise ClusterError(
                "ipyparallel's controller cannot be reached.",
                why=str(error),
                do=end_it,
            ) from error
        connection = self._require_connection()
        for rank in self.dead():
            connection.leave_out(rank)
        living = self.living()
        connection.wait_for(living, _REQUEST_TIMEOUT_S)
        generations = self._generations(living)
        self.group.adopt(facts["group"], generations)
        self.events.note("attached", ranks=living)

    def _generations(self, ranks: Iterable[int]) -> list[int]:
        """Return the group's generation on each rank that answers."""
        asked = [self.requests.ask(rank, "control.state", busy=True) for rank in ranks]
        done, _ = wait(asked, _REQUEST_TIMEOUT_S)
        states = [future.result() for future in done if future.exception() is None]
        return [state["group"].get("generation", 0) for state in states]

    def leave(self) -> None:
        """Let go of a cluster that is detached; all of it runs on."""
        from nbdist.client.cluster.launchers.hosts.hosts import HostsLauncher

        assert isinstance(self._launcher, HostsLauncher)
        self._stopping = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self.requests.use(None)
        if self._folder is not None:
            self._folder.leave()
            self._folder = None
        self._launcher.leave()
        self._launcher.remove_on_exit(self._on_exit)

    def _end_all(self) -> None:
        self._stopping = True
        self.events.note("stop")
        self._launcher.give_up()
        self._end(self._launcher.running())
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self.requests.use(None)
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        self.requests.fail_all(ClusterError("The cluster was stopped."))
        self._launcher.remove_on_exit(self._on_exit)

    def rebuild(self) -> None:
        """Start controller, store and all ranks again, with the same options.

        Raises:
            StartError: A process ended or did not come up in time; nothing runs then. Or too few
                files may be opened; nothing has changed then.
        """
        options = self.options
        assert options is not None
        require_files_to_start()
        self.events.note("made anew")
        self._clear()
        self.prepare(options.address)
        self.start(options)

    def reopen(self) -> list[str]:
        """Try hosts again that were lost; see `Launcher.reopen`."""
        return self._launcher.reopen()

    def replace(self, ranks: Sequence[int], n: int | None = None, *, crowded: bool = False) -> None:
        """Give these ranks new processes, dead, living or new; `recover` brings them in.

        Args:
            ranks: Which.
            n: The world size that is passed to them; by default that of the cluster.
            crowded: Hosts take more ranks than they should, for a moment.

        Raises:
            NoHostError: The hosts take fewer ranks; living ones keep their processes.
            StartError: A process ended or did not come up in time.
        """
        began = time.monotonic()
        self._find_places(n or self._require_options().n, crowded=crowded)
        self._end_ranks(ranks)
        self._start_ranks(ranks, n)
        self.events.note("replaced", ranks=list(ranks), ms=_ms_since(began))

    def _require_options(self) -> ClusterOptions:
        assert self.options is not None
        return self.options

    def drop(self, ranks: Sequence[int]) -> None:
        """End these ranks for good."""
        self._end_ranks(ranks)
        self._roster.remove(ranks)

    def _end_ranks(self, ranks: Sequence[int]) -> None:
        self._end([f"rank {rank}" for rank in ranks])
        if not self._require_connection().wait_gone(ranks, _REQUEST_TIMEOUT_S):
            raise StartError(f"The controller did not let go of {name_ranks(ranks)}.")

    def recover(self, replacements: Iterable[int] = ()) -> Answers:
        """Form the group of all ranks again; see `ProcessGroup.recover`."""
        assert self.options is not None
        return self._learn(self.group.recover(self.options, replacements))

    def form(self, n: int, replacements: Sequence[int]) -> Answers:
        """Form the group of `n` ranks, after `group.leave`; see `ProcessGroup.form`."""
        assert self.options is not None
        self.options = dataclasses.replace(self.options, n=n)
        self._find_places(n)
        return self._learn(self.group.form(self.options, replacements))

    def _learn(self, answers: Answers) -> Answers:
        """Take what ranks say of themselves as they join."""
        for rank, answer in answers.items():
            if answer.get("rank", rank) != rank:
                raise StartError(f"Engine {rank} says it is rank {answer['rank']}.")
            self.ranks[rank].device = answer.get("device", self.ranks[rank].device)
        if self.memory is not None:
            self.memory.changed()
        return answers

    def _start_ranks(self, ranks: Iterable[int], n: int | None = None) -> None:
        assert self.options is not None
        assert self._folder is not None
        chosen = list(ranks)
        self._find_logs()
        self._roster.expect(chosen)
        for rank in chosen:
            self.requests.begins(rank)
        started = {
            rank: self._launch(f"rank {rank}", "engine", self._engine_spec(rank, n))
            for rank in chosen
        }
        for rank, future in started.items():
            process = future.result(_START_TIMEOUT_S)
            self._roster.came(rank, process)
        connection = self._require_connection()
        if not connection.wait_for(chosen, _START_TIMEOUT_S, lambda: self._check_alive(chosen)):
            missing = sorted(set(chosen) - set(connection.engines()))
            raise StartError(
                f"{begin_with_ranks(missing)} did not register within {_START_TIMEOUT_S:.0f} s.",
                why=f"See the logs in {self.logs}.",
                do="%dist doctor",
            )
        self.requests.reach(chosen, _START_TIMEOUT_S, lambda: self._check_alive(chosen))

    def _find_places(self, n: int, *, crowded: bool = False) -> None:
        """Learn where each of `n` ranks is: with other ranks, a host has others for them."""
        assert self.options is not None
        found = self._launcher.places(n, self.options.address, crowded=crowded)
        self.group.places = keep_numbers(found, self.group.places)

    def _find_logs(self) -> None:
        """See to it that new processes have a folder for their logs: a person may delete it."""
        logs = living_logs(self.logs)
        if logs != self.logs:
            self.logs = self._launcher.logs = logs
            self.events.path = logs / "events.jsonl"

    def _launch(self, key: str, role: str, spec: Mapping[str, Any]) -> Future[Started]:
        def note(started: Future[Started]) -> None:
            if (error := started.exception()) is None:
                self.events.note("process started", key=key, pid=started.result().pid)
            else:
                self.events.note("process not started", type(error).__name__, key=key)

        future = self._launcher.start_soon(key, role, spec)
        future.add_done_callback(note)
        return future

    def _engine_spec(self, rank: int, n: int | None) -> dict[str, Any]:
        assert self.options is not None
        assert self._folder is not None
        return {
            "rank": rank,
            "place": self.group.places[rank].to_wire(),
            "options": asdict(dataclasses.replace(self.options, n=n or self.options.n)),
            "connection_file": str(self._folder.connection_file("engine")),
            "profile_dir": self._folder.path,
            "output_folder": str(self.logs),
            "work_folders": work_folders(self._place),
        }

    def _connect(self) -> None:
        assert self.options is not None
        facts = self._controller_facts()
        check_connection(facts, self.options.address)
        self._open_connection()

    def _open_connection(self) -> None:
        from nbdist.client.cluster.connection import Connection

        assert self._folder is not None
        self._connection = Connection(self._folder.connection_file("client"), timeout_s=30.0)
        self.requests.use(self._connection)

    def _controller_facts(self) -> dict[str, Any]:
        """Wait for what the controller writes of itself."""
        assert self._folder is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while (facts := self._folder.facts()) is None:
            self._check_alive()
            if time.monotonic() > deadline:
                raise StartError(
                    "ipyparallel's controller wrote no connection file.",
                    why=f"Its log: {self.logs / 'controller.log'}",
                )
            time.sleep(0.01)
        return facts

    def _check_alive(self, starting: Sequence[int] | None = None) -> None:
        """Raise when a process has ended that a start needs; `starting`: by default all ranks."""
        if self.broken:
            file = self.logs / ("store.log" if self.reachable else "controller.log")
            why = last_lines(file)
            raise StartError(self.broken, why=why, do=fix_for_start(why))
        dead = [rank for rank, state in self.ranks.items() if not state.alive]
        if dead:
            is_new = starting is None or set(dead) <= set(starting)
            when = "starting" if is_new else f"{name_ranks(starting or ())} started"
            raise StartError(
                f"{begin_with_ranks(dead)}{self._on_host(dead[0])} ended while {when}.",
                why=(why := last_lines(self.logs / f"rank-{dead[0]}.log")),
                do=fix_for_start(why),
            )

    def _on_host(self, rank: int) -> str:
        state = self.ranks[rank]
        return "" if state.is_here else f" on {state.host}"

    def _end(self, keys: Iterable[str]) -> None:
        """Kill processes, with all they have started, and wait until they have ended."""
        chosen = set(keys)
        deadline = time.monotonic() + _END_TIMEOUT_S
        again_at = 0.0
        while left := chosen & set(self._launcher.running()):
            now = time.monotonic()
            if now > deadline:
                log.error("%s did not end when killed", ", ".join(sorted(left)))
                return
            if now > again_at:
                # More than once: a signal is lost when the parent dies before it passes it on.
                for key in left:
                    self._launcher.signal(key, signal.SIGKILL, group=True)
                again_at = now + 0.5
            time.sleep(0.005)

    # -- who is alive

    @property
    def broken(self) -> str | None:
        """Why no cell can run on the whole cluster; None while all is well."""
        return self._broken

    @broken.setter
    def broken(self, what: str | None) -> None:
        if what is not None:
            # What follows a colon describes an error, in words that may be the user's.
            self.events.note("broken", what.partition(":")[0])
        self._broken = what

    @property
    def is_up(self) -> bool:
        """Whether it has been started and not stopped."""
        return self._connection is not None

    @property
    def ranks(self) -> dict[int, RankProcess]:
        """The known state of each rank."""
        return self._roster.ranks

    def living(self) -> list[int]:
        """Return the ranks whose processes are there."""
        return self._roster.living()

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        return self._roster.dead()

    def faults(self) -> int:
        """Return how often ranks have died since the cluster was made; several at once are one."""
        times = self._deaths_s
        return sum(not i or at - times[i - 1] > _AT_ONCE_S for i, at in enumerate(times))

    def on_death(self, callback: Callable[[int, Ended], None]) -> Callable[[], None]:
        """Call `callback(rank, ended)` on the launcher's thread; returns how to stop that."""
        self._death_callbacks.append(callback)
        return lambda: self._death_callbacks.remove(callback)

    def _take_notice(self, sentence: str) -> None:
        if not self.notice:
            self.events.note("notice", sentence)
        self.notice = self.notice or sentence

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank's process."""
        self._launcher.signal(f"rank {rank}", number)

    def _sleeping_s(self, ranks: Iterable[int]) -> dict[int, float]:
        return sleeping_s(self.ranks[rank] for rank in ranks)

    def _wake(self, rank: int) -> None:
        """Continue a rank that was stopped (SIGSTOP); no effect on one that runs."""
        self.signal(rank, signal.SIGCONT)

    def kill(self, rank: int, why: str = "") -> None:
        """End a rank's process and everything it started; reports of its end add `why`."""
        if rank in self.ranks:
            self.ranks[rank].killed_for = why
        self._launcher.signal(f"rank {rank}", signal.SIGKILL, group=True)

    def _on_exit(self, key: str, ended: Ended) -> None:
        if self._stopping:
            return
        self.events.note("process ended", str(ended), key=key, **ended.to_wire())
        if not key.startswith("rank "):
            self._host_ended(key, ended)
            return
        rank = int(key.removeprefix("rank "))
        known = self._roster.end(rank, ended)
        if known is None:
            return  # its start finds it dead
        if self._connection is not None:
            self._connection.unregister(rank)
        self._deaths_s.append(self.events.seconds)
        self.requests.rank_died(rank, known)
        for callback in list(self._death_callbacks):
            callback(rank, known)

    def _host_ended(self, key: str, how: Ended) -> None:
        if key == "store":
            if not self.reachable:
                return  # both are lost with their host, and this is the lesser trouble
            self.broken = (
                f"The store, which the ranks use to find each other, has ended ({how}). What the "
                "ranks hold can still be pulled."
            )
            return
        self.broken = f"ipyparallel's controller has ended ({how}): the ranks cannot be reached."
        self.reachable = False
        self.requests.fail_all(self.broken_error())

    def broken_error(self) -> ClusterError:
        """Return the error for any use of a cluster that is `broken`."""
        return ClusterError(self.broken or "", do="%dist restart    (new processes for all ranks)")

    def _require_connection(self) -> "Connection":
        if self._connection is None:
            raise ClusterError("The cluster is not running.", do="%dist start")
        return self._connection


def _surroundings() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in _STANDS_ON:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"  # run from a folder of sources
    return {"versions": versions, "system": platform.platform(), "cores": os.cpu_count()}


def _ms_since(began: float) -> float:
    return round(1e3 * (time.monotonic() - began), 1)
