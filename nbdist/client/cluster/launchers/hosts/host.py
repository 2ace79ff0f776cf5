"""The hosts of one launcher, by name: how each is reached, who it is, and what it has answered.

Threads: `note_answer` and `lose` on the thread that hears the keeper; the rest on any.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.client.cluster.launchers.parent_link import ParentLink
from nbdist.shared.errors import StartError


def explain_parent(status: int, said: str) -> tuple[str, str]:
    """Return why a parent of this machine has ended, in words, and what to do."""
    if status < 0:
        why = f"its parent process was ended by signal {-status}"
    else:
        lines = said.strip().splitlines()
        why = lines[-1] if lines else f"its parent process ended with exit code {status}"
    return why, "%dist restart starts another; %dist doctor shows what is wrong"


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
    explain: Callable[[int, str], tuple[str, str]] = explain_parent


@dataclass(slots=True)
class Host:
    """One host as the notebook knows it. `lost` says why it is gone, once it is.

    Attributes:
        channel: How it is reached.
        link: Its processes.
        name: The keeper's name of the channel: another one each time that it is opened.
        facts: What it said of itself (`host/facts.py`), at `heard_at` (`time.time()`).
        address: By which all other hosts reach it.
        answers: Its newest events, by their names.
        advice: What to do about its loss.
        is_silent: It was lost without a word: what runs there may not have heard of it.
    """

    channel: Channel
    link: ParentLink
    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    heard_at: float = 0.0
    address: str = ""
    lost: str = ""
    answers: dict[str, Any] = field(default_factory=dict)
    advice: str = ""
    is_silent: bool = False


class Hosts:
    """All hosts of a launcher, in the order in which they take ranks; `news` is that one spoke."""

    def __init__(self, send: Callable[[str, Mapping[str, Any]], None]) -> None:
        """Begin without hosts.

        Args:
            send: Sends a request to the parents of a channel, by its name.
        """
        self.by_name: dict[str, Host] = {}
        self._send = send
        self.news = threading.Condition()

    def living(self) -> dict[str, Host]:
        """Return the hosts that are not lost."""
        return {name: host for name, host in self.by_name.items() if not host.lost}

    def of_channel(self, name: str) -> list[Host]:
        """Return the hosts that a channel leads to, by the keeper's name of it."""
        return [host for host in self.by_name.values() if host.name == name]

    def ask(self, names: Iterable[str], request: Mapping[str, Any]) -> None:
        """Send a request to hosts, whose earlier answers are forgotten."""
        for name in names:
            self.by_name[name].answers.clear()
            self._send(self.by_name[name].name, request)

    def note_answer(self, host: Host, event: dict[str, Any]) -> None:
        """Take what a host answers to a request."""
        with self.news:
            host.answers[event["event"]] = event
            if event["event"] == "hello":
                host.facts, host.heard_at = event, time.time()
            self.news.notify_all()

    def lose(self, host: Host, why: str, advice: str) -> bool:
        """Note that a host is lost; return False where it was already."""
        with self.news:
            if host.lost:
                return False
            host.lost, host.advice = why, advice
            self.news.notify_all()
            return True

    def settled(self, names: Iterable[str], answer: str, timeout_s: float) -> bool:
        """Wait until each host has answered or is lost; False where the time was over before."""
        hosts = [self.by_name[name] for name in names]
        with self.news:
            return self.news.wait_for(
                lambda: all(host.lost or answer in host.answers for host in hosts), timeout_s
            )

    def wait_for(
        self, names: Iterable[str], answer: str, timeout_s: float
    ) -> dict[str, dict[str, Any]]:
        """Return what each host answers.

        Raises:
            StartError: Hosts are lost, or did not answer in time: one sentence for each.
        """
        chosen = list(names)
        self.settled(chosen, answer, timeout_s)
        hosts = {name: self.by_name[name] for name in chosen}
        if missing := [h for h in hosts.values() if h.lost or answer not in h.answers]:
            raise _cannot_use(missing, timeout_s)
        return {name: host.answers[answer] for name, host in hosts.items()}


def _cannot_use(hosts: Sequence[Host], timeout_s: float) -> StartError:
    late = f"it did not answer within {timeout_s:.0f} s"
    names = ", ".join(host.channel.host for host in hosts)
    return StartError(
        f"{names} cannot be used, so nothing was started.",
        why="\n     ".join(f"{host.channel.host}: {host.lost or late}" for host in hosts),
        do="; ".join(dict.fromkeys(host.advice or "%dist doctor there" for host in hosts)),
    )
