"""What a cluster is started with: one value, from `%dist start` to each rank. Standard library."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbdist import gpu_errors
from nbdist.errors import StartError, UsageError
from nbdist.formatting import counted
from nbdist.given import is_number, is_whole

LOOPBACK = "127.0.0.1"
OWNER_LOCK = "owner.lock"  # in a controller's folder, held while anybody needs it
MOST_RANKS_A_CORE = 64
_DEVICES = ("cpu", "cuda")
_TAPS = ("off", "counts", "full")
_CHECKS = ("shared", "store", "off")


TIMEOUT_S = 1800.0  # torch's own
SHARED_NCCL = "NCCL_MULTI_RANK_GPU_ENABLE"  # of newer NCCL; older ones say "Duplicate GPU detected"
ONE_GPU_A_RANK = (
    f"NCCL refuses two ranks on one GPU, unless {SHARED_NCCL}=1 is set where the ranks start, "
    "which newer NCCL takes."
)


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
        require_word("device", self.device, _DEVICES)
        require_word("tap", self.tap, _TAPS)
        require_word("check", self.check, _CHECKS)
        _require_ranks(self.n)
        if not is_whole(self.threads, 1):
            raise UsageError(f"threads is at least 1, not {self.threads!r}.")
        if not (is_number(self.timeout) and self.timeout > 0):
            raise UsageError(f"timeout is a number of seconds above 0, not {self.timeout!r}.")
        if not (is_number(self.quiet) and self.quiet >= 0):
            raise UsageError(f"quiet is a number of seconds, 0 for never, not {self.quiet!r}.")
        if not is_whole(self.peer_snapshots):
            raise UsageError(
                f"--peer-snapshots is a number of steps, 0 for never, not {self.peer_snapshots!r}."
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
    gpus_each: int | None = None,
    threads_a_rank: int | None = None,
    no_gpu: str = "",
    **rest: Any,
) -> ClusterOptions:
    """Return the options for a machine with this number of GPUs; None stands for its own choice.

    Args:
        gpus: GPUs this machine has, or the hosts have together.
        n: Number of ranks: by default the GPUs, else 2; on several hosts, their slots.
        device: By default "cuda" where there are GPUs.
        backend: "gloo", "nccl" or None, for what the device calls for: nccl, or gloo where ranks
            share a GPU.
        threads: CPU threads of each rank: by default the cores divided by the ranks.
        slots: Ranks that several hosts take; None on one machine.
        gpus_each: GPUs of the host that has fewest; None on one machine.
        threads_a_rank: CPU threads that a rank may have on each of several hosts.
        no_gpu: What torch says of why there is no GPU.
        rest: Other fields of `ClusterOptions`.

    Raises:
        StartError: There is no GPU that can be used, or too few for the backend, with the choice
            offered.
        UsageError: A word or a number makes no sense.
    """
    if backend is not None:
        require_word("backend", backend, ("gloo", "nccl"))
    if n is not None:
        _require_ranks(n)
    device = device or ("cuda" if gpus else "cpu")
    if n is None:
        n = slots or (gpus if device == "cuda" and gpus else 2)
    if threads is None:
        threads = threads_a_rank or max(1, _cores() // max(1, n))
    if slots is not None and n > slots:
        raise UsageError(f"-n {n} is too many for these hosts: they take {counted(slots, 'rank')}.")
    if backend == "nccl" and device == "cpu":
        raise UsageError("backend nccl needs device cuda; on the CPU it is gloo.")
    options = ClusterOptions(
        n=n,
        device=device,
        backend=backend or default_backend(device, n, gpus),
        threads=threads,
        **rest,
    )
    most = MOST_RANKS_A_CORE * (os.cpu_count() or 1)
    if slots is None and n > most:
        raise UsageError(f"-n {n} is too many for this machine; use at most {most}.")
    _require_gpus(options, gpus, gpus if gpus_each is None else gpus_each, no_gpu)
    return options


def default_backend(device: str, n: int, gpus: int) -> str:
    """Return what carries the collectives of `n` ranks where nobody has said it."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" and n <= gpus else "gloo"


def may_share_gpus(backend: str, environ: Mapping[str, str]) -> bool:
    """Return whether ranks may share a GPU: over gloo, or where NCCL is told to allow it."""
    return "nccl" not in backend or environ.get(SHARED_NCCL) == "1"


def sharing_note(options: ClusterOptions, gpus: int) -> str:
    """Return what to know where ranks share a GPU, or nothing where none does.

    Args:
        options: With which they start.
        gpus: As in `choose_options`.
    """
    if options.device != "cuda" or options.n <= gpus:
        return ""
    over = (
        f"nccl, as {SHARED_NCCL}=1 allows"
        if "nccl" in options.backend
        else "gloo, because NCCL refuses two ranks on one GPU"
    )
    return (
        f"{counted(options.n, 'rank')} share {counted(gpus, 'GPU')}, over {over}. "
        "Ranks on one GPU take turns: times here are no forecast for one GPU a rank."
    )


def _require_gpus(options: ClusterOptions, gpus: int, gpus_each: int, no_gpu: str) -> None:
    n, fewer = options.n, f"%dist start -n {gpus}   or   " if gpus else ""
    if options.device != "cuda" or n <= gpus:
        return
    if not gpus and no_gpu:
        known = gpu_errors.explain(no_gpu)
        raise StartError(
            "No GPU can be used here.",
            why=f"{known.why} ({no_gpu})" if known else no_gpu,
            do=(known and known.do) or f"%dist start -n {n} --device cpu",
        )
    if not gpus_each:
        raise StartError(
            f"{counted(n, 'rank')} on cuda need GPUs, and "
            + ("one of the hosts has none." if gpus else "there are none that torch can use."),
            do=f"{fewer}%dist start -n {n} --device cpu",
        )
    if not may_share_gpus(options.backend, os.environ):
        raise StartError(
            f"{n} ranks need {n} GPUs with nccl, and there {'is' if gpus == 1 else 'are'} {gpus}.",
            why=ONE_GPU_A_RANK,
            do=f"{fewer}%dist start -n {n} --backend gloo   or   %dist start -n {n} --device cpu",
        )


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    return ipaddress.ip_address(address).is_loopback


def _require_ranks(n: object) -> None:
    if not is_whole(n, 1):
        raise UsageError(f"-n is the number of ranks, at least 1, not {n!r}.")


def require_word(name: str, word: object, words: tuple[str, ...]) -> None:
    """Refuse a word that is none of these.

    Raises:
        UsageError: It is none; one line says what there is.
    """
    if word not in words:
        # Named as in Python: %dist start, %config and nbdist.init(), in a script, all give it.
        *most, last = [f'"{known}"' for known in words]
        raise UsageError(f"{name} is {', '.join(most)} or {last}, not {word!r}.")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
