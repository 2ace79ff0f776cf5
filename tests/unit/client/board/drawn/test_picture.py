"""A picture that stays follows the window, says what it shows, and does not bloat the file."""

import base64
import io
import math
import re
from dataclasses import replace
from functools import cache

import nbformat
import numpy as np
import pytest
from nbconvert import HTMLExporter
from PIL import Image

from nbdist.client.board import VIEWS, palette
from nbdist.client.board.drawn import compare_plot
from nbdist.client.board.drawn.measures import NARROW, WIDE
from nbdist.client.board.drawn.picture import (
    AUTO_CLASS,
    NARROW_PX,
    SWITCH_PX,
    few_colors,
    halved,
    single,
)
from nbdist.client.board.figure import compose, draw
from nbdist.client.board.palette import PAPER
from nbdist.client.board.past import NARROW_SHARP, SHARP, Past
from nbdist.client.board.scene.look import look
from nbdist.client.output.slots import Display
from nbdist.client.tracking.past.compare import Entry
from tests.unit.client.board.board_data import analysis_of, cell_info, training

LETTERS_PX = 8 / 72 * 100  # of TEXT_PT, where a picture is as wide as it was composed


def past(theme: str = "auto", ranks: int = 4) -> Past:
    scene = look(training(ranks, 60), cell_info(ranks), analysis_of(ranks, slow=1))
    return Past(replace(scene, outcome="finished"), palette.theme_named(theme))


@cache
def picture(name: str, theme: str = "auto") -> Display:
    """Return a picture that stays; drawing one takes some tenths of a second."""
    return past(theme).picture(name)


def images(html: str) -> list[Image.Image]:
    """Return the pictures that a page holds."""
    sources = re.findall(r'src="data:image/\w+;base64,([^"]+)"', html)
    return [Image.open(io.BytesIO(base64.b64decode(source))) for source in sources]


def shown_px(html: str, width: int) -> list[float]:
    """Return how wide each picture is in an output of `width`, by CSS's rules for clamp()."""

    def clamp(low: float, value: float, high: float) -> float:
        return max(low, min(value, high))

    found = []
    for style, most in re.findall(r" width: (clamp[^;]+); max-width: (\w+)", html):
        plain = style.replace("100%", str(width)).replace("px", "")
        most_px = math.inf if most == "none" else float(most.removesuffix("px"))
        found.append(min(most_px, eval(plain, {"clamp": clamp})))
    return found


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_is_composed_for_a_wide_and_for_a_narrow_window(name: str) -> None:
    wide, narrow = images(picture(name).data["text/html"])

    assert (wide.width, narrow.width) == (SHARP * WIDE, NARROW_SHARP * NARROW)
    assert np.asarray(narrow)[..., 3].any()


@pytest.mark.parametrize("width", [400, 484, 700, 780, SWITCH_PX - 1, SWITCH_PX, 1220, 1820])
def test_letters_are_ten_pixels_or_more_in_any_window(width: int) -> None:
    wide_px, narrow_px = shown_px(picture("overview").data["text/html"], width)

    assert sorted([wide_px > 0, narrow_px > 0]) == [False, True], "one of them is shown"
    letters_px = LETTERS_PX * max(wide_px / WIDE, narrow_px / NARROW)
    assert 9.9 <= letters_px <= 18
    assert max(wide_px, narrow_px) <= max(width, NARROW_PX[0])


def test_a_screen_reader_hears_once_what_is_seen() -> None:
    known = past()
    html = picture("step").data["text/html"]

    first, second = re.findall(r"<img ([^>]*?) width", html)
    assert first == f'alt="{known.caption("step")}"'
    assert second == 'alt="" aria-hidden="true"'


def test_where_css_is_dropped_only_the_wide_one_has_a_width() -> None:
    html = picture("overview").data["text/html"]

    assert re.findall(r'width="(\d+)"', html) == [str(WIDE), "0"]


def test_what_shows_no_html_gets_a_png_with_a_pixel_for_each_css_pixel() -> None:
    display = picture("overview", "light")
    png = Image.open(io.BytesIO(base64.b64decode(display.data["image/png"])))

    assert png.format == "PNG"
    assert png.width == display.metadata["image/png"]["width"] == WIDE
    parts = {tuple(bytes.fromhex(palette.PARTS[p][0][1:])) for p in ("compute", "waiting")}
    pixels = np.asarray(png.convert("RGB")).reshape(-1, 3)
    assert parts <= {tuple(int(c) for c in color) for color in np.unique(pixels, axis=0)}


@pytest.mark.parametrize("name", ["overview", "collectives"])
def test_all_forms_together_take_less_than_twice_of_one_png(name: str) -> None:
    held = sum(len(picture(name).data[kind]) for kind in ("text/html", "image/png"))

    assert held < 2 * len(base64.b64encode(past().png(name)))


@pytest.mark.parametrize(("theme", "follows"), [("auto", True), ("light", False), ("dark", False)])
def test_only_a_picture_without_a_background_follows_the_pages_theme(
    theme: str, follows: bool
) -> None:
    assert (f'class="{AUTO_CLASS}"' in picture("overview", theme).data["text/html"]) == follows


def test_what_nbconvert_writes_has_the_alt_text_and_lacks_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = past()
    display = picture("step")
    output = nbformat.v4.new_output("display_data", display.data, metadata=display.metadata)
    cell = nbformat.v4.new_code_cell("train()", outputs=[output])

    page, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))

    assert f'alt="{known.caption("step")}"' in page
    assert "Alternative text is missing" not in caplog.text
    assert "No description has been provided" not in page


def test_a_comparison_of_runs_has_its_alt_text_and_the_colours_of_its_runs() -> None:
    curve = [(1, 2.0, 1.9, 2.1), (9, 1.0, 0.9, 1.1)]
    entry = Entry("careful", "finished", 9, {}, loss=None, throughput=None, curve=curve)
    theme = palette.theme_named("light")
    display = single(compare_plot.picture([entry], theme), "1 run <compared>.", theme)

    assert 'alt="1 run &lt;compared&gt;."' in display.data["text/html"]
    (image,) = images(display.data["text/html"])
    color, _ = palette.line_style(0)
    pixels = np.asarray(image.convert("RGB"))
    assert (pixels == list(bytes.fromhex(color[1:]))).all(axis=2).any()


def test_where_no_theme_is_told_white_lies_under_the_picture() -> None:
    shown = picture("overview", "auto").data
    frame = f'<div class="{AUTO_CLASS}" style="overflow-x: auto; background: {PAPER}">'
    assert frame in shown["text/html"]
    for page in ('[data-jp-theme-light="false"]', ".vscode-dark"):
        assert f"{page} .{AUTO_CLASS} {{background: none !important}}" in shown["text/html"]
    with Image.open(io.BytesIO(base64.b64decode(shown["image/png"]))) as alone:
        pixels = np.asarray(alone.convert("RGBA")).reshape(-1, 4)
    assert pixels[0].tolist() == [255, 255, 255, 255]
    assert (pixels[:, 3] == 255).all()
    assert (pixels[:, :3] == 0x76).all(axis=1).any(), "letters"
    assert PAPER not in picture("overview", "dark").data["text/html"]


def rgba(color: str) -> tuple[int, ...]:
    return (*bytes.fromhex(color.removeprefix("#")), 255)


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_the_file_has_the_ground_the_text_and_the_colours_of_the_legend(theme: str) -> None:
    ranks, colors = 8, palette.theme_named(theme)
    scene = look(training(ranks, 200), cell_info(ranks), analysis_of(ranks, 200, slow=0))

    png = Image.open(io.BytesIO(draw(scene, colors)))

    assert png.mode == "P"
    image = np.asarray(png.convert("RGBA"))
    ground = (255, 255, 255, 0) if colors.background is None else rgba(colors.background)
    assert tuple(image[0, 0]) == ground
    seen = np.unique(image.reshape(-1, 4), axis=0).astype(int)
    assert (seen == rgba(colors.text)).all(axis=1).any()
    assert scene.stack is not None
    meant = [*palette.LINE_COLORS, *(palette.PARTS[part][0] for part in scene.stack.seen)]
    for color in meant:
        assert np.abs(seen - rgba(color)).sum(axis=1).min() <= 4, color


@pytest.mark.parametrize("background", [255, 17])
@pytest.mark.parametrize("name", VIEWS)
def test_few_colours_look_like_all_of_them_on_white_and_on_dark(name: str, background: int) -> None:
    page = compose(past().scene, palette.theme_named("auto"), scale=2, name=name)
    pixels = page.pixels()

    png = few_colors(Image.fromarray(pixels), page.theme)

    def seen(image: np.ndarray) -> np.ndarray:
        shown = image[..., 3:] / 255
        return image[..., :3] * shown + background * (1 - shown)

    apart = np.abs(seen(np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))) - seen(pixels))
    assert apart.mean() < 1
    assert np.percentile(apart, 99.5) < 24


def test_a_usual_picture_of_two_ranks_takes_little_of_a_notebook_and_of_a_runs_page() -> None:
    scene = look(training(2, 80), cell_info(2), analysis_of(2, 80))
    known = Past(replace(scene, outcome="finished"), palette.theme_named("auto"))

    display = known.picture("overview")

    assert len(halved(known.png("overview"), known.theme)) < 30_000
    assert sum(len(display.data[kind]) for kind in ("text/html", "image/png")) < 120_000
