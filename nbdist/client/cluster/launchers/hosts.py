"""Ranks on several hosts: one parent on each, reached through the keeper.

What leads to the parents is a list of `Channel`s, which `ssh`, Slurm and MPI make. Controller and
store run on the notebook's machine. A host that is lost takes its ranks with it; the others stay.

Threads: `_take` on the keeper's (`nbdist-hosts`); the rest on the caller's.
"""

import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbdist.client.cluster.launchers import preflight
from nbdist.client.cluster.launchers.base import OnExit, Started
from nbdist.client.cluster.launchers.keeper_link import KeeperLink
from nbdist.client.cluster.launchers.parent_link import ExitCallbacks, ParentLink
from nbdist.client.cluster.processes import HOST_LOST
from nbdist.errors import StartError
from nbdist.options import is_loopback
from nbdist.placement import HERE, TOKEN, Place, assign, places

log = logging.getLogger(__name__)

_HELLO_S = 30.0  # a login, and the start of a Python on a cold disk
_REACH_S = 3.0
_ANSWER_S = 10.0
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True)
class Channel:
    """A command that leads to the parent of one host.

    Attributes:
        host: As the person named it.
        slots: Ranks that it takes.
        command: What the keeper runs; None for a parent on the notebook's machine.
        environment: What ranks have in their environment there, beside what it has itself.
        explain: From the command's exit status and the end of what it wrote, why there is no
            parent, and what to do.
    """

    host: str
    slots: int
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    explain: Callable[[int, str], tuple[str, str]] = lambda status, said: (said, "%dist doctor")


@dataclass(slots=True)
class Host:
    """One host as the notebook knows it. `lost` says why it is gone, once it is."""

    channel: Channel
    link: ParentLink
    facts: dict[str, Any] = field(default_factory=dict)
    heard_at: float = 0.0
    address: str = ""
    ready: dict[str, Any] = field(default_factory=dict)
    lost: str = ""
    answers: dict[str, Any] = field(default_factory=dict)


class HostsLauncher:
    """Processes on several hosts, by key."""

    def __init__(self, log_folder: Path, channels: Sequence[Channel]) -> None:
        """Open all channels; returns at once.

        Args:
            log_folder: Where logs go (0700).
            channels: One a host, in the order in which they take ranks; none where `open` follows.
        """
        self.logs = log_folder
        self._token = secrets.token_hex(16)
        (log_folder / TOKEN).write_text(self._token)
        self._told = ExitCallbacks()
        self._news = threading.Condition()
        self._where: dict[int, str] = {}  # each rank's host
        self._is_closed = False
        self._hosts: dict[str, Host] = {}
        self._keeper = KeeperLink(log_folder, self._take)
        if channels:
            self.open(channels)

    def open(self, channels: Sequence[Channel]) -> None:
        """Open all channels, and one to a parent on this machine; returns at once."""
        if all(channel.host != HERE for channel in channels):
            channels = [Channel(HERE, 0, parent_command(sys.executable)), *channels]
        self._hosts = {one.host: Host(one, self._link_to(one.host)) for one in channels}
        for host, known in self._hosts.items():
            file = self.logs / f"host-{host.replace('/', '-')}.log"
            self._keeper.open(host, known.channel.command, {}, file)
            environment = _ONE_THREAD | dict(known.channel.environment)
            self._send(
                host,
                {"op": "hello", "host": host, "environment": environment}
                | {"logs": str(self.logs), "token": self._token},
            )

    @property
    def alive(self) -> bool:
        """Whether it can still start processes."""
        is_lost = HERE in self._hosts and self._hosts[HERE].lost
        return not self._is_closed and self._keeper.alive and not is_lost

    # -- the way to a start

    def meet(self, asked: str) -> str:
        """Find out who the hosts are and how they reach each other; see `Launcher.meet`."""
        self._wait_for("hello", _HELLO_S)
        preflight.require_alike({name: host.facts for name, host in self._hosts.items()})
        if len(self._hosts) == 1:
            self._hosts[HERE].address = asked
            self._tell_all({"op": "warm"})
            return asked
        self._tell_all({"op": "listen"})
        ports = {name: told["ports"] for name, told in self._wait_for("listening").items()}
        facts = {name: host.facts for name, host in self._hosts.items()}
        addresses = preflight.candidates(facts, None if is_loopback(asked) else asked)
        for name in self._hosts:
            targets = {
                other: [
                    (address, ports[other][address]) for address in tried if address in ports[other]
                ]
                for other, tried in addresses.items()
                if other != name
            }
            self._send(name, {"op": "reach", "targets": targets, "within_s": _REACH_S})
        reached = {n: t["addresses"] for n, t in self._wait_for("reached").items()}
        self._tell_all({"op": "warm"})
        for name, address in preflight.choose_addresses(addresses, reached).items():
            self._hosts[name].address = address
        return self._hosts[HERE].address

    def ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the parents' imports of torch; see `Launcher.ready`."""
        told = self._wait_for("ready", timeout_s)
        takers = {name: host for name, host in self._hosts.items() if host.channel.slots}
        slow = [told[name] for name in takers if not told[name]["forks"]]
        heard = {name: host.heard_at for name, host in self._hosts.items()}
        facts = {name: host.facts for name, host in self._hosts.items()}
        return {
            "gpus": sum(min(told[name]["gpus"], one.channel.slots) for name, one in takers.items()),
            "forks": not slow,
            "why": slow[0]["why"] if slow else "",
            "slots": sum(host.channel.slots for host in takers.values()),
            "threads_a_rank": min(
                max(1, int(host.facts["cores"]) // host.channel.slots) for host in takers.values()
            ),
            "notes": preflight.clock_notes(facts, heard),
        }

    def places(self, n: int, address: str) -> dict[int, Place]:
        """Return the ranks' places; see `Launcher.places`."""
        living = {name: host for name, host in self._hosts.items() if not host.lost}
        slots = {name: host.channel.slots for name, host in living.items()}
        try:
            self._where = assign(range(n), slots, self._where)
        except LookupError as error:
            (rank,) = error.args
            lost = [f"{name}: {host.lost}" for name, host in self._hosts.items() if host.lost]
            raise StartError(
                f"There is no host for rank {rank}.",
                why="; ".join(lost) or f"the hosts take {sum(slots.values())} ranks.",
                do="name a spare host in --hosts, or %dist scale to fewer ranks.",
            ) from error
        return places(self._where, {name: host.address for name, host in self._hosts.items()})

    # -- processes

    def start_soon(self, key: str, role: str, spec: Mapping[str, Any]) -> Future[Started]:
        """Ask for a process; see `Launcher.start_soon`."""
        name = self._where[int(key.removeprefix("rank "))] if key.startswith("rank ") else HERE
        host = self._hosts[name]
        if not host.facts.get("shares") and role == "engine":
            told = json.loads(Path(spec["connection_file"]).read_text())
            spec = {**spec, "connection": told}
        try:
            if host.lost:
                raise OSError(host.lost)
            return host.link.start_soon(key, role, spec, self.logs)
        except OSError as error:
            raise StartError(f"{name} cannot start {key}.", why=str(error)) from error

    def give_up(self) -> None:
        """Give up what is being started; see `Launcher.give_up`."""
        for host in self._hosts.values():
            host.link.give_up()

    def signal(self, key: str, number: int, *, group: bool = False) -> None:
        """Send a signal; nothing to a host that is gone; see `Launcher.signal`."""
        for host in self._hosts.values():
            if key in host.link.pids:
                try:
                    host.link.signal(key, number, group=group)
                except OSError:
                    log.info("The keeper is gone: signal %d did not reach %s", number, key)

    def running(self) -> list[str]:
        """Return the keys of the processes that are running."""
        return [key for host in self._hosts.values() for key in list(host.link.pids)]

    def on_exit(self, callback: OnExit) -> None:
        """Register a callback; see `Launcher.on_exit`."""
        self._told.add(callback)

    def remove_on_exit(self, callback: OnExit) -> None:
        """Undo `on_exit`."""
        self._told.remove(callback)

    def rest(self) -> None:
        """Leave nothing on any host; see `Launcher.rest`."""
        self.close()

    def close(self) -> None:
        """End everything on all hosts that can be reached."""
        if not self._is_closed:
            self._is_closed = True
            self._keeper.close()
            (self.logs / TOKEN).unlink(missing_ok=True)

    # -- what the keeper tells

    def _take(self, event: dict[str, Any]) -> None:
        name = event["event"]
        if name == "gone":
            for host in self._hosts.values():
                self._lose(host, "the process that reaches it has ended")
            return
        host = self._hosts[event.get("host") or event["channel"]]
        if name == "lost":
            self._lose(host, event["why"])
        elif name == "closed":
            why, _ = host.channel.explain(event["status"], event["said"])
            host.answers["closed"] = event
            self._lose(host, why)
        elif name in ("hello", "listening", "reached", "ready"):
            with self._news:
                host.answers[name] = event
                if name == "hello":
                    host.facts, host.heard_at = event, time.time()
                self._news.notify_all()
        else:
            if name == "exited":
                self._keep_last_words(event)
            host.link.take(event)

    def _keep_last_words(self, event: Mapping[str, Any]) -> None:
        """Write the ends of a rank's files where those of ranks of this machine are."""
        for kind in ("log", "stderr"):
            if kind in event:
                file = self.logs / f"{event['key'].replace(' ', '-')}.{kind}"
                try:
                    file.write_text(event[kind])
                except OSError:
                    log.exception("What %s wrote last was not kept", event["key"])

    def _lose(self, host: Host, why: str) -> None:
        name = host.channel.host
        with self._news:
            if host.lost:
                return
            host.lost = why
            self._news.notify_all()
        if not self._is_closed:
            log.warning("Host %s is lost: %s", name, why)
        host.link.lose(
            StartError(f"Host {name} is lost.", why=why), f"{HOST_LOST}{name} is lost: {why}"
        )

    def _wait_for(self, answer: str, timeout_s: float = _ANSWER_S) -> dict[str, dict[str, Any]]:
        """Return what each host answers.

        Raises:
            StartError: Hosts ended, or did not answer in time: one sentence for each.
        """
        deadline = time.monotonic() + timeout_s
        with self._news:
            while any(
                not host.lost and answer not in host.answers for host in self._hosts.values()
            ):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._news.wait(left)
            missing = [host for host in self._hosts.values() if answer not in host.answers]
        if missing:
            raise _cannot_use(missing, timeout_s)
        return {name: host.answers[answer] for name, host in self._hosts.items()}

    def _link_to(self, host: str) -> ParentLink:
        return ParentLink(lambda request: self._send(host, request), self._told, host)

    def _send(self, host: str, request: Mapping[str, Any]) -> None:
        self._keeper.send(host, request)

    def _tell_all(self, request: Mapping[str, Any]) -> None:
        for name in self._hosts:
            self._send(name, request)


def parent_command(python: str) -> list[str]:
    """Return what starts a parent on the host where it is run."""
    return [
        python,
        "-m",
        "nbdist.host.parent",
        "stdio",
        "fork" if sys.platform == "linux" else "spawn",
    ]


def _cannot_use(hosts: Sequence[Host], timeout_s: float) -> StartError:
    sentences, advice = [], []
    for host in hosts:
        why, do = f"it did not answer within {timeout_s:.0f} s", "%dist doctor there"
        if (closed := host.answers.get("closed")) is not None:
            why, do = host.channel.explain(closed["status"], closed["said"])
        sentences.append(f"{host.channel.host}: {host.lost or why}")
        advice.append(do)
    names = ", ".join(host.channel.host for host in hosts)
    return StartError(
        f"{names} cannot be used, so nothing was started.",
        why="\n     ".join(sentences),
        do="; ".join(dict.fromkeys(advice)),
    )
