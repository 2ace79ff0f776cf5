"""Ranks on several hosts: one parent on each, reached through the keeper.

What leads to the parents is a list of `Channel`s, which `ssh`, Slurm and MPI make. Controller and
store run on the notebook's machine. A host that is lost takes its ranks with it; the others stay.

Threads: `_take` on the keeper's (`nbdist-hosts`); the rest on the caller's.
"""

import json
import logging
import secrets
import signal as signals
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from nbdist.client.cluster.launchers.base import NoHostError, OnExit, OnNotice
from nbdist.client.cluster.launchers.hosts import rendezvous
from nbdist.client.cluster.launchers.hosts.host import Channel, Host, Hosts, explain_parent
from nbdist.client.cluster.launchers.hosts.keeper_link import KeeperLink
from nbdist.client.cluster.launchers.hosts.preflight import show_host
from nbdist.client.cluster.launchers.parent_link import ExitCallbacks, ParentLink
from nbdist.client.cluster.patience import FAR_S
from nbdist.client.cluster.processes import Started
from nbdist.shared.errors import StartError
from nbdist.shared.placement import HERE, TOKEN, RankPlacement, assign, places
from nbdist.shared.processes.ended import Ended, EndKind

log = logging.getLogger(__name__)

_REOPEN_S = 15.0  # for a login on a host that came back; ssh gives up after 8 s
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class HostsLauncher:
    """Processes on several hosts, by key."""

    def __init__(
        self,
        log_folder: Path,
        channels: Sequence[Channel],
        keeper: KeeperLink | None = None,
    ) -> None:
        """Open all channels; returns at once.

        Args:
            log_folder: Where logs go (0700).
            channels: One a host, in the order in which they take ranks; none where `open` follows.
            keeper: One that is detached, and has opened them; `adopt` follows.
        """
        self.logs = log_folder
        self._token = secrets.token_hex(16)
        if keeper is None:
            (log_folder / TOKEN).write_text(self._token)
        self._exit_callbacks = ExitCallbacks()
        self._where: dict[int, str] = {}  # each rank's host
        self._is_closed = False
        self._on_notice: OnNotice = log.warning
        self._opened = 0
        self._address = ""
        self._hosts = Hosts(lambda channel, request: self._keeper.send(channel, request))
        self._keeper = KeeperLink(log_folder, self._take) if keeper is None else keeper
        if channels:
            self.open(channels)

    def open(self, channels: Sequence[Channel]) -> None:
        """Open all channels, and one to a parent on this machine; returns at once."""
        if all(channel.host != HERE for channel in channels):
            channels = [Channel(HERE, 0, parent_command(sys.executable)), *channels]
        for channel in channels:
            self._open(channel)

    @property
    def alive(self) -> bool:
        """Whether it can still start processes."""
        here = self._hosts.by_name.get(HERE)
        is_lost = here is not None and here.lost
        return not self._is_closed and self._keeper.alive and not is_lost

    def meet(self, asked: str) -> str:
        """Find out who the hosts are and how they reach each other; see `Launcher.meet`."""
        rendezvous.meet(self._hosts, list(self._hosts.by_name), asked)
        self._address = self._hosts.by_name[HERE].address
        return self._address

    def ready(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Wait for the parents' imports of torch; see `Launcher.ready`."""
        return rendezvous.ready(self._hosts, say)

    def places(self, n: int, address: str, *, crowded: bool = False) -> dict[int, RankPlacement]:
        """Return the ranks' places; see `Launcher.places`."""
        living = self._hosts.living()
        slots = {name: host.channel.slots for name, host in living.items()}
        if crowded and (lacking := n - sum(slots.values())) > 0:
            slots[max(slots, key=lambda name: slots[name])] += lacking
        try:
            self._where = assign(range(n), slots, self._where)
        except LookupError as error:
            lost: dict[str, list[str]] = {}
            for name, host in self._hosts.by_name.items():
                if host.lost:
                    lost.setdefault(host.lost, []).append(name)
            why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in lost.items())
            why = why or f"The hosts take {sum(slots.values())} ranks."
            raise NoHostError(error.args, sum(slots.values()), why) from error
        return places(self._where, {name: host.address for name, host in living.items()})

    def reopen(self) -> list[str]:
        """Try lost hosts again, all at once; see `Launcher.reopen`."""
        if not self._keeper.alive:
            self._keeper = KeeperLink(self.logs, self._take)
        lost = [name for name, host in self._hosts.by_name.items() if host.lost]
        before = {name: self._hosts.by_name[name] for name in lost}
        for host in before.values():
            self._open(host.channel)
        self._hosts.settled(lost, "hello", _REOPEN_S)
        greeted = [name for name in lost if "hello" in self._hosts.by_name[name].answers]
        try:
            if greeted:
                rendezvous.meet(self._hosts, greeted, self._address)
                self._hosts.wait_for(greeted, "ready", FAR_S)
        except StartError as error:
            why = " ".join(filter(None, (error.what, error.why)))
        else:
            why = "it did not answer"
            lost = [name for name in lost if name not in greeted]
        for name in lost:
            self._lose(self._hosts.by_name[name], why)
            self._hosts.by_name[name].is_silent = before[name].is_silent
            self._keeper.end(self._hosts.by_name[name].name)
        reasons = {name: self._hosts.by_name[name].lost.rstrip(".") for name in lost}
        return [
            *(f"Host {name} is back." for name in greeted if name not in lost),
            *(f"Host {name} cannot be used: {reason}." for name, reason in reasons.items()),
        ]

    def _open(self, channel: Channel) -> None:
        """Open a channel, and greet the parent at its end."""
        self._opened += 1
        name = f"{channel.host}#{self._opened}"
        self._add(channel, name)
        file = self.logs / f"host-{channel.host.replace('/', '-')}.log"
        self._keeper.open(name, channel.command, {}, file)
        hello = {
            "op": "hello",
            "host": channel.host,
            "environment": _ONE_THREAD | dict(channel.environment),
            "logs": str(self.logs),
            "token": self._token,
        }
        self._keeper.send(name, hello)

    def _add(self, channel: Channel, name: str) -> Host:
        """Enter a host that is reached by a channel; `name` is the keeper's for it."""
        is_here = channel.host == HERE
        link = ParentLink(
            lambda request: self._keeper.send(name, request),
            self._exit_callbacks,
            show_host(channel.host),
            is_here=is_here,
        )
        host = self._hosts.by_name[channel.host] = Host(channel, link, name)
        return host

    # -- detached

    def detach(self, name: str, facts: Mapping[str, Any]) -> None:
        """Let all of it outlive this process; see `KeeperLink.detach`."""
        self._keeper.detach(name, facts)

    def remember(self, value: Any, says: str) -> None:
        """Leave a value with the keeper for the next kernel; logged when the keeper is gone."""
        try:
            self._keeper.remember(value, says)
        except OSError:
            log.warning("The keeper is gone: nothing can be attached to")

    def leave(self) -> None:
        """Let go of everything, and leave it running."""
        self._is_closed = True
        self._keeper.leave()

    def memory(self) -> dict[str, Any]:
        """Return what another kernel's launcher `adopt`s: JSON-like."""
        hosts = [
            {
                "host": host.channel.host,
                "slots": host.channel.slots,
                "command": list(host.channel.command),
                "environment": dict(host.channel.environment),
                "name": host.name,
                "address": host.address,
                "facts": host.facts,
                "lost": host.lost,
                "pids": dict(host.link.pids),
            }
            for host in self._hosts.by_name.values()
        ]
        return {
            "where": list(self._where.items()),
            "address": self._address,
            "opened": self._opened,
            "token": self._token,
            "hosts": hosts,
        }

    def adopt(
        self,
        memory: Mapping[str, Any],
        changes: Mapping[str, Any],
        explain: Callable[[str, int, str], tuple[str, str]],
    ) -> None:
        """Take over the processes of another kernel's launcher; call after `on_exit`.

        What has ended since is reported like an end of now. What that kernel was starting is
        ended: no kernel knows it.

        Args:
            memory: What `memory` returned there.
            changes: What the keeper reported on attaching; see `host/process_table.py`.
            explain: As `Channel.explain`, of a host.
        """
        self._where, self._address = dict(memory["where"]), memory["address"]
        self._opened, self._token = memory["opened"], memory["token"]
        ended = {(event["key"], event["pid"]): event for event in changes["ended"]}
        for known in memory["hosts"]:
            name, pids = known["name"], known["pids"]
            running = changes["running"].get(name, {})
            name_ = known["host"]
            channel = Channel(
                name_,
                known["slots"],
                known["command"],
                known["environment"],
                explain_parent if name_ == HERE else partial(explain, name_),
            )
            host = self._add(channel, name)
            host.address, host.facts, host.lost = known["address"], known["facts"], known["lost"]
            host.link.pids.update(pids)
            for key, pid in pids.items():
                if running.get(key) != pid:
                    unseen = {"event": "exited", "key": key, "pid": pid}
                    unseen |= {"ended": Ended(EndKind.UNSEEN).to_wire()}
                    self._take_of(host, ended.get((key, pid), unseen))
            for key, pid in running.items():
                if pids.get(key) != pid:
                    log.info("%s (%d) was being started, and is ended", key, pid)
                    end = {"op": "signal", "pid": pid, "signal": signals.SIGKILL, "group": True}
                    self._keeper.send(name, end)
        for event in changes["lost"]:
            self._take(event)
        self._keeper.listen(self._take)

    # -- processes

    def start_soon(self, key: str, role: str, spec: Mapping[str, Any]) -> Future[Started]:
        """Ask for a process; see `Launcher.start_soon`."""
        name = self._where[int(key.removeprefix("rank "))] if key.startswith("rank ") else HERE
        host = self._hosts.by_name[name]
        if name != HERE and role == "engine":
            connection = json.loads(Path(spec["connection_file"]).read_text())
            spec = {**spec, "connection": connection}
        try:
            if host.lost:
                raise OSError(host.lost)
            return host.link.start_soon(key, role, spec, self.logs)
        except OSError as error:
            raise StartError(f"{name} cannot start {key}.", why=str(error)) from error

    def give_up(self) -> None:
        """Give up what is being started; see `Launcher.give_up`."""
        for host in self._hosts.by_name.values():
            host.link.give_up()

    def signal(self, key: str, number: int, *, group: bool = False) -> None:
        """Send a signal; no effect on a host that is gone; see `Launcher.signal`."""
        for host in self._hosts.by_name.values():
            if key in host.link.pids:
                try:
                    host.link.signal(key, number, group=group)
                except OSError:
                    log.info("The keeper is gone: signal %d did not reach %s", number, key)

    def running(self) -> list[str]:
        """Return the keys of the processes that are running."""
        return [key for host in self._hosts.by_name.values() for key in list(host.link.pids)]

    def on_exit(self, callback: OnExit) -> None:
        """Register a callback; see `Launcher.on_exit`."""
        self._exit_callbacks.add(callback)

    def remove_on_exit(self, callback: OnExit) -> None:
        """Undo `on_exit`."""
        self._exit_callbacks.remove(callback)

    def on_notice(self, callback: OnNotice) -> None:
        """Register the callback; see `Launcher.on_notice`."""
        self._on_notice = callback

    def notice_of(self, host: str, number: str) -> str:
        """Return what a signal to a host's parent means."""
        return f"Host {host} is being shut down ({number})."

    def rest(self) -> list[str]:
        """Leave nothing on any host; see `Launcher.rest`."""
        self.close()
        silent = [name for name, host in self._hosts.by_name.items() if host.is_silent]
        if not silent:
            return []
        ends = "what runs there ends 10 s after it last heard of the notebook."
        return [f"{', '.join(silent)} could not be reached: {ends}"]

    def close(self) -> None:
        """End everything on all hosts that can be reached."""
        if not self._is_closed:
            self._is_closed = True
            self._keeper.close()
            (self.logs / TOKEN).unlink(missing_ok=True)

    # -- events of the keeper

    def _take(self, event: dict[str, Any]) -> None:
        name = event["event"]
        if name == "gone":
            for host in self._hosts.by_name.values():
                self._lose(host, "the process that reaches it has ended")
            return
        # A channel that was opened again has another name: events of the old one are outdated.
        for host in self._hosts.of_channel(event["channel"]):
            if event.get("host", host.channel.host) in (host.channel.host, ""):
                self._take_of(host, event)

    def _take_of(self, host: Host, event: dict[str, Any]) -> None:
        name = event["event"]
        if name == "lost":
            host.is_silent = True
            self._lose(host, event["why"])
        elif name == "notice":
            self._on_notice(self.notice_of(host.channel.host, event["signal"]))
        elif name == "closed":
            self._lose(host, *host.channel.explain(event["status"], event["said"]))
        elif name in ("hello", "listening", "reached", "ready"):
            self._hosts.note_answer(host, event)
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

    def _lose(self, host: Host, why: str, advice: str = "") -> None:
        name = host.channel.host
        if not self._hosts.lose(host, why, advice):
            return
        if not self._is_closed:
            log.warning("Host %s is lost: %s", name, why)
        host.link.lose(
            StartError(f"Host {name} is lost.", why=why),
            Ended(EndKind.HOST_LOST, host=show_host(name), detail=why),
        )


def parent_command(python: str) -> list[str]:
    """Return what starts a parent on the host where it is run."""
    return [
        python,
        "-m",
        "nbdist.host.parent",
        "stdio",
        "fork" if sys.platform == "linux" else "spawn",
    ]
