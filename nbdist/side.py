"""On which side of the wire this process is, for calls that mean something on one side alone.

Set once: by `%load_ext nbdist` in the notebook's kernel, by a rank when it begins to serve.
"""

from typing import Literal

from nbdist.errors import UsageError

Side = Literal["", "notebook", "rank"]

_here: Side = ""  # neither: a script, which may be on any


def settle(side: Side) -> None:
    """Say what this process is."""
    global _here
    _here = side


def require_rank(call: str) -> None:
    """Refuse a call in the notebook, where it would have no effect on any rank.

    Raises:
        UsageError: This is the notebook's kernel.
    """
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
