"""Read and write `fault_table.md`: strategy x torch version, and what a fault in each place leaves.

Pure: text in, text out.
"""

from pathlib import Path

FILE = Path(__file__).parent / "fault_table.md"

Row = dict[str, str]  # place: outcome
Table = dict[tuple[str, str], Row]  # (strategy, torch version): row

_HEAD = """# What a fault leaves of a training

Four ranks, gloo. One of them, rank 1 if no other is named, raises in the place named; all ranks
recover, and train on from the step that was lost. The final parameters are compared with those of a
run without a fault.

- **bit-equal**: every parameter is the same, bit by bit, on every rank.
- **differs**: it goes on, and replicas are alike, with other parameters than the unbroken run has.
- **diverges**: ranks that should hold the same parameters do not.
- **fails**: it does not go on.

Measured by `test_fault_table.py`, which compares each run with this file and says how to write it
anew. Steps are counted from 0; pipelines fail in their third micro-batch. DDP lays its buckets anew
before step 1, with a static graph before step 2: a fault then finds some ranks with new ones.

"""


def parse(text: str) -> Table:
    """Return the rows of a table that `render` has written."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    if not lines:
        return {}
    (_, _, *places), *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {
        (strategy, version): dict(zip(places, cells, strict=True))
        for strategy, version, *cells in rows
        if not strategy.startswith("---")
    }


def render(table: Table, places: list[str]) -> str:
    """Return the table as Markdown, in its order."""
    lines = [["strategy", "torch", *places], ["---"] * (len(places) + 2)]
    lines += [
        [strategy, version, *(row.get(place, "") for place in places)]
        for (strategy, version), row in table.items()
    ]
    return _HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
