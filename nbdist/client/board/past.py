"""The board of a cell that has ended: any of its views, as picture, as table, as text.

It holds what was seen last and nothing of the records, so it costs what its lines cost. Drawing
loads matplotlib, words do not. May be asked on any thread.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbdist.client.board import sentences, text, verdict_block
from nbdist.client.board.measures import NARROW, WIDE
from nbdist.client.board.palette import Theme
from nbdist.client.board.picture import lasting
from nbdist.client.board.tables import to_html, to_text
from nbdist.client.board.views import VIEWS
from nbdist.client.output.slots import Display

if TYPE_CHECKING:  # for its type alone: the scene loads numpy
    from nbdist.client.board.scene import Scene

SHARP, NARROW_SHARP = 2.0, 1.5  # pixels of a lasting picture for one CSS pixel


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """A board of a cell; its scene has an `outcome`.

    `elapsed_s` is how long the cell has run, while it runs. `run` is the run's name where the board
    is not that of this kernel's last cell.
    """

    scene: "Scene"
    theme: Theme
    elapsed_s: float | None = None
    run: str = ""

    def picture(
        self, name: str, smoothing: int | None = None, *, beside_words: bool = False
    ) -> Display:
        """Return the view called `name` as an output, for wide and for narrow windows.

        Its arguments are those of `png`.
        """
        wide, narrow = (
            self.png(name, smoothing, beside_words=beside_words, width=width, scale=scale)
            for width, scale in ((WIDE, SHARP), (NARROW, NARROW_SHARP))
        )
        return lasting(wide, narrow, self.caption(name), self.theme)

    def png(
        self,
        name: str,
        smoothing: int | None = None,
        *,
        beside_words: bool = False,
        width: int = WIDE,
        scale: float = SHARP,
    ) -> bytes:
        """Draw the view called `name`.

        Args:
            name: One of `board.VIEWS`.
            smoothing: The window of a loss' running mean; None chooses.
            beside_words: `words` are shown with it: it does without what is there, its table.
            width: In CSS pixels.
            scale: Pixels for one CSS pixel.
        """
        from nbdist.client.board.figure import Painter

        scene = self.scene
        if beside_words:
            scene = replace(scene, analysis=replace(scene.analysis, table=()))
        painter = Painter(self.theme, width, scale, name=name, final=True, smoothing=smoothing)
        return painter.frame(scene)

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
            return of + "\n".join(block or sentences.verdicts(self._seen))
        said, table = of + view.sentence(self._seen), view.table(self._seen)
        return "\n\n".join([*block, said, *([to_text(table)] if table.rows else [])])

    @property
    def _seen(self) -> "Scene":
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
        table = view.table(self._seen)
        html = verdict_block.to_html(verdicts)
        if not (verdicts and view.SHOWS_VERDICTS):
            html += text.spoken(view.sentence(self._seen), is_seen=True)
        html += to_html(table) if table.rows else ""
        return Display({"text/html": html, "text/plain": self.plain(name)})


def caption(sentence: str) -> Display:
    """Return lines of text that front ends show as a paragraph."""
    return Display({"text/markdown": text.markdown(sentence), "text/plain": sentence})
