"""Run a function on n real ranks: processes of their own, joined in one gloo group.

The processes come from multiprocessing's fork server, which has imported torch and the engine once
and has run nothing else (forking after torch has started threads hangs), so that a test pays for
its work and not for n imports of torch. The parent, pytest, never imports torch.
"""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.group.last_words import LastWords, has_crashed, speak_into, speak_of_threads

CONTEXT = multiprocessing.get_context("forkserver")
# None of these starts a thread. Making an optimizer imports Dynamo, the longest of all (0.7 s).
# Pipelining is left to those who use it: where it is imported, recovery looks for stages.
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.profiler",
        "nbdist.engine.rank.boot",
        "nbdist.engine.rank.register",
        "nbdist.engine.layout.parallelize",
        "nbdist.engine.training",
        "nbdist.engine.data.make",
        "pytest",
    ]
)

# A bound that tells a hang from a slow machine: most need a second of it, and 60 where twenty more
# share the two cores.
HANG_S = 200.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended: its `value`, or why it has none."""

    rank: int
    value: Any = None
    error: str | None = None  # a traceback, or how the process died


@dataclass(frozen=True, slots=True)
class _Rank:
    process: BaseProcess
    pipe: Connection
    words: LastWords


def run_ranks(
    n: int, function: Callable[..., Any] | str, *args: object, timeout_s: float = HANG_S
) -> list[Any]:
    """Return what `function(*args)` returned on each of `n` ranks, in rank order.

    Args:
        n: Number of ranks.
        function: A function of a module's top level, or its name as `module:function`.
        args: Passed on; anything that can be pickled.
        timeout_s: After so many seconds the ranks that still run are killed.

    Raises:
        AssertionError: A rank raised, died or ran out of time; the text holds every traceback.
    """
    outcomes = try_ranks(n, function, *args, timeout_s=timeout_s)
    errors = [f"rank {o.rank}: {o.error}" for o in outcomes if o.error is not None]
    errors.sort(key=has_crashed)  # last, for what its peers raise follows from it
    assert not errors, "\n".join(errors)
    return [o.value for o in outcomes]


def try_ranks(
    n: int, function: Callable[..., Any] | str, *args: object, timeout_s: float = HANG_S
) -> list[Outcome]:
    """Like `run_ranks`, but return how each rank ended and raise nothing: for tests of faults."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = str(Path(folder) / "store")
        ranks = [_start(rank, n, store, function, args) for rank in range(n)]
        try:
            return _collect(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.pipe.close()  # lets a rank that has answered go
                rank.process.join(0.5)
                if rank.process.is_alive():
                    rank.process.kill()
                    rank.process.join()
                rank.words.close()


def _start(rank: int, n: int, store: str, function: object, args: tuple[object, ...]) -> _Rank:
    here, there = CONTEXT.Pipe()
    words = LastWords()
    process = CONTEXT.Process(
        target=_rank_main, args=(there, words.path, rank, n, store, function, args)
    )
    process.start()
    words.watch(process)
    there.close()
    return _Rank(process, here, words)


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Outcome]:
    deadline = time.monotonic() + timeout_s
    outcomes: dict[int, Outcome] = {}
    pending = {rank.pipe: number for number, rank in enumerate(ranks)}
    while pending and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pending), left):
            assert isinstance(pipe, Connection)
            number = pending.pop(pipe)
            try:
                value, error = pipe.recv()
            except EOFError:
                value, error = None, ranks[number].words.of(ranks[number].process)
            outcomes[number] = Outcome(number, value, error)
    for number in pending.values():
        stacks = ranks[number].words.of_stuck(ranks[number].process)
        error = f"still running after {timeout_s:g} s, killed there:\n{stacks}"
        outcomes[number] = Outcome(number, error=error)
    return [outcomes[number] for number in range(len(ranks))]


def _rank_main(
    pipe: Connection,
    stderr: str,
    rank: int,
    world_size: int,
    store_path: str,
    function: Callable[..., Any] | str,
    args: tuple[object, ...],
) -> None:
    speak_into(stderr)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo"
    )
    import torch
    import torch.distributed as dist

    from nbdist.engine.rank import register

    speak_of_threads()
    gc.freeze()  # as the parent of real ranks does before it forks them
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        store = dist.FileStore(store_path, world_size)
        register.here.register()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(__import__(module, fromlist=[name]), name)
        assert callable(function)
        pipe.send((function(*args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    finally:
        # Stay until all have answered: peers may still be reading what this rank sent. Then no
        # destroy_process_group: a peer may have died, and nobody should wait for it here.
        pipe.poll(None)
        os._exit(0)
