"""The output of one rank: text as a terminal shows it, and displays between it.

`Screen` knows what progress bars need: a carriage return goes back to the line's beginning, so
that what follows overwrites. `RankOutput` puts together what one rank sends: text in parts and
windows (see `engine/kernel/output/stdio`), and displays. Both are bounded. No threads, no locks:
a caller with several threads must lock.
"""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.client.output.merge import Item, OutputLine, Shown
from nbdist.client.output.slots import Display
from nbdist.shared.text import name_bytes

HEAD_LINES = 500
TAIL_LINES = 500
MAX_LINE_CHARS = 8192
MAX_DISPLAYS = 100
_WIDGET = "application/vnd.jupyter.widget-view+json"

ACTIVE_LINES = 20  # the last lines, which a cursor that moves up can reach

# Line feed, carriage return, backspace; cursor up (nested progress bars); erase (tqdm's `close`);
# other movements, for which there is no place here.
_CONTROL = re.compile(
    r"(\n|\r|\x08|\x1b\[\d*A|\x1b\[[012]?[JK]|\x1b\[[\d;]*[B-DGHf]|\x1b\[\?\d+[hl])"
)


class Screen:
    """Lines of text with the meaning of line feed, carriage return and backspace.

    Keeps the first `head` and the last `tail` lines, and one line that says how many are
    missing between them.
    """

    def __init__(self, head: int = HEAD_LINES, tail: int = TAIL_LINES) -> None:
        """Make an empty screen."""
        self._head_lines = head
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=tail)
        self._missing = 0
        self._rows = [""]  # the last lines; the cursor is in one of them
        self._row = 0
        self._column = 0

    def feed(self, text: str) -> None:
        """Take a piece of text; pieces may end anywhere, also within a line."""
        for index, piece in enumerate(_CONTROL.split(text)):
            if index % 2:
                self._control(piece)
            elif piece:
                self._put(piece)

    def _control(self, code: str) -> None:
        if code == "\n":
            self._row += 1
            self._column = 0
            if self._row == len(self._rows):
                self._rows.append("")
            if len(self._rows) > ACTIVE_LINES:
                self._keep(self._rows.pop(0))
                self._row -= 1
        elif code == "\r":
            self._column = 0
        elif code == "\b":
            self._column = max(0, self._column - 1)
        elif code.endswith("A"):
            self._row = max(0, self._row - int(code[2:-1] or 1))
        elif code.endswith(("J", "K")):
            line = self._rows[self._row]
            self._rows[self._row] = line[: self._column]

    def _put(self, piece: str) -> None:
        line = self._rows[self._row]
        if "\x1b" in piece or "\x1b" in line:
            # Colours have no width, so columns cannot be counted: a rewritten line is replaced.
            line = line[: self._column] + piece
            self._column = len(line)
        else:
            end = self._column + len(piece)
            line = line[: self._column].ljust(self._column) + piece + line[end:]
            self._column = end
        if len(line) > MAX_LINE_CHARS:
            line = line[: MAX_LINE_CHARS - 1] + "…"
            self._column = min(self._column, MAX_LINE_CHARS)
        self._rows[self._row] = line

    def _keep(self, line: str) -> None:
        if len(self._head) < self._head_lines:
            self._head.append(line)
            return
        if len(self._tail) == self._tail.maxlen:
            self._missing += 1
        self._tail.append(line)

    def lines(self) -> list[str]:
        """Return the lines, the unfinished one last."""
        between = [f"… {self._missing:,} lines not shown"] if self._missing else []
        rows = self._rows if self._rows[-1] else self._rows[:-1]
        return [*self._head, *between, *self._tail, *rows]


@dataclass(slots=True)
class _Text:
    """A stretch of text; `window` is the number of the window it came from, if from one."""

    screen: Screen
    window: int | None = None


@dataclass(slots=True)
class _Rich:
    shown: Shown
    display_id: str | None


@dataclass(slots=True)
class RankOutput:
    """All that one rank has shown in one cell, in order."""

    _pieces: list[_Text | _Rich] = field(default_factory=list)
    _clear_next: bool = False
    _displays: int = 0

    def receive(self, content: Mapping[str, Any]) -> None:
        """Take one message of text: `parts`, and for a window its number and `cut_bytes`."""
        text = "".join(str(part[1]) for part in content["parts"])
        number = content.get("window")
        if number is None:
            self.write(text)
            return
        self._clear()
        screen = Screen()
        cut = int(content["cut_bytes"])
        if cut:
            screen.feed(f"… {name_bytes(cut)} not shown\n")
            # The window begins anywhere; a part of a line would look like a whole one.
            _, _, rest = text.partition("\n")
            text = rest or text
        screen.feed(text)
        for index, piece in enumerate(self._pieces):
            if isinstance(piece, _Text) and piece.window == number:
                self._pieces[index] = _Text(screen, number)
                return
        self._pieces.append(_Text(screen, number))

    def write(self, text: str) -> None:
        """Take text that was sent whole."""
        self._clear()
        last = self._pieces[-1] if self._pieces else None
        if not isinstance(last, _Text) or last.window is not None:
            last = _Text(Screen())
            self._pieces.append(last)
        last.screen.feed(text)

    def show(self, display: Display, *, value: bool = False, display_id: str | None = None) -> None:
        """Take a display; `value` when it is the value of the cell."""
        self._clear()
        if self._displays == MAX_DISPLAYS:
            # A loop without `clear_output`: the newest replaces the one before it.
            self._displays -= 1
            newest = max(i for i, p in enumerate(self._pieces) if isinstance(p, _Rich))
            del self._pieces[newest]
        self._displays += 1
        self._pieces.append(_Rich(Shown(_without_widget(display), value), display_id))

    def update(self, display_id: str, display: Display) -> None:
        """Replace what is shown under `display_id`; shows nothing when there is none."""
        for piece in self._pieces:
            if isinstance(piece, _Rich) and piece.display_id == display_id:
                piece.shown = Shown(_without_widget(display), piece.shown.value)

    def clear(self, *, wait: bool) -> None:
        """Do what `clear_output` asks for: forget everything, now or when more comes."""
        self._clear_next = True
        if not wait:
            self._clear()

    def _clear(self) -> None:
        if self._clear_next:
            self._pieces.clear()
            self._displays = 0
            self._clear_next = False

    def items(self) -> list[Item]:
        """Return the lines and displays in order, for `merge.render`."""
        items: list[Item] = []
        for piece in self._pieces:
            if isinstance(piece, _Rich):
                items.append(piece.shown)
            else:
                items += [OutputLine(line) for line in piece.screen.lines()]
        return items

    def text(self) -> str:
        """Return the text alone, without the displays."""
        return "\n".join(item.text for item in self.items() if isinstance(item, OutputLine))


def _without_widget(display: Display) -> Display:
    """Return what remains of a widget in the file: its text.

    A widget made on a rank has its model there. What the browser would draw of it has no
    effect, and once the notebook is opened again it is an error message.
    """
    kept = {mime: part for mime, part in display.data.items() if mime != _WIDGET}
    return display if len(kept) == len(display.data) else Display(kept, display.metadata)
