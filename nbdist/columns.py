"""Tables as lines of text."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], to_the_right: Sequence[bool] = ()) -> list[str]:
    """Return a line for each row, with columns below each other, two spaces apart.

    Args:
        rows: Cells of one line each, as many in every row.
        to_the_right: Which columns end on one line, as numbers do; without it none.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = to_the_right or [False] * len(widths)
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in rows
    ]
