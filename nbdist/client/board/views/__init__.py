"""The views of the board: a module each, which owns all that is particular to it.

A view says what it shows in a picture, in a sentence and in a table. Importing them loads neither
numpy, matplotlib nor ipywidgets: `compose` imports what it draws with.
"""

from difflib import get_close_matches
from typing import TYPE_CHECKING, Protocol

from nbdist.client.board.tables import ViewTable
from nbdist.client.board.views import collectives, loss, overview, ranks, step, stragglers
from nbdist.shared.errors import UsageError

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.drawn.page import Page
    from nbdist.client.board.scene.scene import Scene


class View(Protocol):
    """One of the views.

    Attributes:
        NAME: What people type: `%dist board NAME`.
        HELP: What it shows, in a few words.
        CAPTION: What a picture's caption says is seen; empty where it names the plots there are.
        SHOWS_VERDICTS: Whether it is about verdicts, and says why there is none.
    """

    NAME: str
    HELP: str
    CAPTION: str
    SHOWS_VERDICTS: bool

    def height(self, scene: "Scene", width: int) -> int:
        """Return the height in CSS pixels of a page so wide, without its head."""

    def compose(self, page: "Page", scene: "Scene") -> None:
        """Draw it on the page, which is as high as that."""

    def sentence(self, scene: "Scene") -> str:
        """Return what is seen: spoken by screen readers, written above a plain table."""

    def table(self, scene: "Scene") -> ViewTable:
        """Return the numbers of now."""


# In the order of the board's buttons.
_ALL: tuple[View, ...] = (overview, loss, step, collectives, ranks, stragglers)

VIEWS = {view.NAME: view for view in _ALL}


def require_view(name: str) -> None:
    """Check that there is a view of that name.

    Raises:
        UsageError: There is none; one line says what there is.
    """
    if name not in VIEWS:
        close = get_close_matches(str(name), VIEWS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it is one of {', '.join(VIEWS)}."
        raise UsageError(f"The board has no view {name!r}; {hint}")
