"""What to do about a name that the ranks lack and the notebook has: what is advised was tried.

What cannot be sent is found by packing the value, as `push` would.
"""

import inspect
import sys
from types import ModuleType

from nbdist.shared import payload
from nbdist.shared.errors import TransferError


def advise(name: str, value: object) -> str:
    """Return how ranks get what the notebook has by this name, without a full stop."""
    if line := _import_of(name, value):
        return (
            f"{name} is imported in the notebook, not on the ranks: {line} in a %%distributed cell"
        )
    if not _can_travel(value):
        return f"{name} is in the notebook and cannot be sent: make it in a %%distributed cell"
    is_code = inspect.isclass(value) or inspect.isroutine(value)
    kind = "variable" if not is_code else "class" if inspect.isclass(value) else "function"
    return f"{name} is a {kind} of the notebook: %dist push {name}"


def _import_of(name: str, value: object) -> str:
    """Return the statement that imports this; "" for what was made in the notebook."""
    if isinstance(value, ModuleType):
        module, (package, _, last) = value.__name__, value.__name__.rpartition(".")
        if name == module:
            return f"import {module}"
        return f"from {package} import {name}" if name == last else f"import {module} as {name}"
    own, of = getattr(value, "__name__", None), getattr(value, "__module__", None)
    if not (isinstance(own, str) and isinstance(of, str)) or of == "__main__":
        return ""
    parts = of.split(".")
    # Packages offer what their private modules define: the shortest place is the one that is meant.
    for place in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
        if getattr(sys.modules.get(place), own, None) is value:
            return f"from {place} import {own}" + ("" if own == name else f" as {name}")
    return ""


def _can_travel(value: object) -> bool:
    # By its name goes what wraps a function and is none, as functools.cache's; ranks lack the name.
    wraps = getattr(value, "__module__", None) == "__main__" and hasattr(value, "__wrapped__")
    if wraps and not inspect.isfunction(value):
        return False
    try:
        payload.pack(value)
    except TransferError:
        return False
    return True
