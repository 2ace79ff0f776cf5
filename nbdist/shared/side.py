"""On which side of the wire this process is, for calls that mean something on one side alone.

Set once: by `%load_ext nbdist` in the notebook's kernel, by a rank when it begins to serve. A
program without either is on the notebook's side as long as it has a session.
"""

from collections.abc import Callable
from typing import Literal

from nbdist.shared.errors import UsageError

Side = Literal["", "notebook", "program", "rank"]

_here: Side = ""  # neither: a script, which may be on any


class Notebook:
    """What the notebook's side tells calls that mean something on both.

    Attributes:
        checkpoints: Returns the folder of checkpoints without a name; "" where there is no kernel.
        advise_on: Returns how ranks get what the notebook has by a name; "" where it has none.
    """

    def __init__(self) -> None:
        self.checkpoints: Callable[[], str] = lambda: ""
        self.advise_on: Callable[[str], str] = lambda name: ""


notebook = Notebook()


def settle(side: Side) -> None:
    """Say what this process is."""
    global _here
    _here = side


def session_began() -> None:
    """Say that this process has a session."""
    if _here == "":
        settle("program")


def session_ended() -> None:
    """Say that it has none any more."""
    if _here == "program":
        settle("")


def require_rank(call: str) -> None:
    """Refuse a call on the notebook's side, where it would have no effect on any rank.

    Raises:
        UsageError: This is the notebook's kernel, or a program with a session.
    """
    if _here == "program":
        raise UsageError(
            f"{call} is for ranks, and this process has a session with them and is none.",
            do=f'run it on the ranks: nbdist.current().run("{call}(...)")',
        )
    if _here == "notebook":
        raise UsageError(
            f"{call} is for ranks, and this cell runs in the notebook.",
            do="begin the cell with %%distributed",
        )


def require_notebook(call: str) -> None:
    """Refuse a call on a rank, where each would start or look for a cluster of its own.

    Raises:
        UsageError: This is a rank.
    """
    if _here == "rank":
        raise UsageError(
            f"{call} is for the notebook, and this cell runs on the ranks.",
            do="call it in a cell without %%distributed",
        )
