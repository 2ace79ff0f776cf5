"""What a cluster is started with: one value, from `%dist start` to each rank. Standard library.

An option is a field of a dataclass, made by `option`: its text and its default stand there alone.
"""

import argparse
import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from nbdist.shared import gpu_errors
from nbdist.shared.errors import StartError, UsageError
from nbdist.shared.text import counted
from nbdist.shared.virtual import VirtualMachine

LOOPBACK = "127.0.0.1"
HASH_SEED = "0"  # PYTHONHASHSEED of ranks, where a notebook on one machine has no other
# What `%dist scaling` starts ranks with: after how many steps they end, where they leave the time
# of a short collective, and by what `nbdist.loader` multiplies its batch.
STEPS, LATENCY, BATCH_TIMES = "NBDIST_STEPS", "NBDIST_LATENCY", "NBDIST_BATCH_TIMES"
VIRTUAL = "NBDIST_VIRTUAL"  # the option, for a script's ranks
MOST_RANKS_A_CORE = 64
DEVICES = ("cpu", "cuda")
BACKENDS = ("gloo", "nccl")
ANIMATIONS = ("pipeline", "ring", "shards")
_TAPS = ("off", "counts", "full")
_CHECKS = ("shared", "store", "off")
_OPTION = "nbdist option"  # in a field's metadata


TIMEOUT_S = 1800.0  # torch's own
SHARED_NCCL = "NCCL_MULTI_RANK_GPU_ENABLE"  # of newer NCCL; older ones say "Duplicate GPU detected"
ONE_GPU_A_RANK = (
    f"NCCL refuses two ranks on one GPU, unless {SHARED_NCCL}=1 is set where the ranks start, "
    "which newer NCCL takes."
)


class Parser(argparse.ArgumentParser):
    """argparse that takes options by their whole names, and says what is no number."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about, allow_abbrev=False)
        self.register("type", int, read_whole)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a start, of which its parameter, flag, trait and documentation are made.

    Attributes:
        name: Of the parameter.
        hint: Its type, which says how a flag is read. `bool | str` is a flag that may have a value,
            a sequence one that may be repeated.
        default: Where nothing is given.
        help: As `--help` shows it: a phrase without a full stop.
        more: What documentation adds: whole sentences.
        metavar: What stands for the value in `--help`: its unit, or what it is.
        choices: The words that it takes, if these are few.
        read: Reads the word after the flag, where the type alone would take too much.
        flag: Whether `%dist start` has it.
        trait: Whether `%config NBDist` has it.
    """

    name: str
    hint: Any
    default: Any
    help: str = ""
    more: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None
    flag: bool = True
    trait: bool = True

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that a value may have beside None."""
        is_union = get_origin(self.hint) in (Union, UnionType)
        return tuple(t for t in (get_args(self.hint) if is_union else [self.hint]) if t != NoneType)

    @property
    def text(self) -> str:
        """The whole documentation, in one line."""
        return f"{self.help}. {self.more}".strip()


def option(default: Any, help: str, more: str = "", **shown: Any) -> Any:
    """Return a field of a dataclass of options.

    Args:
        default: Where nothing is given.
        help: As `--help` shows it; see `Option`.
        more: What documentation adds.
        shown: More of `Option`: `metavar`, `choices`, `read`, `flag`, `trait`.
    """
    return field(default=default, metadata={_OPTION: {"help": help, "more": more, **shown}})


def same_option(owner: type, name: str) -> Any:
    """Return a field that is the same option as another dataclass's field of this name."""
    (found,) = (one for one in fields(owner) if one.name == name)
    return field(default=found.default, metadata=found.metadata)


def options_of(owner: type) -> dict[str, Option]:
    """Return the options that are a dataclass's fields, by name."""
    hints = get_type_hints(owner)
    return {
        one.name: Option(one.name, hints[one.name], one.default, **one.metadata.get(_OPTION, {}))
        for one in fields(owner)
    }


def flag_of(name: str) -> str:
    """Return how an option is written on a magic's line: `-n`, `--pod-wait`."""
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


def read_whole(text: str) -> int:
    """Return a whole number as typed after a flag."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a whole number, not {text!r}") from None


def read_seconds(text: str) -> float:
    """Return seconds as typed after a flag, such as `2.5` or `60s`."""
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, not {text!r}")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What a cluster is started with. It checks itself when made, in the notebook and on a rank.

    Attributes:
        n: Number of ranks, from 1.
        device: "cpu" or "cuda".
        backend: As in `init_process_group`.
        threads: CPU threads of each rank, from 1.
        address: IPv4 address on which all that belongs to the cluster listens.

    The other fields say themselves what they are.

    Raises:
        UsageError: A word or a number makes no sense. Named as in Python: `%dist start`, `%config`
            and `nbdist.init()`, in a script, all give it.
    """

    n: int
    device: str
    backend: str
    threads: int
    timeout: float = option(
        TIMEOUT_S, "timeout of one collective, in seconds", metavar="SECONDS", read=read_seconds
    )
    peer_snapshots: int = option(
        0,
        "keep each rank's sharded state in another rank's memory, every so many steps",
        "A rank that dies is then replaced with its part. 0: never.",
        metavar="STEPS",
    )
    tap: str = option(
        "full",
        "how much is measured of each collective: off, counts or full",
        choices=_TAPS,
        flag=False,
    )
    hooks: bool = option(
        True,
        "watch steps, loss and data time",
        "Off, nothing of it is left in torch, and only `nbdist.log` begins a run.",
        flag=False,
    )
    grad_norm: bool = option(
        False,
        "measure the norm of the gradients at each step, without a collective",
        flag=False,
    )
    quiet: float = option(
        10.0,
        "seconds without any progress after which a cell says what each rank does and whom it "
        "waits for; 0 for never",
        flag=False,
    )
    check: str = option(
        "shared",
        "how each collective is compared with the other ranks' before it is sent",
        "`shared`, through memory of this machine, costs microseconds; `store`, through the ranks' "
        "store, also reaches ranks on other machines, and lets every collective wait for all; "
        "`off`: not at all.",
        choices=_CHECKS,
        flag=False,
    )
    virtual: str | None = option(
        None,
        'let each rank stand for a device and its links: "2 GFLOP/s, 100 Mbit/s"',
        "Computation and gloo's messages then take the time that they take there, and all that is "
        "shown is emulated. Names of accelerators and links are known, such as `h100, nvlink4`; a "
        "third part, `1000000x slower`, slows both.",
        metavar="DEVICE,LINK",
    )
    address: str = LOOPBACK

    def __post_init__(self) -> None:
        """Refuse what makes no sense on any machine."""
        if self.machine is not None and self.device != "cpu":
            raise UsageError("virtual devices are emulated on the CPU: use device cpu.")
        require_word("device", self.device, DEVICES)
        require_word("tap", self.tap, _TAPS)
        require_word("check", self.check, _CHECKS)
        if self.machine is not None and self.machine.latency_s and self.tap == "off":
            raise UsageError("a virtual link's latency is emulated by the tap, and that is off.")
        _require_ranks(self.n)
        if not is_whole(self.threads, 1):
            raise UsageError(f"threads is at least 1, not {self.threads!r}.")
        if not (is_number(self.timeout) and self.timeout > 0):
            raise UsageError(f"timeout is a number of seconds above 0, not {self.timeout!r}.")
        if not (is_number(self.quiet) and self.quiet >= 0):
            raise UsageError(f"quiet is a number of seconds, 0 for never, not {self.quiet!r}.")
        if not is_whole(self.peer_snapshots):
            raise UsageError(
                f"peer_snapshots is a number of steps, 0 for never, not {self.peer_snapshots!r}."
            )

    @property
    def machine(self) -> VirtualMachine | None:
        """What each rank stands for; None where it is this machine."""
        return None if self.virtual is None else VirtualMachine.read(self.virtual)

    def __str__(self) -> str:
        """Return one line, such as `4 ranks on cpu, gloo`."""
        text = f"{counted(self.n, 'rank')} on {self.device}, {self.backend}"
        if self.machine is not None:
            text += f", emulated: {self.machine.told()}"
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
        require_word("backend", backend, BACKENDS)
    if n is not None:
        _require_ranks(n)
    device = device or ("cuda" if gpus and not rest.get("virtual") else "cpu")
    if n is None:
        n = slots or (gpus if device == "cuda" and gpus else 2)
    if threads is None:
        threads = threads_a_rank or max(1, _cores() // max(1, n))
    if slots is not None and n > slots:
        raise UsageError(f"n={n} is too many for these hosts: they take {counted(slots, 'rank')}.")
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
        raise UsageError(f"n={n} is too many for this machine; use at most {most}.")
    _require_gpus(options, gpus, gpus if gpus_each is None else gpus_each, no_gpu)
    return options


def default_backend(device: str, n: int, gpus: int) -> str:
    """Return what carries the collectives of `n` ranks where none was asked for."""
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


def cores_note(options: ClusterOptions, cores: float) -> str:
    """Return what to know where ranks share the cores of this machine, or nothing where none does.

    Args:
        options: With which they start.
        cores: That they may use together; a container's quota may be a fraction.
    """
    if options.device != "cpu" or options.n <= cores:
        return ""
    share = Fraction(cores).limit_denominator(10) / options.n
    there = counted(int(cores), "core") if cores == int(cores) else f"{cores:.1f} cores"
    return f"{counted(options.n, 'rank')} on {there}: each gets {share} of a core."


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
        raise UsageError(f"n is the number of ranks, at least 1, not {n!r}.")


def read_word(name: str, words: tuple[str, ...], text: str) -> str:
    """Return one of these words as typed after a flag; raises as `require_word`."""
    require_word(name, text, words)
    return text


def require_word(name: str, word: object, words: tuple[str, ...]) -> None:
    """Refuse a word that is none of these.

    Raises:
        UsageError: It is none; one line says what there is.
    """
    if word not in words:
        *most, last = [f'"{known}"' for known in words]
        raise UsageError(f"{name} is {', '.join(most)} or {last}, not {word!r}.")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether that is a whole number, `least` or more; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether that is a number; True and False are none, and neither is NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) == float(value)
