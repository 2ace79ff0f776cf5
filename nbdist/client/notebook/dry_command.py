"""`%%distributed --dry`: a cell of the notebook checked, after those that ranks have run."""

import argparse
from dataclasses import replace

from nbdist.client.advice.dry import dry
from nbdist.client.export.parts import name_cells, parts_of
from nbdist.client.export.plain_code import plain
from nbdist.client.notebook import export_command
from nbdist.client.notebook.arguments import parse_distributed
from nbdist.shared.errors import UsageError
from nbdist.study.dry import DryRun


def check_cell(asked: argparse.Namespace, code: str, n: int, cell_id: str) -> DryRun:
    """Return what a cell would do on ranks that have run what the notebook's cells have sent.

    Args:
        asked: The words of `%%distributed`.
        code: The cell's.
        n: Ranks, where the words say none.
        cell_id: The front end's: an older form of this cell has not run before it.

    Raises:
        UsageError: The cell has what no rank of a dry run can do, or a word makes no sense.
    """
    found = plain(code)
    if found.reason or found.awaits:
        raise UsageError(f"This cell {found.reason or 'awaits'}, so it cannot be run dry.")
    params = dict(asked.params)
    first = {key: one[0] if isinstance(one, list) else one for key, one in params.items()}
    parts = parts_of(export_command.here.cells(cell_id), None, set(), parse_distributed)
    before = [(part.number, part.code) for part in parts if part.code]
    before += [(0, f"{key} = {value!r}") for key, value in first.items()]
    made = dry(
        "\n" * _lines_above(code) + found.code,
        asked.n or n,
        memory=asked.memory,
        ranks=asked.ranks,
        before=before,
    )
    ran = [number for number, _ in before if number]
    notes = [f"Before it ran {name_cells(ran)}."] if ran else []
    left: dict[str, list[int]] = {}
    for one in parts:
        if one.reason:
            left.setdefault(one.reason, []).append(one.number)
    notes += [
        f"Not in it: {name_cells(of)} ({'each' if len(of) > 1 else 'it'} {reason})."
        for reason, of in left.items()
    ]
    notes += [
        f"Of -p {key} the first value was taken." for key in params if params[key] != first[key]
    ]
    return replace(made, notes=(*made.notes, *notes))


def _lines_above(code: str) -> int:
    """Return the empty lines above a cell's code, which `plain` leaves out."""
    return len(code) - len(code.lstrip("\n"))
