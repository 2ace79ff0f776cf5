"""Rank processes as the engines have them: joined through a store of its own, and steerable.

Each has a main thread that runs what the test posts, in order, and a control thread that answers
at once, also while the main thread is stuck in C++. The parent, pytest, never imports torch.
"""

import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from nbdist.shared.options import LOOPBACK, ClusterOptions
from nbdist.shared.placement import one_host
from tests.group.harness import CONTEXT, HANG_S
from tests.group.last_words import LastWords, has_crashed, speak_into, speak_of_threads


class RankFailed(AssertionError):
    """A function raised on a rank, or the rank died; the text is its traceback, or its end."""


class Engine:
    """One rank: a process, a pipe to its main thread and one to its control thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.main, main = CONTEXT.Pipe()
        self.control, control = CONTEXT.Pipe()
        self.words = LastWords()
        self.process: BaseProcess = CONTEXT.Process(
            target=_serve, args=(main, control, self.words.path, sys.path), daemon=True
        )
        self.process.start()
        self.words.watch(self.process)
        main.close()
        control.close()

    def post(self, function: Callable[..., Any], *args: object) -> None:
        """Let the main thread run `function(*args)` after what was posted before."""
        self.main.send((function, args))

    def result(self, timeout_s: float = HANG_S) -> Any:
        """Return what the oldest posted function returned; raise RankFailed if it raised."""
        return self._answer(self.main, timeout_s)

    def now(self, function: Callable[..., Any], *args: object) -> Any:
        """Run `function(*args)` on the control thread and return its value."""
        self.control.send((function, args))
        return self._answer(self.control, HANG_S)

    def _answer(self, pipe: Connection, timeout_s: float) -> Any:
        if not pipe.poll(timeout_s):
            stacks = self.words.of_stuck(self.process)
            raise RankFailed(
                f"rank {self.rank} gave no answer in {timeout_s:g} s, killed there:\n{stacks}"
            )
        try:
            value, error = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RankFailed(f"rank {self.rank}: {self.words.of(self.process)}") from None
        if error is not None:
            raise RankFailed(f"rank {self.rank}: {error}")
        return value

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.process.kill()
        self.process.join()


class Cluster:
    """n engines and the store they meet in."""

    def __init__(self, n: int, *, timeout_s: float = 60.0, check: str = "shared") -> None:
        self.n = n
        self.check = check
        self.timeout_s = timeout_s
        self._has_crashed = False
        self._start()

    def _start(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.store: BaseProcess = CONTEXT.Process(
            target=_run_store, args=(listener, os.getpid(), sys.path), daemon=True
        )
        self.store.start()
        listener.close()
        self.engines = [Engine(rank) for rank in range(self.n)]

    def join(self) -> None:
        """Form the group, generation 0."""
        for engine in self.engines:
            self.post_join(engine, 0)
        self.results()

    def post_join(self, engine: Engine, generation: int) -> None:
        """Post one engine's join."""
        where = (engine.rank, self.n, self.port)
        engine.post(join_group, *where, self.timeout_s, generation, self.check)

    def replace(self, rank: int) -> Engine:
        """Put a new process in the place of a rank that is dead."""
        self.engines[rank].words.close()
        self.engines[rank] = Engine(rank)
        return self.engines[rank]

    def post(self, function: Callable[..., Any], *args: object) -> None:
        """Post to every rank."""
        for engine in self.engines:
            engine.post(function, *args)

    def results(self) -> list[Any]:
        """Return every rank's answer, in rank order."""
        return [engine.result() for engine in self.engines]

    def run(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """Post to every rank and return every answer.

        Where a rank has crashed in C++ before, all are started again: the test runs once more.
        """
        if self._has_crashed:
            self.stop()
            self._start()
            self.join()
        self.post(function, *args)
        try:
            found, self._has_crashed = self.results(), False
        except RankFailed as error:
            self._has_crashed = has_crashed(str(error))
            raise
        return found

    def now(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """Run on every rank's control thread, one rank after the other."""
        return [engine.now(function, *args) for engine in self.engines]

    def stop(self) -> None:
        """End every process."""
        for engine in self.engines:
            engine.kill()
            engine.main.close()
            engine.control.close()
            engine.words.close()
        self.store.kill()
        self.store.join()


@contextmanager
def cluster(n: int, *, timeout_s: float = 60.0, check: str = "shared") -> Iterator[Cluster]:
    """Start n ranks, joined; end them all afterwards."""
    made = Cluster(n, timeout_s=timeout_s, check=check)
    try:
        made.join()
        yield made
    finally:
        made.stop()


def join_group(
    rank: int, n: int, port: int, timeout_s: float, generation: int, check: str = "shared"
) -> None:
    from nbdist.engine.group import group
    from nbdist.engine.rank import register

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    register.here.register()
    options = ClusterOptions(
        n=n, device="cpu", backend="gloo", threads=1, timeout=timeout_s, check=check
    )
    place = one_host(n, LOOPBACK)[rank]
    group.join(rank, options, place, port, generation=generation)


def _serve(main: Connection, control: Connection, stderr: str, path: list[str]) -> None:
    speak_into(stderr)
    import torch

    speak_of_threads()
    gc.freeze()  # as the parent of real ranks does before it forks them
    sys.path[:] = path
    torch.set_num_threads(1)
    threading.Thread(target=_loop, args=(control,), daemon=True).start()
    _loop(main)
    os._exit(0)


def _loop(pipe: Connection) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def _run_store(listener: socket.socket, kernel_pid: int, path: list[str]) -> None:
    sys.path[:] = path
    from nbdist.host import store

    store.run(listener, kernel_pid)


def clock() -> float:
    """Return the time in seconds on a clock that all processes of this machine share."""
    return time.monotonic()
