"""The one room that touches private parts of ipykernel, IPython and ipyparallel's engine.

Tried with ipykernel 7.4, IPython 9.18, ipyparallel 9.2. `check()` says what broke when one of
them moves. What is touched, and what for:

- `ipyparallel.engine.app.Kernel`: our kernel class takes its place, to see a cell begin and end
  and to add a summary to its reply;
- `IPEngine.redirect_output`: the last step before the engine serves, where ours are installed;
- `Kernel.shell_handlers` and `control_handlers`: requests of our own;
- `Kernel.session.send` on `iopub_socket`: messages of our own;
- `pre_handler_hook` and `saved_sigint_handler`: when an interrupt may strike;
- `_cancel_on_sigint`, which handles an interrupt of a cell that awaits;
- `InteractiveTB.get_records`, which makes a traceback's frames: seconds for a deep recursion;
- `shell.ask_exit`, which `exit()` calls;
- `sys.ps1`, which IPython sets and by which Lightning refuses to run.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import TracebackType
from typing import Any, Protocol

import ipyparallel.engine.app
from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQDisplayPublisher, ZMQInteractiveShell
from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.kernel import IPythonParallelKernel
from IPython.core.ultratb import VerboseTB

from nbdist import wire
from nbdist.engine import where
from nbdist.engine.output_files import LogStream

log = logging.getLogger(__name__)

TRIED = {"ipykernel": "7.4", "IPython": "9.18", "ipyparallel": "9.2"}


class Rank(Protocol):
    """What the kernel calls on the program that lives in it (`engine/boot.py`)."""

    def installed(self, kernel: "RankKernel") -> None:
        """The kernel exists and is about to serve."""

    def cell_began(self, options: dict[str, Any]) -> None:
        """A cell is about to run on the main thread."""

    def cell_ended(self, result: Any) -> dict[str, Any]:
        """The cell is over; returns the summary that rides in its reply."""

    def answer(self, content: dict[str, Any], buffers: list[memoryview], *, busy: bool) -> "Answer":
        """Carry out a request; `busy` on the control thread, while the main one may be stuck."""


Answer = tuple[dict[str, Any], list[Any]]


class _NoSubshells:
    """Stands where ipykernel 7 keeps its shell-channel thread, which an engine does not have.

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
        self._was_interrupted = False
        self.shell.events.register("post_run_cell", self._remember_result)

    def _remember_result(self, result: Any) -> None:
        self._last_result = result

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
        """Run one cell; a cell of ours carries its options in the message's metadata."""
        options = (cell_meta or {}).get(wire.SUMMARY_KEY)
        if options is None:
            reply: dict[str, Any] = await super().do_execute(
                code, silent, store_history, user_expressions, allow_stdin, cell_id=cell_id
            )
            return reply
        try:
            self._last_result = None
            self.shell.execution_count = options["prompt"]
            self.rank.cell_began(options)
            try:
                with self._interruptible():
                    reply = await super().do_execute(
                        code, silent, store_history, user_expressions, allow_stdin, cell_id=cell_id
                    )
            finally:
                summary = self.rank.cell_ended(self._last_result)
            if reply["status"] == "error" and reply["ename"] == "NoneType":
                # The value's repr failed: ipykernel calls the cell failed, and forgets by what.
                failed = sys.last_value
                reply.update(ename=type(failed).__name__, evalue=str(failed))
            return {**reply, wire.SUMMARY_KEY: summary}
        except BaseException as error:
            # IPython has answered for the user's code by now; this is ours. Without a reply the
            # notebook would wait for ever.
            if not isinstance(error, KeyboardInterrupt):  # which may come before the user's code
                log.exception("A cell could not be run to its end")
            return {
                "status": "error",
                "ename": type(error).__name__,
                "evalue": str(error),
                "traceback": traceback.format_exception(error),
                "execution_count": options["prompt"],
                "user_expressions": {},
                "payload": [],
            }

    def pre_handler_hook(self) -> None:
        """Note an interrupt, until something runs that may be interrupted.

        ipykernel's own hook lets it strike from here on: a reply that was about to be sent, or a
        cell that had not begun, was lost, and the notebook waited for ever.
        """
        self._was_interrupted = False
        self.saved_sigint_handler = signal.signal(signal.SIGINT, self._note_interrupt)

    def _note_interrupt(self, *_: Any) -> None:
        self._was_interrupted = True

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let SIGINT raise KeyboardInterrupt; at once, if it has come in the meantime."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            if self._was_interrupted:
                raise KeyboardInterrupt
            yield
        finally:
            signal.signal(signal.SIGINT, self._note_interrupt)

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """Cancel a cell that awaits when SIGINT comes, at once.

        ipykernel's handler runs in the event loop's own thread and so does not wake it: a cell
        that only waited went on waiting.
        """
        loop = asyncio.get_running_loop()
        with super()._cancel_on_sigint(future):
            cancel: Any = signal.getsignal(signal.SIGINT)

            def cancel_and_wake(*arguments: Any) -> None:
                cancel(*arguments)
                loop.call_soon_threadsafe(_nothing)

            signal.signal(signal.SIGINT, cancel_and_wake)
            yield

    @property
    def _supports_kernel_subshells(self) -> bool:
        return False

    def _on_main_thread(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        try:
            with self._interruptible():
                answer = self._answer(parent, busy=False)
        except KeyboardInterrupt:
            answer = {"error": "KeyboardInterrupt: "}, []
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
    """ipyparallel's engine application, which calls `rank` once its kernel stands."""

    rank: Rank

    def redirect_output(self, iopub_socket: Any) -> None:
        """Install this rank instead of ipykernel's streams; called once, before serving."""
        self.kernel.rank = self.rank
        self.rank.installed(self.kernel)


def serve(rank: Rank, arguments: list[str]) -> None:
    """Become an engine; returns when it has been told to stop.

    Args:
        rank: Receives the kernel's callbacks.
        arguments: `ipengine`'s command line.
    """
    ipyparallel.engine.app.Kernel = RankKernel
    sys.argv = ["ipengine", *arguments]
    app = RankEngine.instance()
    app.rank = rank
    app.initialize(arguments)
    app.start()


def _nothing() -> None:
    """Be called by an event loop, which wakes up for it."""


def hide_interactive_prompt() -> None:
    """Remove `sys.ps1`: Lightning refuses its DDP strategies where it finds one."""
    with contextlib.suppress(AttributeError):
        del sys.ps1


def log_to(application_log: logging.Logger, stream: LogStream) -> None:
    """Send the engine's own log to `stream`: standard error belongs to the user's code."""
    for handler in application_log.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


def name_cells_alike(rank_kernel: RankKernel) -> None:
    """Give a cell the same file name on every rank; ipykernel's holds the process id.

    Warnings and logs show it: with the same name, what all ranks say appears once.
    """

    def name(raw_code: str, transformed_code: str, number: int) -> str:
        digest = hashlib.sha1(raw_code.encode(), usedforsecurity=False).hexdigest()[:10]
        file = os.path.join(tempfile.gettempdir(), "ipykernel_nbdist", f"{digest}.py")
        where.name_cell(file, number)
        return file

    rank_kernel.shell.compile.get_code_name = name


def flush_before_display(rank_kernel: RankKernel, flush: Callable[[], None]) -> None:
    """Call `flush` before a display or a value is published, so that the order is kept.

    ipykernel flushes `sys.stdout` there, which on a rank does not wait.
    """

    def hook(message: dict[str, Any]) -> dict[str, Any]:
        flush()
        return message

    rank_kernel.shell.display_pub.register_hook(hook)
    rank_kernel.shell.displayhook.register_hook(hook)


def refuse_input(rank_kernel: RankKernel) -> None:
    """Make `input()` and `getpass()` on a rank say what to do instead."""

    def refuse(prompt: str = "", *_: Any, **__: Any) -> str:
        raise RuntimeError(
            "input() cannot ask from a rank: several ranks would ask at once. Ask in an ordinary "
            "cell of the notebook, then send the answer with %dist push NAME."
        )

    rank_kernel.raw_input = refuse
    rank_kernel.getpass = refuse


def refuse_exit(rank_kernel: RankKernel) -> None:
    """Make `exit()` and `quit()` say what to do instead of stopping the engine's event loop."""

    def refuse() -> None:
        raise RuntimeError(
            "exit() would end this rank and lose its variables. To leave a cell early raise an "
            "exception; to end all ranks use %dist stop."
        )

    rank_kernel.shell.ask_exit = refuse


def shorten_tracebacks(rank_kernel: RankKernel, first: int = 10, last: int = 30) -> None:
    """Leave out the middle of very deep tracebacks.

    IPython looks up the module and the source of every frame: 3000 frames of a recursion took
    14 s with torch imported, and nobody reads them.

    Args:
        rank_kernel: Whose tracebacks.
        first: Outermost frames that stay.
        last: Innermost frames that stay.
    """
    formatter = rank_kernel.shell.InteractiveTB
    get_records = formatter.get_records

    def get_few_records(etb: TracebackType, context: int, tb_offset: int) -> Any:
        links = list(_links(etb))
        left_out = len(links) - first - last
        if left_out <= 0:
            return get_records(etb, context, tb_offset)
        from IPython.core.tbtools import FrameInfo
        from stack_data.core import RepeatedFrames

        outer: TracebackType | None = None
        for link in reversed(links[:first]):
            outer = TracebackType(outer, link.tb_frame, link.tb_lasti, link.tb_lineno)
        assert outer is not None
        text = f"{left_out} frames of {len(links)}"
        between = FrameInfo(text, "", 0, None, None, sd=RepeatedFrames([], []))
        return [
            *get_records(outer, context, tb_offset),
            between,
            *get_records(links[-last], context, 0),
        ]

    formatter.get_records = get_few_records


def repeat_lost_interrupts() -> None:
    """Interrupt again when Python has dropped a KeyboardInterrupt.

    One that is raised in a finaliser, or in a hook around `fork` (a DataLoader starting its
    workers), is printed as "Exception ignored in" and forgotten: the cell would run on.
    """
    show = sys.unraisablehook
    main = threading.main_thread().ident
    assert main is not None

    def hook(lost: Any) -> None:
        if lost.exc_type is not None and issubclass(lost.exc_type, KeyboardInterrupt):
            # A little later: now, it would be raised in here and dropped once more.
            threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            show(lost)

    sys.unraisablehook = hook


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def check() -> list[str]:
    """Return what no longer fits the installed versions; empty when all is well."""
    broken = []
    if ipyparallel.engine.app.Kernel not in (IPythonParallelKernel, RankKernel):
        broken.append("ipyparallel.engine.app.Kernel is no longer the engine's kernel class")
    wanted: list[tuple[Any, tuple[str, ...]]] = [
        (IPEngine, ("redirect_output", "initialize", "start")),
        (
            IPythonKernel,
            (
                *("do_execute", "get_parent", "_topic", "_cancel_on_sigint", "iopub_socket"),
                *("pre_handler_hook", "post_handler_hook"),
                *("_supports_kernel_subshells", "shell_channel_thread", "raw_input", "getpass"),
            ),
        ),
        (
            ZMQInteractiveShell,
            ("ask_exit", "user_ns", "execution_count"),
        ),
        (VerboseTB, ("get_records",)),
        (ZMQDisplayPublisher, ("register_hook",)),
        (ZMQShellDisplayHook, ("register_hook",)),
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in TRIED)
    return broken + [
        f"{versions}: {owner.__name__}.{name} is gone"
        for owner, names in wanted
        for name in names
        if not hasattr(owner, name)
    ]
