"""The cells that a script is made of: of a kernel's history, or of a notebook's file."""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nbdist.client.export.plain_code import plain
from nbdist.client.export.sent import Sent, written_down
from nbdist.shared.errors import UsageError

Parse = Callable[[str], argparse.Namespace | None]

RETRY = re.compile(r"^%dist\s+retry\b", re.MULTILINE)
_DISTRIBUTED = "%%distributed"
_DIST = re.compile(r"^%dist\s+(.*)")


@dataclass(frozen=True, slots=True)
class NotebookCell:
    """A code cell, as it succeeded last.

    Attributes:
        number: The prompt's; in a file, the place among its code cells, from 1.
        source: As it stands in the notebook.
        trouble: Why it cannot be in a script, in words that follow `cell 5`, such as `failed`; ""
            where it can.
        sent: What it has sent to the ranks by `%dist push` and `session.push`.
        ran_code: It is the notebook's own, and has let ranks run code in another way.
        runs: How often it has succeeded, where that is known.
        losses: Of the first step that it has made, by rank; empty where it has made none.
        changes: What was changed by hand while it trained, in words.
        has_lost_steps: It failed after steps before it succeeded, or has failed after some.
    """

    number: int
    source: str
    trouble: str = ""
    sent: tuple[Sent, ...] = ()
    ran_code: bool = False
    runs: int = 1
    losses: Mapping[int, float] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    has_lost_steps: bool = False

    @property
    def line(self) -> str:
        """What follows `%%distributed` on its line; "" of another cell."""
        return self._split()[0]

    @property
    def body(self) -> str:
        """What runs: all below `%%distributed`, or the whole of the notebook's own cell."""
        return self._split()[1]

    @property
    def is_of_ranks(self) -> bool:
        """Whether it is a `%%distributed` cell, also below a line such as `%%time`."""
        return any(line.startswith(_DISTRIBUTED) for line in self._magics())

    def _magics(self) -> list[str]:
        """Return the lines of cell magics above all else."""
        lines = self.source.lstrip("\n").split("\n")
        return lines[: next((n for n, one in enumerate(lines) if not one.startswith("%%")), None)]

    def _split(self) -> tuple[str, str]:
        if not self.is_of_ranks:
            return "", self.source
        lines = self.source.lstrip("\n").split("\n")
        at = next(n for n, one in enumerate(lines) if one.startswith(_DISTRIBUTED))
        return lines[at].removeprefix(_DISTRIBUTED).strip(), "\n".join(lines[:at] + lines[at + 1 :])


def dist_lines(cells: Sequence[NotebookCell], parse: Parse) -> Iterator[argparse.Namespace]:
    """Yield the words of each `%dist` line of cells that have not failed, in order.

    Args:
        cells: The notebook's.
        parse: Reads the words after `%dist`.
    """
    for line in (line for cell in cells if not cell.trouble for line in cell.source.split("\n")):
        if found := _DIST.match(line):
            try:
                asked = parse(found[1])
            except UsageError:
                continue
            if asked is not None:
                yield asked


def read_notebook(path: Path, parse: Parse) -> list[NotebookCell]:
    """Return the code cells of a notebook's file.

    A cell without a prompt has not run, unless none has one: then the outputs were cleared.

    Args:
        path: The file.
        parse: Reads the words after `%dist`.

    Raises:
        UsageError: It is no notebook.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        has_prompts = any(cell.get("execution_count") for cell in code)
        found = [
            NotebookCell(number, "".join(cell["source"]), _trouble(cell, has_prompts))
            for number, cell in enumerate(code, 1)
        ]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no notebook.", do="give an .ipynb file") from error
    return _with_sent(_with_retries(found), parse)


def _trouble(cell: dict[str, Any], has_prompts: bool) -> str:
    if any(output["output_type"] == "error" for output in cell.get("outputs", ())):
        return "failed"
    return "has not run" if has_prompts and not cell.get("execution_count") else ""


def _with_retries(cells: Sequence[NotebookCell]) -> list[NotebookCell]:
    """Return the cells; one that `%dist retry` has run again below has succeeded."""
    found = list(cells)
    for at, cell in enumerate(cells):
        failed = [n for n in range(at) if found[n].is_of_ranks and found[n].trouble == "failed"]
        if failed and not cell.trouble and RETRY.search(cell.source):
            found[failed[-1]] = replace(found[failed[-1]], trouble="")
    return found


def _with_sent(cells: Sequence[NotebookCell], parse: Parse) -> list[NotebookCell]:
    """Return the cells with what their `%dist push` lines send, as far as cells write it down."""
    found: list[NotebookCell] = []
    before: list[str] = []  # of the notebook's own
    for cell in cells:
        asked = [] if cell.is_of_ranks else list(dist_lines([cell], parse))
        if not cell.is_of_ranks and not cell.trouble:
            before.append(plain(cell.source).code)
        sent = tuple(
            written_down(name, before, one.ranks)
            for one in asked
            if one.command == "push"
            for name in one.names
        )
        found.append(replace(cell, sent=sent, ran_code=any(one.command == "run" for one in asked)))
    return found


def numbers(cells: Sequence[NotebookCell], option: str, text: str) -> set[int]:
    """Return the numbers that `--cells` or `--skip` names, such as `3,5-8`.

    Raises:
        UsageError: It is not of that form, or names a cell that is not there.
    """
    known = sorted(cell.number for cell in cells)
    there = f"cells are {known[0]} to {known[-1]}" if known else "there is none"
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"{option} takes numbers of cells, such as 3,5-8, not {text!r}.")
        found = {number for number in known if int(first) <= number <= int(last or first)}
        if not found:
            raise UsageError(f"{option} {text}: there is no cell {part.strip()}; {there}.")
        chosen |= found
    return chosen
