"""Answer pages that are opened while a cell runs, so that the widgets there live on.

A page that connects asks what the kernel is and for the state of all widgets, on the shell channel.
There it waits for the cell, and gives up: its live board would be lost. ipykernel 7 reads that
channel on a thread of its own, and has subshells to answer beside a cell; a page names one only
when it knows them, which is after these questions. So here they are handed to a subshell of ours.
Where ipykernel differs the page waits, as everywhere in Jupyter.

Threads: `begin`, `end` and `opened` on the main one, `_hear` on ipykernel's shell channel thread.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from nbdist.client.output.slots import kernel_shell

CONTROL = "jupyter.widget.control"  # what ipywidgets 8 asks for the state of all widgets
_QUESTIONS = frozenset({"kernel_info_request", "comm_info_request"})
_COMM = frozenset({"comm_open", "comm_msg", "comm_close"})

_log = logging.getLogger(__name__)


class Pages:
    """The pages of one kernel, from its first cell on all ranks.

    Args:
        kernel: ipykernel's, with a shell channel thread.
        events: IPython's.

    Attributes:
        opened: Whether a page with widgets was opened since `begin`, or in a part before it.
    """

    def __init__(self, kernel: Any, events: Any) -> None:
        self.opened = False
        self._events = events
        self._kernel, self._thread = kernel, kernel.shell_channel_thread
        self._is_waiting = False  # whether the kernel's main thread has no time for questions
        self._subshell: str | None = None
        self._comm: str | None = None  # of the page that asks for widgets
        self._continues = False
        self._left: Callable[[], None] | None = None
        self._thread.io_loop.add_callback(self._listen)

    def begin(self, *, continues: bool) -> None:
        """Answer beside the main thread from now on: a cell begins, or one that `continues`."""
        self.opened = self.opened and (continues or self._continues)
        self._is_waiting = True

    def end(self, *, continues: bool) -> None:
        """Leave all questions to the main thread again; a cell that `continues` has more parts."""
        self._is_waiting, self._continues = False, continues

    def show_next(self, show: Callable[[], None]) -> None:
        """Call `show` once, when the next cell begins: what it displays is in that cell's output.

        It takes the place of what was to be called then.
        """
        if self._left is None:
            self._events.register("pre_run_cell", self._next_begins)
        self._left = show

    def _next_begins(self, info: object = None) -> None:
        self._events.unregister("pre_run_cell", self._next_begins)
        show, self._left, self.opened = self._left, None, False
        if show is not None:
            show()

    def _listen(self) -> None:
        self._thread.shell_stream.on_recv(self._hear, copy=False)

    async def _hear(self, frames: Sequence[Any]) -> None:
        try:
            if self._is_waiting and self._answer(frames):
                return
        except Exception as error:
            _log.warning("A page could not be answered beside the cell: %r", error)
        await self._kernel.shell_channel_thread_main(frames)

    def _answer(self, frames: Sequence[Any]) -> bool:
        """Hand a page's first questions to the subshell; return whether this was one."""
        session, manager = self._kernel.session, self._thread.manager
        names, parts = session.feed_identities(frames, copy=False)
        # Without content: a signature that is checked with it counts as a replay the next time.
        message = session.deserialize(parts, content=False, copy=False)
        header, content = message["header"], session.unpack(message["content"])
        if header.get("subshell_id") is not None or not self._is_question(header, content):
            return False
        if self._subshell is None:
            self._subshell = manager._create_subshell()
        header["subshell_id"] = self._subshell
        asked = session.serialize({**message, "content": content}, names)
        socket = manager.get_shell_channel_to_subshell_socket(self._subshell)
        socket.send_multipart([*asked, *message["buffers"]], copy=False)
        return True

    def _is_question(self, header: dict[str, Any], content: dict[str, Any]) -> bool:
        kind = header["msg_type"]
        if kind == "comm_open" and content.get("target_name") == CONTROL:
            self._comm, self.opened = content["comm_id"], True
        return kind in _QUESTIONS or (kind in _COMM and content.get("comm_id") == self._comm)


class KernelPages:
    """The pages of the kernel that this process is, from when they are first asked for."""

    def __init__(self) -> None:
        self._pages: Pages | None = None

    def get(self) -> Pages | None:
        """Return them; None where pages cannot be answered while a cell runs."""
        shell = kernel_shell()
        thread = getattr(shell.kernel, "shell_channel_thread", None) if shell is not None else None
        if shell is None or getattr(thread, "shell_stream", None) is None:
            return None
        if self._pages is None and not check():
            self._pages = Pages(shell.kernel, shell.events)
        return self._pages


def check() -> list[str]:
    """Return what no longer fits the imported ipykernel; empty when all is well.

    One before 7, of a kernel that runs on after pip has installed another, has no subshells.
    """
    from ipykernel._version import __version__

    if int(__version__.partition(".")[0]) < 7:
        return []
    from ipykernel.ipkernel import IPythonKernel
    from ipykernel.subshell_manager import SubshellManager

    used = {
        IPythonKernel: ("shell_channel_thread_main", "shell_channel_thread"),
        SubshellManager: ("_create_subshell", "get_shell_channel_to_subshell_socket"),
    }
    return [
        f"ipykernel {__version__}: {owner.__name__}.{name} is gone"
        for owner, names in used.items()
        for name in names
        if not hasattr(owner, name)
    ]


here = KernelPages()
