"""Checks that hosts can train together: versions, clocks, addresses. Facts in, errors out."""

import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbdist.shared.errors import StartError
from nbdist.shared.placement import HERE
from nbdist.shared.text import aligned, counted

_MOST_CLOCK_S = 60.0
Facts = Mapping[str, Any]
Reached = Mapping[str, Mapping[str, Sequence[str]]]  # from host, to host: addresses that answered


def require_same_versions(facts: Mapping[str, Facts]) -> None:
    """Refuse hosts whose Python, torch or nbdist differ from the notebook's.

    Args:
        facts: By host, what `host/facts.py` reported; the notebook's machine among them.

    Raises:
        StartError: With a table of what differs, or the reason why a host cannot take ranks.
    """
    if troubled := {host: found["trouble"] for host, found in facts.items() if found["trouble"]}:
        raise StartError(
            f"{_named(troubled)} cannot take ranks.",
            why="; ".join(f"{host}: {why}" for host, why in troubled.items()),
            do="free space there, or leave the host out.",
        )
    versions = {host: _versions(found) for host, found in facts.items()}
    wanted = versions[HERE]
    others = {host: found for host, found in versions.items() if found != wanted}
    if not others:
        return
    names = [
        name for name in wanted if any(found[name] != wanted[name] for found in others.values())
    ]
    rows = [("host", *names)]
    rows += [(host, *(found[name] for name in names)) for host, found in versions.items()]
    differing = " and ".join(names)
    raise StartError(
        f"{_named(others)} and the notebook differ in {differing}.",
        why="\n".join(("", *(f"     {line}" for line in aligned(rows)))),
        do="install the same versions there, or name another Python for the host in a file of "
        "hosts: python=/path/to/python.",
    )


def _versions(found: Facts) -> dict[str, str]:
    """Return what must be equal. Patches of Python read each other's pickles."""
    python = ".".join(found["python"].split(".")[:2])
    torch = found["versions"]["torch"].partition("+")[0]
    nbdist = found["versions"]["nbdist"]
    return {"Python": python, "torch": torch, "nbdist": f"{nbdist} (messages {found['messages']})"}


def clock_notes(facts: Mapping[str, Facts], heard_at: Mapping[str, float]) -> list[str]:
    """Return a sentence for each host whose clock is far from the notebook's.

    Times of steps do not depend on it: they are measured by monotonic clocks.
    """
    notes = []
    for host, found in facts.items():
        ahead_s = found["time"] - heard_at[host]
        if abs(ahead_s) > _MOST_CLOCK_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            notes.append(
                f"The clock of {host} is {abs(ahead_s):,.0f} s {way} the notebook's: times of "
                "files, and of downloads that expire, will be wrong there."
            )
    return notes


def candidates(facts: Mapping[str, Facts], asked: str | None) -> dict[str, list[str]]:
    """Return the addresses by which each host may be reached, best first.

    An address that several machines have (a bridge of Docker) leads to none of them.

    Args:
        facts: By host.
        asked: The address that the person chose for the notebook's machine.
    """
    # The notebook's machine may be a node of the job, too.
    machines = {of_host["machine"]: of_host["addresses"] for of_host in facts.values()}
    everyone = [address for addresses in machines.values() for address in addresses]
    found = {
        host: [address for address in of_host["addresses"] if everyone.count(address) == 1]
        for host, of_host in facts.items()
    }
    if asked is not None:
        found[HERE] = [asked]
    return found


def choose_addresses(candidates: Mapping[str, Sequence[str]], reached: Reached) -> dict[str, str]:
    """Return for each host the first of its addresses that all other hosts have reached.

    Args:
        candidates: By host, see `candidates`.
        reached: What each host has reached of each other one.

    Raises:
        StartError: A host has none; it names who does not reach it.
    """
    chosen, failures = {}, []
    for host, addresses in candidates.items():
        others = [other for other in candidates if other != host]
        by_all = [a for a in addresses if all(a in reached[other][host] for other in others)]
        if by_all:
            chosen[host] = by_all[0]
            continue
        from_whom = [other for other in others if not reached[other][host]] or others
        tried = ", ".join(addresses) or "no address but loopback"
        shown = ", ".join(show_host(other) for other in from_whom)
        failures.append(f"{shown} cannot reach {show_host(host)} ({tried})")
    if failures:
        raise StartError(
            f"{counted(len(failures), 'host')} cannot be reached by the others.",
            why="; ".join(failures) + ". Each was tried on a free port: gloo, the store and "
            "ipyparallel listen on ports between those of net.ipv4.ip_local_port_range.",
            do="open those ports between the hosts (the range can be made smaller by sysctl), or "
            "name the notebook's address on their network: --interface ADDRESS.",
        )
    return chosen


def show_host(host: str) -> str:
    """Return a host's name for people: the notebook's machine has one, too."""
    return socket.gethostname() if host == HERE else host


def _named(hosts: Iterable[str]) -> str:
    names = list(hosts)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
