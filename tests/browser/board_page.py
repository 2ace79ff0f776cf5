"""The board in a page without a kernel: its own module, told what a kernel would say."""

import base64
from collections.abc import Mapping
from typing import Any

from playwright.sync_api import Browser, FloatRect, Locator, Page

from nbdist.client.board import palette
from nbdist.client.board.live.points import Points
from nbdist.client.board.live.source import source
from nbdist.client.board.live.words import frame_of, words_of
from nbdist.client.board.scene.look import look
from nbdist.client.metrics.analysis.values import Analysis
from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from tests.browser.lab import PICTURES

# What anywidget gives a module: a model, and an element to draw into.
_OPEN = """async ({source, state, points}) => {
  const bytes = base64 => new DataView(Uint8Array.from(atob(base64), c => c.charCodeAt(0)).buffer);
  const heard = [];
  const all = {...state, points: bytes(points)};
  window.board = {sent: [], tell: (content, base64) =>
    heard.forEach(hear => hear(content, base64 === null ? [] : [bytes(base64)]))};
  const model = {
    get: name => all[name], send: content => window.board.sent.push(content),
    on: (event, hear) => event === 'msg:custom' && heard.push(hear), off: () => {},
  };
  const url = URL.createObjectURL(new Blob([source], {type: 'text/javascript'}));
  const module = await import(url);
  const el = document.getElementById('board');
  window.board.close = module.default.render({model, el});
  window.board.page = el.nbdist;
}"""

# Two of the browser's frames later everything is drawn.
_DRAWN = "() => new Promise(ok => requestAnimationFrame(() => requestAnimationFrame(() => ok(0))))"


class BoardPage:
    """One board of a cell in a page of its own."""

    def __init__(
        self,
        browser: Browser,
        telemetry: Telemetry,
        info: CellInfo,
        points: Points,
        known: Analysis | None = None,
        *,
        view: str = "overview",
        width: int = 1000,
        is_dark: bool = False,
        script: str = "",
        frame: Mapping[str, Any] | None = None,
    ) -> None:
        """Open it with what is given, also in its frame; `script` runs in the page before."""
        self._context = browser.new_context(viewport={"width": width, "height": 900})
        self.page: Page = self._context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        colors = ("#111", "#ddd") if is_dark else ("#fff", "#222")
        self.page.set_content(
            f'<!doctype html><body style="margin: 0; background: {colors[0]}; '
            f'--jp-ui-font-color1: {colors[1]}"><div id="board"></div></body>'
        )
        self.page.evaluate(f"() => {{{script}}}")
        plain = frame_of(info.ranks, palette.theme_named("auto"), view)
        frame = {**plain, "has_actions": True, **(frame or {})}
        words = words_of(look(telemetry, info, known, histories=False), "1,200 [00:12]")
        state = {"frame": frame, "words": words, "history": {"headers": points.headers}}
        given = {"source": source(), "state": state, "points": _text(points.data)}
        self.page.evaluate(_OPEN, given)
        self.drawn()

    def tell(self, kind: str, points: Points | None = None, **more: Any) -> None:
        """Send what a kernel sends, and wait until it is drawn."""
        headers = {} if points is None else {"headers": points.headers}
        data = None if points is None else _text(points.data)
        self.page.evaluate(
            "([content, data]) => window.board.tell(content, data)",
            [{"kind": kind, **headers, **more}, data],
        )
        self.drawn()

    def drawn(self) -> None:
        """Wait until all is drawn that is known; nothing may have failed meanwhile."""
        self.page.evaluate(_DRAWN)
        assert self.errors == []

    @property
    def sent(self) -> list[dict[str, Any]]:
        """What the page has sent to the kernel, without its greetings."""
        sent: list[dict[str, Any]] = self.page.evaluate("() => window.board.sent")
        said = [{k: v for k, v in one.items() if k != "page"} for one in sent]
        return [one for one in said if one["kind"] != "hello"]

    def plot(self, title: str) -> Locator:
        """Return the canvas of a plot."""
        return self.page.locator(
            "figure", has=self.page.locator(f"figcaption:text('{title}')")
        ).locator("canvas")

    def ask(self, expression: str) -> Any:
        """Evaluate an expression of `page`, the board's own object."""
        return self.page.evaluate(f"() => {{const page = window.board.page; return {expression}}}")

    def point_at(self, title: str, share: float) -> None:
        """Move the pointer over a plot: 0 is the first step that is shown, 1 the last one."""
        box = self._box(title)
        self.page.mouse.move(self._x(box, share), box["y"] + 40)
        self.drawn()

    def drag(self, title: str, begin: float, end: float) -> None:
        """Drag over a part of a plot."""
        box = self._box(title)
        self.page.mouse.move(self._x(box, begin), box["y"] + 40)
        self.page.mouse.down()
        self.page.mouse.move(self._x(box, end), box["y"] + 40, steps=3)
        self.page.mouse.up()
        self.drawn()

    def picture(self, name: str) -> None:
        """Keep a picture of the page for people to look at."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png", full_page=True)

    def close(self) -> None:
        """Close the page."""
        self._context.close()

    def _box(self, title: str) -> FloatRect:
        box = self.plot(title).bounding_box()
        assert box is not None
        return box

    @staticmethod
    def _x(box: FloatRect, share: float) -> float:
        left, right = 48, 10  # PAD of plot.js
        return box["x"] + left + share * (box["width"] - left - right)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
