"""What a cluster is started with: one value, from `%dist start` to each rank. Standard library."""

import ipaddress
import os
from dataclasses import dataclass
from typing import Any

from nbdist.errors import StartError, UsageError
from nbdist.formatting import counted

LOOPBACK = "127.0.0.1"
OWNER_LOCK = "owner.lock"  # in a controller's folder, held while anybody needs it
MOST_RANKS_A_CORE = 64
_DEVICES = ("cpu", "cuda")
_TAPS = ("off", "counts", "full")
_CHECKS = ("shared", "store", "off")


TIMEOUT_S = 1800.0  # torch's own


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What a cluster is started with. It checks itself when made, in the notebook and on a rank.

    Attributes:
        n: Number of ranks, from 1.
        device: "cpu" or "cuda".
        backend: As in `init_process_group`.
        threads: CPU threads of each rank, from 1.
        timeout: Longest wait inside one collective, in seconds.
        tap: How much is measured of each collective: "off", "counts" or "full".
        hooks: Whether training is watched.
        grad_norm: Whether the norm of gradients is, too.
        quiet: Seconds without progress after which a cell explains itself; 0 for never.
        check: How collectives are compared before they are sent: "shared" (memory of a host),
            "store" (between hosts too, slowly) or "off".
        peer_snapshots: Steps between two snapshots that ranks keep in each other's memory; 0: none.
        address: IPv4 address on which all that belongs to the cluster listens.

    Raises:
        UsageError: A word or a number makes no sense.
    """

    n: int
    device: str
    backend: str
    threads: int
    timeout: float = TIMEOUT_S
    tap: str = "full"
    hooks: bool = True
    grad_norm: bool = False
    quiet: float = 10.0
    check: str = "shared"
    peer_snapshots: int = 0
    address: str = LOOPBACK

    def __post_init__(self) -> None:
        """Refuse what makes no sense on any machine."""
        _require_word("device", self.device, _DEVICES)
        _require_word("tap", self.tap, _TAPS)
        _require_word("check", self.check, _CHECKS)
        if self.n < 1:
            raise UsageError(f"-n is the number of ranks, at least 1, not {self.n}.")
        if self.threads < 1:
            raise UsageError(f"threads is at least 1, not {self.threads}.")
        if not self.timeout > 0:
            raise UsageError(f"timeout is a number of seconds above 0, not {self.timeout:g}.")
        if not self.quiet >= 0:
            raise UsageError(f"quiet is a number of seconds, 0 for never, not {self.quiet:g}.")
        if self.peer_snapshots < 0:
            raise UsageError(
                f"--peer-snapshots is a number of steps, 0 for never, not {self.peer_snapshots}."
            )

    def __str__(self) -> str:
        """Return one line, such as `4 ranks on cpu, gloo`."""
        text = f"{counted(self.n, 'rank')} on {self.device}, {self.backend}"
        if is_loopback(self.address):
            return text
        return f"{text}, open to the network on {self.address}"


def choose_options(
    gpus: int,
    *,
    n: int | None,
    device: str | None,
    backend: str | None,
    threads: int | None,
    slots: int | None = None,
    threads_a_rank: int | None = None,
    **rest: Any,
) -> ClusterOptions:
    """Return the options for a machine with this number of GPUs; None stands for its own choice.

    Args:
        gpus: GPUs this machine has, or the hosts have together.
        n: Number of ranks: by default the GPUs, else 2; on several hosts, their slots.
        device: By default "cuda" where there are GPUs.
        backend: "gloo", "nccl" or None, for what the device calls for.
        threads: CPU threads of each rank: by default the cores divided by the ranks.
        slots: Ranks that several hosts take; None on one machine.
        threads_a_rank: CPU threads that a rank may have on each of several hosts.
        rest: Other fields of `ClusterOptions`.

    Raises:
        StartError: More ranks than GPUs, with the choice offered.
        UsageError: A word or a number makes no sense.
    """
    if backend is not None:
        _require_word("backend", backend, ("gloo", "nccl"))
    device = device or ("cuda" if gpus else "cpu")
    if n is None:
        n = slots or (gpus if device == "cuda" and gpus else 2)
    if threads is None:
        threads = threads_a_rank or max(1, _cores() // max(1, n))
    if slots is not None and n > slots:
        raise UsageError(f"-n {n} is too many for these hosts: they take {counted(slots, 'rank')}.")
    options = ClusterOptions(
        n=n,
        device=device,
        backend=backend or ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"),
        threads=threads,
        **rest,
    )
    most = MOST_RANKS_A_CORE * (os.cpu_count() or 1)
    if slots is None and n > most:
        raise UsageError(f"-n {n} is too many for this machine; use at most {most}.")
    if backend == "nccl" and device == "cpu":
        raise UsageError("backend nccl needs device cuda; on the CPU it is gloo.")
    if device == "cuda" and backend != "gloo" and gpus < n:
        raise StartError(
            f"{n} ranks need {n} GPUs, and this machine has {gpus}.",
            why="with nccl each rank has a GPU of its own.",
            do=(f"%dist start -n {gpus}   or   " if gpus else "")
            + f"%dist start -n {n} --device cpu",
        )
    return options


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    return ipaddress.ip_address(address).is_loopback


def _require_word(name: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        # Named as in Python: %dist start, %config and nbdist.init(), in a script, all give it.
        *most, last = [f'"{known}"' for known in words]
        raise UsageError(f"{name} is {', '.join(most)} or {last}, not {word!r}.")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
