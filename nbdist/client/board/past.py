"""The board of a cell that has ended: any of its views, as picture, as table, as text.

It holds what was seen last. Drawing loads matplotlib, words do not. May be asked on any thread.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbdist.client.board import sentences, text, verdict_block
from nbdist.client.board.drawn.measures import NARROW, WIDE
from nbdist.client.board.drawn.picture import lasting
from nbdist.client.board.palette import Theme
from nbdist.client.board.tables import to_html, to_text
from nbdist.client.board.views import VIEWS
from nbdist.client.output.slots import Display

if TYPE_CHECKING:  # for their types alone: they load numpy and matplotlib
    from nbdist.client.board.drawn.animation import Animation
    from nbdist.client.board.scene.scene import Scene
    from nbdist.client.metrics.telemetry import Telemetry

# nbval_sanitize.cfg knows it: numbers differ from run to run.
_NUMBERS = '<details class="nbdist-numbers"><summary>Its numbers</summary>{}</details>'
SHARP, NARROW_SHARP = 2.0, 1.5  # pixels of a lasting picture for one CSS pixel


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """A board of a cell; its scene has an `outcome`.

    `elapsed_s` is how long the cell has run, while it runs. `run` is the run's name where the board
    is not that of this kernel's last cell; of that one `records` has what zooming shows.
    """

    scene: "Scene"
    theme: Theme
    elapsed_s: float | None = None
    run: str = ""
    records: "Telemetry | None" = None

    def picture(self, name: str, *, with_table: bool = False) -> Display:
        """Return the view called `name` as an output, for wide and for narrow windows.

        Args:
            name: One of `board.VIEWS`.
            with_table: Have its numbers below, folded, where HTML is shown.
        """
        wide, narrow = self.png(name), self.png(name, NARROW, NARROW_SHARP)
        shown = lasting(wide, narrow, self.caption(name), self.theme)
        table = VIEWS[name].table(self.seen)
        if not (with_table and table.rows):
            return shown
        page = shown.data["text/html"] + _NUMBERS.format(to_html(table))
        return Display({**shown.data, "text/html": page}, shown.metadata)

    def png(self, name: str, width: int = WIDE, scale: float = SHARP) -> bytes:
        """Draw the view called `name`.

        Args:
            name: One of `board.VIEWS`.
            width: In CSS pixels.
            scale: Pixels for one CSS pixel.
        """
        from nbdist.client.board.figure import draw

        return draw(self.scene, self.theme, width, scale, name=name)

    def animation(self, what: str) -> "Animation":
        """Return what the training did in motion; one of `options.ANIMATIONS`.

        Raises:
            ClusterError: It has done no such thing.
        """
        from nbdist.client.board.drawn import pipeline, ring, shards

        made = {"pipeline": pipeline.animate, "ring": ring.animate, "shards": shards.animate}
        return made[what](self.scene)

    def caption(self, name: str) -> str:
        """Return the sentence below the picture, the same for every run of the same cell."""
        assert self.scene.outcome is not None  # the cell has ended
        sentence = text.caption(self.scene, self.scene.outcome, VIEWS[name].CAPTION)
        return f"Run {self.run}: {sentence}" if self.run else sentence

    def plain(self, name: str) -> str:
        """Return the view called `name` as text: a sentence, and its table where it has rows."""
        view, of = VIEWS[name], f"Run {self.run}: " if self.run else ""
        verdicts = self.scene.analysis.verdicts
        block = [verdict_block.to_text(verdicts)] if verdicts else []
        if view.SHOWS_VERDICTS:  # which its table would repeat
            return of + "\n".join(block or sentences.verdicts(self.seen))
        said, table = of + view.sentence(self.seen), view.table(self.seen)
        return "\n\n".join([*block, said, *([to_text(table)] if table.rows else [])])

    @property
    def seen(self) -> "Scene":
        """The scene as views take it: without an outcome while the cell runs."""
        return replace(self.scene, outcome=None) if self.scene.outcome == "running" else self.scene

    def summary(self, name: str) -> str:
        """Return all that the board says, as text: progress or caption, verdicts, the view."""
        elapsed_s = self.elapsed_s
        said = self.caption(name) if elapsed_s is None else text.progress(self.scene, elapsed_s)
        return f"{said}\n{self.plain(name)}"

    def words(self, name: str) -> Display:
        """Return the view called `name` as HTML: a sentence that is spoken when it changes."""
        view, verdicts = VIEWS[name], self.scene.analysis.verdicts
        table = view.table(self.seen)
        html = verdict_block.to_html(verdicts)
        if not (verdicts and view.SHOWS_VERDICTS):
            html += text.spoken(view.sentence(self.seen))
        html += to_html(table) if table.rows else ""
        return Display({"text/html": html, "text/plain": self.plain(name)})


def caption(sentence: str) -> Display:
    """Return lines of text that front ends show as a paragraph."""
    return Display({"text/markdown": text.markdown(sentence), "text/plain": sentence})
