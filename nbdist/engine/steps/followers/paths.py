"""Paths to lists and dicts of the user, as expressions: `history['loss']`, `trainer.counts`.

No weak reference takes these, so each is looked up by its path where it is needed. To look changes
nothing: a `defaultdict` is asked what it has, and makes no item. Main thread.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

_MOST = 32

T = TypeVar("T", list[Any], dict[Any, Any])
_Step = tuple[bool, Any]  # whether it is a key, and the key or the attribute
_GONE = object()


class Paths:
    """The paths to some lists, or dicts."""

    def __init__(self) -> None:
        self._steps: dict[str, list[_Step]] = {}

    def watch(self, paths: Iterable[str]) -> list[str]:
        """Look up the first of these; return the others."""
        left_out = []
        known, self._steps = self._steps, {}
        for path in paths:
            steps = known.get(path) or _parsed(path)
            if steps and len(self._steps) < _MOST:
                self._steps[path] = steps
            else:
                left_out.append(path)
        return left_out

    def living(self, names: Mapping[str, Any], kind: type[T]) -> Iterator[tuple[str, T]]:
        """Yield each path with what these variables lead to there, if that is of this kind."""
        for path, steps in self._steps.items():
            one = _at(names, steps)
            if isinstance(one, kind):
                yield path, one


def _at(names: Mapping[str, Any], steps: Sequence[_Step]) -> Any:
    """Return what is there; `_GONE` where these steps lead there no more."""
    one: Any = names
    for is_key, step in steps:
        if not is_key:
            one = getattr(one, step, _GONE)
        elif isinstance(one, Mapping):
            one = one.get(step, _GONE)
        else:
            one = one[step] if isinstance(one, list | tuple) and step < len(one) else _GONE
    return one


def _parsed(path: str) -> list[_Step]:
    """Return the steps of a path, the first from the variables; none where a key does not show."""
    steps: list[_Step] = []
    try:
        node = ast.parse(path, mode="eval").body
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Attribute):
                steps.append((False, node.attr))
            elif isinstance(node, ast.Subscript):
                steps.append((True, ast.literal_eval(node.slice)))
            else:
                return []
            node = node.value
    except (SyntaxError, ValueError):
        return []
    return [(True, node.id), *reversed(steps)]
