"""The environment of a rank: what `torchrun` sets, and what libraries look for.

Each line has a reason, found by running Accelerate, Lightning, Fabric, transformers' Trainer
and torchmetrics unmodified in live engines.
"""

import functools
import os
import random
import sys
from collections.abc import Mapping
from typing import Any

from nbdist.engine.compat import on_import
from nbdist.engine.kernel import location
from nbdist.errors import UsageError
from nbdist.options import ClusterOptions
from nbdist.placement import Place


def rank_variables(rank: int, options: ClusterOptions, place: Place) -> dict[str, str]:
    """Return what a rank has in its environment.

    Args:
        rank: Global rank.
        place: Where it is, which numbers it on its host.
        options: Of the cluster. Its `threads` keep ranks from competing for cores.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(options.n),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(options.n),
        "ROLE_NAME": "default",
        # Lightning picks its TorchElasticEnvironment by this, and then leaves our variables be.
        "TORCHELASTIC_RUN_ID": "nbdist",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": str(options.threads),
        "MKL_NUM_THREADS": str(options.threads),
        "OPENBLAS_NUM_THREADS": str(options.threads),
    }
    if options.device == "cpu":
        # Without it Accelerate and transformers' Trainer silently train undistributed on CPU.
        variables["ACCELERATE_USE_CPU"] = "true"
    return variables


def group_variables(store_host: str, store_port: int) -> dict[str, str]:
    """Return how `env://` finds the store, which no rank hosts."""
    return {
        "MASTER_ADDR": store_host,
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def restore(variables: Mapping[str, str]) -> None:
    """Set the variables; after each cell as well, for some libraries delete them."""
    os.environ.update(variables)


def seed_anew(rank: int) -> None:
    """Give each rank random numbers of its own: forks begin with their parent's state."""
    import torch

    seed = int.from_bytes(os.urandom(4), "little")
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed((seed + rank) % 2**32)


def refuse_forked_ranks() -> None:
    """Make launchers for notebooks say what to do here, where they would wait for ever.

    Lightning's `ddp_notebook`, Accelerate's `notebook_launcher` and the like fork the ranks they
    want to have. A rank is one of the ranks already, and a process with its threads and
    connections must not fork another. What spawns fresh interpreters, and DataLoader's workers,
    are left alone.
    """
    from torch import multiprocessing

    native: Any = multiprocessing.start_processes

    @functools.wraps(native)
    def start_processes(
        fn: Any,
        args: Any = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        if start_method == "fork":
            raise _forks(nprocs)
        return native(fn, args, nprocs, join, daemon, start_method)

    multiprocessing.start_processes = start_processes
    on_import.adapt("accelerate.launchers", _refuse_notebook_launcher)


def _refuse_notebook_launcher(module: Any) -> None:
    """Speak before it does: it blames an Accelerator that was made, or torch's elastic agent."""

    @functools.wraps(module.notebook_launcher)
    def notebook_launcher(
        function: Any, args: Any = (), num_processes: int | None = None, *_: Any, **__: Any
    ) -> Any:
        raise _forks(num_processes)

    module.notebook_launcher = notebook_launcher


def _forks(count: int | None) -> UsageError:
    more = f"{count} more ranks" if count else "ranks"
    return UsageError(
        f"A rank cannot fork {more}: {location.name_running()} already runs on every rank.",
        do="use the library's ordinary way, such as Lightning's strategy=\"ddp\" instead of "
        '"ddp_notebook", or call the function yourself, with Accelerator() in it, instead of '
        "giving it to notebook_launcher",
    )
