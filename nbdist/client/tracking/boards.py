"""Find a run of this notebook by name or number, and what its board was kept as.

Reads the spool alone, as `%dist runs` does: without MLflow, and whichever kernel made the run.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from nbdist.client.tracking.runs import RunRow, runs
from nbdist.client.tracking.spool import SpooledRun, spool_of
from nbdist.errors import TrackingError, UsageError

_MOST_SEARCHED = 1000
_MOST_NAMED = 6
_WHY = {
    "running": ("its cell still runs in another kernel", "wait until it has ended"),
    "killed": (
        "its kernel ended before its cell did, and a board is kept at the end",
        "%dist runs and %dist ui show what was recorded",
    ),
}


def find_run(folder: Path, experiment: str, word: str, also: Sequence[str] = ()) -> RunRow:
    """Return the run that a word means: the newest of that name, else the one of that number.

    Args:
        folder: The private folder beside the notebook.
        experiment: The notebook's.
        word: A name, or a number as `%dist runs` shows it.
        also: Words that would have been right too: they may be what was meant.

    Raises:
        UsageError: There is none; one line names the newest runs.
    """
    rows, listed = runs(folder, experiment, limit=_MOST_SEARCHED), runs(folder, experiment)
    if named := [row for row in rows if row.name == word]:
        return max(named, key=lambda row: row.key)  # keys sort by time
    if word.isdecimal() and 1 <= int(word) <= len(listed):
        return listed[int(word) - 1]
    names = list(dict.fromkeys(row.name for row in rows))
    close = get_close_matches(word, [*also, *names], n=1)
    said = f"No run{' or view' if also else ''} is called {word!r}"
    said += f"; did you mean {close[0]}?" if close else "."
    newest = f"The newest runs: {', '.join(names[:_MOST_NAMED])}." if names else "No runs yet."
    raise UsageError(f"{said} {newest}")


def kept_board(folder: Path, experiment: str, row: RunRow) -> bytes:
    """Return what the board of a run is drawn from.

    Raises:
        TrackingError: It has none; it says why.
    """
    board = SpooledRun(spool_of(folder) / row.key).board()
    if board is not None:
        return board
    if row.kind == "study":
        inner = [run.name for run in runs(folder, experiment, _MOST_SEARCHED) if _is_of(run, row)]
        names = ", ".join(inner[:_MOST_NAMED])
        why, do = "it is a sweep: each of its runs has one", f"name one of them: {names}"
    elif not row.steps and not row.logged and row.state not in _WHY:
        why, do = "its cell made no step and logged nothing", "%dist runs shows how it ended"
    else:
        older = "it was made before boards were kept", "%dist ui shows what was recorded"
        why, do = _WHY.get(row.state, older)
    raise TrackingError(f"Run {row.name} has no board.", why=why, do=do)


def _is_of(run: RunRow, study: RunRow) -> bool:
    return run.study == study.key
