"""Become rank r: from a bare process to an engine whose cells can train.

`run` is called once, in a process forked from the warmed parent (or a fresh interpreter). It
sets the environment, then serves as an ipyparallel engine until it is stopped or the
notebook's kernel ends. `join` is called over the wire, when all engines are connected, and forms
the process group.

Threads: `run` and `join` on the main thread; ipykernel's control thread answers requests
marked busy (`engine/kernel/ipython/calls.py`).
"""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

import nbdist
from nbdist.engine.kernel import environment, fd_reserve
from nbdist.engine.kernel.ipython import kernel
from nbdist.engine.kernel.output import tqdm_bars
from nbdist.engine.rank.rank import Rank, become, this_rank
from nbdist.shared import side, wire
from nbdist.shared.options import ClusterOptions
from nbdist.shared.placement import RankPlacement
from nbdist.shared.processes import lifeline
from nbdist.shared.text import name_ranks

log = logging.getLogger(__name__)


def run(spec: dict[str, Any]) -> None:
    """Serve as an engine; returns when it is stopped. Called once a process."""
    lifeline.watch(spec["kernel_pid"], lifeline.end_own_session)
    side.settle("rank")
    _go_to_work(spec["work_folders"])
    rank = become(spec)
    rank.variables = environment.rank_variables(rank.rank, rank.options, rank.place)
    environment.restore(rank.variables)
    environment.refuse_more_ranks()
    environment.refuse_second_rpc()
    environment.hush_torchao()
    torch.set_num_threads(rank.options.threads)
    environment.seed_rank(rank.rank)
    tqdm_bars.install()
    kernel.serve(
        rank,
        [
            f"--file={spec['connection_file']}",
            f"--profile-dir={spec['profile_dir']}",
            # By default the folder in which ipyparallel was imported: in a fork, that was earlier.
            f"--work-dir={os.getcwd()}",
            f"--IPEngine.id={rank.rank}",
            "--IPEngine.enable_nanny=False",
            "--IPEngine.timeout=60",
            # The lifeline replaces it, and works while the main thread is busy.
            "--IPEngine.max_heartbeat_misses=0",
            "--log-level=30",
        ],
    )


def answer() -> None:
    """Return: calls reach this rank."""


def join(
    *,
    version: int,
    options: dict[str, Any],
    place: dict[str, Any],
    store_port: int,
    generation: int,
    replacements: list[int],
    first_group: int,
) -> dict[str, Any]:
    """Form the process group with the other ranks; again after `resize.leave`. Main thread.

    Args:
        version: Of the notebook's messages.
        options: The fields of `ClusterOptions`.
        place: The fields of this rank's `RankPlacement`.
        store_port: Where the store listens, at the cluster's address.
        generation: 0 in a new cluster.
        replacements: Ranks that take the place of others, this one among them; empty in a new
            cluster. The survivors run `recover` at the same time, or also `join` after `leave`.
        first_group: The number of the default group, see `group.join`.

    Returns:
        This rank's number and device; for a new rank also the facts that `recover` returns.

    Raises:
        RuntimeError: The notebook runs another version of nbdist.
    """
    from nbdist.engine.group import group
    from nbdist.engine.group.links import throttle
    from nbdist.engine.recovery import recovery

    if version != wire.VERSION:
        raise RuntimeError(
            f"the notebook speaks version {version} of nbdist's messages, this rank "
            f"{wire.VERSION}: install the same nbdist on both"
        )
    here = this_rank()
    here.options, here.place = asked, place_ = ClusterOptions(**options), RankPlacement(**place)
    if asked.device == "cuda":
        torch.cuda.init()  # its error says why a GPU cannot be used
    if here.torchs is not None:
        here.torchs.put_back()
    throttle.here.stand_for(asked.machine)
    device = group.join(
        here.rank, asked, place_, store_port, generation=generation, first_group=first_group
    )
    _set_up(here, device, store_port, is_first=not generation and not replacements)
    fd_reserve.here.fill()
    answer = {"rank": here.rank, "device": str(device)}
    return {**answer, **recovery.settle(generation, replacements)} if replacements else answer


def _set_up(here: Rank, device: torch.device, store_port: int, *, is_first: bool) -> None:
    """Prepare this rank for cells, as a member of the group that was just formed.

    Args:
        here: The rank.
        device: Its device.
        store_port: As in `join`.
        is_first: Whether the cluster is new.
    """
    from nbdist.engine.compat.groups import torch_dist
    from nbdist.engine.data.position import account
    from nbdist.engine.rank import standalone
    from nbdist.engine.rank.register import connect
    from nbdist.engine.recovery import resize

    n, address = here.options.n, here.options.address
    here.torchs = torch_dist.Functions()  # with `init_process_group` of this group
    here.joined = True
    here.keep_with_peers()
    here.variables.update(environment.rank_variables(here.rank, here.options, here.place))
    here.variables.update(environment.group_variables(address, store_port))
    environment.restore(here.variables)
    account.here.keep_in(Path(here.logs), str(store_port), here.rank, n, is_first=is_first)
    connect(here, device)
    local_rank = int(here.variables["LOCAL_RANK"])
    standalone.here.rank = standalone.ThisRank(here.rank, local_rank, n, device)
    here.recorder.fact(torch=torch.__version__)
    here.kernel.shell.user_ns.update(
        rank=here.rank,
        local_rank=local_rank,
        world_size=n,
        device=device,
        torch=torch,
        dist=torch.distributed,
        nbdist=nbdist,
    )
    resize.follow()


def recover(
    generation: int, replacements: list[int], peers: list[tuple[int, int | None]]
) -> dict[str, Any]:
    """Put all ranks together again after a fault; see `recovery`. All ranks, main thread.

    `peers` are pairs of a rank and the one in whose memory it keeps its snapshots: a rank that
    lives keeps its place, but others may have moved to its host.
    """
    from nbdist.engine.checkpoint import save
    from nbdist.engine.recovery import recovery

    if replacements:
        save.here.give_up(f"{name_ranks(replacements)} died")
    fd_reserve.here.release()
    if (torchs := this_rank().torchs) is not None:
        torchs.put_back()  # functions that a successful cell has replaced
    try:
        return recovery.recover(generation, replacements, dict(peers))
    finally:
        fd_reserve.here.fill()


def leave() -> dict[str, Any]:
    """Leave all groups, for the number of ranks changes; see `resize`. All ranks, main thread."""
    from nbdist.engine.checkpoint import save
    from nbdist.engine.recovery import resize

    save.here.give_up("the number of ranks changes")
    return resize.leave(this_rank().kernel.shell.user_ns)


def resend(first: int, next: int) -> list[dict[str, Any]]:
    """Return the record batches of `range(first, next)` that the push has lost."""
    return this_rank().recorder.resend(first, next)


def missed(message: str, *, whole: bool = False) -> dict[str, Any]:
    """Return what a notebook has missed of a cell; see `Journal.report`. Control thread.

    With `whole` also `first_seq` and `next_seq`, the bounds of its records so far, and `facts`.
    """
    here = this_rank()
    report = here.kernel.journal.report(message, whole=whole)
    if whole:
        report |= {"first_seq": here.first_seq, "next_seq": here.recorder.next_seq}
        report["facts"] = here.recorder.facts
    return report


def _go_to_work(folders: list[str]) -> None:
    """Change to the first of these folders that exists."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.chdir(folder)
            return


def main(arguments: list[str]) -> None:
    """Run as a fresh interpreter: `python -m nbdist.engine.rank.boot '{...}'`."""
    import json

    # `__main__` belongs to the user's code: run the module under its real name.
    from nbdist.engine.rank import boot

    boot.run(json.loads(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
