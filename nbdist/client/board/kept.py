"""What stays of a live board where its widgets do not: the last picture, in words too.

A widget lives in one page and in one kernel. A page that is opened again while the cell runs, a
second browser, a file that is saved meanwhile and a kernel that ends have only ordinary outputs,
so one is below the widgets and is renewed now and then. It cannot be in the widgets' own
output: JupyterLab makes a new view of a widget at each update of its output, and drops none.

JupyterLab and Notebook 7 hide it while the widgets live, and in their place the line of a widget
that is lost. Other front ends show it below the widgets. Pure.
"""

import base64
import html
from typing import Any

from nbdist.client.board.measures import WIDE
from nbdist.client.board.palette import Theme
from nbdist.client.board.picture import live
from nbdist.client.board.text import STYLE
from nbdist.client.output.slots import Display

LIVE_CLASS = "nbdist-live"  # of the live board's outermost widget
AGAIN_CLASS = "nbdist-again"  # of the one that shows in its place all that its cell has left
MOST_BYTES = 200_000  # of the picture; a larger one is left out, for the file holds it twice
_CLASS = "nbdist-kept"
_OUTPUT = ".jp-OutputArea-child"
_ENDED = "The kernel was restarted or has ended while this cell ran; this is its last frame."
# Of widgets without a kernel ipywidgets shows broken links, one each and no word.
_CUT_OFF = "jupyter-widgets-disconnected"
LIVE_STYLE = (
    f"<style>{_OUTPUT}:has(.{LIVE_CLASS}) ~ {_OUTPUT}:has(.{_CLASS}) {{display: none}} "
    f".{LIVE_CLASS} .{_CUT_OFF}::before {{content: none}} "
    f'.{LIVE_CLASS}.{_CUT_OFF}::before {{content: "{_ENDED}"; {STYLE}; font-weight: bold; '
    "color: inherit}</style>"
)
# A style is the whole page's: what it hides must be beside that widget, and no other board.
HIDES_OTHERS = (
    f"<style>.jp-OutputArea:has(> {_OUTPUT} .{AGAIN_CLASS}) > "
    f"{_OUTPUT}:not(:has(.{AGAIN_CLASS})) {{display: none}}</style>"
)
_HIDES_LOST = (
    f"<style>{_OUTPUT}:has(.jupyter-widgets):not(:has(.{LIVE_CLASS})):has(~ {_OUTPUT} .{_CLASS}) "
    "{display: none}</style>"
)
WAITING = "This cell trains. If nothing moves here, run %dist board in the next cell."


def kept(said: str, png: bytes, theme: Theme, at: str) -> Display:
    """Return what to show where the live board is lost.

    Args:
        said: What the board says at this moment, in lines.
        png: Its picture.
        theme: Its colours.
        at: The time of day.
    """
    since = (
        f"The board as it was at {at}. If this does not change, the page was opened again or the "
        "kernel has ended; %dist board shows what is known now."
    )
    lines = [since, *said.splitlines()]
    shown = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
    data = {"text/plain": "\n".join(lines)}
    metadata: dict[str, Any] = {}
    if len(png) <= MOST_BYTES:
        encoded = base64.b64encode(png).decode("ascii")
        shown += live(png, said, theme)
        data["image/png"] = encoded
        metadata["image/png"] = {"width": WIDE, "alt": said}
    data["text/html"] = f'{_HIDES_LOST}<div class="{_CLASS}" style="{STYLE}">{shown}</div>'
    return Display(data, metadata)
