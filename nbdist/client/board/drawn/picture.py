"""A picture as an output: it follows the window, and says in words what it shows.

Front ends give an image/png no alternative text, whatever its metadata say, and shrink it with its
letters. JupyterLab, Notebook 7, VS Code, GitHub and nbconvert's HTML all prefer text/html where an
output has both. So the HTML holds the picture with its `alt`, composed twice: wide, and narrow with
plots below each other. Inline CSS, which also stays in a notebook that is not trusted, shows the
one that fits the output's width. WebP takes half of PNG's bytes: all together takes 1.2 to 1.9
times what one PNG did.

image/png, with one pixel for each CSS pixel, is for what shows no HTML: PDF, diffs of notebooks. A
viewer that removes data URIs from HTML, as GitHub did from 2021 to 2024, shows the words alone.

Grey that is readable on both white and black has a contrast of 4.3 at most, below WCAG's 4.5.
Where the page declares its theme, colours of a picture without a background get darker or
lighter with it. Elsewhere, and in the PNG, white lies under it.
"""

import base64
import html
import io
from typing import TYPE_CHECKING

from nbdist.client.board.drawn.measures import WIDE
from nbdist.client.board.palette import BRIGHTNESS, LINE_COLORS, PAPER, PARTS, Theme
from nbdist.client.output.slots import Display

if TYPE_CHECKING:
    from PIL import Image

SWITCH_PX = 860  # output's width from which the wide picture's letters have ten pixels or more
MOST_PX, MOST_SINGLE_PX = 1440, 1200
NARROW_PX = 452, 680  # of the narrow one; a window with less scrolls
AUTO_CLASS = "nbdist-auto"  # of what holds a picture without a background

_PAGES = {
    "light": ('[data-jp-theme-light="true"]', ".vscode-light"),
    "dark": ('[data-jp-theme-light="false"]', ".vscode-dark"),
}
_ON_PAGES = "<style>{}</style>".format(
    " ".join(
        f"{page} .{AUTO_CLASS} {{background: none !important}} "
        f"{page} .{AUTO_CLASS} img {{filter: brightness({BRIGHTNESS[theme]})}}"
        for theme, pages in _PAGES.items()
        for page in pages
    )
)
_WIDE = f"clamp(0px, (100% - {SWITCH_PX - 1}px) * 9999, 100%); max-width: {MOST_PX}px"
_NARROW = (
    f"clamp(0px, ({SWITCH_PX}px - 100%) * 9999, clamp({NARROW_PX[0]}px, 100%, {NARROW_PX[1]}px)); "
    "max-width: none"
)
_SINGLE = f"clamp({SWITCH_PX}px, 100%, {MOST_SINGLE_PX}px); max-width: none"
_NEAR = 12  # a sum over red, green and blue that nobody sees


def lasting(wide: bytes, narrow: bytes, alt: str, theme: Theme) -> Display:
    """Return a picture that stays.

    Args:
        wide: A PNG, composed for a wide window, with two pixels for each CSS pixel.
        narrow: The same, composed for a narrow window.
        alt: What it shows, in a sentence.
        theme: Colours of both.
    """
    # Without CSS, the narrow one has no width. It says nothing, for the wide one always does.
    shown = _img(_webp(wide), alt, WIDE, _WIDE) + _img(_webp(narrow), "", 0, _NARROW)
    return _display(_framed(shown, theme), wide, alt, theme)


def single(png: bytes, alt: str, theme: Theme) -> Display:
    """Return a picture that stays and has no narrow form: below its width it scrolls.

    Args:
        png: A PNG of `2 * WIDE` pixels.
        alt: What it shows, in a sentence.
        theme: Its colours.
    """
    shown = _img(_webp(png), alt, WIDE, _SINGLE)
    return _display(_framed(shown, theme), png, alt, theme)


def _framed(images: str, theme: Theme) -> str:
    """Return `images` in what scrolls where they do not fit, and follows the page's theme."""
    frame = 'style="overflow-x: auto"'
    if theme.background is not None:
        return f"<div {frame}>{images}</div>"
    frame = f'style="overflow-x: auto; background: {PAPER}"'  # inline: a page may drop all rules
    return f'{_ON_PAGES}<div class="{AUTO_CLASS}" {frame}>{images}</div>'


def halved(png: bytes, theme: Theme) -> bytes:
    """Return a picture with half of its pixels in each direction, in the colours of `theme`.

    One without a background gets a white one: what shows a PNG alone may be dark.
    """
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        half = image.convert("RGBA").reduce(2)
    if theme.background is None:
        theme = Theme(theme.text, PAPER)
        half = Image.alpha_composite(Image.new("RGBA", half.size, PAPER), half)
    return few_colors(half, theme)


def few_colors(image: "Image.Image", theme: Theme) -> bytes:
    """Return a picture as a PNG of at most 256 colours, which has a third of the bytes.

    Each is the mean of some that look alike, so white may become 254: those that mean something are
    then written as they are.
    """
    import numpy as np
    from PIL import Image, ImageColor

    mode = "RGBA" if theme.background is None else "RGB"
    few = image.convert(mode).quantize(method=Image.Quantize.FASTOCTREE)
    colors = np.array(few.getpalette(mode)).reshape(-1, len(mode))
    parts = [color for color, _ in PARTS.values()]
    for meant in (*LINE_COLORS, *parts, theme.text, theme.background):
        if meant is not None:
            color = (*ImageColor.getrgb(meant), 255)[: len(mode)]
            apart = np.abs(colors - color).sum(axis=1)
            if apart.min() <= _NEAR:
                colors[apart.argmin()] = color
    few.putpalette(colors.astype(np.uint8).tobytes(), mode)
    out = io.BytesIO()
    few.save(out, "PNG", optimize=True)
    return out.getvalue()


def _display(page: str, png: bytes, alt: str, theme: Theme) -> Display:
    encoded = base64.b64encode(halved(png, theme)).decode("ascii")
    data = {"text/html": page, "image/png": encoded, "text/plain": alt}
    return Display(data, {"image/png": {"width": WIDE, "alt": alt}})


def _img(source: str, alt: str, width: int, css_width: str) -> str:
    words = f'alt="{html.escape(alt)}"' if alt else 'alt="" aria-hidden="true"'
    return (
        f'<img {words} width="{width}" src="{source}" '
        f'style="display: block; margin: 0; height: auto; width: {css_width}">'
    )


def _webp(png: bytes) -> str:
    """Return a PNG as the data URI of a WebP with the same pixels, or as it is."""
    from PIL import Image, features

    kind = "png"
    if features.check("webp"):
        out, kind = io.BytesIO(), "webp"
        with Image.open(io.BytesIO(png)) as image:
            image.convert("RGBA").save(out, "WEBP", lossless=True, quality=50, method=2)
        png = out.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(png).decode('ascii')}"
