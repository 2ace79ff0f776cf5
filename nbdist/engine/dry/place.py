"""Where in a cell this thread is."""

import sys

CELL = "<dry cell>"
_EARLIER = "<dry cell "


def file_of(number: int) -> str:
    """Return the name under which an earlier cell is compiled."""
    return f"{_EARLIER}{number}>"


def place() -> str:
    """Return the innermost place, such as "line 12", or "cell 3, line 2" in an earlier cell."""
    frame = sys._getframe()
    while frame is not None:
        if found := in_words(frame.f_code.co_filename, frame.f_lineno):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return "its end"


def in_words(file: str, line: int | None) -> str:
    """Return a place in words; "" where it is not in a cell."""
    if file == CELL:
        return f"line {line}"
    if file.startswith(_EARLIER):
        return f"cell {file.removeprefix(_EARLIER)[:-1]}, line {line}"
    return ""
