"""Find what belongs to a training beside the model: what the cells have named, and what was kept.

Schedulers and scalers live in the cells' namespace most of the time. `nbdist.keep` adds what does
not: an attribute of a user's own class, an object in a list.
"""

from collections.abc import Callable
from typing import Any

from nbdist.shared import side
from nbdist.shared.errors import UsageError


def keep(*unnamed: Any, **objects: Any) -> None:
    """Add objects to what is brought to the same step on all ranks, saved, restored and cloned.

    Args:
        unnamed: Nothing; an object without a name is refused.
        objects: By name; each has `state_dict` and `load_state_dict`. None takes a name out again.

    Raises:
        UsageError: No object was given, one has no state to keep, or this is the notebook; nothing
            was added.
    """
    side.require_rank("nbdist.keep")
    if unnamed or not objects:
        raise UsageError("nbdist.keep takes objects by name: nbdist.keep(scheduler=scheduler).")
    for name, value in objects.items():
        if value is not None and not (
            hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        ):
            raise UsageError(
                f"nbdist.keep cannot keep {name}, a {type(value).__name__}.",
                why="its state is read by state_dict() and put back by load_state_dict()",
                do="give the object both methods",
            )
    here.keep(objects)


class Kept:
    """What `keep` was given, and where cells run."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self._names: Callable[[], dict[str, Any]] = dict  # until the rank has a namespace

    def keep(self, objects: dict[str, Any]) -> None:
        """Keep these, by name, and None no more."""
        for name, value in objects.items():
            if value is None:
                self._kept.pop(name, None)
            else:
                self._kept[name] = value

    def kept(self) -> dict[str, Any]:
        """Return what `keep` was given, by name."""
        return dict(self._kept)

    def take_over(self, objects: dict[str, Any]) -> None:
        """Keep, in a replacement rank, what is kept on the rank that it was cloned from."""
        self._kept.update(objects)

    def look_in(self, names: Callable[[], dict[str, Any]]) -> None:
        """Have cells run in the namespace that `names` returns."""
        self._names = names

    def names(self) -> dict[str, Any]:
        """Return the namespace itself, in which cells run."""
        return self._names()

    def named(self) -> dict[str, Any]:
        """Return everything that a cell has named or kept; what was kept goes first."""
        return {**self._kept, **{k: v for k, v in self._names().items() if k not in self._kept}}


here = Kept()
