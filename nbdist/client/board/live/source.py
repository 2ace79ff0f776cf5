"""The page's modules as the one that anywidget takes: joined in order, without a bundler.

Each is an ES module that editors, linters and tests can read by itself. Joined, they share one
scope, so no name may be defined twice at their top.
"""

import re
from functools import cache
from importlib.resources import files

MODULES = (
    *("numbers", "lines", "plot", "bars", "timeline", "outputs", "notices", "style", "board"),
)  # each after those that it imports
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)


@cache
def source() -> str:
    """Return the page's module."""
    folder = files("nbdist.client.board.live") / "page"
    parts = [(folder / f"{name}.js").read_text("utf-8") for name in MODULES]
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", part)) for part in parts)
