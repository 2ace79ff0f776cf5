"""What every way of starting engines offers to the cluster, and how one is found by name.

An installed package offers one as an entry point of the group `nbdist.launchers`: a callable that
takes the folder of the logs and a `LaunchOptions`, and returns a `Launcher`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from nbdist.ended import Ended
from nbdist.errors import StartError, UsageError
from nbdist.placement import HERE, Place
from nbdist.ranks import name_ranks

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


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What `%dist start` says of hosts.

    Attributes:
        hosts: As typed, such as `a:2,b:2`, or a file of hosts.
        trust_network: The person accepts that torch authenticates nobody on the network.
        n: Ranks in all, if the person said so.
        nodes: Nodes of Slurm's, or pods.
        gpus_per_node: GPUs of each node or pod, and ranks there.
        partition: Slurm's.
        time_limit: As Slurm reads it: minutes, or `1-12:00:00`.
        sbatch: More options of Slurm's, or files with `#SBATCH` lines.
        image: Of pods.
        namespace: Of pods; "" for that of the cluster's configuration.
        pod_template: A file with a pod, which says the rest.
        pod_wait_s: How long pods may be without a node.
    """

    hosts: str = ""
    trust_network: bool = False
    n: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    partition: str = ""
    time_limit: str = ""
    sbatch: tuple[str, ...] = ()
    image: str = ""
    namespace: str = ""
    pod_template: str = ""
    pod_wait_s: float = 20.0

    def require_meaning(self, launcher: str) -> None:
        """Refuse options that a launcher of nbdist's would ignore.

        Raises:
            UsageError: There is such an option.
        """
        nodes = {
            "--nodes": self.nodes,
            "--gpus-per-node": self.gpus_per_node,
            "--time": self.time_limit,
        }
        slurms = {"--partition": self.partition, "--sbatch": self.sbatch}
        pods = {
            "--image": self.image,
            "--namespace": self.namespace,
            "--pod-template": self.pod_template,
        }
        for options, takers in (
            (nodes, (SLURM, KUBERNETES)),
            (slurms, (SLURM,)),
            (pods, (KUBERNETES,)),
        ):
            given = [name for name, value in options.items() if value]
            if given and launcher in OWN and launcher not in takers:
                raise UsageError(f"{given[0]} is for --launcher {takers[0]}, not {launcher}.")
        if self.hosts and launcher in (LOCAL, SLURM, KUBERNETES):
            raise UsageError(f"--hosts is for --launcher ssh or mpi, not {launcher}.")


@dataclass(frozen=True, slots=True)
class Started:
    """A process that has been started.

    Attributes:
        pid: On its host.
        port: Of the one that listens (the store).
        host: As it is shown.
        is_here: It runs on the notebook's machine, where its pid names it.
    """

    pid: int
    port: int | None = None
    host: str = HERE
    is_here: bool = True


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
    The processes' own output goes into files in `logs`, which may be changed at any time.
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

        It waits while torch's import gets on (`cluster/patience.py`), and says so now and then.

        Keys: `gpus` (how many there are), `no_gpu` (what torch says where there is none), `forks`
        (ranks begin with torch imported), and `why` they do not. With several hosts also `hosts`
        (how many take ranks), `slots` (ranks that they take), `gpus_each` (GPUs of the host that
        has fewest), `threads_a_rank` (CPU threads that
        each may have), and `notes` (sentences for the person).

        Raises:
            StartError: It ended, or gets on no further.
        """

    def places(self, n: int, address: str, *, crowded: bool = False) -> Mapping[int, Place]:
        """Return where each of `n` ranks is, or will be started; ranks that live stay.

        Args:
            n: Number of ranks.
            address: The cluster's.
            crowded: Hosts take more ranks than they should, for a moment.

        Raises:
            NoHostError: There are hosts for fewer ranks only.
        """

    def reopen(self) -> list[str]:
        """Try hosts again that were lost; return what came of each, in a sentence.

        May take as long as a login and an import of torch.
        """

    def start_soon(self, key: str, role: str, spec: Mapping[str, Any]) -> Future[Started]:
        """Ask for a process; the future resolves once it exists.

        It fails with a StartError where the process could not be started. Who waits for it says
        how long.

        Raises:
            StartError: There is nobody left to ask.
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
        """Call `callback(sentence)` on the launcher's thread: hosts are told to leave soon.

        The last callback counts. Ranks go on until their hosts are gone.
        """

    def rest(self) -> list[str]:
        """Keep nothing that the person would not expect after `%dist stop`.

        Returns:
            Sentences about what could not be reached, and may run on for a while.
        """

    def close(self) -> None:
        """End every process that is left, and the launcher itself."""


MakeLauncher = Callable[[Path, LaunchOptions], Launcher]


def find_launcher(name: str) -> MakeLauncher:
    """Return what makes the launcher of this name: one of nbdist's, or one that a package offers.

    Raises:
        UsageError: There is none, or it is one of ipyparallel's.
    """
    if name == LOCAL:
        from nbdist.client.cluster.launchers.local import LocalLauncher

        return lambda logs, _asked: LocalLauncher(logs)
    if name == SSH:
        from nbdist.client.cluster.launchers.ssh import make_launcher

        return make_launcher
    if name == SLURM:
        from nbdist.client.cluster.launchers import slurm

        return slurm.make_launcher
    if name == MPI:
        from nbdist.client.cluster.launchers import mpi

        return mpi.make_launcher
    if name == KUBERNETES:
        from nbdist.client.cluster.launchers import kubernetes

        return kubernetes.make_launcher
    offered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in offered:
        from nbdist.client.cluster.launchers.batch_systems import refusal

        if (refused := refusal(name)) is not None:
            raise refused
        known = ", ".join([LOCAL, *sorted([*OWN[1:], *offered])])
        raise UsageError(f"There is no launcher {name!r}.", do=f"use one of: {known}")
    made: MakeLauncher = offered[name].load()
    return made
