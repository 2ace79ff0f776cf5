"""The threads that answer asynchronous workers, and their groups.

One thread per worker on the server's rank, and a group of these two ranks: no two threads of a rank
ever share a gloo group, and a receive from one known rank ends at an abort (one from any
rank does not: gloo does not notify it). A group is found by its name: after a fault
and on a new rank it is the same. The threads of a rank serve all its masters.

They end at an abort (a fault, an interrupt); `restart` starts them again when those
have been re-created.
"""

import atexit
import logging
import threading
from datetime import timedelta
from weakref import WeakValueDictionary

import torch.distributed as dist

from nbdist.engine.averaging import messages
from nbdist.engine.averaging.master import Answer, Master
from nbdist.engine.compat.groups import torch_backends, torch_groups
from nbdist.engine.group import state
from nbdist.engine.tap.interruptible_store import ReleasedError
from nbdist.shared.errors import ClusterError

# A thread waits while no worker trains, and a receive that times out breaks the group.
_PATIENCE = timedelta(days=365)

_log = logging.getLogger("nbdist.serving")


def make_groups(server: int) -> None:
    """Make the groups of a server, if there are none yet. All ranks, main threads."""
    others = [rank for rank in range(dist.get_world_size()) if rank != server]
    mine = others if dist.get_rank() == server else [dist.get_rank()]
    if all(find_group(server, worker) is not None for worker in mine):
        return
    for worker in others:
        title = _title(server, worker)
        dist.new_group([server, worker], timeout=_PATIENCE, backend="gloo", group_desc=title)


def find_group(server: int, worker: int) -> dist.ProcessGroup | None:
    """Return the group of a server and a worker; None if it no longer exists."""
    title = _title(server, worker)
    groups = [live.group for live in torch_groups.live_groups()]
    return next((group for group in groups if group.group_desc == title), None)


def _title(server: int, worker: int) -> str:
    return f"asynchronous training, server {server} and worker {worker}"


class Serving:
    """The threads of a process that answer workers, and the masters that they answer for."""

    def __init__(self) -> None:
        self._masters: WeakValueDictionary[int, Master] = WeakValueDictionary()
        self._threads: dict[int, threading.Thread] = {}  # by worker
        self._ended: dict[int, Exception] = {}  # by worker: why its thread has ended
        self._failed: Exception | None = None  # of this rank's own, in applying an update

    def serve(self, number: int, master: Master) -> None:
        """Answer for this master, as long as it lives. On the server's rank."""
        self._masters[number] = master
        self.start()

    def start(self) -> None:
        """Start the missing threads of this rank."""
        for worker in range(dist.get_world_size()):
            group = find_group(dist.get_rank(), worker)
            running = self._threads.get(worker)
            if group is None or (running is not None and running.is_alive()):
                continue
            self._ended.pop(worker, None)
            self._threads[worker] = threading.Thread(
                target=self._serve,
                args=(group, worker),
                name=f"nbdist-serving-{worker}",
                daemon=True,
            )
            self._threads[worker].start()

    def restart(self) -> None:
        """Continue when the groups have been re-created. Main thread, after a fault."""
        for thread in self._threads.values():
            thread.join(10.0)
        self._failed = None
        for master in list(self._masters.values()):
            master.restart()
        self.start()

    def stop(self) -> None:
        """End the threads of this rank: their groups no longer exist. Main thread."""
        for worker, thread in list(self._threads.items()):
            group = find_group(dist.get_rank(), worker) if dist.is_initialized() else None
            if thread.is_alive() and group is not None:
                for _, backend in torch_backends.backends_of(group):
                    torch_backends.break_backend(backend)
            thread.join(10.0)
            del self._threads[worker]
        self._ended.clear()
        self._failed = None

    def check(self) -> None:
        """Raise if a thread of this rank has ended: its worker is no longer served.

        Raises:
            ReleasedError: The groups were aborted, because of a fault elsewhere.
            ClusterError: The server has failed, or a worker's process has ended.
        """
        if (error := self._failed) is not None:
            raise ClusterError(
                "Asynchronous training cannot continue.",
                why=f"the server failed in applying an update: {type(error).__name__}: {error}",
            ) from error
        error = next(iter(self._ended.values()), None)
        if error is None:
            return
        if state.here.place() is not None:
            why = "this rank aborted its collectives, and serves no worker"
            raise ReleasedError(why) from error
        raise ClusterError(
            "Asynchronous training cannot continue.", why=f"a worker is gone: {error}"
        )

    def is_serving(self) -> bool:
        """Return whether threads of this rank answer workers. Any thread."""
        return any(thread.is_alive() for thread in list(self._threads.values()))

    def _serve(self, group: dist.ProcessGroup, worker: int) -> None:
        try:
            while True:
                request = messages.receive_request(group, worker)
                answer = self._answer_or_fail(request)
                if request.kind != messages.LEAVE:
                    messages.send_answer(group, worker, answer)
        except Exception as error:
            # The groups were aborted, or the worker is gone: no one waits for an answer any longer.
            self._ended[worker] = error
            _log.info("Serving rank %d has ended: %s: %s", worker, type(error).__name__, error)
            if error is self._failed:  # its worker waits, and would do so for ever
                for _, backend in torch_backends.backends_of(group):
                    torch_backends.break_backend(backend)

    def _answer_or_fail(self, request: messages.Request) -> Answer | None:
        try:
            return self._answer(request)
        except Exception as error:
            self._failed = error
            raise

    def _answer(self, request: messages.Request) -> Answer | None:
        master = self._masters.get(request.number)
        if master is None:
            return None
        if request.body is not None:
            gradients = messages.unpack_gradients(request.body, request.read, master.like())
            return master.update(request.worker, gradients)
        if request.kind == messages.ASK:
            return master.ask(request.worker)
        if request.kind == messages.FINISH:
            return master.finish(request.worker, request.cell)
        master.leave(request.worker, request.cell)
        return None


here = Serving()
# A thread within gloo when Python ends would end the process with an error.
atexit.register(here.stop)
