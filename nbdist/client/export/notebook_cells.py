"""The cells that a script is made of: of a kernel's history, or of a notebook's file.

Of a cell that was run again the newest run that went well counts, in the place of the first: a
definition that was corrected after it was used stays above its use.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nbdist import plain
from nbdist.client.export.code import literal
from nbdist.client.export.ipython_lines import inner
from nbdist.errors import UsageError

_RETRY = re.compile(r"^%dist\s+retry\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Pushed:
    """What `%dist push` has sent.

    Attributes:
        name: On the ranks.
        literal: The value in Python's notation; "" where it has none.
        why_none: Why it has none, such as `a torch.Tensor is no plain value`.
        ranks: To which.
    """

    name: str
    literal: str
    why_none: str = ""
    ranks: str = "all"


@dataclass(frozen=True, slots=True)
class NotebookCell:
    """A code cell.

    Attributes:
        number: The prompt's; in a file, the place among its code cells, from 1.
        source: As it stands in the notebook.
        has_failed: Its last run ended with an error.
        pushed: What it has sent to the ranks, as far as it is known.
        runs: How often it has succeeded, where that is known.
        retried: Number of the failed run that its `%dist retry` ran again, where it is known.
        ran: The code that it has run on ranks, in whichever way, as far as it is known.
        failures: How often it has failed before it succeeded, where that is known.
        was_edited: It has succeeded with another source before.
    """

    number: int
    source: str
    has_failed: bool = False
    pushed: tuple[Pushed, ...] = ()
    retried: int | None = None
    runs: int = 1
    ran: tuple[str, ...] = ()
    failures: int = 0
    was_edited: bool = False


def pushed(name: str, value: object) -> Pushed:
    """Return what is remembered of a value that is sent to the ranks now."""
    if plain.is_plain(value):
        return Pushed(name, literal(value))
    kind, module = type(value).__name__, type(value).__module__
    if isinstance(value, list | tuple | dict | str):
        return Pushed(name, "", f"its {kind} is too large, or holds more than plain values")
    if module not in ("builtins", "__main__"):
        kind = f"{module}.{kind}"  # there is a bool of numpy's
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return Pushed(name, "", f"{article} {kind} is no plain value")


@dataclass
class History:
    """What the kernel has run, in order. Main thread."""

    runs: list[tuple[str, NotebookCell]] = field(default_factory=list)  # each with what names it
    _pushed: list[Pushed] = field(default_factory=list)  # by the cell that runs
    _ran: list[str] = field(default_factory=list)  # by the cell that runs
    _failed: tuple[int, str] | None = None  # the newest run of ranks that did, till it succeeds

    def note_push(self, values: Mapping[str, Any], ranks: str = "all") -> None:
        """Note what the cell that runs has sent to ranks."""
        sent = (pushed(name, value) for name, value in values.items())
        self._pushed += (replace(one, ranks=ranks) for one in sent)

    def note_code(self, code: str) -> None:
        """Note what the cell that runs has let ranks run."""
        self._ran.append(code)

    def note_run(self, number: int, source: str, cell_id: str | None, *, has_failed: bool) -> None:
        """Note a cell that has ended; without an id, cells of the same source are one."""
        key = cell_id or source
        retried = None
        if _RETRY.search(source):
            # Each is a run of another cell, also where the notebook has but one such cell.
            key, retried = f"retry {number}", self._failed and self._failed[0]
        if inner(source).startswith("%%distributed"):
            if has_failed:
                self._failed = number, source
            elif self._failed and self._failed[1] == source:
                self._failed = None
        elif retried is not None and not has_failed:
            self._failed = None
        sent, ran = tuple(self._pushed), tuple(self._ran)
        cell = NotebookCell(number, source, has_failed, sent, retried, ran=ran)
        self._pushed.clear()
        self._ran.clear()
        self.runs.append((key, cell))

    def cells(self) -> list[NotebookCell]:
        """Return the cells in the order of their first successes, each as it succeeded last."""
        newest: dict[str, NotebookCell] = {}
        sources: dict[str, set[str]] = defaultdict(set)  # of successes
        for key, cell in self.runs:
            if not cell.has_failed:
                sources[key].add(cell.source)
            before = newest.get(key)
            if before is not None and before.has_failed and not cell.has_failed:
                del newest[key]  # it stands where it succeeded first
            if before is None or before.has_failed or not cell.has_failed:
                newest[key] = cell
        ended = Counter((key, cell.has_failed) for key, cell in self.runs)
        return [
            replace(
                cell,
                runs=max(1, ended[key, False]),
                failures=0 if cell.has_failed else ended[key, True],
                was_edited=len(sources[key]) > 1,
            )
            for key, cell in newest.items()
        ]


def read_notebook(path: Path) -> list[NotebookCell]:
    """Return the code cells of a notebook's file.

    Raises:
        UsageError: It is no notebook.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        return [
            NotebookCell(number, "".join(cell["source"]), _failed(cell))
            for number, cell in enumerate(code, 1)
        ]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no notebook.", do="give an .ipynb file") from error


def _failed(cell: dict[str, Any]) -> bool:
    return any(output["output_type"] == "error" for output in cell.get("outputs", ()))


def choose(cells: Sequence[NotebookCell], text: str) -> list[int]:
    """Return the numbers that `--cells` names, such as `3,5-8`.

    Raises:
        UsageError: It is not of that form, or names a cell that is not there.
    """
    known = {cell.number for cell in cells}
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--cells takes numbers of cells, such as 3,5-8, not {text!r}.")
        low, high = int(first), int(last or first)
        if not dash and low not in known:
            raise UsageError(f"--cells {text}: there is no cell {low}; {_range(known)}.")
        found = [number for number in known if low <= number <= high]
        if not found:
            raise UsageError(f"--cells {text}: no cell is in {part.strip()}; {_range(known)}.")
        chosen += found
    return sorted(set(chosen))


def _range(known: Iterable[int]) -> str:
    numbers = sorted(known)
    return f"cells are {numbers[0]} to {numbers[-1]}" if numbers else "there is none"
