"""Run one notebook in a kernel of its own, on CPU ranks, and end all that it started.

nbclient runs the cells. A cell beyond its time is asked where its ranks are, then interrupted, as a
person would do; a kernel that does not answer is killed, and its ranks end with it.

Threads: nbclient's loop runs on a thread of its own, so that Ctrl-C and pytest-timeout reach the
main one, which then kills the kernel.
"""

import asyncio
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError

from nbdist.shared.errors import NBDistError
from nbdist.shared.processes import terminal
from nbdist.testing.outcome import NotebookFailed, failure, shown_error

_SETTLE_S = 60.0  # of a cell after its interrupt


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How notebooks run.

    Attributes:
        ranks: Their number, instead of what `%dist start -n` says; None leaves that.
        cell_timeout_s: The longest that a cell may take.
        writes_baseline: Whether comparisons store their runs as baselines.
    """

    ranks: int | None = None
    cell_timeout_s: float = 300.0
    writes_baseline: bool = False


def run_notebook(notebook: Any, path: Path, options: RunOptions) -> None:
    """Run a notebook in its folder; its cells have their outputs afterwards, whatever happens.

    Args:
        notebook: As nbformat has read it.
        path: Where it lies.
        options: How it runs.

    Raises:
        NotebookFailed: A cell failed, took too long, or lost its kernel.
    """
    run = _Run(notebook, path, options)
    with ThreadPoolExecutor(1, "nbdist-notebook") as pool:
        done: Future[None] = pool.submit(asyncio.run, run.to_its_end())
        try:
            done.result()
        except BaseException:
            run.kill()
            raise


class _Run:
    """One notebook's run."""

    def __init__(self, notebook: Any, path: Path, options: RunOptions) -> None:
        self._notebook = notebook
        self._path = path
        self._options = options
        self._manager = AsyncKernelManager(kernel_name="python3")
        assert self._manager.kernel_spec is not None
        self._manager.kernel_spec.argv[0] = sys.executable  # whatever kernels this machine has
        self._loop: asyncio.AbstractEventLoop | None = None
        self._index = 0
        self._limit: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._stacks: str | None = None  # of ranks, once a cell has taken too long
        self._is_deaf = False  # the cell has not ended at its interrupt

    async def to_its_end(self) -> None:
        """Run all cells; the kernel has ended afterwards."""
        self._loop = asyncio.get_running_loop()
        client = NotebookClient(
            self._notebook,
            km=self._manager,
            timeout=None,  # its own would be told beside the option's
            # Errors alone: ipykernel warns at each start that its loopback ports are not encrypted.
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
            on_cell_execute=self._begin,
            on_cell_executed=self._end,
        )
        try:
            await client.async_execute(
                env=self._environment(),
                cwd=str(self._path.parent),
                cleanup_kc=True,
            )
        except CellExecutionError as error:
            shown = shown_error(self._notebook.cells[self._index])
            raise self._failed(shown or f"{error.ename}: {error.evalue}") from None
        except (CellControlSignal, DeadKernelError) as error:
            if self._is_deaf:
                raise self._failed(
                    "It did not end when it was interrupted, so its kernel was killed."
                ) from None
            raise self._failed(f"{type(error).__name__}: {error}") from None
        finally:
            self._disarm()
            await self._shut_down()

    def kill(self) -> None:
        """End the kernel at once, from another thread; what it started ends with it."""
        if self._loop is None or self._loop.is_closed():
            return
        ending = self._shut_down()
        try:
            asyncio.run_coroutine_threadsafe(ending, self._loop)
        except RuntimeError:  # closed meanwhile: the run has ended
            ending.close()

    async def _shut_down(self) -> None:
        if await self._manager.is_alive():
            await self._manager.shutdown_kernel(now=True)

    def _environment(self) -> dict[str, str]:
        ranks = self._options.ranks
        return {
            **os.environ,
            "NBDIST_STATIC": "1",
            "NBDIST_TEST_RANKS": "as written" if ranks is None else str(ranks),
            "NBDIST_BASELINE": "write" if self._options.writes_baseline else "require",
            "JPY_SESSION_NAME": str(self._path),
        }

    def _begin(self, cell: Any, cell_index: int) -> None:
        self._index = cell_index
        assert self._loop is not None
        self._limit = self._loop.call_later(self._options.cell_timeout_s, self._take_too_long)

    def _end(self, **_: Any) -> None:
        self._disarm()
        if self._stacks is not None:  # its interrupt may be an error that the cell allows
            raise self._failed("")

    def _disarm(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    def _take_too_long(self) -> None:
        self._stacks = "(the ranks were not asked in time)"
        assert self._loop is not None
        self._asking = self._loop.create_task(self._ask_and_interrupt())

    async def _ask_and_interrupt(self) -> None:
        pid = getattr(self._manager.provisioner, "pid", None)
        try:
            self._stacks = await asyncio.to_thread(terminal.stacks, pid, "all")
        except NBDistError as error:
            self._stacks = str(error)  # such as: it has no ranks
        assert self._loop is not None
        self._limit = self._loop.call_later(_SETTLE_S, self._give_up)
        await self._manager.interrupt_kernel()

    def _give_up(self) -> None:
        self._is_deaf = True
        assert self._loop is not None
        self._asking = self._loop.create_task(self._shut_down())

    def _failed(self, text: str) -> NotebookFailed:
        what = "failed"
        if self._stacks is not None:
            what = f"took longer than {self._options.cell_timeout_s:g} s"
            text = f"Where it was when its time was over:\n{self._stacks}\n\n{text}"
        return failure(self._notebook.cells, self._index, what, text)
