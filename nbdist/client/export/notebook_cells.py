"""The cells that a script is made of: of a kernel's history, or of a notebook's file.

Of a cell that was run again the newest run that went well counts, in the place of the first: a
definition that was corrected after it was used stays above its use. What the notebook's own cells
have sent to the ranks is no definition but an event: each such run stays, in its place.

Which runs are of one cell the front end says, by an id. Some send none (nbclient, papermill,
IPython in a terminal): cells of equal text may be two there, and each run is one of its own.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nbdist import plain
from nbdist.client.export.as_sent import known_of
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
        known: What it stands on, as the kernel had it then; see `as_sent`.
    """

    name: str
    literal: str
    why_none: str = ""
    ranks: str = "all"
    known: Mapping[str, str] = field(default_factory=dict)


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
        failures: How often it, or an attempt in it, has failed before it succeeded last, where that
            is known.
        was_edited: It has succeeded with another source before.
        key: What is the same in all runs of the cell; "" where nothing says so.
        is_past: It has run again since: what it has sent counts, and nothing else.
        before: Of the notebook's own cells that had succeeded by then, number and source, in order
            of runs, where it has sent something; None where only the order of cells is known.
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
    key: str = ""
    is_past: bool = False
    before: tuple[tuple[int, str], ...] | None = None

    @property
    def is_of_ranks(self) -> bool:
        """Whether it is a `%%distributed` cell."""
        return inner(self.source).startswith("%%distributed")

    @property
    def has_sent(self) -> bool:
        """Whether it is the notebook's own, and ranks have got something from it."""
        return bool(self.pushed or self.ran) and not self.is_of_ranks


def pushed(name: str, value: object) -> Pushed:
    """Return what is remembered of a value that is sent to the ranks now."""
    if plain.is_plain(value):
        try:
            return Pushed(name, literal(value))
        except ValueError:  # sys.set_int_max_str_digits
            return Pushed(name, "", "it holds a number of more digits than Python writes")
    kind, module = type(value).__name__, type(value).__module__
    if type(value) in (list, tuple, dict, str):  # not one of their kinds: it is never plain
        return Pushed(name, "", f"its {kind} is too large, or holds more than plain values")
    if module not in ("builtins", "__main__"):
        kind = f"{module}.{kind}"  # there is a bool of numpy's
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return Pushed(name, "", f"{article} {kind} is no plain value", known=known_of(name, value))


@dataclass
class History:
    """What the kernel has run, in order. Main thread."""

    runs: list[NotebookCell] = field(default_factory=list)
    _pushed: list[Pushed] = field(default_factory=list)  # by the cell that runs
    _ran: list[str] = field(default_factory=list)  # by the cell that runs
    _attempts: int = 0  # of the cell that runs, which have failed
    _failed: tuple[int, str] | None = None  # the newest run of ranks that did, till it succeeds

    def note_push(self, values: Mapping[str, Any], ranks: str = "all") -> None:
        """Note what the cell that runs has sent to ranks."""
        sent = (pushed(name, value) for name, value in values.items())
        self._pushed += (replace(one, ranks=ranks) for one in sent)

    def note_code(self, code: str) -> None:
        """Note what the cell that runs has let ranks run."""
        self._ran.append(code)

    def note_failed_attempt(self) -> None:
        """Note that what the cell that runs let ranks run has failed, and runs again."""
        self._attempts += 1

    def note_run(self, number: int, source: str, cell_id: str | None, *, has_failed: bool) -> None:
        """Note a cell that has ended; without an id it is none of those before."""
        key = cell_id or ""
        retried = None
        if _RETRY.search(source):
            # Each is a run of another cell, also where the notebook has but one such cell.
            key, retried = f"retry {number}", self._failed and self._failed[0]
        cell = NotebookCell(
            number,
            source,
            has_failed,
            tuple(self._pushed),
            retried,
            ran=tuple(self._ran),
            failures=self._attempts,
            key=key,
        )
        if cell.is_of_ranks:
            if has_failed:
                self._failed = number, source
            elif self._failed and self._failed[1] == source:
                self._failed = None
        elif retried is not None and not has_failed:
            self._failed = None
        self._pushed.clear()
        self._ran.clear()
        self._attempts = 0
        self.runs.append(cell)

    def cells(self) -> list[NotebookCell]:
        """Return the cells in the order of their first successes, each as it succeeded last.

        Of the notebook's own each run that has sent something is there, in its place.
        """
        found = _Runs()
        for cell in self.runs:
            found.add(cell)
        return list(found.cells.values())


class _Runs:
    """Goes through the runs, and knows those before."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, int], NotebookCell] = {}  # by their places
        self._newest: dict[str, tuple[str, int]] = {}  # the place of a cell, by its key
        self._count = 0
        self._successes: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()  # by the cell's id
        self._sources: dict[str, set[str]] = defaultdict(set)  # of successes
        # Without an id: the places of those that may be tried again, by their source.
        self._failed: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._own: list[tuple[int, str]] = []  # of the notebook, that have succeeded

    def add(self, run: NotebookCell) -> None:
        self._count += 1
        key = run.key or f"run {self._count}"
        cell = self._counted(run, key)
        place = key, self._count if cell.has_sent else 0
        self._put(cell, key, place)
        if not run.key:
            self._forget_failures(run, place)
        elif run.retried is not None and not run.has_failed:
            for places in self._failed.values():  # that one has been tried again
                places[:] = [one for one in places if self.cells[one].number != run.retried]
        if not (run.has_failed or run.is_of_ranks):
            self._own.append((run.number, run.source))

    def _put(self, cell: NotebookCell, key: str, place: tuple[str, int]) -> None:
        """Let a run take the place of the one before, or stand beside it where that has sent."""
        at = self._newest.get(key)
        if at is not None:
            before = self.cells[at]
            if cell.has_failed and not before.has_failed:
                if cell.has_sent:
                    self.cells[place] = replace(cell, is_past=True)
                return
            if before.has_sent:
                self.cells[at] = replace(before, is_past=True)
            elif cell.has_sent or (before.has_failed and not cell.has_failed):
                del self.cells[at]  # it stands where it succeeded first
        self.cells[place] = cell
        self._newest[key] = place

    def _counted(self, run: NotebookCell, key: str) -> NotebookCell:
        """Return a run with what is known of those of the same cell before it."""
        before = self._failures[run.key] if run.key else len(self._failed[run.source])
        self._failures[key] += run.failures + run.has_failed
        if run.has_sent:
            # What it had sent when it failed stands there by itself.
            return replace(run, failures=0, before=tuple(self._own))
        if run.has_failed:
            return replace(run, failures=0, before=())
        self._successes[key] += 1
        self._sources[key].add(run.source)
        return replace(
            run,
            runs=self._successes[key],
            failures=before + run.failures,
            was_edited=len(self._sources[key]) > 1,
            before=(),
        )

    def _forget_failures(self, run: NotebookCell, place: tuple[str, int]) -> None:
        """Drop runs without an id that have failed once their text has succeeded."""
        if run.has_failed and not run.has_sent:
            self._failed[run.source].append(place)
        elif not run.has_failed:
            for failed in self._failed.pop(run.source, ()):
                del self.cells[failed]


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
    known = {cell.number for cell in cells if not cell.is_past}
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
