"""Where a detached cluster is found: the keeper's socket for this user's kernels and terminals.

A connection begins with one JSON line, which `nbdist/shared/processes/detached.py` sends:

    {"ask": "who"}      answered by what the cluster is, and which kernel has it
    {"ask": "stop"}     ends all of it, then answers; refused while a kernel has it
    {"ask": "attach", "pid": ..., "version": ...}
                        refused likewise; else the connection is the kernel's from here on

One event loop, the keeper's.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from nbdist.shared import wire
from nbdist.shared.errors import NBDistError
from nbdist.shared.processes import lifeline, user_socket

MOST_LINE_BYTES: Final = 1 << 26  # a kernel's memory holds the source of the cell that runs
_QUESTION_S: Final = 2.0

Serve = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Door:
    """One detached cluster's name, what it remembers for kernels, and who has it."""

    def __init__(
        self,
        name: str,
        facts: Mapping[str, Any],
        *,
        kernel: int,
        serve: Serve,
        end: Callable[[], None],
        running: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Take the name; no one is let in before `open`.

        Args:
            name: The cluster's.
            facts: What `who` tells beside it.
            kernel: The pid of the kernel that has it.
            serve: Serves a kernel that has attached, until it is gone.
            end: Begins to end the cluster.
            running: Returns what an attaching kernel is told beside the memory.

        Raises:
            OSError: The name is taken, or there is no private folder.
        """
        self.memory: Any = None
        self.says = ""
        self.kernel: int | None = kernel
        self.ended = asyncio.Event()
        self._is_shut = False
        self._name, self._facts, self._since = name, dict(facts), time.time()
        self._serve, self._end, self._running = serve, end, running
        self._conversations: set[asyncio.Task[None]] = set()
        self._socket, self.path = user_socket.claim(user_socket.detached_name(name))

    async def open(self) -> None:
        """Let kernels and terminals in."""
        self._server = await asyncio.start_unix_server(
            self._meet, sock=self._socket, limit=MOST_LINE_BYTES
        )

    def shut(self) -> None:
        """Give the name back, and let no one in any more: the cluster begins to end."""
        if not self._is_shut:
            self._is_shut = True
            self._server.close()
            self.path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Tell who asked for the end that it has come."""
        self.ended.set()
        if self._conversations:
            await asyncio.wait(self._conversations, timeout=_QUESTION_S)

    def left(self, kernel: int) -> None:
        """Note that a kernel is gone."""
        if self.kernel == kernel:
            self.kernel = None

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            await self._converse(reader, writer)
        except (OSError, ValueError, KeyError, TypeError, TimeoutError):
            pass  # it left, or asks in another way than we do: nothing of the cluster's concern
        finally:
            self._conversations.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not user_socket.is_this_user(writer.get_extra_info("socket")):
            return
        asked = json.loads(await asyncio.wait_for(reader.readline(), _QUESTION_S))
        if self._is_shut and asked["ask"] != "stop":
            return
        if asked["ask"] == "who":
            await _answer(writer, self._who())
        elif (why := self._why_not(asked)) is not None:
            await _answer(writer, {"error": [why.what, why.why, why.do]})
        elif asked["ask"] == "stop":
            self._end()
            await self.ended.wait()
            await _answer(writer, {"stopped": self._name})
        elif asked["ask"] == "attach":
            self.kernel = int(asked["pid"])
            # Nothing is awaited in between: an event that came then would reach no kernel.
            writer.write(_line({"event": "attached", "memory": self.memory, **self._running()}))
            await self._serve(self.kernel, reader, writer)

    def _who(self) -> dict[str, Any]:
        return self._facts | {
            "name": self._name,
            "since": self._since,
            "says": self.says,
            "kernel": self._living_kernel(),
            "pid": os.getpid(),
            "version": wire.VERSION,
        }

    def _living_kernel(self) -> int | None:
        is_there = self.kernel is not None and lifeline.is_alive(self.kernel)
        return self.kernel if is_there else None

    def _why_not(self, asked: Mapping[str, Any]) -> NBDistError | None:
        if (pid := self._living_kernel()) is not None:
            return NBDistError(
                f"Kernel {pid} has the cluster {self._name}.",
                do="restart or shut down that kernel: the cluster stays (nbdist stop --pid "
                f"{pid} ends it).",
            )
        if asked["ask"] == "attach" and asked["version"] != wire.VERSION:
            return NBDistError(
                f"The cluster {self._name} runs nbdist's messages {wire.VERSION}, and this "
                f"notebook {asked['version']}.",
                do="attach from an environment with the nbdist that has started it.",
            )
        return None


async def _answer(writer: asyncio.StreamWriter, value: Mapping[str, Any]) -> None:
    writer.write(_line(value))
    with contextlib.suppress(ConnectionError):
        await writer.drain()


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
