"""The interface of launchers, which start engines, and how one is found by name.

An installed package offers one as an entry point of the group `nbdist.launchers`: a callable that
takes the folder of the logs and a `LaunchOptions`, and returns a `Launcher`. A dataclass `Options`
in the same module, of fields made by `nbdist.shared.options.option`, has its options.
nbdist's launchers are found in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from nbdist.client.cluster.processes import Started
from nbdist.shared.errors import StartError, UsageError
from nbdist.shared.placement import RankPlacement
from nbdist.shared.processes.ended import Ended
from nbdist.shared.text import name_ranks

GROUP = "nbdist.launchers"
LOCAL = "local"
SSH = "ssh"
SLURM = "slurm"
MPI = "mpi"
KUBERNETES = "kubernetes"
OnExit = Callable[[str, Ended], None]
OWN = (LOCAL, SSH, SLURM, MPI, KUBERNETES)  # the launchers of nbdist's
DETACHABLE = (LOCAL, SSH)  # whose clusters may outlive the kernel
OnNotice = Callable[[str], None]


OwnOptions = TypeVar("OwnOptions")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a launcher that has no options."""


@dataclass(frozen=True, slots=True)
class LaunchOptions(Generic[OwnOptions]):
    """The options of a start, for the launcher.

    Attributes:
        own: The options of this launcher.
        n: Ranks in all, if the person said so.
        trust_network: The person accepts that torch authenticates no one on the network.
    """

    own: OwnOptions
    n: int | None = None
    trust_network: bool = False


class NoHostError(StartError):
    """The hosts that are left take fewer ranks than there are to be.

    Attributes:
        ranks: Those without a host.
        room: How many the hosts take.
    """

    def __init__(self, ranks: Sequence[int], room: int, why: str) -> None:
        """Tell that there are too few slots, and why."""
        super().__init__(
            f"There is no host for {name_ranks(ranks)}.",
            why=why,
            do="name a spare host in --hosts, or %dist scale to fewer ranks.",
        )
        self.ranks = tuple(ranks)
        self.room = room


class Launcher(Protocol):
    """Starts processes by key, sees them end, and signals them.

    Keys are `controller`, `store` and `rank 0`, `rank 1`, ...; one process a key at a time.
    The output of processes goes into files in `logs`, which may be changed at any time.
    """

    logs: Path

    @property
    def alive(self) -> bool:
        """Whether it can still start processes."""

    def meet(self, asked: str) -> str:
        """Return the address on which the cluster listens, found together with other hosts.

        Args:
            asked: An address of this machine; loopback where the person named none.

        Raises:
            StartError: A host cannot be used, or cannot be reached.
        """

    def ready(self, say: Callable[[str], None]) -> Mapping[str, Any]:
        """Wait until it can start ranks, and return what it found there.

        It waits while torch's import makes progress (`cluster/patience.py`), and reports it.

        Keys: `gpus` (how many there are), `no_gpu` (what torch says where there is none), `forks`
        (ranks begin with torch imported), and `why` they do not. With several hosts also `hosts`
        (how many take ranks), `slots` (ranks that they take), `gpus_each` (GPUs of the host that
        has fewest), `threads_a_rank` (CPU threads that
        each may have), and `notes` (sentences for the person).

        Raises:
            StartError: It ended, or makes no progress.
        """

    def places(self, n: int, address: str, *, crowded: bool = False) -> Mapping[int, RankPlacement]:
        """Return where each of `n` ranks is, or will be started; ranks that live stay.

        Args:
            n: Number of ranks.
            address: The cluster's.
            crowded: Hosts take more ranks than they should, for a moment.

        Raises:
            NoHostError: There are hosts for fewer ranks only.
        """

    def reopen(self) -> list[str]:
        """Try hosts again that were lost; return the outcome of each, in a sentence.

        May take as long as a login and an import of torch.
        """

    def start_soon(self, key: str, role: str, spec: Mapping[str, Any]) -> Future[Started]:
        """Ask for a process; the future resolves once it exists.

        It fails with a StartError where the process could not be started. Who waits for it says
        how long.

        Raises:
            StartError: No parent is left to ask.
        """

    def give_up(self) -> None:
        """End what is still being started as soon as it exists; its future fails."""

    def running(self) -> list[str]:
        """Return the keys of the processes that are running."""

    def signal(self, key: str, number: int, *, group: bool = False) -> None:
        """Send a signal to a process, or to its whole group; nothing if it has ended."""

    def on_exit(self, callback: OnExit) -> None:
        """Call `callback(key, ended)` on the launcher's thread: a process has ended."""

    def remove_on_exit(self, callback: OnExit) -> None:
        """Undo `on_exit`; nothing if it was not registered."""

    def on_notice(self, callback: OnNotice) -> None:
        """Call `callback(sentence)` on the launcher's thread: hosts will be shut down soon.

        The last callback counts. Ranks continue until their hosts are gone.
        """

    def rest(self) -> list[str]:
        """Keep nothing that the person would not expect after `%dist stop`.

        Returns:
            Sentences about what could not be reached, and may run on for a while.
        """

    def close(self) -> None:
        """End every process that is left, and the launcher itself."""


MakeLauncher = Callable[[Path, LaunchOptions[Any]], Launcher]


def find_launcher(name: str) -> MakeLauncher:
    """Return what makes the launcher of this name: one of nbdist's, or one that a package offers.

    Raises:
        UsageError: There is none, or it is one of ipyparallel's.
    """
    made: MakeLauncher = _entry(name).load()
    return made


def find_options(name: str) -> type:
    """Return the dataclass of a launcher's options.

    Raises:
        UsageError: There is no such launcher.
    """
    found: type = getattr(import_module(_entry(name).module), "Options", NoOptions)
    return found


def _entry(name: str) -> EntryPoint:
    if name in OWN:  # without a look at what is installed
        return EntryPoint(name, f"{__package__}.{name}:make_launcher", GROUP)
    offered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in offered:
        from nbdist.client.cluster.launchers.batch_systems import refusal

        if (refused := refusal(name)) is not None:
            raise refused
        known = ", ".join([LOCAL, *sorted([*OWN[1:], *offered])])
        raise UsageError(f"There is no launcher {name!r}.", do=f"use one of: {known}")
    return offered[name]
