"""Add to IPython's tracebacks on a rank: lines of cells, and members of exception groups.

A compat module, as `shell.py` is. Tried with IPython 9.18. The parts used:

- `ultratb.get_line_number_of_frame`, which counts a file's lines. A cell is in no file: of its
  frames IPython then shows the line that runs *now*, which for a cause is the `raise` after it, and
  each repeat of a recursion one by one;
- `shell.showtraceback`, which leaves exception groups to Python: it prints them, with IPython's own
  frames, on each rank, and the reply to the cell has none of it. Of nbdist's own errors it shows
  their text alone, which does not say where in the cell they were raised;
- `InteractiveTB.format_exception`, a traceback's last lines, where a group's members are added.
"""

import functools
import linecache
import logging
import textwrap
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Final

from IPython.core import ultratb
from IPython.core.interactiveshell import InteractiveShell

from nbdist.engine.kernel import location
from nbdist.shared import origins
from nbdist.shared.errors import NBDistError

MOST_MEMBERS: Final = 6  # of one group that are shown
MOST_NESTED: Final = 3  # groups in groups

log = logging.getLogger(__name__)


def install(kernel: Any) -> None:
    """Make the shell of this rank's kernel format errors as described above."""
    _count_lines_of_cells()
    _add_members(kernel.shell.InteractiveTB)
    _show_groups(kernel.shell)
    _place_own_errors(kernel.shell)


def _count_lines_of_cells() -> None:
    count = ultratb.get_line_number_of_frame  # type: ignore[attr-defined]

    @functools.wraps(count)
    def count_also_of_cells(frame: FrameType) -> int:
        file = frame.f_code.co_filename
        lines = len(linecache.getlines(file)) if origins.is_cell(file) else 0
        return lines or int(count(frame))

    ultratb.get_line_number_of_frame = count_also_of_cells  # type: ignore[attr-defined]


def _add_members(formatter: Any) -> None:
    format_exception = formatter.format_exception
    depth = 0

    def format_with_members(kind: Any, error: Any) -> Any:
        nonlocal depth
        lines = format_exception(kind, error)
        if isinstance(error, BaseExceptionGroup) and depth < MOST_NESTED:
            depth += 1
            try:
                # One part each: only the first is taken for a frame of the group itself.
                lines = [*lines, *_members(formatter, error)]
            finally:
                depth -= 1
        return lines

    formatter.format_exception = format_with_members


def _members(formatter: Any, group: BaseExceptionGroup[BaseException]) -> Iterator[str]:
    """Yield a text for each exception in a group, indented."""
    held = group.exceptions
    for number, error in enumerate(held[:MOST_MEMBERS], 1):
        _, heading, *parts = ultratb.VerboseTB.structured_traceback(
            formatter, type(error), error, error.__traceback__, 0, 3
        )
        if error.__cause__ or error.__context__:  # then there are several headings
            parts = [heading, *parts]
        body = "\n".join(part.rstrip("\n") for part in parts)
        yield f"\n{number} of {len(held)} in it:\n{textwrap.indent(body, '    ')}"
    if len(held) > MOST_MEMBERS:
        yield f"\n{len(held) - MOST_MEMBERS} more in it are not shown."


def _show_groups(shell: Any) -> None:
    show = shell.showtraceback

    @functools.wraps(show)
    def show_also_groups(exc_tuple: Any = None, *args: Any, **more: Any) -> None:
        kind, error, trace = shell._get_exc_info(exc_tuple)
        if not any(isinstance(one, BaseExceptionGroup) for one in _chain(error)):
            show(exc_tuple, *args, **more)
            return
        try:
            parts = shell.InteractiveTB.structured_traceback(kind, error, trace)
        except Exception:
            log.exception("An exception group could not be formatted")
            show(exc_tuple, *args, **more)
        else:
            shell._showtraceback(kind, error, parts)

    shell.showtraceback = show_also_groups


def _place_own_errors(shell: Any) -> None:
    show = shell.showtraceback

    @functools.wraps(show)
    def show_with_place(exc_tuple: Any = None, *args: Any, **more: Any) -> None:
        kind, error, trace = shell._get_exc_info(exc_tuple)
        if isinstance(error, NBDistError) and (place := place_of(trace)):
            shell._showtraceback(kind, error, [place, *error._render_traceback_()])
        else:
            show(exc_tuple, *args, **more)

    shell.showtraceback = show_with_place


def place_of(trace: TracebackType | None) -> str:
    """Return the innermost of the user's lines, formatted as IPython names a frame; "" without one.

    Code without a file, as the `__init__` of a dataclass, has no such line.
    """
    place = ""
    while trace is not None:
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if (prompt := location.here.prompt_of(file)) and origins.is_cell(file):
            place = f"Cell In[{prompt}], line {line}"
        elif not (
            file.startswith("<")
            or origins.is_library(file)
            or origins.is_of(file, "nbdist", "ipykernel", "IPython")
        ):
            place = f"File {file}:{line}"
        trace = trace.tb_next
    return place


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those it was raised after, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__context__


def check() -> list[str]:
    """Return what no longer fits the installed IPython; empty if all fits."""
    wanted: list[tuple[Any, tuple[str, ...]]] = [
        (ultratb, ("get_line_number_of_frame",)),
        (ultratb.VerboseTB, ("format_exception", "structured_traceback")),
        (InteractiveShell, ("showtraceback", "_showtraceback", "_get_exc_info")),
    ]
    return [
        f"IPython: {owner.__name__}.{name} is gone"
        for owner, names in wanted
        for name in names
        if not hasattr(owner, name)
    ]
