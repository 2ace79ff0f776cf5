"""A slow link on purpose, without privileges: `nbdist.emulate_link`. Main thread.

Linux paces a TCP connection by itself when its socket is told a rate, on loopback too. So what a
rank sends through gloo can be as slow as through a network of that rate; NCCL, the store and
ipyparallel are not touched.
"""

import math

from nbdist.engine.group import sockets, state, tcp_info
from nbdist.errors import ClusterError, UsageError

_rate: float | None = None
_is_used = False


def emulate_link(bytes_per_s: float | None) -> None:
    """Let this rank send at most so many bytes a second to each peer; None lifts it.

    It holds for the groups there are and for those made later, also after a fault. A rank whose
    process was replaced sends at full speed again.

    Args:
        bytes_per_s: For each connection, such as `125e6` for 1 Gbit/s.

    Raises:
        UsageError: That is no rate.
        ClusterError: This rank is in no group, has no gloo, or its system cannot.
    """
    global _rate, _is_used
    if bytes_per_s is not None and not _is_rate(bytes_per_s):
        raise UsageError(
            f"emulate_link takes bytes per second, at least 1, or None, not {bytes_per_s!r}."
        )
    here = state.member()
    if "gloo" not in here.backend:
        raise ClusterError(
            "No link can be emulated here.",
            why=f"this group's backend is {here.backend}, and only gloo sends through TCP.",
            do="%dist start --device cpu",
        )
    before, _rate = _rate, bytes_per_s
    _is_used = True
    try:
        apply()
    except OSError as error:
        _rate = before
        raise ClusterError("No link can be emulated on this system.", why=str(error)) from error


def apply() -> None:
    """Pace the connections of groups that were just made, if that is asked for."""
    here = state.here()
    if here is None or not _is_used:
        return
    for pair in sockets.pairs(here.address, here.peers):
        pair.use(lambda s: tcp_info.pace(s, _rate))


def _is_rate(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 1
