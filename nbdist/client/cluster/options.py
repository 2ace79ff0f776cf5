"""Decide what a cluster is started with: pure, from what was asked and what the machine has."""

import os
from dataclasses import dataclass

from nbdist.client.cluster.network import LOOPBACK, is_loopback
from nbdist.errors import StartError, UsageError

MOST_RANKS_A_CORE = 64
CHECKS = ("shared", "store", "off")


@dataclass(frozen=True, slots=True)
class Options:
    """What a cluster is started with.

    `device` is cpu or cuda, `backend` what `init_process_group` gets, `threads` the number of
    CPU threads of each rank, `collective_timeout_s` the longest wait inside one collective.
    `quiet_s` is the time without progress after which a cell explains itself; 0: never.
    `check` is how collectives are compared before they are sent.
    """

    n: int
    device: str
    backend: str
    threads: int
    collective_timeout_s: float = 1800.0
    tap: str = "full"
    hooks: bool = True
    quiet_s: float = 10.0
    check: str = "shared"
    grad_norm: bool = False
    address: str = LOOPBACK

    def __str__(self) -> str:
        """Return one line, such as `4 ranks on cpu, gloo`."""
        ranks = "1 rank" if self.n == 1 else f"{self.n} ranks"
        text = f"{ranks} on {self.device}, {self.backend}"
        return (
            text if is_loopback(self.address) else f"{text}, open to the network on {self.address}"
        )


def choose_options(
    n: int | None,
    gpus: int,
    device: str | None,
    backend: str | None,
    threads: int | None,
    timeout: float,
    tap: str,
    hooks: bool = True,
    quiet: float = 10.0,
    check: str = "shared",
    grad_norm: bool = False,
) -> Options:
    """Fill in what was not asked for, and refuse what cannot be.

    Args:
        n: Ranks asked for.
        gpus: GPUs this machine has.
        device: As in `start`, like the rest.
        backend: See `device`.
        threads: See `device`.
        timeout: See `device`.
        tap: See `device`.
        hooks: See `device`.
        quiet: See `device`.
        check: See `device`.
        grad_norm: See `device`.

    Raises:
        StartError: More ranks than GPUs, with the choice offered.
        UsageError: A word or a number makes no sense.
    """
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device is cpu or cuda, not {device!r}.")
    if backend not in (None, "gloo", "nccl"):
        raise UsageError(f"--backend is gloo or nccl, not {backend!r}.")
    if tap not in ("off", "counts", "full"):
        raise UsageError(f"tap is off, counts or full, not {tap!r}.")
    if check not in CHECKS:
        raise UsageError(f"check is {', '.join(CHECKS[:-1])} or {CHECKS[-1]}, not {check!r}.")
    if quiet < 0:
        raise UsageError(f"quiet is a number of seconds, 0 for never, not {quiet:g}.")
    device = device or ("cuda" if gpus else "cpu")
    n = n if n is not None else (gpus if device == "cuda" and gpus else 2)
    if n < 1:
        raise UsageError(f"-n is the number of ranks, at least 1, not {n}.")
    most = MOST_RANKS_A_CORE * (os.cpu_count() or 1)
    if n > most:
        raise UsageError(f"-n {n} is more than this machine can carry; ask for at most {most}.")
    if timeout <= 0:
        raise UsageError(f"--timeout is a number of seconds above 0, not {timeout:g}.")
    if device == "cuda" and backend != "gloo" and gpus < n:
        raise StartError(
            f"{n} ranks need {n} GPUs, and this machine has {gpus}.",
            why="with nccl each rank has a GPU of its own.",
            do=(f"%dist start -n {gpus}   or   " if gpus else "")
            + f"%dist start -n {n} --device cpu",
        )
    if backend == "nccl" and device == "cpu":
        raise UsageError("--backend nccl needs --device cuda; on the CPU it is gloo.")
    backend = backend or ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = threads if threads is not None else max(1, (cores or 1) // n)
    if threads < 1:
        raise UsageError(f"--threads is at least 1, not {threads}.")
    return Options(n, device, backend, threads, timeout, tap, hooks, quiet, check, grad_norm)
