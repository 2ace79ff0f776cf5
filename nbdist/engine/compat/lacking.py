"""What the self-test of each module here asks: is a private name still there?"""

from collections.abc import Iterable


def lacking(owner: object, names: Iterable[str], label: str) -> list[str]:
    """Return which of `names` the owner has not, in words."""
    return [f"{label}.{name} is gone" for name in names if not hasattr(owner, name)]
