"""Know how long the user's lists are, for they grow with the steps: losses, say.

Where a fault takes a step back, what it added stands at the end of lists, until the step is made
again. What a rank did not add no other one can give it, for each adds its own; so that is said.

Main thread.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nbdist.engine.steps.followers.paths import Paths

_NAME = re.compile(r"len\((.+)\)")


def is_length(name: str) -> bool:
    """Return whether a number's name is that of a list's length."""
    return _NAME.fullmatch(name) is not None


def list_of(name: str) -> str:
    """Return the path of the list whose length has this name."""
    found = _NAME.fullmatch(name)
    return found[1] if found else name


class GrownLists:
    """The lists that names lead to, by these paths."""

    def __init__(self) -> None:
        self._paths = Paths()
        self._too_long: dict[str, int] = {}  # by path, what is left when they are cut

    def watch(self, paths: Iterable[str]) -> list[str]:
        """Watch the first of these; return the others."""
        return self._paths.watch(paths)

    def living(self, names: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
        """Yield each path with the list to which these variables lead there."""
        return self._paths.living(names, list)

    def lengths(self, names: Mapping[str, Any]) -> dict[str, int]:
        """Return the lengths of lists, by name, as these variables lead there."""
        return {f"len({path})": len(one) for path, one in self.living(names)}

    def go_back(self, numbers: Mapping[str, Any]) -> None:
        """Note the lengths among these numbers, to which lists are cut back in `cut`."""
        self._too_long |= {list_of(n): int(v) for n, v in numbers.items() if is_length(n)}

    def lengths_to_be(self) -> dict[str, int]:
        """Return the lengths to which `cut` will cut, by name."""
        return {f"len({path})": length for path, length in self._too_long.items()}

    def stay(self) -> None:
        """Forget `go_back`: other steps have been made since."""
        self._too_long = {}

    def cut(self, names: Mapping[str, Any]) -> None:
        """Cut lists where the steps that added to them are made again."""
        for path, one in self.living(names):
            del one[self._too_long.get(path, len(one)) :]
        self.stay()
