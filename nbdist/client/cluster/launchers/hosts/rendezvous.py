"""The way of hosts to a start: who they are, whether they fit, and how they reach each other.

    hello ─▶ require_same_versions ─▶ listen ─▶ reach ─▶ choose_addresses ─▶ warm ─▶ ready

The same way for all at a start, and for those that come back later. On the caller's thread.
"""

import time
from collections.abc import Callable, Collection
from typing import Any

from nbdist.client.cluster.launchers.hosts import preflight
from nbdist.client.cluster.launchers.hosts.host import Hosts
from nbdist.client.cluster.patience import FAR_S, LongWait
from nbdist.shared.options import is_loopback
from nbdist.shared.placement import HERE

_HELLO_S = 30.0  # a login, and the start of a Python on a cold disk
_REACH_S = 3.0
_ANSWER_S = 30.0  # a host at load 40 has taken more than 10


def meet(hosts: Hosts, new: Collection[str], asked: str) -> None:
    """Give each new host an address that all living hosts reach, and let it import torch.

    Args:
        hosts: All of them. Those that are not new have an address.
        new: Names of those that have been greeted.
        asked: The notebook's address, as the person wants it; loopback for any.

    Raises:
        StartError: A host cannot be used, or cannot be reached.
    """
    hosts.wait_for(new, "hello", _HELLO_S)
    known = hosts.living()
    preflight.require_same_versions({name: host.facts for name, host in known.items()})
    if len(known) == 1:
        known[HERE].address = asked
    else:
        for name, address in _addresses(hosts, new, asked).items():
            known[name].address = address
    hosts.ask(new, {"op": "warm"})


def _addresses(hosts: Hosts, new: Collection[str], asked: str) -> dict[str, str]:
    known = hosts.living()
    hosts.ask(known, {"op": "listen"})
    listening = hosts.wait_for(known, "listening", _ANSWER_S)
    facts = {name: host.facts for name, host in known.items()}
    addresses = preflight.candidates(facts, None if is_loopback(asked) else asked)
    # Ranks of hosts that are not new have met at their addresses already.
    addresses |= {name: [host.address] for name, host in known.items() if name not in new}
    for name in known:
        targets = {
            other: [
                (address, listening[other]["ports"][address])
                for address in tried
                if address in listening[other]["ports"]
            ]
            for other, tried in addresses.items()
            if other != name
        }
        hosts.ask([name], {"op": "reach", "targets": targets, "within_s": _REACH_S})
    reached = hosts.wait_for(known, "reached", _ANSWER_S)
    return preflight.choose_addresses(addresses, {n: t["addresses"] for n, t in reached.items()})


def ready(hosts: Hosts, say: Callable[[str], None]) -> dict[str, Any]:
    """Wait for the parents' imports of torch; see `Launcher.ready`."""
    known = hosts.living()
    begins = time.monotonic()
    wait = LongWait("torch's import on the hosts", say, begins)
    while not hosts.settled(known, "ready", 1.0) and (now := time.monotonic()) < begins + FAR_S:
        wait.attend(now)
    answers = hosts.wait_for(known, "ready", 0.0)
    takers = {name: host for name, host in known.items() if host.channel.slots}
    slow = [answers[name] for name in takers if not answers[name]["forks"]]
    heard = {name: host.heard_at for name, host in known.items()}
    facts = {name: host.facts for name, host in known.items()}
    return {
        "gpus": sum(min(answers[name]["gpus"], one.channel.slots) for name, one in takers.items()),
        "gpus_each": min(answers[name]["gpus"] for name in takers),
        "no_gpu": next((why for name in takers if (why := answers[name]["no_gpu"])), ""),
        "forks": not slow,
        "why": slow[0]["why"] if slow else "",
        "hosts": len(takers),
        "slots": sum(host.channel.slots for host in takers.values()),
        "threads_a_rank": min(
            max(1, int(host.facts["cores"]) // host.channel.slots) for host in takers.values()
        ),
        "notes": preflight.clock_notes(facts, heard),
    }
