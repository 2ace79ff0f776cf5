"""Whose code a file holds: a cell's, a package's, a library's or the user's.

A package is known by the folder it was imported from, never by a name in a path: people's own
folders are called `nbdist` (what `git clone` makes of it), `torch` and `site-packages` too. Cells
alone are known by their name, for IPython and ipykernel make it. Any thread may call.
"""

import functools
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

# The folder of cells on ranks; ipykernel's own is called by its process, and code that was pushed
# from the notebook comes with that.
CELLS = "ipykernel_nbdist"
# For texts too: no quote and no line's end is part of a name.
CELL_FILE = rf'(?:<ipython-input[^"\n]*|[^"\n]*[/\\](?:{CELLS}|ipykernel_\d+)[/\\][^"\n/\\]+\.py)'

_cell_file = re.compile(CELL_FILE)


def cell_file_name(code: str) -> str:
    """Return the name, in its folder, of the file that a cell with this code has on each rank."""
    digest = hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest()[:10]
    return f"{digest}.py"


@functools.lru_cache(maxsize=4096)
def is_cell(file: str) -> bool:
    """Return whether a code's file name is a cell's, as IPython, ipykernel and we name them."""
    return _cell_file.fullmatch(file) is not None


@functools.lru_cache(maxsize=4096)
def is_of(file: str, *packages: str) -> bool:
    """Return whether a code's file lies in the folder of one of these packages.

    Args:
        file: As code objects or tracebacks name it; `~` stands for the home folder.
        packages: Names at the top level, such as "torch"; none is imported for this.
    """
    return _is_below(file, filter(None, map(_folder, packages)))


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Return whether a code's file is Python's own or was installed: not what a user works on.

    Where a package was installed, there is a note of it, also in a folder of `pip --target` that
    only the ranks have on their path.
    """
    if file.startswith("<frozen "):
        return True
    own = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    installed = (p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages"))
    return _is_below(file, (*own, *installed)) or any(
        map(_holds_installed, Path(os.path.expanduser(file)).parents)
    )


@functools.lru_cache(maxsize=4096)
def _holds_installed(folder: Path) -> bool:
    try:
        # Who works in such a folder, or below it, works on what lies there.
        is_elsewhere = folder.is_absolute() and not Path.cwd().is_relative_to(folder)
        return is_elsewhere and any(folder.glob("*.dist-info"))
    except OSError:
        return False


def _is_below(file: str, folders: Iterable[str]) -> bool:
    path = os.path.expanduser(file)
    return any(path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


@functools.cache
def _folder(package: str) -> str | None:
    """Return the folder of a package's code, None where it is not installed."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return next(iter(folders), None) if folders else None
