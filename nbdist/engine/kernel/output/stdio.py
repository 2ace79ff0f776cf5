"""Capture a rank's output: in order, sent soon but seldom, bounded, and without blocking.

One `Output` per engine owns `stdout` and `stderr` of the process. Both write into one buffer, so
that prints, warnings and logging keep their order. A thread publishes it: the first text of a
cell within about 10 ms, then at most every `INTERVAL_S`.

Bounded: the first `HEAD_BYTES` of a cell are published whole. What follows is published as a
*window*, the newest `WINDOW_BYTES`, twice a second: a progress bar that runs for hours stays
alive, and 20 MB cost the notebook some kilobytes. From the moment that something may be cut, the
whole cell's text, from its first byte, goes to a file. A full disk ends the file, not the cell.

Text printed between two cells (background threads) belongs to the next cell, the newest
`WINDOW_BYTES` of it.

File descriptors 1 and 2 (C++ prints, subprocesses, forked workers) are pointed at two files,
which are read while a cell runs. Files and not pipes, for three reasons: C++ code that prints
while it holds the GIL can never block on a reader that needs it; the last output of a dying process
is on the disk; and a forked child may write whatever the parent's threads did.

What is published: `{"parts": [["stdout", text], ...]}`, and for a window also `"window"`, its
number, and `"cut_bytes"`, how many bytes before it were not sent. A window with the number of
the one before replaces it.

Threads: `write` may be called from any; `begin_cell`, `flush` and `end_cell` from the main one.
"""

import contextlib
import io
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from nbdist.engine.kernel.output.stdio_files import KeptText, WatchedFile, write_all
from nbdist.engine.kernel.output.text_window import Part, TextWindow, as_lists, joined

HEAD_BYTES: Final = 256 * 1024
INTERVAL_S: Final = 0.1
WINDOW_INTERVAL_S: Final = 0.5
POLL_S: Final = 0.1  # how often the files behind descriptors 1 and 2 are read
LINGER_S: Final = 1.0  # as long after a cell, too: waking the thread costs a short cell more
GRACE_S: Final = 0.01  # `print` writes its text and its line break separately; send them together

Publish = Callable[[dict[str, Any]], None]


class Stream(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of a rank: text goes into the output's common buffer."""

    def __init__(self, output: "Output", name: str, descriptor: int) -> None:
        """Make the stream `name` of `output`; `descriptor` is 1 or 2."""
        self._output = output
        self._name = name
        self._descriptor = descriptor
        self._line = ""  # in a forked child only: the unfinished line

    name = property(lambda self: f"<{self._name}>")
    encoding = "utf-8"
    errors = "replace"
    line_buffering = True

    def fileno(self) -> int:
        """Return 1 or 2, whose text is captured too, so that `subprocess` may be given the stream.

        Raises:
            io.UnsupportedOperation: The descriptors are not captured, so the text would be lost.
        """
        if not self._output.watches_descriptors:
            raise io.UnsupportedOperation("fileno")
        return self._descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Flush; the stream stays open, for later cells print here too."""
        self.flush()

    def write(self, text: str) -> int:
        """Take `text`; never waits for the network."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if not self._output.forked:
            self._output.write(self._name, text)
            return len(text)
        # A forked child has none of our threads: its lines go through the descriptor, whole
        # lines at a time, so that lines of workers are not mixed.
        self._line += text
        if self._line.endswith("\n") or len(self._line) > 4096:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Request publishing; its rate stays as it is.

        tqdm and logging flush at each line. `Output.flush` is the one that waits.
        """
        if self._output.forked and self._line:
            line, self._line = self._line, ""
            write_all(self._descriptor, line.encode(errors="replace"))


def _can_write(stream: Any) -> bool:
    try:
        stream.flush()  # as IPython does before it displays anything; ValueError when it is closed
        return callable(stream.write)
    except Exception:
        return False


class Output:
    """All output of one rank. See the module's docstring.

    Args:
        rank: Names the files.
        folder: Where files are kept; made with mode 0700.
        publish: Sends one message to the notebook. Must not block; called from any thread.
    """

    def __init__(self, rank: int, folder: Path, publish: Publish) -> None:
        """Start the publishing thread; `install` makes the streams the process' own."""
        self.rank = rank
        self.forked = False  # True in a child that was forked from the rank
        self.stdout = Stream(self, "stdout", 1)
        self.stderr = Stream(self, "stderr", 2)
        self._folder = folder
        self._publish = publish
        # Re-entrant: a signal handler or a finaliser may print while its own thread is in here.
        self._lock = threading.RLock()
        self._sending = threading.RLock()  # held from taking text out until it is published
        self._wake = threading.Event()  # there is text, or a cell has begun
        self._hurry = threading.Event()  # end the pause between two messages
        self._is_polling = False  # the thread polls the descriptors
        self._ended_at = 0.0  # time.monotonic() at the newest cell's end
        self._closed = False
        self._sent_at = 0.0
        self._wrote_at = 0.0
        self._troubles: set[str] = set()
        self._watched: list[WatchedFile] = []
        self._spare: list[tuple[int, int]] = []
        self._previous: tuple[Any, Any] | None = None
        self._inbox: list[Part] = []  # written, not yet taken: 200 000 prints are joined first
        self._inbox_size = 0
        self._reset("between")
        self._thread = threading.Thread(target=self._run, name="nbdist-output", daemon=True)
        self._thread.start()
        _forks.alive.add(self)

    def _reset(self, name: str) -> None:
        self._file_name = name
        self._in_cell = name != "between"
        self._head: list[Part] = []  # of the whole cell, until a file takes over
        self._head_bytes = 0
        self._unsent = 0  # index into _head
        self._window = TextWindow()
        self._window_number = 0
        self._window_new = False
        self._cut_bytes = 0  # in windows that are closed
        self._file: KeptText | None = None

    @property
    def watches_descriptors(self) -> bool:
        """Whether text written to descriptors 1 and 2 is captured."""
        return bool(self._watched)

    # Life

    def install(self, *, descriptors: bool = True) -> None:
        """Replace `sys.stdout` and `sys.stderr`, and capture descriptors 1 and 2.

        Log handlers that hold the earlier streams keep writing where they wrote.
        """
        self._previous = (sys.stdout, sys.stderr)
        for stream in self._previous:
            stream.flush()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if descriptors:
            for number, name in ((1, "stdout"), (2, "stderr")):
                self._spare.append((number, os.dup(number)))
                self._watched.append(WatchedFile(name, self._folder / f"rank-{self.rank}.{name}"))
                os.dup2(self._watched[-1].write_fd, number)
        sys.stdout, sys.stderr = self.stdout, self.stderr

    def put_back(self) -> None:
        """Restore `sys.stdout` and `sys.stderr` where a cell has left them unusable.

        A stream that the program has put there itself, and that is open, stays. So do the files it
        has put behind descriptors 0 to 2. Where one is closed, a socket of gloo's would get its
        number, and what C++ prints would go there.
        """
        self._reopen_descriptors()
        if not _can_write(sys.stdout):
            sys.stdout = self.stdout
        if not _can_write(sys.stderr):
            sys.stderr = self.stderr

    def _reopen_descriptors(self) -> None:
        watched = dict(zip((1, 2), self._watched, strict=False))
        for number in (0, 1, 2):
            try:
                os.fstat(number)
            except OSError:
                leads_to = os.open(os.devnull, os.O_RDWR)  # the lowest free one: this one
                if number in watched:
                    os.dup2(watched[number].write_fd, leads_to)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Set missing streams within the block, for IPython flushes both. Main thread."""
        before = sys.stdout, sys.stderr
        self.put_back()
        lent = sys.stdout, sys.stderr
        try:
            yield
        finally:
            if lent != before:
                sys.stdout, sys.stderr = before

    def original(self, descriptor: int) -> int:
        """Return a descriptor of the file that 1 or 2 was before `install` (the engine's log)."""
        return dict(self._spare).get(descriptor, descriptor)

    def close(self) -> None:
        """Send what is left, stop the thread and give back streams and descriptors."""
        if self.forked:
            return
        self.flush()
        if self._previous is not None:
            sys.stdout, sys.stderr = self._previous
        for number, spare in self._spare:
            os.dup2(spare, number)
            os.close(spare)
        for watched in self._watched:
            watched.close()
        self._spare, self._watched, self._previous = [], [], None
        self._closed = True
        self._wake.set()
        self._hurry.set()
        self._thread.join(timeout=5)

    # Writing

    def write(self, name: str, text: str) -> None:
        """Take `text` of the stream `name`; any thread."""
        if not text:
            return
        with self._lock:
            # A subprocess's output since the last print came before this one. A call of
            # `fstat` for each print would cost as much as the print, hence the clock: a process
            # that prints takes longer than this on any machine (0.5 ms seen).
            now = time.monotonic()
            if now - self._wrote_at > 0.0002:
                self._read_descriptors()
                now = time.monotonic()
            self._wrote_at = now
            self._inbox.append((name, text))
            self._inbox_size += len(text)
            if self._inbox_size > 32768:
                self._take_inbox()
            elif not self._wake.is_set() and self._in_cell:
                self._wake.set()

    def _take_inbox(self) -> None:
        inbox, self._inbox, self._inbox_size = self._inbox, [], 0
        for name, text in joined(inbox):
            self._take(name, text)

    def _take(self, name: str, text: str) -> None:
        size = len(text) if text.isascii() else len(text.encode(errors="replace"))
        if not self._in_cell:
            self._window.add(name, text, size)
            return
        room = HEAD_BYTES - self._head_bytes
        if room > 0:
            # Of one large text the beginning is head; cut by characters, so that wide ones make
            # the head somewhat longer.
            first, text = text[:room], text[room:]
            self._head.append((name, first))
            self._head_bytes += room if text else size
            size -= room if text else size
        if text:
            if self._file is None:
                self._file = KeptText(self._folder, f"{self._file_name}-rank-{self.rank}.txt")
                self._keep("".join(part for _, part in self._head))
            self._keep(text)
            self._window.add(name, text, size)
            self._window_new = True
        if not self._wake.is_set():
            self._wake.set()

    def _keep(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(text)
        except OSError as error:
            self._file.broken = True
            note = f"\n[nbdist: the whole output cannot be kept: {error.strerror or error}]\n"
            self._window.add("stderr", note, len(note))

    # Cells

    def begin_cell(self, number: int) -> None:
        """Begin cell `number`; text since the last cell comes first in it."""
        with self._lock:
            self._read_descriptors()
            between = self._window.parts()
            self._reset(f"cell-{number}")
            self._sent_at = 0.0  # the first text of a cell goes at once
            for name, text in between:
                self._take(name, text)
            if not self._is_polling:
                self._wake.set()
            self._hurry.set()

    def end_cell(self) -> tuple[int, Path | None]:
        """Publish the rest; return how many bytes were cut, and the file that has them all.

        The file is None when nothing was cut, or when it could not be written whole.
        """
        self.flush()
        with self._lock:
            self._take_inbox()
            cut, file = self._cut_bytes, self._file
            late = self._head[self._unsent :] + self._window.parts()
            self._reset("between")
            self._ended_at = time.monotonic()
            for name, text in late:  # printed by another thread since the line above
                self._take(name, text)
        if file is None:
            return 0, None
        whole = file.finish()
        if cut == 0:
            file.path.unlink(missing_ok=True)
        return cut, file.path if cut and whole else None

    def flush(self) -> None:
        """Pass all text so far to `publish` before returning.

        Before anything else is published (a display, a reply) this is called, so that the
        order is kept. A window ends here: text that follows makes a new one.
        """
        if self.forked:
            self.stdout.flush()
            self.stderr.flush()
            return
        with self._sending:
            with self._lock:
                self._read_descriptors()
            self._send()
            with self._lock:
                if self._in_cell and self._window.total:
                    self._cut_bytes += self._window.cut_bytes
                    self._window = TextWindow()
                    self._window_number += 1
                    self._window_new = False

    # Publishing

    def _run(self) -> None:
        while not self._closed:
            try:
                with self._lock:
                    is_near = self._in_cell or time.monotonic() < self._ended_at + LINGER_S
                    self._is_polling = is_near and bool(self._watched)
                self._wake.wait(POLL_S if self._is_polling else None)
                with self._lock:
                    self._read_descriptors()
                if not self._wake.is_set():
                    continue
                wait = self._sent_at + self._interval() - time.monotonic()
                if self._hurry.wait(min(max(wait, GRACE_S), WINDOW_INTERVAL_S)):
                    self._hurry.clear()
                    continue
                self._wake.clear()
                with self._sending:
                    self._send()
            except Exception as error:
                # Without this thread no output would appear live, so it continues; the text
                # of the error goes to the engine's log, once for each kind.
                self._report(error)
                time.sleep(INTERVAL_S)

    def _interval(self) -> float:
        return INTERVAL_S if self._head_bytes < HEAD_BYTES else WINDOW_INTERVAL_S

    def _send(self) -> None:
        with self._lock:
            if not self._in_cell:
                return
            self._take_inbox()
            parts = self._head[self._unsent :]
            self._unsent = len(self._head)
            if self._file is not None and self._head:
                self._head, self._unsent = [], 0  # the file has it
            window: dict[str, Any] | None = None
            if self._window_new:
                self._window_new = False
                window = {
                    "parts": as_lists(self._window.parts()),
                    "window": self._window_number,
                    "cut_bytes": self._window.cut_bytes,
                }
        for message in ({"parts": as_lists(parts)} if parts else None, window):
            if message is None:
                continue
            self._sent_at = time.monotonic()
            try:
                self._publish(message)
            except Exception as error:  # a broken connection must not fail the user's print
                self._report(error)

    def _report(self, error: Exception) -> None:
        text = f"nbdist: output could not be sent: {type(error).__name__}: {error}\n"
        if text not in self._troubles and len(self._troubles) < 10:
            self._troubles.add(text)
            write_all(self.original(2), text.encode(errors="replace"))

    def _read_descriptors(self) -> None:
        self._take_inbox()
        for watched in self._watched:
            for text in watched.read():
                self._take(watched.name, text)

    # Forking

    def _before_fork(self) -> None:
        self._sending.acquire()
        self._lock.acquire()

    def _after_fork_in_parent(self) -> None:
        self._lock.release()
        self._sending.release()

    def _after_fork_in_child(self) -> None:
        self.forked = True
        self._lock = threading.RLock()
        self._sending = threading.RLock()
        if self._file is not None:
            self._file.forget()


class _Forks:
    """The outputs that are alive, and those that a fork under way holds."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Output] = weakref.WeakSet()
        self._held: list[Output] = []
        # It cannot be undone, so it is done once for all outputs.
        os.register_at_fork(
            before=self._hold_all,
            after_in_parent=self._release_in_parent,
            after_in_child=self._release_in_child,
        )

    def _hold_all(self) -> None:
        for output in list(self.alive):
            if not output.forked:
                output._before_fork()
                self._held.append(output)

    def _release_in_parent(self) -> None:
        while self._held:
            self._held.pop()._after_fork_in_parent()

    def _release_in_child(self) -> None:
        while self._held:
            self._held.pop()._after_fork_in_child()


_forks = _Forks()
