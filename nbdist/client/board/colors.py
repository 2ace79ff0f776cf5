"""Write a frame's pixels as a PNG of 256 colours, chosen for what they mean and not by the frame.

A colour of a rank or of a part of steps is the same in every frame, exactly as in the legend; what
lies between two of them, at the edge of a line, becomes the nearest shade. Which one, a table
says, filled as colours are met: a frame costs a look-up of what is not background.
"""

import io
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nbdist.client.board import palette
from nbdist.client.board.palette import Theme

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.uint32]
RGBA = tuple[int, int, int, int]

MOST = 256  # a byte a pixel
LINE_SHADES, PART_SHADES, TEXT_SHADES = 8, 12, 16  # from nothing to the colour itself
HATCH_SHADES = 6  # from a part's colour to its hatch
INKS = "#111111", "#ffffff"  # of numbers in bars
NOTHING = 255, 255, 255, 0  # as matplotlib clears a page without a background
BITS = 5  # of each channel, by which the table knows a colour


def png(pixels: Bytes, theme: Theme, *, small: bool = False) -> bytes:
    """Return `pixels` (height, width, RGBA) as a PNG; `small` takes longer and saves a tenth."""
    shades = _shades_on(theme)
    image = Image.fromarray(shades.index(pixels))
    # On a ground of its own nothing is transparent, and readers need not ask.
    mode = "RGBA" if theme.background is None else "RGB"
    image.putpalette(shades.colors[:, : len(mode)].tobytes(), mode)
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=6 if small else 1)
    return out.getvalue()


def meanings(theme: Theme) -> list[str]:
    """Return the colours that say something by themselves, and are never mixed with others."""
    parts = [color for color, _ in palette.PARTS.values()]
    return list(dict.fromkeys([*palette.LINE_COLORS, *parts, theme.text, *INKS]))


class Shades:
    """The colours of one theme, the ground first, and the nearest of them for each pixel.

    Any thread may ask: what two of them add to the table at once is the same.
    """

    def __init__(self, theme: Theme) -> None:
        ground = NOTHING if theme.background is None else _opaque(theme.background)
        found = dict.fromkeys([ground, *map(_opaque, meanings(theme)), *_between(theme, ground)])
        self.colors: Bytes = np.array(list(found)[:MOST], dtype=np.uint8)
        self._seen = _seen(self.colors)
        self._table: NDArray[np.int16] = np.full(1 << 4 * BITS, -1, dtype=np.int16)
        exact = 1 + len(meanings(theme))
        # Backwards: where two look the same to the table, the first is meant.
        self._table[_keys(_packed(self.colors[:exact]))[::-1]] = np.arange(exact)[::-1]

    def index(self, pixels: Bytes) -> Bytes:
        """Return the number of each pixel's colour (height, width)."""
        packed = _packed(pixels).ravel()
        drawn = np.flatnonzero(packed != _packed(self.colors[:1])[0])
        keys = _keys(packed[drawn])
        numbers = self._table[keys]
        if (numbers < 0).any():
            self._add(np.unique(keys[numbers < 0]))
            numbers = self._table[keys]
        indexed: Bytes = np.zeros(len(packed), dtype=np.uint8)
        indexed[drawn] = numbers
        return indexed.reshape(pixels.shape[:2])

    def _add(self, keys: Numbers) -> None:
        """Put the nearest colours into the table: nearest on both white and black."""
        channels = [keys >> BITS * place & (1 << BITS) - 1 for place in range(4)]
        middles = np.stack(channels, axis=1) * 255 / ((1 << BITS) - 1)
        for some in np.array_split(np.arange(len(keys)), 1 + len(keys) // 1000):
            difference = _seen(middles[some])[:, None] - self._seen[None]
            self._table[keys[some]] = (difference**2).sum(axis=2).argmin(axis=1)


@cache
def _shades_on(theme: Theme) -> Shades:
    return Shades(theme)


def _between(theme: Theme, ground: RGBA) -> list[RGBA]:
    """Return what lies between the colours that mean something, what is seen most first."""
    parts = dict.fromkeys(color for color, _ in palette.PARTS.values())
    hatch = _opaque(theme.background or "#ffffff")
    shades = _fade(theme.text, ground, TEXT_SHADES)
    shades += [shade for color in parts for shade in _fade(color, ground, PART_SHADES)]
    shades += [shade for color in parts for shade in _fade(color, hatch, HATCH_SHADES)]
    for color in palette.LINE_COLORS:
        shades += _fade(color, ground, LINE_SHADES)
        shades += [_mixed(_opaque(color), _opaque(ink), 0.5) for ink in INKS]
    return shades + [(r, g, b, 255) for r, g, b in product((43, 128, 213), repeat=3)]


def _fade(color: str, ground: RGBA, count: int) -> list[RGBA]:
    """Return what a colour becomes on `ground` as it gets fainter, without its ends."""
    if not ground[3]:
        return [(*_opaque(color)[:3], round(255 * i / count)) for i in range(1, count)]
    return [_mixed(_opaque(color), ground, 1 - i / count) for i in range(1, count)]


def _mixed(one: RGBA, other: RGBA, share: float) -> RGBA:
    """Return an opaque colour with this share of another."""
    r, g, b = (round(a + share * (b - a)) for a, b in zip(one[:3], other[:3], strict=True))
    return r, g, b, 255


def _opaque(color: str) -> RGBA:
    r, g, b = bytes.fromhex(color.removeprefix("#"))
    return r, g, b, 255


def _seen(colors: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return how colours (N, RGBA) look on black and on white (N, 6)."""
    rgba = np.asarray(colors, dtype=np.float64)
    alpha = rgba[:, 3:] / 255
    return np.concatenate([rgba[:, :3] * alpha, 255 + (rgba[:, :3] - 255) * alpha], axis=1)


def _packed(colors: Bytes) -> Numbers:
    """Return each colour as one number, red in its lowest byte."""
    return np.ascontiguousarray(colors).view("<u4")[..., 0]


def _keys(packed: Numbers) -> Numbers:
    """Return where the table has these colours: the highest bits of their channels."""
    keys = np.zeros_like(packed)
    for place in range(4):
        keys |= packed >> (8 - BITS) * (place + 1) & 0x1F << BITS * place
    return keys
