import io

import numpy as np
import pytest
from PIL import Image

from nbdist.client.board import VIEWS, colors, palette
from nbdist.client.board.figure import Painter
from nbdist.client.board.look import look
from nbdist.client.metrics.telemetry import Telemetry
from tests.unit.client.board.board_data import analysis_of, cell_info, training

THEMES = ["auto", "light", "dark"]


def rgba(color: str) -> tuple[int, ...]:
    return (*bytes.fromhex(color.removeprefix("#")), 255)


def written(pixels: np.ndarray, theme: str) -> np.ndarray:
    png = colors.png(pixels.astype(np.uint8), palette.theme_named(theme))
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def seen_in(png: bytes) -> set[tuple[int, ...]]:
    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))
    return {tuple(color) for color in np.unique(image.reshape(-1, 4), axis=0).tolist()}


@pytest.mark.parametrize("theme", THEMES)
def test_each_colour_of_the_legend_is_found_exactly_in_the_picture(theme: str) -> None:
    ranks = 8
    painter = Painter(palette.theme_named(theme))
    known = analysis_of(ranks, 200, slow=0)

    seen = seen_in(painter.frame(look(training(ranks, 200), cell_info(ranks), known)))

    parts = {palette.PARTS[part][0] for part in known.ranks[0].parts}
    meant = [*palette.LINE_COLORS, *parts, palette.theme_named(theme).text]
    assert {color for color in meant if rgba(color) not in seen} == set()


@pytest.mark.parametrize("theme", THEMES)
def test_every_colour_that_means_something_is_written_as_it_is(theme: str) -> None:
    meant = np.array([[rgba(c) for c in colors.meanings(palette.theme_named(theme))]])

    assert (written(meant, theme) == meant).all()


@pytest.mark.parametrize("theme", THEMES)
def test_there_are_no_more_colours_than_a_byte_has(theme: str) -> None:
    assert len(colors.Shades(palette.theme_named(theme)).colors) < colors.MOST


@pytest.mark.parametrize("line", palette.LINE_COLORS[:3])
def test_the_edge_of_a_line_keeps_its_hue(line: str) -> None:
    edge = np.array([[(*rgba(line)[:3], 255 * i // 8) for i in range(2, 9)]])

    found = written(edge, "auto").astype(int)

    assert (found[..., :3] == edge[..., :3]).all()
    assert np.abs(found[..., 3] - edge[..., 3]).max() < 32


@pytest.mark.parametrize("theme", THEMES)
def test_any_colour_becomes_one_that_looks_much_like_it(theme: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 4))
    pixels[..., 3] = 255

    apart = np.abs(written(pixels, theme).astype(int) - pixels)

    assert np.median(apart) < 32


def test_what_is_not_drawn_on_stays_transparent() -> None:
    nothing = np.tile(np.array(colors.NOTHING), (3, 5, 1))

    assert (written(nothing, "auto")[..., 3] == 0).all()


@pytest.mark.parametrize("name", VIEWS)
def test_a_frame_is_the_same_whatever_was_drawn_before(name: str) -> None:
    known, scenes = analysis_of(2, 60), [training(2, steps) for steps in (60, 40)]
    theme = palette.theme_named("auto")

    def frame(telemetry: Telemetry) -> bytes:
        return Painter(theme, name=name).frame(look(telemetry, cell_info(2), known, name=name))

    first = frame(scenes[0])
    frame(scenes[1])

    assert frame(scenes[0]) == first
