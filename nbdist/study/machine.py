"""A machine that nobody has to own: accelerators, hosts and the links between them, from a text.

`"8 h100 nvlink4, 2 hosts ib400"`: on each of 2 hosts are 8 H100, joined by NVLink 4, and one NIC of
400 Gbit. A number before a link between hosts counts NICs: `"2 hosts 8 ib400"`.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, TypeVar

from nbdist.shared.errors import UsageError
from nbdist.shared.text import counted
from nbdist.study.accelerators import ACCELERATORS, Accelerator
from nbdist.study.links import BETWEEN_HOSTS, INSIDE_HOSTS, LINKS, Link

EXAMPLE: Final = "8 h100 nvlink4, 2 hosts ib400"
_Known = TypeVar("_Known")
_PART = re.compile(r"(?P<count>\d+)\s*x?\s+(?P<words>.+)")


@dataclass(frozen=True, slots=True)
class Machine:
    """Hosts that are all alike, a rank on each of their accelerators.

    Ranks are numbered host after host, so that the innermost axes of a layout, whose ranks are
    neighbours, fill a host first.

    Attributes:
        accelerator: Each of them.
        per_host: Accelerators of a host.
        hosts: 1 or more.
        inside: The link between those of a host.
        between: One NIC, where there are several hosts.
        nics: NICs of a host, which its ranks share.
    """

    accelerator: Accelerator
    per_host: int
    hosts: int
    inside: Link
    between: Link | None = None
    nics: int = 1

    @property
    def world_size(self) -> int:
        """Ranks, all hosts together."""
        return self.per_host * self.hosts

    def link_of(self, ranks: Collection[int]) -> Link:
        """Return what the collectives of an axis get, while its other groups send as much.

        Inside a host each rank has the link to itself. A ring over several hosts crosses every
        NIC of a host, and all groups with ranks there share these: of `"8 h100, 2 hosts 8 ib400"`,
        the one ring of all 16 ranks gets 8 NICs, each of 8 pairs one.

        Args:
            ranks: One of the axis' groups, such as `[0, 8]`; `group_of` has the first.

        Raises:
            UsageError: A rank that the machine does not have.
        """
        if max(ranks) >= self.world_size:
            raise UsageError(
                f"There is no rank {max(ranks)} on {self}.", why=f"it has {self.world_size} ranks"
            )
        hosts = {rank // self.per_host for rank in ranks}
        if len(hosts) == 1 or self.between is None:
            return self.inside
        groups_at_nics = max(1, self.per_host * len(hosts) // len(ranks))
        shared = self.nics * self.between.bandwidth / groups_at_nics
        return replace(self.between, bandwidth=min(shared, self.inside.bandwidth))

    def __str__(self) -> str:
        inside = f" on {self.inside.name}" if self.per_host > 1 else ""
        one = f"{self.per_host} {self.accelerator.name}{inside}"
        if self.between is None:
            return one
        return f"{counted(self.hosts, 'host')} of {one}, {self.nics} x {self.between.name} a host"


def group_of(axes: str, sizes: Mapping[str, int]) -> list[int]:
    """Return the ranks of the first group over some axes, as `Traffic` names them: "dp x fsdp".

    Args:
        axes: One name, or several with " x " between.
        sizes: Ranks along each axis of the layout, outermost first.
    """
    strides: dict[str, int] = {}
    stride = 1
    for axis, size in reversed(list(sizes.items())):
        strides[axis], stride = stride, stride * size
    chosen = [axis for axis in axes.split(" x ") if axis in sizes]
    steps = [[i * strides[axis] for i in range(sizes[axis])] for axis in chosen]
    return sorted(map(sum, product(*steps)))


def parse_machine(text: str) -> Machine:
    """Return the machine that a text names, capitals aside.

    Args:
        text: `"8 h100"`, `"8 h100 nvlink4"`, `"8 h100 nvlink4, 2 hosts ib400"`, `"1 t4, 4 hosts
            ethernet10"`, `"8 h100, 2 hosts 8 ib400"`. Without a link inside, it is the usual one.

    Raises:
        UsageError: Anything else, with what is right.
    """
    here, comma, rest = text.lower().partition(",")
    per_host, words = _counted(here, text)
    if len(words) > 2:
        raise _wrong(text, f'"{" ".join(words[2:])}" is one word too many')
    accelerator = _known(words[0], ACCELERATORS, "accelerator", text)
    inside = {word: LINKS[word] for word in INSIDE_HOSTS}
    link = _known(words[1] if len(words) > 1 else accelerator.link, inside, "link in a host", text)
    require_link(accelerator, words[-1], text)
    if not comma:
        return Machine(accelerator, per_host, 1, link)
    hosts, words = _counted(rest, text)
    if words.pop(0) not in ("hosts", "host") or not words:
        raise _wrong(text, 'behind the comma stand hosts and their link: "2 hosts ib400"')
    nics = int(words.pop(0)) if words[0].isdecimal() and len(words) > 1 else 1
    if len(words) > 1 or nics < 1:
        raise _wrong(text, f'"{rest.strip()}" is not a number of hosts and one link')
    nic = _known(words[0], {word: LINKS[word] for word in BETWEEN_HOSTS}, "link of hosts", text)
    return Machine(accelerator, per_host, hosts, link, nic if hosts > 1 else None, nics)


def require_link(accelerator: Accelerator, word: str, text: str) -> None:
    """Refuse a link in a host that does not join such accelerators.

    Theirs does, and PCIe: up to its own generation where that is theirs.

    Raises:
        UsageError: It is another one.
    """
    buses = [one for one in INSIDE_HOSTS if one.startswith("pcie")]
    if accelerator.link in buses:
        buses = buses[: buses.index(accelerator.link)]
    if word in INSIDE_HOSTS and word not in (joins := [*buses, accelerator.link]):
        why = f"{accelerator.name} has no {LINKS[word].name}; in a host it takes {', '.join(joins)}"
        raise _wrong(text, why)


def words_after(text: str) -> tuple[str, ...]:
    """Return the words that may come next in a text for `parse_machine`, for Tab."""
    here, comma, rest = text.lower().partition(",")
    count = len((rest if comma else here).split())
    if not comma:
        return ((), tuple(ACCELERATORS), INSIDE_HOSTS)[count] if count < 3 else ()
    return ((), ("hosts",), BETWEEN_HOSTS, BETWEEN_HOSTS)[count] if count < 4 else ()


def _counted(part: str, text: str) -> tuple[int, list[str]]:
    found = _PART.fullmatch(part.strip())
    if found is None or int(found["count"]) < 1:
        raise _wrong(text, f'"{part.strip()}" does not begin with a number from 1 on')
    return int(found["count"]), found["words"].split()


def _known(word: str, known: Mapping[str, _Known], what: str, text: str) -> _Known:
    if word not in known:
        raise _wrong(text, f'no {what} is called "{word}"; known are {", ".join(known)}')
    return known[word]


def _wrong(text: str, why: str) -> UsageError:
    return UsageError(f'"{text}" is no machine.', why=why, do=f'such as "{EXAMPLE}"')
