"""Paths to lists and dicts of the user, as expressions: `history['loss']`, `trainer.counts`.

No weak reference takes these, so each is looked up by its path where it is needed. Main thread.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any, TypeVar

_MOST = 32

T = TypeVar("T", list[Any], dict[Any, Any])


class Paths:
    """The paths to some lists, or dicts."""

    def __init__(self) -> None:
        self._code: dict[str, CodeType] = {}

    def watch(self, paths: Iterable[str]) -> None:
        """Look up the first of these."""
        known, self._code = self._code, {}
        for path in paths:
            code = known.get(path) or _compiled(path)
            if code is not None and len(self._code) < _MOST:
                self._code[path] = code

    def living(self, names: Mapping[str, Any], kind: type[T]) -> Iterator[tuple[str, T]]:
        """Yield each path with what these variables lead to there, if that is of this kind."""
        for path, code in self._code.items():
            try:
                one = eval(code, {"__builtins__": {}}, names)
            except (NameError, AttributeError, LookupError, TypeError):
                continue  # it leads there no more
            if isinstance(one, kind):
                yield path, one


def _compiled(path: str) -> CodeType | None:
    """Return a path as an expression; None where a key of a dict does not show as one."""
    try:
        return compile(path, path, "eval")
    except SyntaxError:
        return None
