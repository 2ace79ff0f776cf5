"""Become a rank without a notebook: `nbdist.init()`, in a script that torchrun runs.

It has what cells have: the process group with nbdist's parts around it, layouts, loaders,
checkpoints. Threads and random numbers are as in an engine, so that losses are bit-equal to the
notebook's on the same ranks. A notebook's displays (board, MLflow runs, `nbdist.publish`) are
missing: `nbdist.log` prints (`rank/printed`), and `records` names a folder for the data that a
board would be drawn from. Faults are torchrun's: the first one ends all ranks.

In an engine, where `%dist run` runs such a script, the existing rank is used.

Main thread; records are written by the thread that publishes them.
"""

import atexit
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel import environment, location
from nbdist.engine.rank.printed import PrintedNumbers
from nbdist.shared import side
from nbdist.shared.errors import LayoutError, NBDistError, StartError, UsageError
from nbdist.shared.options import (
    LOOPBACK,
    ONE_GPU_A_RANK,
    TIMEOUT_S,
    VIRTUAL,
    ClusterOptions,
    choose_options,
    may_share_gpus,
)
from nbdist.shared.placement import HERE, RankPlacement
from nbdist.shared.text import counted
from nbdist.shared.virtual import VirtualMachine
from nbdist.shared.wire import CELL_END, EMULATED, Batch, CellStart

_LET_GO_S = 0.1
_RUN_IT = "torchrun --nproc-per-node 2 {}    (or %dist run in a notebook)"


class ThisRank(NamedTuple):
    """The names that a cell finds set: `rank, local_rank, world_size, device = nbdist.init()`."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


class Standalone:
    """This process's rank, if it is one."""

    def __init__(self) -> None:
        self.rank: ThisRank | None = None
        self.ranks_on_host: int | None = None  # None for those of a notebook
        self.kept: list[Any] = []  # objects that must live as long as the process


def init(
    *,
    layouts: Sequence[str] = (),
    device: str | None = None,
    backend: str | None = None,
    threads: int | None = None,
    timeout: float = TIMEOUT_S,
    records: str | os.PathLike[str] | None = None,
) -> ThisRank:
    """Make this process, which torchrun has started, a rank as a cell of a notebook finds it.

        rank, local_rank, world_size, device = nbdist.init(layouts=["fsdp=2 tp=2"])
        layout = nbdist.parallelize(model, "fsdp=2 tp=2")

    Where it is a rank already, as in `%dist run`, that one is returned. Values of `nbdist.log`
    are printed by one rank, 0 if it logs them; checkpoints without a name are in
    `.nbdist/checkpoints` and the script's name.

    Args:
        layouts: Those that the script will ask for; all must fit the number of ranks.
        device: `cpu` or `cuda`; by default `cuda` where there are GPUs.
        backend: `gloo` or `nccl`; by default what the device calls for.
        threads: CPU threads of a rank; by default the cores divided by the ranks of this host.
        timeout: Longest wait inside one collective, in seconds.
        records: A folder: each rank writes losses, times of steps and what is logged to
            `rank-N.jsonl` there, a JSON line a record. Without it none of this is measured. By
            default `NBDIST_RECORDS`.

    Returns:
        `rank`, `local_rank`, `world_size` and `device`.

    Raises:
        SystemExit: A layout does not fit; rank 0 has said which numbers would.
        StartError: This machine has fewer GPUs than ranks, and nccl is asked for.
        UsageError: torchrun has not started this process, or a word makes no sense. Or the script
            runs once more, imported by a process that it has spawned, such as a loader's worker. Or
            there is a process group already.
    """
    side.require_rank("nbdist.init")
    if here.rank is not None:
        _require_layouts(layouts, here.rank)
        return here.rank
    _refuse_import(sys._getframe(1))
    _refuse_group()
    rank, place = _place(os.environ)
    options = choose_options(
        _gpus(torch.cuda.device_count(), place.local_size, device, backend),
        n=int(os.environ["WORLD_SIZE"]),
        device=device,
        backend=backend,
        threads=threads,
        slots=int(os.environ["WORLD_SIZE"]),
        threads_a_rank=max(1, _cores() // place.local_size),
        timeout=timeout,
        virtual=os.environ.get(VIRTUAL) or None,
        address=LOOPBACK if place.nodes == 1 else place.address,
    )
    here.rank = this = ThisRank(rank, place.local_rank, options.n, _join(rank, options, place))
    here.ranks_on_host = place.local_size
    _require_layouts(layouts, this)
    _begin(this, records or os.environ.get("NBDIST_RECORDS"), options.machine)
    return this


def _refuse_import(frame: FrameType | None) -> None:
    """Refuse a script that a spawned process imports: it would join the group as one rank twice.

    Such a process begins by running the script's top level under another name. It cannot join,
    its parent waits for it, and the other ranks for the parent.
    """
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] == "__mp_main__":
            raise UsageError(
                "nbdist.init() is called once more, in a process that this script has spawned.",
                why="a spawned process, such as a DataLoader's worker, first imports the script, "
                "and runs all code at its top level",
                do='put nbdist.init() and all that trains below `if __name__ == "__main__":`; '
                "functions, classes and imports stay above it",
            )
        frame = frame.f_back


def _refuse_group() -> None:
    """Refuse a process group that others have made: nbdist's parts are not around it."""
    if dist.is_initialized():
        raise UsageError(
            "There is a process group already, and nbdist.init() makes one.",
            why="dist.init_process_group was called before it",
            do="leave that out, or put it below nbdist.init(), where it does nothing; where "
            "a library has called it, dist.destroy_process_group() first",
        )


def _place(environ: Mapping[str, str]) -> tuple[int, RankPlacement]:
    """Return the rank and the place that torchrun has set, or Ray, Spark or Azure like it."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in environ]
    if missing:
        raise UsageError(
            "nbdist.init() makes a process of torchrun a rank, and this is not one.",
            why=f"{missing[0]} is not set.",
            do=_RUN_IT.format(os.path.basename(sys.argv[0]) or "SCRIPT"),
        )
    rank, n = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    local_size = int(environ.get("LOCAL_WORLD_SIZE", n // int(environ.get("GROUP_WORLD_SIZE", 1))))
    # Only torchrun counts nodes. Some may have fewer ranks than this one, so that it is a guess.
    nodes = int(environ.get("GROUP_WORLD_SIZE", -(-n // local_size)))
    node = int(environ.get("GROUP_RANK", environ.get("NODE_RANK", 0)))
    local_rank = int(environ.get("LOCAL_RANK", rank))
    host = HERE if nodes == 1 else f"node {node}"
    address = LOOPBACK if nodes == 1 else _address_towards(environ["MASTER_ADDR"])
    place = RankPlacement(host, address, local_rank, local_size, node, nodes, leads=local_rank == 0)
    return rank, place


def _gpus(here: int, local_size: int, device: str | None, backend: str | None) -> int:
    """Return the number of GPUs of all machines for their ranks, each of which counts its own.

    Raises:
        StartError: This machine has none, or fewer than ranks, which use nccl.
    """
    wants = device == "cuda" or (device is None and here > 0)
    may_share = here > 0 and may_share_gpus(backend or "nccl", os.environ)
    if wants and here < local_size and not may_share:
        fewer = f"torchrun --nproc-per-node {here}, or " if here else ""
        shared = 'nbdist.init(backend="gloo") to share them, or ' if here else ""
        raise StartError(
            f"{counted(local_size, 'rank')} of this machine need as many GPUs, and it has {here}.",
            why=ONE_GPU_A_RANK if here else "",
            do=f'{fewer}{shared}nbdist.init(device="cpu")',
        )
    return int(os.environ["WORLD_SIZE"]) if here else 0


def _address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the way to a host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
    return address


def _join(rank: int, options: ClusterOptions, place: RankPlacement) -> torch.device:
    """Join the group through the store of torchrun's agent, prepared like an engine."""
    from nbdist.engine.group import group
    from nbdist.engine.group.links import throttle
    from nbdist.engine.rank import register

    at, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", 29500))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0:
        # Not torchrun: srun or mpirun with a script's own variables. No other process hosts the
        # store.
        here.kept.append(dist.TCPStore(at, port, options.n, True, wait_for_workers=False))
    variables = environment.rank_variables(rank, options, place)
    environment.restore({k: v for k, v in variables.items() if not k.startswith("TORCHELASTIC")})
    torch.set_num_threads(options.threads)
    environment.seed_rank(rank)
    register.here.register()
    throttle.here.stand_for(options.machine)
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # in the same agent's store
    prefix = f"start-{again}"
    return group.join(
        rank, options, place, port, store_host=at, store_prefix=prefix, recovers=False
    )


def _require_layouts(layouts: Sequence[str], this: ThisRank) -> None:
    """End all ranks if their number does not fit a layout; rank 0 says why."""
    from nbdist.engine.layout.plan import mesh

    try:
        for text in layouts:
            mesh.parse(text, this.world_size, here.ranks_on_host)
    except LayoutError as error:
        if here.ranks_on_host is None:  # the notebook's ranks: an error of the cell
            raise
        if this.rank == 0:
            error.do = _on_other_ranks(mesh.ranks_needed(text), this.world_size, error.do)
            print(f"LayoutError: {error}", file=sys.stderr, flush=True)
        dist.barrier()  # torchrun ends all at the first that fails: rank 0 must have printed
        raise SystemExit(1) from None


def _on_other_ranks(needed: int | None, world_size: int, do: str) -> str:
    """Return the advice for a layout: first to start the ranks it needs, if known."""
    if needed is None:
        return do
    script = os.path.basename(sys.argv[0]) or "SCRIPT"
    is_one_node = here.ranks_on_host == world_size
    start = (
        f"torchrun --nproc-per-node {needed} {script}" if is_one_node else f"start {needed} ranks"
    )
    return f"{start}    (or {do})" if do else start


def _begin(
    this: ThisRank, records: str | os.PathLike[str] | None, machine: VirtualMachine | None
) -> None:
    """Begin the script as one cell of the engine, and end it at exit."""
    from nbdist.engine.data.position import account
    from nbdist.engine.group import state
    from nbdist.engine.rank import components
    from nbdist.engine.rank.virtual_device import VirtualDevice
    from nbdist.engine.recovery import wrapped_models
    from nbdist.engine.steps import keep, step_state
    from nbdist.engine.training import training

    stem = Path(sys.argv[0]).stem or "script"
    location.here.script = sys.argv[0] or None  # as messages name it
    keep.here.look_in(lambda: vars(sys.modules["__main__"]))
    here.kept.append(journals := tempfile.TemporaryDirectory(prefix="nbdist-"))
    (folder := Path(journals.name, "journal")).mkdir()  # the same name on all ranks
    token = os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ["MASTER_PORT"]
    account.here.keep_in(folder, token, this.rank, this.world_size, is_first=True)
    report: Callable[[dict[str, float]], None] | None = None
    if records is not None:
        recorder = _recorder(this.rank, Path(records))
        training.here.install(recorder)
        recorder.begin_cell()
        atexit.register(recorder.close)
        report = partial(recorder.add, EMULATED, CELL_END)
    if not step_state.here().is_installed:  # without the snapshots that a recovery needs
        step_state.install(wrapped_models.buffers_of, lambda optimizer, steps: None)
    names = dist.PrefixStore("nbdist/log", state.here.member().client)
    printed = PrintedNumbers(this.rank, this.world_size, names)
    step_state.here().then(lambda optimizer, steps: printed.stepped(steps))
    training.here.on_log(printed.log)
    atexit.register(printed.decide)
    virtual = VirtualDevice(machine, training.here.current_step, report)
    parts = components.of_script(virtual)
    checkpoints = os.path.join(".nbdist", "checkpoints", stem)
    components.begin(parts, CellStart(1, tuple(range(this.world_size)), 1, checkpoints=checkpoints))
    atexit.register(_end, this.rank, parts)


def _end(rank: int, parts: Sequence[Component]) -> None:
    """Wait for pending writes, and print the notices of a cell's end."""
    from nbdist.engine.rank import components

    lines = tuple(components.end(parts, EndedCell(1, "", has_succeeded=True)))
    if rank == 0 and lines:
        print(*lines, sep="\n", flush=True)
    # A thread of gloo's drops the last collective and needs the GIL for it. An interpreter that
    # ends meanwhile ends the thread, and the process with SIGABRT (pytorch/pytorch#190489).
    time.sleep(_LET_GO_S)


def _recorder(rank: int, folder: Path) -> Any:
    from nbdist.engine.kernel.records import Recorder

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"rank-{rank}.jsonl").open("w", encoding="utf-8")
    except OSError as error:
        raise NBDistError(
            f"Records cannot be written to {folder}.", why=error.strerror or str(error)
        ) from error
    here.kept.append(file)

    def write(batch: dict[str, Any]) -> None:
        for record in Batch.from_wire(batch).records:
            row = {name: getattr(record, name) for name in ("kind", "step", "time_ns", "values")}
            if record.detail is not None:
                row["detail"] = record.detail.to_wire()
            file.write(json.dumps(row) + "\n")
        file.flush()

    return Recorder(rank, write)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


here = Standalone()
