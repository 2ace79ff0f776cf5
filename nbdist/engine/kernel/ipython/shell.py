"""Adapt IPython's shell to a rank: no questions, no exit, the same cell names on all ranks.

A compat module, as `kernel.py` is. Tried with ipykernel 7.4, IPython 9.18. The parts used:

- `show_in_pager`, a hook of the shell;
- `shell.compile`, see `cell_compiler`;
- `display_pub` and `displayhook`: their hooks;
- `raw_input` and `getpass` of the kernel, `sys.breakpointhook`, which ipykernel may have taken,
  `shell.ask_exit`, which `exit()` calls;
- `InteractiveTB.structured_traceback` and its `get_records`, which makes a traceback's frames:
  seconds for a deep recursion, half a second for the first one through torch;
- its `format_exception`, `shell._showtraceback` and `_format_exception_for_storage`, and a result's
  error: they read an exception's text;
- `safe_execfile` and `safe_run_module`, which run the scripts of `%run`, and `run_code`: errors
  shown while it runs do not end the cell;
- `display_pub._flush_streams`, `displayhook.finish_displayhook` and again `shell._showtraceback`,
  which flush `sys.stdout` and `sys.stderr` without asking whether they are there;
- `interactiveshell.warn`, which recommends `exit` after `sys.exit()`;
- `sys.ps1`, which IPython sets and by which Lightning refuses to run.
"""

import contextlib
import functools
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from types import FrameType, TracebackType
from typing import Any

from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQDisplayPublisher, ZMQInteractiveShell
from IPython.core import interactiveshell
from IPython.core.ultratb import VerboseTB

from nbdist.engine.kernel import interrupts
from nbdist.engine.kernel.ipython import cell_compiler, tracebacks
from nbdist.shared import origins
from nbdist.shared.error_text import ToldError, cut
from nbdist.shared.errors import UsageError

Lent = Callable[[], contextlib.AbstractContextManager[None]]

TRIED = {"ipykernel": "7.4", "IPython": "9.18"}


def install(
    kernel: Any,
    flush: Callable[[], None],
    lent: Lent,
    was_freed: Callable[[BaseException], bool],
) -> None:
    """Adapt the shell of this rank's kernel as described above.

    Args:
        kernel: The kernel.
        flush: Publishes what was printed so far.
        lent: Provides `sys.stdout` and `sys.stderr` within its block.
        was_freed: Returns whether an error only means that this rank was freed from a collective.
    """
    _flush_before_display(kernel, flush)
    _raise_from_scripts(kernel)
    _read_errors_once(kernel)
    _show_errors_that_end_no_cell(kernel)
    _lend_streams(kernel, lent)
    _hide_interactive_prompt()
    kernel.shell.compile = cell_compiler.CellCompiler()
    _print_pages(kernel)
    _refuse_input(kernel)
    _refuse_exit(kernel)
    refuse_magics(kernel.shell)
    _shorten_tracebacks(kernel, was_freed)
    tracebacks.install(kernel)
    _repeat_lost_interrupts()


def _hide_interactive_prompt() -> None:
    """Remove `sys.ps1`: Lightning refuses its DDP strategies where it finds one."""
    with contextlib.suppress(AttributeError):
        del sys.ps1


def _flush_before_display(kernel: Any, flush: Callable[[], None]) -> None:
    """Call `flush` before a display or a value is published, so that the order is kept.

    ipykernel flushes `sys.stdout` there, which on a rank does not wait.
    """

    def hook(message: dict[str, Any]) -> dict[str, Any]:
        flush()
        return message

    kernel.shell.display_pub.register_hook(hook)
    kernel.shell.displayhook.register_hook(hook)


def _lend_streams(kernel: Any, lent: Lent) -> None:
    """Let IPython show values and errors although the program has set `sys.stdout` to None."""
    shell = kernel.shell
    for owner, name in (
        (shell.display_pub, "_flush_streams"),
        (shell.displayhook, "finish_displayhook"),
        (shell, "_showtraceback"),
    ):
        setattr(owner, name, _within(lent, getattr(owner, name)))


def _within(lent: Lent, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lent():
            return function(*args, **kwargs)

    return call


def _read_errors_once(kernel: Any) -> None:
    """Read the text of a cell's error once, whatever its `__str__` does, and limit its length.

    IPython and ipykernel read it three times, and an error without a text broke the reply.
    """
    shell, formatter = kernel.shell, kernel.shell.InteractiveTB
    show, format_exception = shell._showtraceback, formatter.format_exception
    read: list[tuple[BaseException, ToldError]] = []  # the newest

    def read_once(error: BaseException) -> ToldError:
        if not read or read[0][0] is not error:
            read[:] = [(error, ToldError.of(error))]
        return read[0][1]

    def show_read(kind: Any, error: Any, traceback: list[str]) -> None:
        show(kind, read_once(error), [cut(part) for part in traceback])

    def format_read(kind: Any, error: Any) -> Any:
        return format_exception(
            kind, read_once(error) if isinstance(error, BaseException) else error
        )

    def reply_with_read(result: Any) -> None:
        for name in ("error_before_exec", "error_in_exec"):
            error = getattr(result, name, None)
            if error is not None:
                setattr(result, name, read_once(error))
        read.clear()

    def store_read(error: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        # For a history of errors, which is not used on a rank.
        return {"ename": type(error).__name__, "evalue": str(read_once(error)), "traceback": []}

    shell._showtraceback, formatter.format_exception = show_read, format_read
    shell._format_exception_for_storage = store_read
    shell.events.register("post_run_cell", reply_with_read)


def _raise_from_scripts(kernel: Any) -> None:
    """Let an error of a `%run` script end the cell, as if its lines were in the cell.

    IPython shows it and calls the cell a success: a rank whose script has failed would leave the
    others waiting, without an error. The script's names are kept all the same.
    """
    shell = kernel.shell
    execute_file = shell.safe_execfile

    def execute(
        file: Any, namespace: dict[str, Any], *more: Any, exit_ignore: bool = False, **options: Any
    ) -> None:
        try:
            execute_file(file, namespace, *more, **options | {"raise_exceptions": True})
        except SystemExit:
            _keep_names(shell, namespace)
            if not exit_ignore:
                raise
        except BaseException:
            _keep_names(shell, namespace)
            raise

    def run_module(name: str, namespace: dict[str, Any]) -> None:
        try:
            namespace.update(runpy.run_module(str(name), run_name="__main__", alter_sys=True))
        except SystemExit as status:
            if status.code:
                raise

    shell.safe_execfile, shell.safe_run_module = execute, run_module


def _keep_names(shell: Any, namespace: dict[str, Any]) -> None:
    if namespace is not shell.user_ns:
        kept = {name: value for name, value in namespace.items() if not name.startswith("__")}
        shell.user_ns.update(kept)


def _show_errors_that_end_no_cell(kernel: Any) -> None:
    """Print errors that are shown while a cell continues, such as by `showtraceback()`.

    The notebook takes a cell's error from its reply, which does not contain these.
    """
    shell = kernel.shell
    run_code, show = shell.run_code, shell._showtraceback
    running: list[Any] = []  # results, the cell's own first

    async def run_and_know(code: Any, result: Any = None, **options: Any) -> Any:
        running.append(result)
        try:
            ends = await run_code(code, result, **options)
        finally:
            running.pop()
        if ends and result is not None and _ends_well(result.error_in_exec):
            result.error_in_exec = None
        return bool(ends)

    def show_or_print(kind: Any, error: Any, traceback: list[str]) -> None:
        if _ends_well(error):
            return
        ends = not running or getattr(running[0], "error_in_exec", None) is error
        if ends or _is_within(shell.displayhook):  # a value's repr has failed, which fails the cell
            show(kind, error, traceback)
        else:
            print(*traceback, sep="\n", file=sys.stderr)

    shell.run_code, shell._showtraceback = run_and_know, show_or_print


def _ends_well(error: object) -> bool:
    """Return whether this is `sys.exit()` or `sys.exit(0)`, which end a program normally."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _is_within(owner: object) -> bool:
    """Return whether a method of `owner` is among the calling frames."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_locals.get("self") is owner:
            return True
        frame = frame.f_back
    return False


def _print_pages(kernel: Any) -> None:
    """Print what `name?` shows: its page would go with the reply, of which there are many."""

    def print_page(_: Any, data: Any, *args: Any, **more: Any) -> None:
        print(data["text/plain"] if isinstance(data, dict) else data)

    kernel.shell.set_hook("show_in_pager", print_page, 0)


def _refuse_input(kernel: Any) -> None:
    """Make `input()`, `getpass()` and `breakpoint()` raise an error with the alternative."""

    def refuse(prompt: str = "", *_: Any, **__: Any) -> str:
        raise RuntimeError(
            "input() cannot ask from a rank: several ranks would ask at once. Ask in an ordinary "
            "cell of the notebook, then send the answer with %dist push NAME."
        )

    def refuse_debugger(*_: Any, **__: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT") != "0":
            raise RuntimeError(
                "breakpoint() cannot ask from a rank: several ranks would ask at once. Print what "
                "you want to see, or let the cell raise there: variables are kept, and "
                "%%distributed -r RANK looks at those of one rank."
            )

    kernel.raw_input = refuse
    kernel.getpass = refuse
    sys.breakpointhook = refuse_debugger


def refuse_magics(shell: Any) -> None:
    """Make the notebook's magics raise an error on a rank that says where they belong."""

    def refuse_line(line: str) -> None:
        raise UsageError(
            f"%dist {line}".rstrip() + " is for the notebook, and this cell runs on the ranks.",
            do="put the line into a cell of its own",
        )

    def refuse_cell(line: str, cell: str = "") -> None:
        raise UsageError(
            "%%distributed is for the notebook, and this cell runs on the ranks already.",
            do="keep one %%distributed, as the cell's first line",
        )

    shell.register_magic_function(refuse_line, "line", "dist")
    shell.register_magic_function(refuse_cell, "cell", "distributed")
    shell.register_magic_function(refuse_cell, "line", "%distributed")  # below the first line


def _refuse_exit(kernel: Any) -> None:
    """Make `exit()` and `quit()` raise an error instead of stopping the engine's event loop."""
    # After sys.exit() IPython recommends exit(), which is refused here. Not by a filter:
    # cells may set others.
    of_shell: Any = interactiveshell
    warn = of_shell.warn

    def warn_of_else(message: Any, *args: Any, stacklevel: int = 1, **more: Any) -> None:
        if not str(message).startswith("To exit: use"):
            warn(message, *args, stacklevel=stacklevel + 1, **more)

    of_shell.warn = warn_of_else

    def refuse() -> None:
        raise RuntimeError(
            "exit() would end this rank and lose its variables. To leave a cell early, raise an "
            "exception; to end all ranks use %dist stop."
        )

    kernel.shell.ask_exit = refuse


def _shorten_tracebacks(
    kernel: Any, was_freed: Callable[[BaseException], bool], first: int = 10, last: int = 30
) -> None:
    """Leave out the middle of very deep tracebacks, and library frames where a rank was stopped.

    IPython looks up the module and the source of every frame: 3000 frames of a recursion took
    14 s with torch imported, and no one reads them. It also parses the file of each frame:
    0.5 s for the first error out of a collective, several where other processes want the processor
    too. The cell cannot end before, and they are not read for interrupted or freed ranks.

    Args:
        kernel: The rank's kernel.
        was_freed: As for `install`.
        first: Outermost frames that stay.
        last: Innermost frames that stay.
    """
    formatter = kernel.shell.InteractiveTB
    get_records, structured_traceback = formatter.get_records, formatter.structured_traceback
    was_stopped = False

    def look_at_kind(etype: Any, evalue: Any = None, *args: Any, **more: Any) -> Any:
        nonlocal was_stopped
        was_stopped = isinstance(evalue, KeyboardInterrupt) or (
            isinstance(evalue, BaseException) and was_freed(evalue)
        )
        return structured_traceback(etype, evalue, *args, **more)

    def get_few_records(etb: TracebackType, context: int, tb_offset: int) -> Any:
        links = list(_links(etb))
        if was_stopped and (own := [link for link in links if not _is_unread(link)]):
            return get_records(_chained(own[-last:]), context, 0)
        left_out = len(links) - first - last
        if left_out <= 0:
            return get_records(etb, context, tb_offset)
        from IPython.core.tbtools import FrameInfo
        from stack_data.core import RepeatedFrames

        text = f"{left_out} frames of {len(links)}"
        between = FrameInfo(text, "", 0, None, None, sd=RepeatedFrames([], []))
        return [
            *get_records(_chained(links[:first]), context, tb_offset),
            between,
            *get_records(links[-last], context, 0),
        ]

    formatter.get_records = get_few_records
    formatter.structured_traceback = look_at_kind


def _repeat_lost_interrupts() -> None:
    """Interrupt again when Python has dropped a KeyboardInterrupt.

    One that is raised in a finaliser, or in a hook around `fork` (a DataLoader starting its
    workers), is printed as "Exception ignored in" and lost: the cell would keep running.
    """
    show = sys.unraisablehook

    def hook(lost: Any) -> None:
        if lost.exc_type is not None and issubclass(lost.exc_type, KeyboardInterrupt):
            # A little later: now, it would be raised in here and dropped again.
            threading.Timer(0.02, interrupts.here.strike, (interrupts.here.running,)).start()
        else:
            show(lost)

    sys.unraisablehook = hook


def _is_unread(link: TracebackType) -> bool:
    """Return whether a frame is of an installed library, of the standard library, or of nbdist."""
    file = link.tb_frame.f_code.co_filename
    return origins.is_library(file) or origins.is_of(file, "nbdist")


def _chained(links: Sequence[TracebackType]) -> TracebackType:
    """Return a traceback of only these frames; there is at least one."""
    made: TracebackType | None = None
    for link in reversed(links):
        made = TracebackType(made, link.tb_frame, link.tb_lasti, link.tb_lineno)
    assert made is not None
    return made


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def check() -> list[str]:
    """Return what no longer fits the installed versions; empty if all fits."""
    wanted: list[tuple[Any, tuple[str, ...]]] = [
        (IPythonKernel, ("raw_input", "getpass")),
        (ZMQInteractiveShell, ("ask_exit",)),
        (interactiveshell, ("warn",)),
        (VerboseTB, ("get_records", "structured_traceback", "format_exception")),
        (ZMQInteractiveShell, ("_showtraceback", "_format_exception_for_storage")),
        (ZMQInteractiveShell, ("safe_execfile", "safe_run_module", "run_code")),
        (ZMQDisplayPublisher, ("register_hook", "_flush_streams")),
        (ZMQShellDisplayHook, ("register_hook", "finish_displayhook")),
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in TRIED)
    return [
        f"{versions}: {owner.__name__}.{name} is gone"
        for owner, names in wanted
        for name in names
        if not hasattr(owner, name)
    ]
