"""The views of the board, by the names of `board.VIEWS`.

Each is a module of three functions: `plan`, what it is composed for, composed anew when that
changes; `height`, in CSS pixels below the head; and `compose`, which puts its plots on a page.
"""

from typing import Protocol

from nbdist.client.board.page import Page, Plot
from nbdist.client.board.scene import Scene
from nbdist.client.board.views import collectives, loss, overview, ranks, step, verdicts


class Sheet(Protocol):
    """One of the views."""

    def plan(self, scene: Scene, final: bool) -> tuple[object, ...]:
        """Return what the page is composed for."""

    def height(self, scene: Scene, final: bool) -> int:
        """Return the height of the page in CSS pixels, without its head."""

    def compose(self, page: Page, scene: Scene) -> list[Plot]:
        """Put axes, titles and legends on the page; return the plots that draw upon them."""


SHEETS: dict[str, Sheet] = {
    "overview": overview,
    "loss": loss,
    "step": step,
    "collectives": collectives,
    "ranks": ranks,
    "verdicts": verdicts,
}
