"""The keeper: holds the channels to the parents of all hosts, beside the notebook's kernel.

A channel is a command whose standard input and output lead to one parent, or to one on each of
several hosts (`ssh`, `srun`, `mpiexec`, or the parent itself on this machine). The keeper passes
JSON lines on, sends a beat into each channel every second, and says which host has been silent.
It is a process of its own: a kernel whose Python code holds the GIL would lose its hosts.

Requests of the kernel, over a socket pair:

    {"op": "open", "channel": ..., "command": [...], "environment": {}, "log": ..., "cancel": []}
    {"op": "send", "channel": ..., "line": {...}}
    {"op": "close", "channel": ...}
    {"op": "quit"}
    {"op": "detach", "name": ..., "facts": {}}        outlive the kernel; see `host/door.py`
    {"op": "remember", "value": ..., "says": ...}     what the next kernel is told

Events: what parents tell, with `channel` added; `lost` (channel, host, why), after which nothing
more of that host is passed on; `closed` (channel, status, said: the end of its standard error);
`detached` (why not, or nothing).

Ends with the kernel, unless detached, and ends every channel; parents then end what they have
started. Detached, it goes on without a kernel, and serves one after another.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from nbdist.host.door import MOST_LINE_BYTES, Door
from nbdist.host.guest import BEAT_S
from nbdist.host.process_table import ProcessTable
from nbdist.shared.processes import lifeline

SILENT_S: Final = 4.0  # without a beat, after which a host counts as lost
_LAST_WORDS_S: Final = 0.5  # of a kernel that has ended
_END_S: Final = 2.0  # for a channel's command to end by itself
_CANCEL_S: Final = 3.0
_MOST_LINE_BYTES: Final = 1 << 20
_SAID_LINES: Final = 40  # Open MPI's advice is longer than what has happened
_BEAT: Final = b'{"op": "beat"}\n'


class OpenChannel:
    """One command, and the hosts that answer through it."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, cancel: Sequence[str]
    ) -> None:
        """Begin with no host heard.

        Args:
            name: The kernel's for it.
            process: The command.
            cancel: What ends the work that a scheduler does for it, whether or not it can.
        """
        self.name = name
        self.process = process
        self._cancel = cancel
        self.heard: dict[str, float] = {}  # when each host that beats was heard last
        self.lost: set[str] = set()
        self.said: deque[str] = deque(maxlen=_SAID_LINES)
        self.is_closing = False

    def write(self, line: bytes) -> None:
        """Send a line; nothing where the command has ended."""
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(line)

    def silent(self, now: float) -> list[str]:
        """Return the hosts that have been silent for too long, each once."""
        late = [
            host for host, at in self.heard.items() if now - at > SILENT_S and host not in self.lost
        ]
        self.lost.update(late)
        return late

    async def end(self) -> None:
        """Let the command end: its input's end tells the parents; then by signals."""
        self.is_closing = True
        assert self.process.stdin is not None
        self.write(b'{"op": "quit"}\n')
        self.process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                await asyncio.wait_for(self.process.wait(), _END_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
            else:
                return
        await self.process.wait()

    async def cancel(self) -> None:
        """See to it that a scheduler does nothing more for the command, which has ended."""
        if not self._cancel:
            return
        try:
            process = await asyncio.create_subprocess_exec(
                *self._cancel, stdin=asyncio.subprocess.DEVNULL
            )
            await asyncio.wait_for(process.wait(), _CANCEL_S)
        except TimeoutError:  # which is an OSError
            print(f"{self._cancel[0]} did not end in time", flush=True)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        except OSError as error:
            print(f"{self._cancel[0]}: {error}", flush=True)


class Keeper:
    """All channels, by name. One event loop, one thread."""

    def __init__(self, kernel: socket.socket) -> None:
        """Serve the kernel at the other end of a socket."""
        self._kernel = kernel
        self._channels: dict[str, OpenChannel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None  # to the kernel; None while there is none
        self._ended = asyncio.Event()
        self._table = ProcessTable()
        self._door: Door | None = None

    async def serve(self, kernel_pid: int) -> None:
        """Pass lines on until all is to end; then end all channels."""
        reader, writer = await asyncio.open_connection(sock=self._kernel, limit=MOST_LINE_BYTES)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end)
        self._spawn(self._beat())
        self._spawn(self._serve_kernel(kernel_pid, reader, writer))
        await self._ended.wait()
        ending = list(self._channels.values())
        await asyncio.gather(*(channel.end() for channel in ending))
        await asyncio.gather(*(channel.cancel() for channel in ending))
        if self._door is not None:
            await self._door.close()

    def _end(self) -> None:
        """Begin to end all; what takes seconds to end is found by its name no more."""
        if self._door is not None:
            self._door.shut()
        self._ended.set()

    async def _serve_kernel(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one kernel until it is gone: its connection, or its process."""
        loop = asyncio.get_running_loop()

        def hang_up() -> None:
            loop.call_later(_LAST_WORDS_S, writer.transport.abort)

        # Processes that it has forked may hold the connection. What it had said is heard first.
        lifeline.watch(pid, lambda: _soon(loop, hang_up))
        self._writer = writer
        try:
            await self._listen(pid, reader)
        except OSError:
            pass  # it was killed in the midst of a line
        finally:
            if self._writer is writer:  # the next kernel may have come
                self._writer = None
            writer.close()
        if self._door is None:
            self._end()
        else:
            self._door.left(pid)

    async def _listen(self, pid: int, reader: asyncio.StreamReader) -> None:
        while (line := await reader.readline()).endswith(b"\n"):
            request = json.loads(line)
            op = request["op"]
            if op == "quit":
                self._end()
                return
            if op == "open":
                await self._open(**{k: v for k, v in request.items() if k != "op"})
            elif op == "detach":
                self._tell(event="detached", why=await self._detach(pid, request))
            elif op == "remember" and self._door is not None:
                self._door.memory, self._door.says = request["value"], request["says"]
            elif (channel := self._channels.get(request.get("channel", ""))) is not None:
                if op == "send":
                    channel.write(json.dumps(request["line"]).encode() + b"\n")
                else:
                    self._spawn(channel.end())

    async def _detach(self, pid: int, request: dict[str, Any]) -> str:
        """Outlive the kernel from here on; return why that does not go."""
        try:
            self._door = Door(
                request["name"],
                request["facts"],
                kernel=pid,
                serve=self._serve_kernel,
                end=self._end,
                running=self._table.told,
            )
            await self._door.open()
        except FileExistsError:
            return "the name is taken"
        except OSError as error:
            return str(error)
        return ""

    async def _open(
        self,
        channel: str,
        command: list[str],
        environment: dict[str, str],
        log: str,
        cancel: list[str],
    ) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | environment,
                start_new_session=True,
                limit=_MOST_LINE_BYTES,
            )
        except OSError as error:
            self._tell(event="closed", channel=channel, status=127, said=f"{command[0]}: {error}")
            return
        made = self._channels[channel] = OpenChannel(channel, process, cancel)
        self._spawn(self._follow(made, log))

    async def _follow(self, channel: OpenChannel, log: str) -> None:
        """Pass on what a channel's hosts tell, until its command has ended."""
        process = channel.process
        assert process.stdout is not None
        errors = asyncio.create_task(self._keep_errors(channel, log))
        try:
            while line := await process.stdout.readline():
                self._pass_on(channel, line)
        except ValueError:  # a line beyond any limit: no parent wrote it
            channel.said.append("it wrote a line without end")
            self._spawn(channel.end())
        status = await process.wait()
        await errors
        if not channel.is_closing:
            await channel.cancel()
        if self._channels.get(channel.name) is channel:
            del self._channels[channel.name]
        said = "\n".join(channel.said)
        self._tell(event="closed", channel=channel.name, status=status, said=said)

    async def _keep_errors(self, channel: OpenChannel, log: str) -> None:
        """Write a command's standard error into its log, and remember the end of it."""
        assert channel.process.stderr is not None
        with contextlib.ExitStack() as opened:
            file = None
            with contextlib.suppress(OSError):  # a full disk ends no host: `said` has the end
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                file = opened.enter_context(open(descriptor, "wb", 0))
            while data := await channel.process.stderr.read(1 << 16):
                with contextlib.suppress(OSError):
                    if file is not None:
                        file.write(data)
                lines = data.decode(errors="replace").splitlines()
                channel.said.extend(line for line in lines if line.strip())

    def _pass_on(self, channel: OpenChannel, line: bytes) -> None:
        try:
            event = json.loads(line)
            name, host = event["event"], event["host"]
        except (ValueError, TypeError, KeyError):
            # What a login shell prints before the parent begins.
            channel.said.append(line.decode(errors="replace").rstrip())
            return
        if host in channel.lost:
            return
        # A host beats from when it has imported torch: before, its one thread is busy.
        if host in channel.heard or name in ("ready", "beat"):
            channel.heard[host] = time.monotonic()
        if name != "beat":
            self._tell(**event, channel=channel.name)

    async def _beat(self) -> None:
        now = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            before, now = now, time.monotonic()
            is_late = now - before > 2 * BEAT_S  # this process was held up, and has not read yet
            for channel in list(self._channels.values()):
                channel.write(_BEAT)
                for host in () if is_late else channel.silent(now):
                    why = f"it did not answer for {SILENT_S:.0f} s"
                    self._tell(event="lost", channel=channel.name, host=host, why=why)
                if channel.lost and channel.lost == set(channel.heard) and not channel.is_closing:
                    self._spawn(channel.end())

    def _tell(self, **event: Any) -> None:
        self._table.take(event)
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(event).encode() + b"\n")

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Half a keeper would leave hosts unwatched.
            traceback.print_exception(error)
            self._end()


def _soon(loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
        loop.call_soon_threadsafe(then)


def main(arguments: list[str]) -> None:
    """Run as `python -m nbdist.host.keeper FD KERNEL_PID`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel = socket.socket(fileno=int(arguments[0]))
    asyncio.run(Keeper(kernel).serve(int(arguments[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
