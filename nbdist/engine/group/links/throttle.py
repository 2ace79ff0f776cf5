"""Emulate a slow link, without privileges: `nbdist.emulate_link`. Main thread.

Linux paces a TCP connection when its socket has a rate, on loopback too. So what a
rank sends through gloo can be as slow as through a network of that rate; NCCL, the store and
ipyparallel are not touched. No socket delays what it sends: latency is added by the tap, to the end
of each collective for its rounds. Messages of send and recv have none.
"""

import math

from nbdist.engine.group import sockets, state
from nbdist.engine.group.links import tcp_info
from nbdist.engine.tap import in_flight
from nbdist.shared.errors import ClusterError, UsageError
from nbdist.shared.virtual import VirtualMachine


def emulate_link(bytes_per_s: float | None, latency_s: float = 0.0) -> None:
    """Let this rank send at most so many bytes a second to each peer; None lifts it.

    It applies to all groups, those made later and those after a fault included. A rank whose
    process was replaced sends at full speed again.

    Args:
        bytes_per_s: For each connection, such as `125e6` for 1 Gbit/s.
        latency_s: What each round of a collective takes longer, from 0 on. The tap adds it.

    Raises:
        UsageError: That is no rate, or no latency; or the tap is off, and a latency asked for.
        ClusterError: This rank is in no group, has no gloo, or its system cannot.
    """
    if bytes_per_s is not None and not _is_rate(bytes_per_s):
        raise UsageError(
            f"emulate_link takes bytes per second, at least 1, or None, not {bytes_per_s!r}."
        )
    if isinstance(latency_s, bool) or not 0 <= latency_s < math.inf:
        raise UsageError(f"emulate_link takes a latency in seconds, 0 or more, not {latency_s!r}.")
    if latency_s and in_flight.state.level == "off":
        raise UsageError("A latency is emulated by the tap, and that is off.")
    backend = state.here.member().backend
    if "gloo" not in backend:
        raise ClusterError(
            "No link can be emulated here.",
            why=f"this group's backend is {backend}, and only gloo sends through TCP.",
            do="%dist start --device cpu",
        )
    try:
        here.pace(bytes_per_s, latency_s)
    except OSError as error:
        raise ClusterError("No link can be emulated on this system.", why=str(error)) from error


class EmulatedLink:
    """The rate at which this rank sends, if one was set."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._is_used = False

    def pace(self, bytes_per_s: float | None, latency_s: float = 0.0) -> None:
        """Send at this rate from now on, if the system can, with this latency."""
        before, self._rate = self._rate, bytes_per_s
        self._is_used = True
        try:
            self.apply()
        except OSError:
            self._rate = before
            raise
        in_flight.state.latency_s = latency_s

    def stand_for(self, machine: VirtualMachine | None) -> None:
        """Send like a virtual machine, if there is one, in groups that are made from here on."""
        if machine is not None:
            self.pace(machine.bytes_here, machine.latency_here)

    def apply(self) -> None:
        """Pace the connections of groups that were just made, if a rate is set."""
        place = state.here.place()
        if place is None or not self._is_used:
            return
        for pair in sockets.pairs(place.address, place.peers):
            pair.use(lambda s: tcp_info.pace(s, self._rate))


def _is_rate(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 1


here = EmulatedLink()
