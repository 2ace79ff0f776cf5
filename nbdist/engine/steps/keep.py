"""Find what belongs to a training beside the model: what the cells have named, and what was kept.

Schedulers and scalers live in the cells' namespace most of the time. `nbdist.keep` adds what does
not: an attribute of a user's own class, an object in a list.
"""

from collections.abc import Callable
from typing import Any

from nbdist import side
from nbdist.errors import UsageError

_kept: dict[str, Any] = {}


def _no_names() -> dict[str, Any]:
    """What the cells have named, until the rank has a namespace."""
    return {}


_names: Callable[[], dict[str, Any]] = _no_names


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
    for name, value in objects.items():
        if value is None:
            _kept.pop(name, None)
        else:
            _kept[name] = value


def kept() -> dict[str, Any]:
    """Return what `keep` was given, by name."""
    return dict(_kept)


def take_over(objects: dict[str, Any]) -> None:
    """Keep, in a replacement rank, what is kept on the rank that it was cloned from."""
    _kept.update(objects)


def look_in(names: Callable[[], dict[str, Any]]) -> None:
    """Have cells run in the namespace that `names` returns."""
    global _names
    _names = names


def names() -> dict[str, Any]:
    """Return the namespace itself, in which cells run."""
    return _names()


def named() -> dict[str, Any]:
    """Return everything that a cell has named or kept; what was kept goes first."""
    return {**_kept, **{name: value for name, value in _names().items() if name not in _kept}}
