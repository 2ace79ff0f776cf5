"""The cells that the steps of one cell need, as a script runs them. Pure."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nbdist.client.export.cells import NotebookCell, Parse
from nbdist.client.export.parts import parts_of, trains
from nbdist.client.export.script import bound, undefined
from nbdist.shared.errors import UsageError

_STAR = "*"
_DEFINES = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_ASSIGNS = ast.Assign | ast.AnnAssign


def cells_for(cells: Sequence[NotebookCell], asked: str | None, parse: Parse) -> list[NotebookCell]:
    """Return the cells that the steps of one need: those before it, and it.

    Of cells before it that train, too, there remain the imports, definitions and assignments that
    give names which nothing else gives.

    Args:
        cells: The notebook's, in order.
        asked: The cell's number; or a name of a layout or model, for the newest that has trained
            and names it; None for the newest that has trained.
        parse: Reads the words after `%%distributed`.

    Raises:
        UsageError: There is no such cell.
    """
    mine = training = [cell for cell in cells if cell.losses and not cell.trouble]
    none = "No cell has trained."
    if asked is not None and asked.isdecimal():
        mine = [cell for cell in cells if cell.number == int(asked)]
        none = f"There is no cell {asked} that ran."
    elif asked is not None:
        mine = [cell for cell in training if re.search(rf"\b{re.escape(asked)}\b", cell.body)]
        none = f"No cell that has trained names {asked}."
    if not mine:
        numbers = ", ".join(str(cell.number) for cell in training)
        raise UsageError(
            none,
            why=f"cells that have trained: {numbers}" if numbers else "",
            do="run the %%distributed cell that trains, then %dist scaling",
        )
    return _with_names([*cells[: cells.index(mine[-1])], mine[-1]], parse)


def _with_names(cells: Sequence[NotebookCell], parse: Parse) -> list[NotebookCell]:
    """Return cells, those that train before the last without what gives no name that is lacking."""
    found = list(cells)
    gives = {at: list(_giving(cell, parse)) for at, cell in enumerate(cells[:-1]) if cell.losses}
    lacking: set[str] = set()
    more = {""}  # nothing is called so
    while more:
        lacking |= more
        for at, statements in gives.items():
            kept = [text for names, text in statements if names & lacking]
            found[at] = replace(found[at], source="\n".join(["%%distributed", *kept]))
        code = "\n\n".join(part.code for part in parts_of(found, None, set(), parse))
        more = undefined(code).keys() - lacking
        more |= {_STAR} if more else set()
    return found


def _giving(cell: NotebookCell, parse: Parse) -> Iterator[tuple[set[str], str]]:
    """Yield names, and the statement of a cell that gives them without a step of an optimizer."""
    for part in parts_of([cell], None, set(), parse):
        for one in ast.parse(part.code).body:
            text = ast.unparse(one)
            if isinstance(one, _DEFINES) or (isinstance(one, _ASSIGNS) and not trains(text)):
                yield bound(text) | ({_STAR} if text.endswith("import *") else set()), text
