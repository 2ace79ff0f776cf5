"""The environment of a rank: variables that `torchrun` sets, and those that libraries read.

Each line has a reason, found by running Accelerate, Lightning, Fabric, transformers' Trainer
and torchmetrics unmodified in live engines.
"""

import functools
import logging
import os
import random
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from nbdist.engine.compat.libraries import on_import
from nbdist.engine.kernel import location
from nbdist.shared.errors import UsageError
from nbdist.shared.options import ClusterOptions
from nbdist.shared.placement import RankPlacement


def rank_variables(rank: int, options: ClusterOptions, place: RankPlacement) -> dict[str, str]:
    """Return a rank's environment variables.

    Args:
        rank: Global rank.
        place: Its host, and its number there.
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
        # Lightning picks its TorchElasticEnvironment by this, and then keeps our variables.
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
    """Return the variables by which `env://` finds the store, which no rank hosts."""
    return {
        "MASTER_ADDR": store_host,
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def restore(variables: Mapping[str, str]) -> None:
    """Set the variables; after each cell too, for some libraries delete them."""
    os.environ.update(variables)


def seed_rank(rank: int) -> None:
    """Seed each rank differently: forks begin with their parent's state."""
    import torch

    seed = int.from_bytes(os.urandom(4), "little")
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed((seed + rank) % 2**32)


def refuse_more_ranks() -> None:
    """Make functions that start ranks raise an explanation: here they would fail or hang.

    torch's `spawn` and `start_processes`, and with them Lightning's `ddp_notebook`, Accelerate's
    `notebook_launcher` and the like, start their own ranks. A rank is one of the ranks
    already, and a process with its threads and connections must not fork another; a new interpreter
    finds no function of a cell. Other processes, such as DataLoader's workers, are not affected.
    """
    from torch import multiprocessing

    spawning: Any = sys.modules["torch.multiprocessing.spawn"]  # `multiprocessing.spawn` hides it

    @functools.wraps(spawning.start_processes)
    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> Any:
        raise _starts_ranks(nprocs, fn)

    @functools.wraps(spawning.spawn)
    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> Any:
        raise _starts_ranks(nprocs, fn)

    modules: tuple[Any, ...] = (multiprocessing, spawning)
    for module in modules:
        module.start_processes, module.spawn = start_processes, spawn
    on_import.here.adapt("accelerate.launchers", _refuse_notebook_launcher)


def _refuse_notebook_launcher(module: Any) -> None:
    """Raise our error before its own, which blames an Accelerator or torch's elastic agent."""

    @functools.wraps(module.notebook_launcher)
    def notebook_launcher(
        function: Any, args: Any = (), num_processes: int | None = None, *_: Any, **__: Any
    ) -> Any:
        raise _starts_ranks(num_processes, function)

    module.notebook_launcher = notebook_launcher


def _starts_ranks(count: int | None, function: Any) -> UsageError:
    more = "ranks" if not count else "1 more rank" if count == 1 else f"{count} more ranks"
    name = getattr(function, "__name__", "the function")
    return UsageError(
        f"A rank cannot start {more}: {location.here.name_running()} already runs on every rank.",
        do=f"call the function yourself, instead of giving it to spawn, as {name}(rank, ...), or "
        "to notebook_launcher; use the library's ordinary way, such as Lightning's "
        'strategy="ddp" instead of "ddp_notebook"',
    )


def hush_torchao() -> None:
    """Leave out what every rank would print as torchao is imported: which kernels are not for it.

    Its extensions for other GPUs and Pythons are tried one by one; it does without them.
    """
    logging.getLogger("torchao").addFilter(_is_no_missing_extension)


def _is_no_missing_extension(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not (text.startswith("Failed to load ") and ".so: " in text)


def refuse_second_rpc() -> None:
    """Refuse a second `init_rpc`, whose `shutdown` would wait in vain.

    torch's RPC records only once that its references (RRefs) are gone: after a second `init_rpc`
    the owners wait 100 s in C++ for messages that users no longer send (torch 2.11 to 2.15).
    """
    on_import.here.adapt("torch.distributed.rpc", _refuse_second_rpc)


def _refuse_second_rpc(module: Any) -> None:
    init_rpc, shutdown = module.init_rpc, module.shutdown
    was_shut_down = False

    @functools.wraps(init_rpc)
    def init_once(*args: Any, **keywords: Any) -> Any:
        if was_shut_down:
            raise UsageError(
                "RPC was shut down in this process, and torch's works only once in one.",
                why="a second shutdown waits for references (RRefs) that are never deleted",
                do="%dist restart, and run the cell again",
            )
        return init_rpc(*args, **keywords)

    @functools.wraps(shutdown)
    def shut_down(*args: Any, **keywords: Any) -> Any:
        nonlocal was_shut_down
        was_shut_down = True
        return shutdown(*args, **keywords)

    module.init_rpc, module.shutdown = init_once, shut_down


def leave_to_parent() -> None:
    """Make SIGTERM end the processes that this rank forks, but not the rank. Main thread.

    Slurm and systemd send it to every process of a host that is shut down. The ranks' parent
    notifies the notebook, which may save a training first: a rank that ended at once would prevent
    that.
    """
    rank = os.getpid()

    def on_term(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != rank:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # A handler, not SIG_IGN, which commands that a cell starts would inherit.
    signal.signal(signal.SIGTERM, on_term)
