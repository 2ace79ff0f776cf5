"""Find what the steps of two runs have computed, and compare it."""

from pathlib import Path

from nbdist.client.metrics.numerics.runs import Recording, RunDiff, compare, read
from nbdist.client.tracking.past.runs import RunRow, find_run
from nbdist.shared.errors import UsageError


def diff(folder: Path, experiment: str | None, one: str, other: str) -> RunDiff:
    """Return where two runs part.

    Args:
        folder: The private folder beside the notebook.
        experiment: The notebook's.
        one: A name or a number, as `find_run` takes it.
        other: Another.

    Raises:
        UsageError: There is no such run, or nothing is kept of what its steps have computed.
    """
    rows = [find_run(folder, experiment, word) for word in (one, other)]
    names = [row.name for row in rows]
    if rows[0].key == rows[1].key:
        raise UsageError(
            f"{one} and {other} are one run, {names[0]}.",
            do="name two; of runs with one name the numbers of %dist runs tell which",
        )
    if names[0] == names[1]:
        names = [f"{row.name} of {row.started:%H:%M:%S}" for row in rows]
    recordings = [_read(folder, row, name) for row, name in zip(rows, names, strict=True)]
    return compare(*recordings)


def _read(folder: Path, row: RunRow, name: str) -> Recording:
    files = sorted((folder / "numerics" / row.numerics).glob("rank*.jsonl")) if row.numerics else []
    if not files:
        why = (
            "the newest 32 recordings stay, and those of ranks on other hosts lie there"
            if row.numerics
            else "ranks write it down in cells with --keep, and at the first step of an optimizer"
        )
        raise UsageError(
            f"What the steps of {name} have computed is not known.",
            why=why,
            do="run its cell again with %%distributed --keep, then %dist diff",
        )
    ranks = {int(file.stem.removeprefix("rank")): file for file in files}
    return read(name, row.layout, {rank: _lines(file) for rank, file in sorted(ranks.items())})


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()
