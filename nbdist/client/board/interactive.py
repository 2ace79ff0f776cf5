"""Show a finished board so that people can hover, zoom and hide: `%dist board --interactive`.

The figures are plotly's (the extra "interactive"), as data that the front end draws: JupyterLab and
Notebook 7 with the extension that plotly installs there, VS Code with its own, none of them from
the network. Each is in one output with the picture of the same view, which other front ends
show, and files on the web. It needs no kernel, so it works also when the notebook is opened again.

plotly's extension shows the picture until the mouse enters it, at one CSS pixel a pixel whatever
its metadata say: it is drawn that wide, and the figure has its size.
"""

import base64
import importlib.util
import struct
from importlib.metadata import PackageNotFoundError, version

from nbdist.client.board.controls import show_past
from nbdist.client.board.measures import WIDE
from nbdist.client.board.past import Past, caption
from nbdist.client.board.picture import halved
from nbdist.client.output.slots import Display, Slots, is_live

MIME = "application/vnd.plotly.v1+json"
VIEWS = ("loss", "step", "collectives")  # those that have something to hover over
MISSING = (
    'The interactive board needs plotly: pip install "plotly>=6", then reload the page. '
    "Here is the picture."
)


HINT = (
    "Move the mouse over a picture: hover to read values, drag to zoom, double-click to zoom out, "
    "and click a name to hide it."
)


def show_interactive(past: Past, name: str | None, otherwise: str) -> None:
    """Show views of a board whose cell has ended, interactive where they can be.

    Args:
        past: The board.
        name: One of `board.VIEWS`; None shows all that can be interactive.
        otherwise: The view to show where none of them can be.
    """
    chosen = VIEWS if name in (None, "overview") else tuple(v for v in VIEWS if v == name)
    if not chosen:
        print(f"The view {name} has no interactive form: {', '.join(VIEWS)} have one.")
    elif not has_plotly():
        print(MISSING)
    elif is_live() and (shown := displays(past, chosen)):
        Slots(live=False).settle(shown)
        return
    show_past(past, name or otherwise)


def has_plotly() -> bool:
    """Return whether figures can be made here: older versions write arrays in another form."""
    try:
        is_new = int(version("plotly").partition(".")[0]) >= 6
        return is_new and importlib.util.find_spec("plotly") is not None
    except (PackageNotFoundError, ValueError):  # ValueError: a program has blocked its import
        return False


def displays(past: Past, names: tuple[str, ...]) -> list[Display]:
    """Return the views of these names, each followed by its words; those of nothing are left out.

    Raises:
        ImportError: plotly is missing.
    """
    from nbdist.client.board.interactive_plots import figure_of

    shown: list[Display] = []
    for name in names:
        png = halved(past.png(name, beside_words=True), past.theme)
        figure, sentence = figure_of(name, past.scene, past.theme, _height(png)), past.caption(name)
        if figure is not None:
            encoded = base64.b64encode(png).decode("ascii")
            data = {MIME: figure, "image/png": encoded, "text/plain": sentence}
            shown.append(Display(data, {"image/png": {"width": WIDE, "alt": sentence}}))
            shown += [caption(sentence), past.words(name)]
    return [caption(HINT), *shown] if shown else []


def _height(png: bytes) -> int:
    """Return the height of a picture in pixels."""
    return int(struct.unpack(">I", png[20:24])[0])
