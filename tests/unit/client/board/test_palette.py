from itertools import combinations, pairwise

import numpy as np
import pytest

from nbdist.client.board import palette
from nbdist.client.metrics.analysis.values import PARTS

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
DEFICIENCIES = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
                   (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                     (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                   (0.004733, 0.691367, 0.303900)),
    "none": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
}  # fmt: skip
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str, deficiency: str) -> np.ndarray:
    channels = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1)
    f = np.cbrt(TO_XYZ @ seen / [0.9505, 1.0, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_ranks_with_the_same_dashes_differ_in_colour_for_every_eye(deficiency: str) -> None:
    styles = [palette.line_style(i) for i in range(palette.MANY)]
    for (one, dashes), (other, same) in combinations(styles, 2):
        if dashes == same:
            assert np.linalg.norm(lab(one, deficiency) - lab(other, deficiency)) > 20


def test_no_two_ranks_that_have_a_line_look_the_same() -> None:
    styles = {palette.line_style(i) for i in range(palette.MANY)}

    assert len(styles) == palette.MANY


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_every_line_is_seen_on_light_and_on_dark(background: str) -> None:
    assert min(palette.contrast(color, background) for color in palette.LINE_COLORS) >= 3


@pytest.mark.parametrize("name", ["light", "dark"])
def test_text_on_a_known_background_is_sharp(name: str) -> None:
    theme = palette.theme_named(name)

    assert theme.background is not None
    assert palette.contrast(theme.text, theme.background) > 9


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_neighbours_in_a_stack_differ_in_colour_for_every_eye(deficiency: str) -> None:
    for one, other in pairwise(PARTS):
        colors = palette.PARTS[one][0], palette.PARTS[other][0]
        assert np.linalg.norm(lab(colors[0], deficiency) - lab(colors[1], deficiency)) > 18


def test_no_two_parts_of_a_step_carry_the_same_hatch() -> None:
    assert len({palette.PARTS[part][1] for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_every_part_is_seen_on_light_and_on_dark(background: str) -> None:
    assert min(palette.contrast(palette.PARTS[part][0], background) for part in palette.PARTS) >= 3


@pytest.mark.parametrize(
    ("theme", "page", "background"),
    [
        ("light", "light", "#ffffff"),
        ("dark", "dark", "#111111"),
        ("auto", "light", "#ffffff"),
        ("auto", "dark", "#111111"),  # JupyterLab's and Notebook's
        ("auto", "dark", "#1f1f1f"),  # VS Code's
    ],
)
def test_text_has_the_contrast_that_wcag_asks_for(theme: str, page: str, background: str) -> None:
    text = palette.theme_named(theme).text
    if theme == "auto":
        text = multiplied(text, palette.BRIGHTNESS[page])

    assert palette.contrast(text, background) >= 4.5


def test_text_is_readable_where_the_page_tells_no_theme_and_on_dark_pages_nearly_so() -> None:
    assert palette.contrast(palette.MID_GREY, palette.PAPER) >= 4.5
    every = [f"#{value:02x}{value:02x}{value:02x}" for value in range(256)]
    fit = [grey for grey in every if palette.contrast(grey, palette.PAPER) >= 4.5]
    assert max(fit, key=lambda grey: palette.contrast(grey, "#111111")) == palette.MID_GREY


@pytest.mark.parametrize(("page", "background"), [("light", "#ffffff"), ("dark", "#111111")])
def test_colours_are_seen_and_told_apart_in_a_page_that_tells_its_theme(
    page: str, background: str
) -> None:
    factor = palette.BRIGHTNESS[page]
    parts = [multiplied(palette.PARTS[part][0], factor) for part in PARTS]
    lines = [multiplied(color, factor) for color in palette.LINE_COLORS]

    assert min(palette.contrast(color, background) for color in [*parts, *lines]) >= 3
    for one, other in pairwise(parts):
        assert np.linalg.norm(lab(one, "none") - lab(other, "none")) > 18


def multiplied(color: str, factor: float) -> str:
    """Return a colour as CSS's brightness() shows it."""
    channels = bytes.fromhex(color.removeprefix("#"))
    return "#" + bytes(min(255, round(c * factor)) for c in channels).hex()
