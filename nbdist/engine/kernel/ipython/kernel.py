"""Use private parts of ipykernel and of ipyparallel's engine.

Tried with ipykernel 7.4, IPython 9.18, ipyparallel 9.2. `check()` reports what broke when one of
them changes. The parts, and their use:

- `ipyparallel.engine.app.Kernel`: replaced by our kernel class, to see a cell begin and end
  and to add a summary to its reply;
- `IPEngine.redirect_output`: the last step before the engine serves, where ours are installed;
- `Kernel.shell_handlers` and `control_handlers`: requests of our own;
- `Kernel.session.send` on `iopub_socket`: messages of our own;
- `_publish_status` and `_publish_execute_input`: only what the notebook reads is sent;
- `Kernel.session.send`, which all messages pass: whether a cell has sent any on `iopub_socket`,
  and which (`journal`);
- `pre_handler_hook` and `saved_sigint_handler`: when an interrupt may be raised;
- `_cancel_on_sigint`, which handles an interrupt of a cell that awaits, and IPython's `run_code`,
  below which a cell's code runs.

How its shell behaves is `shell.py`'s.
"""

import asyncio
import contextlib
import functools
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.metadata import version
from types import FrameType
from typing import Any, Protocol

import ipyparallel.engine.app
from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQInteractiveShell
from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.kernel import IPythonParallelKernel
from IPython.core.interactiveshell import InteractiveShell

from nbdist.engine.kernel import interrupts
from nbdist.engine.kernel.ipython import calls
from nbdist.engine.kernel.ipython.journal import Journal
from nbdist.engine.kernel.output.stdio_files import LogStream
from nbdist.shared import wire
from nbdist.shared.error_text import text_of

log = logging.getLogger(__name__)

TRIED = {"ipykernel": "7.4", "IPython": "9.18", "ipyparallel": "9.2"}


class Rank(Protocol):
    """The calls of the kernel on its rank (`engine/rank/rank.py`)."""

    def installed(self, kernel: "RankKernel") -> None:
        """The kernel exists and is about to serve."""

    def cell_began(self, start: wire.CellStart) -> None:
        """A cell is about to run on the main thread."""

    def cell_ended(self, result: Any) -> wire.CellEnd:
        """The cell is over; returns what its reply carries."""

    def answer(self, content: dict[str, Any], buffers: list[memoryview], *, busy: bool) -> "Answer":
        """Carry out a request; `busy` on the control thread, while the main one may be stuck."""


Answer = tuple[dict[str, Any], list[Any]]


class _NoSubshells:
    """Replaces ipykernel 7's shell-channel thread, which an engine does not have.

    Without it, a cell with top-level `await` fails: ipykernel asks this attribute which thread
    is the main one. It is false, as None was, so that nothing else takes it for the real thing.
    """

    def __init__(self) -> None:
        self.parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


class RankKernel(IPythonParallelKernel):
    """ipyparallel's kernel, with the beginning and end of each cell made visible."""

    rank: Rank

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shell_channel_thread = _NoSubshells()
        self.shell_handlers[wire.REQUEST] = self._on_main_thread
        self.control_handlers[wire.REQUEST] = self._on_control_thread
        self._last_result: Any = None
        self._has_published = True  # something on iopub, since the newest cell began
        self.journal = Journal()
        self._note_what_is_published()
        self.shell.events.register("post_run_cell", self._remember_result)

    def _remember_result(self, result: Any) -> None:
        self._last_result = result

    def _note_what_is_published(self) -> None:
        send = self.session.send

        def send_and_note(stream: Any, *arguments: Any, **more: Any) -> Any:
            sent = send(stream, *arguments, **more)
            if stream is self.iopub_socket:
                self._has_published = True
                if sent is not None:  # in a forked child nothing is
                    self.journal.add(sent)
            return sent

        self.session.send = send_and_note

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, Any] | None = None,
        allow_stdin: bool = False,
        *,
        cell_meta: dict[str, Any] | None = None,
        cell_id: str | None = None,
    ) -> dict[str, Any]:
        """Run one cell; nbdist's cells carry their options in the message's metadata."""
        execute = functools.partial(
            super().do_execute,
            silent=silent,
            store_history=store_history,
            user_expressions=user_expressions,
            allow_stdin=allow_stdin,
            cell_id=cell_id,
        )
        sent = (cell_meta or {}).get(wire.CELL_KEY)
        if sent is None:
            reply: dict[str, Any] = await execute(code)
            return reply
        return await self._run_cell(wire.CellStart.from_wire(sent), code, execute)

    async def _run_cell(
        self,
        start: wire.CellStart,
        code: str,
        execute: Callable[[str], Awaitable[dict[str, Any]]],
    ) -> dict[str, Any]:
        """Run one of nbdist's cells by `execute`; returns its reply, whatever happens."""
        end = None
        try:
            code = self._cell_began(start, code)
            try:
                with _interruptible(self.get_parent("shell")):
                    reply = await execute(code)
            finally:
                interrupts.here.end()  # again: an interrupt may have come just before the first
                self.shell.user_ns.pop(calls.CALL, None)
                end = self.rank.cell_ended(self._last_result)
            _name_lost_error(reply)
            if start.keep:
                self._has_published = True  # its end is sent to any notebook that listens by then
            silence = {} if self._has_published else {wire.SILENT_KEY: True}
            return self._kept({**reply, wire.CELL_KEY: end.to_wire(), **silence})
        except BaseException as error:
            # An error of ours: IPython has handled those of the user's code. Without a reply the
            # notebook would wait for ever.
            self._has_published = True
            if not isinstance(error, KeyboardInterrupt):  # which may come before the user's code
                log.exception("A cell could not be run to its end")
            ended = {} if end is None else {wire.CELL_KEY: end.to_wire()}
            return self._kept({**_error_reply(error, start.prompt), **ended})

    def _cell_began(self, start: wire.CellStart, code: str) -> str:
        """Begin a cell of nbdist's; returns the code to run, of a call in place of `code`."""
        self._last_result, self._has_published = None, False
        message = self.get_parent("shell")["header"]["msg_id"]
        self.journal.begin(message, keeps=start.keep)
        self.shell.execution_count = start.prompt
        self.rank.cell_began(start)
        if start.call:
            return calls.source_of(start.call, start.arguments, self.shell.user_ns)
        return code

    def _kept(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Return a cell's reply, and keep it for a notebook that attaches later."""
        self.journal.end(reply)
        return reply

    def _publish_status(self, status: str, channel: str, parent: Any = None) -> None:
        """Send only the status that ends a cell's output, if the cell sent any.

        No one reads "busy", nor the status of a request: each such message cost every
        rank, the controller and the notebook a fraction of a millisecond.
        """
        if _is_read(status, parent or self.get_parent(channel), is_silent=not self._has_published):
            super()._publish_status(status, channel, parent)

    def _publish_execute_input(
        self, code: str, parent: dict[str, Any], execution_count: int
    ) -> None:
        """Send no cell back to the notebook that has sent it."""
        if not _is_our_cell(parent):
            super()._publish_execute_input(code, parent, execution_count)

    def pre_handler_hook(self) -> None:
        """Drop interrupts, until something runs that may be interrupted.

        ipykernel's own hook allows them from here on: a reply that was about to be sent, or a
        cell that had not begun, was lost, and the notebook waited for ever.
        """
        self.saved_sigint_handler = signal.getsignal(signal.SIGINT)
        interrupts.here.end()

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """Interrupt a cell with an await as soon as SIGINT comes: its code, or its wait.

        ipykernel only cancels the cell, which is seen at its next await: a loop went on. And its
        handler runs in the event loop's own thread and so does not wake it: a wait went on, too.
        """
        loop = asyncio.get_running_loop()
        with super()._cancel_on_sigint(future):
            cancel: Any = signal.getsignal(signal.SIGINT)

            def interrupt(number: int, frame: FrameType | None) -> None:
                if _runs_code(frame):
                    interrupts.here.in_code(number, frame)
                    return
                cancel(number, frame)
                loop.call_soon_threadsafe(_nothing)

            signal.signal(signal.SIGINT, interrupt)
            yield

    @property
    def _supports_kernel_subshells(self) -> bool:
        return False

    def _on_main_thread(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        if parent["content"]["call"] in calls.INTERRUPTIBLE:
            try:
                with _interruptible(parent):
                    answer = self._answer(parent, busy=False)
            except KeyboardInterrupt:
                interrupts.here.end()  # again, as after a cell
                answer = {"error": "KeyboardInterrupt: "}, []
        else:
            answer = self._answer(parent, busy=False)
        self._send_answer(stream, ident, parent, answer)

    def _on_control_thread(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        self._send_answer(stream, ident, parent, self._answer(parent, busy=True))

    def _answer(self, parent: dict[str, Any], *, busy: bool) -> Answer:
        buffers = [memoryview(buffer) for buffer in parent["buffers"]]
        return self.rank.answer(parent["content"], buffers, busy=busy)

    def _send_answer(self, stream: Any, ident: Any, parent: dict[str, Any], answer: Answer) -> None:
        content, buffers = answer
        self.session.send(stream, wire.REPLY, content, parent=parent, ident=ident, buffers=buffers)

    def publish(self, message_type: str, content: dict[str, Any], parent: Any = None) -> None:
        """Send a message on iopub as part of the current cell. From any thread."""
        self.session.send(
            self.iopub_socket,
            message_type,
            content,
            parent=parent if parent is not None else self.get_parent("shell"),
            ident=self._topic(message_type),
        )


class RankEngine(IPEngine):
    """ipyparallel's engine application, which calls `rank` once its kernel is ready."""

    rank: Rank

    def init_signal(self) -> None:
        """Let SIGTERM end the process as such, so that its exit status names the signal."""
        super().init_signal()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def redirect_output(self, iopub_socket: Any) -> None:
        """Install this rank instead of ipykernel's streams; called once, before serving."""
        self.kernel.rank = self.rank
        self.rank.installed(self.kernel)


def serve(rank: Rank, arguments: list[str]) -> None:
    """Become an engine; returns when it is stopped.

    Args:
        rank: Receives the kernel's callbacks.
        arguments: `ipengine`'s command line.
    """
    ipyparallel.engine.app.Kernel = RankKernel
    sys.argv = [""]  # for cells, as in any Python notebook: `argparse` finds no arguments
    app = RankEngine.instance()
    app.rank = rank
    app.initialize(arguments)
    app.start()


@contextlib.contextmanager
def _interruptible(parent: Mapping[str, Any]) -> Iterator[None]:
    """Allow interrupts of this message of the notebook within the block."""
    try:
        interrupts.here.begin(parent["header"]["msg_id"])
        yield
    finally:
        interrupts.here.end()


def _name_lost_error(reply: dict[str, Any]) -> None:
    """Put the error into the reply of a cell whose value's `repr` failed.

    ipykernel calls such a cell failed, and loses the error.
    """
    if reply["status"] == "error" and reply["ename"] == "NoneType":
        failed = sys.last_value
        assert failed is not None
        reply.update(ename=type(failed).__name__, evalue=text_of(failed))


def _error_reply(error: BaseException, prompt: int) -> dict[str, Any]:
    """Return a cell's reply as ipykernel makes it for an error."""
    return {
        "status": "error",
        "ename": type(error).__name__,
        "evalue": text_of(error),
        "traceback": traceback.format_exception(error),
        "execution_count": prompt,
        "user_expressions": {},
        "payload": [],
    }


def _is_our_cell(parent: Mapping[str, Any]) -> bool:
    return wire.CELL_KEY in parent.get("metadata", {})


def _is_read(status: str, parent: Mapping[str, Any], *, is_silent: bool) -> bool:
    """Return whether anyone reads this status of a rank for that message.

    Args:
        status: Such as `idle`.
        parent: The message.
        is_silent: The cell has sent no output that could still be under way.
    """
    if _is_our_cell(parent):
        return status == "idle" and not is_silent
    return bool(parent.get("header", {}).get("msg_type") != wire.REQUEST)


def _runs_code(frame: FrameType | None) -> bool:
    """Return whether a cell's code runs here, of which IPython catches every error.

    Elsewhere in a cell that awaits, an error would end the event loop, and the rank with it.
    """
    while frame is not None and (caller := frame.f_back) is not None:
        if caller.f_code is InteractiveShell.run_code.__code__:
            return frame.f_globals is not caller.f_globals
        frame = caller
    return False


def _nothing() -> None:
    """Do nothing: the call wakes up an event loop."""


def log_to(application_log: logging.Logger, stream: LogStream) -> None:
    """Send the engine's own log to `stream`: standard error belongs to the user's code."""
    for handler in application_log.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


def check() -> list[str]:
    """Return what no longer fits the installed versions; empty if all fits."""
    broken = []
    if ipyparallel.engine.app.Kernel not in (IPythonParallelKernel, RankKernel):
        broken.append("ipyparallel.engine.app.Kernel is no longer the engine's kernel class")
    wanted: list[tuple[Any, tuple[str, ...]]] = [
        (IPEngine, ("redirect_output", "init_signal", "initialize", "start")),
        (
            IPythonKernel,
            (
                *("do_execute", "get_parent", "_topic", "_cancel_on_sigint", "iopub_socket"),
                *("_publish_status", "_publish_execute_input"),
                *("pre_handler_hook", "post_handler_hook"),
                *("_supports_kernel_subshells", "shell_channel_thread"),
            ),
        ),
        (
            ZMQInteractiveShell,
            ("user_ns", "execution_count", "run_code"),
        ),
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in TRIED)
    return broken + [
        f"{versions}: {owner.__name__}.{name} is gone"
        for owner, names in wanted
        for name in names
        if not hasattr(owner, name)
    ]
