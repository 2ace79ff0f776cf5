"""Colours and dashes: distinct with any colour vision, readable on white and on black.

The hues are Matthew Petroff's eight (matplotlib's "petroff8", https://arxiv.org/abs/2107.02270),
reordered so that the first ranks contrast on both backgrounds, the palest darkened until they
are seen on white. Every colour here has a contrast of 3 on white and on #111, as WCAG 2.2 (1.4.11)
asks of graphics. A dash pattern goes with each, for colour is never the only sign.
"""

from dataclasses import dataclass

LINE_COLORS = (
    "#578dff",
    "#ff5e02",
    "#c849a9",
    "#97975f",
    "#787678",
    "#389cb8",
    "#3d5bf0",
    "#c91f16",
)
LINE_DASHES: tuple[tuple[float, ...], ...] = ((), (5.0, 1.6), (1.4, 1.4), (6.0, 1.6, 1.4, 1.6))

# What a step is made of: colour, and the hatch that goes with it. Seven hues cannot all be
# distinguished by every eye; neighbours in a stack can, and each part has a hatch of its own.
PARTS: dict[str, tuple[str, str]] = {
    "compute": ("#156f66", ""),
    "compute and communication": ("#156f66", ""),  # where they were not separated
    "hidden": ("#3a9f7a", "...."),
    "communication": ("#c47a10", "////"),
    "transfer": ("#c47a10", "////"),
    "waiting": ("#bf2a5e", "xxxx"),
    "data": ("#8d6cab", "\\\\\\\\"),
    "optimizer": ("#5f7df0", "----"),
    "other": ("#858282", "||||"),
}

# What a legend says of a part whose name alone does not explain it.
PART_LABELS = {"hidden": "communication hidden behind compute"}

MANY = 8  # more ranks than this are shown as a band, not as one line each

# Text where the kernel cannot know the theme: no grey has WCAG's 4.5 on white and on #111. This one
# has it on `PAPER`, which is under the picture wherever the page does not declare its theme.
MID_GREY, PAPER = "#767676", "#ffffff"

# What such a picture's colours are multiplied with where the page declares its theme: text gets a
# contrast of 6 on white and on #111.
BRIGHTNESS = {"light": 0.8, "dark": 1.2}


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of all but the data: `background` None is transparent."""

    text: str
    background: str | None


def theme_on(background: str | None) -> Theme:
    """Return the theme for a background such as "#ffffff"; None for an unknown one."""
    if background is None:
        return Theme(MID_GREY, None)
    return Theme("#3a3a3a" if luminance(background) > 0.18 else "#d0d0d0", background)


def theme_named(name: str) -> Theme:
    """Return the theme for the option's words: auto, light, dark."""
    return theme_on({"light": "#ffffff", "dark": "#111111"}.get(name))


def luminance(color: str) -> float:
    """Return the relative luminance, 0 (black) to 1 (white), of "#rrggbb" or "#rgb".

    Source: WCAG 2.2, "relative luminance".
    """
    digits = color.removeprefix("#")
    if len(digits) == 3:
        digits = "".join(2 * d for d in digits)
    linear = []
    for i in (0, 2, 4):
        part = int(digits[i : i + 2], 16) / 255
        linear.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return WCAG's contrast ratio of two colours, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def line_style(index: int) -> tuple[str, tuple[float, ...]]:
    """Return (colour, on-off dash lengths in line widths, empty for solid) of the i-th rank."""
    return LINE_COLORS[index % len(LINE_COLORS)], LINE_DASHES[index % len(LINE_DASHES)]


def part_label(part: str) -> str:
    """Return what a legend says of a part of steps."""
    return PART_LABELS.get(part, part)


def rank_labels(ranks: tuple[int, ...]) -> list[str]:
    """Return what a legend says of the lines."""
    if len(ranks) <= MANY:
        return [f"rank {rank}" for rank in ranks]
    return [f"all {len(ranks)} ranks", "80 % of them", "median", "highest", "lowest"]


def row_color(row: int) -> str:
    """Return the colour of a sort of collective; its number separates those that share one."""
    return LINE_COLORS[row % len(LINE_COLORS)]
