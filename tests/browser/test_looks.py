"""The board as people see it: its colours, on both themes, in narrow and in wide windows."""

from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.client.board.drawn.measures import NARROW, TEXT_PT, WIDE
from nbdist.client.board.palette import LINE_COLORS, PARTS, contrast
from nbdist.client.board.past import SHARP
from tests.browser.lab import Cell, OpenNotebook
from tests.browser.test_notebook import TRAIN

pytestmark = pytest.mark.browser

TRAIN_30 = TRAIN.replace("itertools.count()", "range(30)").replace('"enough"', '"never"')
WIDTHS = 600, 1000, 1800
THEMES = "JupyterLab Light", "JupyterLab Dark"
LEAST_PX = 9.0  # of a letter's size on the screen
PICTURE = "img:visible"  # of the wide and the narrow one that which fits
LEGEND_SHARE = 0.25  # of a picture's height, from its top

# All colours of the top of a picture that are seen without any transparency, with their counts.
_COLORS = """async (image, share) => {
  const bitmap = await createImageBitmap(await (await fetch(image.src)).blob());
  const canvas = new OffscreenCanvas(bitmap.width, Math.ceil(bitmap.height * share));
  const context = canvas.getContext('2d');
  context.drawImage(bitmap, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const counts = {};
  for (let i = 0; i < pixels.length; i += 4) {
    if (pixels[i + 3] < 255) continue;
    const hex = '#' + [0, 1, 2].map(j => pixels[i + j].toString(16).padStart(2, '0')).join('');
    counts[hex] = (counts[hex] ?? 0) + 1;
  }
  return counts;
}"""

# What is cut off to the right: tables wider than where they stand, and what runs out of the cell.
_CUT = """cell => [...cell.querySelectorAll('.jp-OutputArea-output')].flatMap(
  output => [...output.querySelectorAll('table, img')].filter(
    e => e.getBoundingClientRect().right > output.getBoundingClientRect().right + 1)
).map(e => e.tagName)"""

_BACKGROUND = """cell => {
  const probe = document.createElement('canvas').getContext('2d');
  probe.fillStyle = getComputedStyle(cell.closest('.jp-Notebook')).backgroundColor;
  return probe.fillStyle;
}"""


@pytest.fixture
def trained(notebook: OpenNotebook) -> Iterator[Cell]:
    """The overview of a short training, as a picture with its table."""
    notebook.run(TRAIN_30).wait()
    board = notebook.run("%dist board overview").wait()
    notebook.run("1").wait()
    board.output.locator(PICTURE).wait_for()
    yield board
    notebook.page.set_viewport_size({"width": 1280, "height": 1000})
    notebook.use_theme(THEMES[0])


def colors_at_the_top(cell: Cell, which: str) -> dict[str, int]:
    """Return the colours of the legend of a cell's picture and how many pixels have them."""
    counts: dict[str, int] = cell.output.locator(which).first.evaluate(
        _COLORS.replace("(image, share)", "image").replace("share)", f"{LEGEND_SHARE})")
    )
    return counts


def letters_px(cell: Cell) -> float:
    """Return the size of the smallest letters of a cell's lasting picture on the screen."""
    seen: dict[str, Any] = cell.output.locator(PICTURE).evaluate(
        "image => ({natural: image.naturalWidth, shown: image.getBoundingClientRect().width})"
    )
    drawn_px = TEXT_PT * 100 / 72  # matplotlib's figures have 100 dots per inch
    drawn_for = WIDE if seen["natural"] == WIDE * SHARP else NARROW
    return drawn_px * float(seen["shown"]) / drawn_for


def test_the_legends_colours_are_those_of_the_lines_and_of_no_other_thing(
    trained: Cell,
) -> None:
    seen = colors_at_the_top(trained, PICTURE)

    swatches = {"rank 0": LINE_COLORS[0], "rank 1": LINE_COLORS[1]}
    swatches |= {part: PARTS[part][0] for part in ("compute", "transfer", "waiting")}
    missing = {name: color for name, color in swatches.items() if seen.get(color, 0) < 10}
    assert not missing, seen
    assert len(set(swatches.values())) == len(swatches)


@pytest.mark.parametrize("theme", THEMES)
def test_words_and_pictures_are_readable_on_both_themes(
    notebook: OpenNotebook, trained: Cell, theme: str
) -> None:
    notebook.use_theme(theme)
    background = trained.element.evaluate(_BACKGROUND)
    words = trained.output.get_by_role("table").first
    color = words.evaluate("e => getComputedStyle(e).color")
    as_hex = "#" + "".join(f"{int(part):02x}" for part in color.strip("rgba()").split(",")[:3])
    assert contrast(as_hex, background) >= 4.5
    assert contrast(max_grey(trained), background) >= 4.0, "letters of the picture"

    trained.picture(f"looks-{theme.split()[-1].lower()}")


def max_grey(cell: Cell) -> str:
    """Return the grey that most pixels at the top of a picture have: that of its letters."""
    seen = colors_at_the_top(cell, PICTURE)
    greys = {c: n for c, n in seen.items() if c[1:3] == c[3:5] == c[5:7]}
    return max(greys, key=lambda c: greys[c])


@pytest.mark.parametrize("width", WIDTHS)
def test_letters_are_large_enough_and_no_table_is_cut(
    notebook: OpenNotebook, trained: Cell, width: int
) -> None:
    notebook.page.set_viewport_size({"width": width, "height": 1000})

    trained.picture(f"looks-{width}")
    assert letters_px(trained) >= LEAST_PX
    assert trained.element.evaluate(_CUT) == []
