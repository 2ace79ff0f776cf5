"""What stays of a live board where its widget does not: its words, in an output of their own.

A widget lives in one kernel. A kernel that ends, and a file that is opened on another day, have
only ordinary outputs, so one is below the widget and is renewed now and then. It cannot be in the
widget's own output: JupyterLab makes a new view of a widget at each update of its output, and drops
none.

JupyterLab and Notebook 7 hide it while the widget lives, and in its place the line of a widget that
is lost. Other front ends show it below the widget. Pure.
"""

import html
from collections.abc import Sequence

from nbdist.client.board.text import STYLE
from nbdist.client.output.slots import Display

WAITING = "This cell trains. If nothing moves here, run %dist board in the next cell."
_CLASS = "nbdist-kept"
_OUTPUT = ".jp-OutputArea-child"
# Where the widget lives it hides these words; where it does not, they hide what JupyterLab says of
# a widget that it does not find. Both rules name one board, and reach no other.
_HIDES = (
    "<style>"
    f"{_OUTPUT}:has(.nbdist-board) ~ {_OUTPUT}:has(.{_CLASS}-ID) {{display: none}} "
    f"{_OUTPUT}:has(.jupyter-widgets):not(:has(.nbdist-board)):has(+ {_OUTPUT} .{_CLASS}-ID) "
    "{display: none}</style>"
)


def below(shown: Display, board: str) -> Display:
    """Return an output so that it is seen only where the widget called `board` does not live."""
    inside = shown.data["text/html"]
    page = f'{_HIDES.replace("ID", board)}<div class="{_CLASS}-{board}">{inside}</div>'
    return Display({**shown.data, "text/html": page}, shown.metadata)


def kept(lines: Sequence[str], board: str, at: str) -> Display:
    """Return what to show where the live board is lost.

    Args:
        lines: What the board says at this moment.
        board: Tells it from other boards of the page.
        at: The time of day.
    """
    since = (
        f"The board as it was at {at}. If this does not change, the page was opened again or the "
        "kernel has ended; %dist board shows what is known now."
    )
    said = [since, *lines]
    shown = "".join(f"<div>{html.escape(line)}</div>" for line in said)
    page = f'<div style="{STYLE}">{shown}</div>'
    return below(Display({"text/html": page, "text/plain": "\n".join(said)}), board)
