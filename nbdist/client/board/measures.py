"""Sizes that all views of the board share: places in CSS pixels, letters in points."""

import textwrap

LEFT_PX, RIGHT_PX, MARGIN_PX = 44, 14, 12
HEAD_PX, LINE_PX = 26, 17
LETTER_PX = 7.2  # of a head's text; few sentences have wider letters
TEXT_PT, TITLE_PT = 8.0, 9.5


def wrapped(sentence: str, width: int) -> list[str]:
    """Return `sentence` in lines that fit into a head of `width` CSS pixels."""
    return textwrap.wrap(sentence, int((width - 2 * MARGIN_PX) / LETTER_PX))
