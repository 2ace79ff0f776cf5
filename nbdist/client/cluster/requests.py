"""Requests to ranks: each one's answer is a future, which fails when the rank's process ends.

Threads: replies come on ipyparallel's IO thread, `rank_died` on the launcher's; everything else on
the caller's.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbdist.shared import gpu_errors, wire
from nbdist.shared.errors import ClusterError, NBDistError
from nbdist.shared.processes.ended import Ended
from nbdist.shared.text import begin_with_ranks

if TYPE_CHECKING:
    from nbdist.client.cluster.connection import Connection, Handler, Message

_ASK_AGAIN_S = 0.25


class RankDiedError(ClusterError):
    """A rank's process ended while it was asked something."""


class RankFailedError(NBDistError):
    """A request failed on a rank; `what` carries the error of the rank."""

    rank = -1

    @classmethod
    def of(cls, rank: int, error_text: str) -> "RankFailedError":
        """Return the error of a request that failed on `rank`, which answered with `error_text`."""
        lines = gpu_errors.without_frames(error_text.splitlines())
        error = cls(f"rank {rank}: " + "\n".join(lines))
        error.rank = rank
        return error


class PendingReply(Future[Any]):
    """The answer of a rank, to come; `message` is the id of the request."""

    message = ""


class Requests:
    """Requests to the ranks of one cluster, over one connection at a time."""

    def __init__(self) -> None:
        """Begin without a connection."""
        self._connection: Connection | None = None
        self._pending: dict[int, set[Future[Any]]] = {}
        # Ranks that have ended, and how: their ids stay registered for a moment.
        self._ended: dict[int, Ended] = {}
        self._lock = threading.Lock()

    def use(self, connection: "Connection | None") -> None:
        """Send over `connection` from now on; None when there is none any more."""
        self._connection = connection

    def rank_died(self, rank: int, how: Ended) -> None:
        """Fail what this rank was asked, and what it is asked before it `begins`. Any thread."""
        with self._lock:
            self._ended[rank] = how
            pending = list(self._pending.get(rank, ()))
        for future in pending:
            _fail(future, _died(rank, how))

    def begins(self, rank: int) -> None:
        """Let this rank be asked again: it gets a new process."""
        with self._lock:
            self._ended.pop(rank, None)

    def fail_all(self, error: ClusterError) -> None:
        """Fail everything that has not been answered. Any thread."""
        with self._lock:
            pending = [future for futures in self._pending.values() for future in futures]
        for future in pending:
            _fail(future, error)

    def ask(
        self,
        rank: int,
        call: str,
        *,
        busy: bool = False,
        buffers: list[Any] | None = None,
        **kwargs: Any,
    ) -> PendingReply:
        """Ask a rank to run one of the functions in `engine/kernel/ipython/calls.py`.

        Args:
            rank: Which rank.
            call: The function's name.
            busy: Use the control channel, which answers while the main thread is blocked.
            buffers: Raw payloads for the function.
            **kwargs: The function's arguments, JSON-like.

        Returns:
            A future of the function's value, or of `(value, buffers)` where it returns some. It
            fails with `RankFailedError`, or with `RankDiedError` when the rank's process ends.
        """
        future = PendingReply()
        connection = self._require()
        with self._lock:
            how = self._ended.get(rank)
            if how is None:
                self._pending.setdefault(rank, set()).add(future)
        if how is not None:
            future.set_exception(_died(rank, how))
            return future

        def on_reply(message: "Message") -> None:
            if "error" in message.content:
                _fail(future, RankFailedError.of(rank, message.content["error"]))
            elif message.buffers:
                _resolve(future, (message.content["value"], message.buffers))
            else:
                _resolve(future, message.content["value"])

        try:
            message_id = connection.send(
                rank,
                wire.REQUEST,
                {"call": call, "kwargs": kwargs},
                on_reply,
                control=busy,
                once=True,
                buffers=buffers,
            )
            future.message = message_id
        except KeyError:
            message_id = ""
            _fail(future, RankDiedError(f"rank {rank} is not there."))

        def settled(_: object) -> None:
            connection.forget(message_id)
            with self._lock:
                self._pending[rank].discard(future)

        future.add_done_callback(settled)
        return future

    def ask_all(
        self,
        ranks: Iterable[int],
        call: str,
        *,
        timeout_s: float,
        busy: bool = False,
        **kwargs: Any,
    ) -> dict[int, Any]:
        """Ask several ranks at once and wait for all; the first failure is raised.

        Raises:
            ClusterError: A rank did not answer within `timeout_s`, or died.
            RankFailedError: The function failed on a rank.
        """
        pending = {rank: self.ask(rank, call, busy=busy, **kwargs) for rank in ranks}
        return gather(pending, call, timeout_s)

    def reach(self, ranks: Iterable[int], timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until ranks answer on both channels.

        The controller drops what is for an engine whose sockets have not connected yet, though its
        heart beats already and it is registered: on a loaded machine a call was lost so.

        Args:
            ranks: Which.
            timeout_s: Longest wait.
            check: Called again and again; raises to give up (a process that died).

        Raises:
            ClusterError: A rank did not answer.
        """
        left = [(rank, busy) for rank in ranks for busy in (False, True)]
        deadline = time.monotonic() + timeout_s
        while left:
            asked = {(rank, busy): self._ask_for_life(rank, busy) for rank, busy in left}
            wait(asked.values(), _ASK_AGAIN_S)
            check()
            left = [key for key, future in asked.items() if future.cancel()]
            for key in asked.keys() - left:
                asked[key].result()
            if left and time.monotonic() > deadline:
                late = sorted({rank for rank, _ in left})
                raise ClusterError(
                    f"{begin_with_ranks(late)} did not answer within {timeout_s:.0f} s."
                )

    def _ask_for_life(self, rank: int, busy: bool) -> PendingReply:
        return self.ask(rank, "clock.read", busy=True) if busy else self.ask(rank, "boot.answer")

    def execute(
        self,
        rank: int,
        code: str,
        start: wire.CellStart,
        handler: "Handler",
        outbox: list[Callable[[], None]] | None = None,
    ) -> str:
        """Send a cell to a rank; `handler` gets its output and its reply.

        With an `outbox` it is put there, until `release`.

        Raises:
            RankDiedError: The rank is not there any more.
        """
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            # Otherwise an engine drops the cells that follow a failed one for a while.
            "stop_on_error": False,
        }
        with self._lock:
            how = self._ended.get(rank)
        if how is not None:
            raise _died(rank, how)
        try:
            return self._require().send(
                rank,
                "execute_request",
                content,
                handler,
                metadata={wire.CELL_KEY: start.to_wire()},
                outbox=outbox,
            )
        except KeyError:
            raise RankDiedError(f"rank {rank} is not there.") from None

    def release(self, outbox: list[Callable[[], None]]) -> None:
        """Send what `execute` has put into an outbox."""
        self._require().release(outbox)

    def interrupt(self, rank: int, message_id: str) -> PendingReply:
        """Interrupt a cell, a push or a pull on a rank, and nothing that runs there after it.

        Args:
            rank: Which rank.
            message_id: What `execute` returned, or `ask` as the answer's `message`.

        Returns:
            A future of whether it ran.
        """
        return self.ask(rank, "control.interrupt", busy=True, message=message_id)

    def hear(self, message_id: str, handler: "Handler") -> None:
        """Hear what a cell sends that another kernel has sent; see `Connection.hear`."""
        self._require().hear(message_id, handler)

    def forget(self, message_id: str) -> None:
        """Stop listening for what a cell still sends."""
        if self._connection is not None:
            self._connection.forget(message_id)

    def _require(self) -> "Connection":
        if self._connection is None:
            raise ClusterError("The cluster is not running.", do="%dist start")
        return self._connection


def gather(pending: Mapping[int, "Future[Any]"], call: str, timeout_s: float) -> dict[int, Any]:
    """Return every rank's answer to `call`; the first failure is raised at once.

    Raises:
        ClusterError: A rank did not answer within `timeout_s`, or died.
        RankFailedError: The function failed on a rank.
    """
    done, late = wait(pending.values(), timeout_s, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if late:
        ranks = [rank for rank, future in pending.items() if future in late]
        raise ClusterError(
            f"{begin_with_ranks(ranks)} did not answer {call} within {timeout_s:.0f} s."
        )
    return {rank: future.result() for rank, future in pending.items()}


def _died(rank: int, how: Ended) -> RankDiedError:
    return RankDiedError(
        f"Rank {rank} has ended, so it did not answer.",
        why=f"its process: {how}.",
        do=f"%dist restart -r {rank}    (or run a cell: it replaces the rank first)",
    )


# A reply and a death may come at the same moment, on two threads: the first one counts.


def _resolve(future: "Future[Any]", value: Any) -> None:
    with suppress(InvalidStateError):
        future.set_result(value)


def _fail(future: "Future[Any]", error: Exception) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
