"""Run the tutorial that trains, headless, and show what it left: `nbdist demo`, `make demo`.

The notebook runs in a copy, in the folder of whoever calls, so that its runs land in `.nbdist/`
there and the tutorial itself stays as it is.
"""

import asyncio
import base64
import re
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError

NOTEBOOK = "02_train_with_ddp.ipynb"
CELL_TIMEOUT_S = 600  # longer than any cell takes on one slow core; a demo never hangs

_INDENT = " " * 8
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def run_demo(notebooks: Path, state: Path, out: TextIO = sys.stdout) -> int:
    """Run the demo and print its story; return 0 when every cell succeeded.

    Args:
        notebooks: The folder that holds the tutorial.
        state: The `.nbdist` folder of the current folder; made when missing.
        out: Where the story goes; the runs' table, the picture and the next command end it.
    """
    from nbdist.client.tracking.folder import make_private_folder
    from nbdist.client.tracking.past.runs import runs_table

    folder = make_private_folder(state) / "demo"
    folder.mkdir(exist_ok=True)
    copy = folder / NOTEBOOK
    shutil.copyfile(notebooks / NOTEBOOK, copy)
    print(f"Running a copy of {NOTEBOOK} in this folder.", file=out, flush=True)
    began = time.monotonic()
    succeeded = execute(copy, Path.cwd(), out)
    print(f"\n{time.monotonic() - began:.0f} s in all", file=out)
    if not succeeded:
        print(f"The demo failed. The notebook up to the failure: {copy}", file=out)
        print(f"Do: {command('doctor')}", file=out, flush=True)
        return 1
    print(f"\n{runs_table(state)}\n", file=out)
    picture = extract_picture(nbformat.read(copy, as_version=4).cells, folder / "board.png")
    if picture:
        print(f"The board:    {picture}", file=out)
    print(f"The notebook: {copy}", file=out)
    print(f"The runs:     {command('ui')}    (opens the MLflow UI)", file=out, flush=True)
    return 0


def execute(path: Path, folder: Path, out: TextIO) -> bool:
    """Execute the notebook at `path` in place, with `folder` as its working folder.

    Prints each cell as it begins and what it showed as it ends. The notebook is written whatever
    happens, Ctrl-C included. Returns whether all cells succeeded.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        # Errors alone: ipykernel warns at each start that its loopback ports are not encrypted.
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=Narrator(notebook.cells, out).begin,
        on_cell_executed=lambda cell, **_: tell(cell, out),
    )
    # In a thread of its own, for nbclient answers Ctrl-C by killing the kernel. We interrupt it
    # instead, as a notebook does: ranks settle, its run says so, and all is shut down.
    with ThreadPoolExecutor(1, "nbdist-demo") as pool:
        done = pool.submit(asyncio.run, client.async_execute())
        try:
            wait_or_interrupt(done, client)
        except CellControlSignal:  # a cell raised, or took too long; `tell` has shown which
            return False
        except DeadKernelError:
            print(f"{_INDENT}The kernel ended.", file=out, flush=True)
            return False
        finally:
            nbformat.write(notebook, path)
    return True


def wait_or_interrupt(done: "Future[Any]", client: NotebookClient) -> None:
    """Wait for `done`, and answer each Ctrl-C by interrupting the kernel; raises what it raises."""
    while True:
        try:
            done.result()
        except KeyboardInterrupt:
            kernel: Any = client.km  # nbclient declares it as None and nothing else
            if kernel is not None and kernel.has_kernel:
                asyncio.run(kernel.interrupt_kernel())
        else:
            return


class Narrator:
    """Announces the cells of a notebook as they begin."""

    def __init__(self, cells: Sequence[Any], out: TextIO) -> None:
        self._total = sum(cell.cell_type == "code" for cell in cells)
        self._begun = 0
        self._out = out

    def begin(self, cell: Any, cell_index: int) -> None:
        """Print the headings of a text, or the number and first line of a code cell."""
        if cell.cell_type == "code":
            self._begun += 1
            number = f"[{self._begun}/{self._total}]"
            print(f"{number:<7} {first_line(cell.source)}", file=self._out, flush=True)
        else:
            for heading in re.findall(r"^#+ +(.+)$", cell.source, re.MULTILINE):
                print(f"\n{heading}", file=self._out, flush=True)


def first_line(source: str) -> str:
    """Return the first line of a cell that says something; below a cell magic two, as one."""
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith("#")]
    shown = 2 if lines and lines[0].startswith("%%") else 1
    return "   ".join(line.strip() for line in lines[:shown])


def tell(cell: Any, out: TextIO) -> None:
    """Print what a cell that has ended shows, as text."""
    for text in texts(cell.outputs):
        for line in text.rstrip().splitlines():
            print(f"{_INDENT}{line}", file=out, flush=True)


def texts(outputs: Iterable[Any]) -> list[str]:
    """Return the texts among a cell's outputs, without colours and without bare reprs.

    A text that repeats the one before is left out: a board's picture is followed by its caption.
    """
    found: list[str] = []
    for output in outputs:
        if output.output_type == "stream":
            text = output.text
        elif output.output_type == "error":
            text = "\n".join(output.traceback)
        else:
            text = output.data.get("text/plain", "")
            if re.fullmatch(r"<[^\n]*>|\w+\([^\n]*\)", text):  # <Figure size ...>, VBox(...)
                continue
        text = _ANSI.sub("", text)
        if found[-1:] != [text]:
            found.append(text)
    return found


def extract_picture(cells: Sequence[Any], path: Path) -> Path | None:
    """Write the last picture in the notebook, which is a board, to `path`; None without one."""
    pictures = [
        output.data["image/png"]
        for cell in cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    if not pictures:
        return None
    path.write_bytes(base64.b64decode(pictures[-1]))
    return path


def command(word: str) -> str:
    """Return what to type for `nbdist word`: `nbdist` where the shell finds ours, else its path."""
    ours = Path(sys.executable).parent / "nbdist"
    found = shutil.which("nbdist")
    if found and Path(found).resolve() == ours.resolve():
        return f"nbdist {word}"
    if not ours.exists():
        return f"{sys.executable} -m nbdist.cli {word}"
    near = ours.relative_to(Path.cwd()) if ours.is_relative_to(Path.cwd()) else ours
    return f"{near} {word}"
