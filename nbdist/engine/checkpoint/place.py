"""Where checkpoints of a name lie. Plain paths: also for the notebook, which has no torch."""

import os

from nbdist.shared.errors import UsageError


class DefaultFolder:
    """Where the checkpoints of a process lie that have no name."""

    def __init__(self) -> None:
        self.folder = ".nbdist/checkpoints/notebook"

    def lie_beside(self, folder: str) -> None:
        """Have checkpoints without a name lie in this folder, words beside it; "": as before."""
        self.folder = folder or self.folder


def place_of(name: str | os.PathLike[str] | None, call: str = "nbdist.save") -> str:
    """Return the folder or URL that a name stands for.

    Args:
        name: None, a word, a folder or a URL.
        call: Which takes it, for the error.

    Raises:
        UsageError: It is none of these.
    """
    if name is None:
        return here.folder
    if isinstance(name, os.PathLike):
        name = os.path.join(os.fspath(name), "")
    if not isinstance(name, str) or not name or name != name.strip():
        raise UsageError(f"{call} takes a name, a folder or a URL, not {name!r}.")
    if "://" in name or os.sep in name or name.startswith(("~", ".")):
        return name
    return os.path.join(os.path.dirname(here.folder), name)


here = DefaultFolder()
