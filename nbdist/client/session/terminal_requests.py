"""Answer the terminals of the same user, also while a cell runs.

They ask for status, stacks, checks and the board, pause and change a training, and stop the
ranks; see `shared/processes/terminal.py`.

Threads: `nbdist-terminal` takes connections, from the start of a session to its stop. Each is
answered on a thread of its own, `nbdist-answer`, which asks the session what a subshell may ask
too: a `stop` that takes long keeps no other waiting. `close` is called on any thread.
"""

import base64
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from nbdist.client.board import VIEWS
from nbdist.client.board.past import Past
from nbdist.client.cells.params import read_param
from nbdist.shared.errors import NBDistError, UsageError
from nbdist.shared.processes import user_socket

log = logging.getLogger(__name__)

_QUESTION_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 5.0
_AFTER_ERROR_S = 1.0  # such as too many open files
_MOST_ANSWERS = 8  # at once; more wait


class RequestHandler(Protocol):
    """The requests that a session answers; see there."""

    describe: str

    def status(self) -> object:
        """Return what each rank does."""

    def stacks(self, ranks: str = "all") -> object:
        """Return where ranks are."""

    def checks(self) -> object:
        """Return the rules on silent mistakes, and what they found."""

    def board(self) -> Past:
        """Return the board of the cell that trains, or has trained last."""

    def pause(self) -> object:
        """Let the training stand still."""

    def resume(self) -> str:
        """Let it go on."""

    def peek(self, expression: str) -> object:
        """Evaluate an expression on all ranks after the same step."""

    def change(self, **values: Any) -> object:
        """Set values on all ranks after the same step."""

    def interrupt_and_stop(self) -> None:
        """Interrupt the cell, then end all ranks."""


class TerminalRequests:
    """Listens for one session, from its making until `close`."""

    def __init__(self, session: RequestHandler, folder: Path | None, notebook: str = "") -> None:
        """Begin to listen.

        Args:
            session: What is asked.
            folder: The notebook's, by which a person knows it.
            notebook: Its file's name, where that is known.

        Raises:
            OSError: There is no place for the socket.
        """
        self._session = session
        self._folder = "a folder that is gone" if folder is None else str(folder)
        self._notebook = notebook
        self._closed = threading.Event()
        self._free = threading.BoundedSemaphore(_MOST_ANSWERS)
        self._stopping = threading.Lock()
        self._server, self.path = user_socket.listen(os.getpid())
        self._thread = threading.Thread(target=self._serve, name="nbdist-terminal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. A request that is being answered is finished."""
        if self._closed.is_set():
            return
        self._closed.set()
        # The thread waits for a connection: this is one. Closing the socket would not wake it.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waker,
        ):
            waker.settimeout(_QUESTION_TIMEOUT_S)
            waker.connect(str(self.path))
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        with self._server:
            while not self._closed.is_set():
                try:
                    connection, _ = self._server.accept()
                except OSError as error:
                    log.warning("No terminal can connect now: %s", error)
                    self._closed.wait(_AFTER_ERROR_S)
                    continue
                if self._closed.is_set():
                    connection.close()
                    return
                self._free.acquire()
                answer = threading.Thread(
                    target=self._converse, args=(connection,), name="nbdist-answer", daemon=True
                )
                answer.start()

    def _converse(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._reply(connection)
        finally:
            self._free.release()

    def _reply(self, connection: socket.socket) -> None:
        try:
            if not user_socket.is_this_user(connection):
                log.warning("Another user connected to %s, and was not answered", self.path)
                return
            asked = user_socket.receive(connection, user_socket.QUESTION_BYTES, _QUESTION_TIMEOUT_S)
            user_socket.send(connection, self._answer(asked), _ANSWER_TIMEOUT_S)
        except (OSError, ValueError) as error:
            log.info("A terminal was not answered: %s", error)

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._ask(asked)
        except NBDistError as error:
            return {"error": [error.what, error.why, error.do]}
        except Exception as error:
            log.exception("A terminal's %s failed", asked.get("ask"))
            return {"error": [f"It failed: {type(error).__name__}: {error}", "", ""]}

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        match asked:
            case {"ask": "who"}:
                return {
                    "folder": self._folder,
                    "notebook": self._notebook,
                    "describe": self._session.describe,
                }
            case {"ask": "status"}:
                return {"text": str(self._session.status())}
            case {"ask": "stacks", "ranks": str(ranks)}:
                return {"text": str(self._session.stacks(ranks))}
            case {"ask": "checks"}:
                return {"text": str(self._session.checks())}
            case {"ask": "board", "view": str(view), "png": bool(with_png)}:
                return self._board(view, with_png=with_png)
            case {"ask": "pause"}:
                return {"text": str(self._session.pause())}
            case {"ask": "continue"}:
                return {"text": self._session.resume()}
            case {"ask": "peek", "expression": str(expression)}:
                return {"text": str(self._session.peek(expression))}
            case {"ask": "change", "words": list(words)}:
                return {"text": str(self._session.change(**_read(words)))}
            case {"ask": "stop"}:
                with self._stopping:  # the second finds all ranks ended
                    self._session.interrupt_and_stop()
                return {"text": f"Stopped {self._session.describe}, in {self._folder}."}
            case _:
                raise UsageError("The kernel's nbdist does not know what was asked.")

    def _board(self, view: str, *, with_png: bool) -> dict[str, Any]:
        if view not in VIEWS:
            raise UsageError(
                f"The board has no view {view!r}.", do=f"choose of {', '.join(VIEWS)}."
            )
        board = self._session.board()
        png = base64.b64encode(board.png(view)).decode("ascii") if with_png else ""
        return {"text": board.summary(view), "png": png, "runs": board.elapsed_s is not None}


def _read(words: list[Any]) -> dict[str, Any]:
    """Return the values of words such as `lr=0.01`."""
    try:
        return dict(read_param(str(word), "change") for word in words)
    except ValueError as error:
        raise UsageError(str(error)) from None
