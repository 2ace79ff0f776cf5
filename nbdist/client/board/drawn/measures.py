"""Sizes that all views of the board share: places in CSS pixels, letters in points."""

import math
import textwrap
from collections.abc import Sequence

WIDE, NARROW = 960, 500  # widths that a picture is composed for
LEFT_PX, RIGHT_PX, MARGIN_PX = 44, 14, 12
HEAD_PX, LINE_PX, LEGEND_PX = 26, 17, 30
LETTER_PX = 7.2  # of a head's text; few sentences have wider letters
TEXT_PT, TITLE_PT = 8.0, 9.5
LABEL_PX, SAMPLE_PX = 6.4, 43  # a letter in a legend; a sample with the gaps around it


def wrapped(sentence: str, width: int) -> list[str]:
    """Return `sentence` in lines that fit into a head of `width` CSS pixels."""
    return textwrap.wrap(sentence, int((width - 2 * MARGIN_PX) / LETTER_PX))


def is_narrow(width: int) -> bool:
    """Return whether plots are below each other, and tables leave columns out."""
    return width < (WIDE + NARROW) / 2


def legend_columns(labels: Sequence[str], width: int) -> int:
    """Return how many columns of a legend fit; it is filled column by column."""
    for rows in range(1, len(labels)):
        columns = math.ceil(len(labels) / rows)
        if _legend_px(labels, columns) <= width - 2 * MARGIN_PX:
            return columns
    return 1


def legend_rows(labels: Sequence[str], width: int) -> int:
    """Return how many lines a legend takes, 0 without labels."""
    return math.ceil(len(labels) / legend_columns(labels, width))


def fit_beside(one: Sequence[str], other: Sequence[str], width: int) -> bool:
    """Return whether two legends fit into one line."""
    both = [*one, *other]
    return _legend_px(both, max(1, len(both))) <= width - 2 * MARGIN_PX


def _legend_px(labels: Sequence[str], columns: int) -> float:
    lengths = [len(label) for label in labels]
    short, longer = divmod(len(labels), columns)  # as matplotlib divides them: longer columns first
    at, total = 0, 0.0
    for column in range(columns):
        count = short + (column < longer)
        total += SAMPLE_PX + LABEL_PX * max(lengths[at : at + count], default=0)
        at += count
    return total
