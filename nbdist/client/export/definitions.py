"""The definitions in the notebook's own cells that a value sent to the ranks stands on. Pure."""

import ast
import builtins
from collections.abc import Iterator, Mapping

from nbdist.client.export import code as code_of
from nbdist.client.export import names as names_of
from nbdist.client.export.as_sent import is_as_sent
from nbdist.client.export.names import root
from nbdist.ranks import NAMES_OF_A_RANK

_STAND_ALONE = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
)


# Methods of lists, dicts, sets and deques that change them.
_CHANGING = {
    *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert"),
    *("intersection_update", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"),
}


class NotAsSent(LookupError):
    """A cell says something else than what was sent."""


class Definitions:
    """What the cells so far have bound, each name by its newest statement."""

    def __init__(self) -> None:
        self._statements: dict[str, tuple[int, ast.stmt, str]] = {}  # order, statement, source
        self._cells: dict[int, int] = {}  # the cell's number, by the statement's order
        self._count = 0
        self._changed: set[str] = set()  # names whose values are another since they were bound
        self.features: list[str] = []  # of `__future__`, which the notebook has had from then on

    def add(self, body: str, number: int) -> None:
        """Take in code of the notebook's cell `number`; what is no plain Python is passed over."""
        try:
            body, features = code_of.without_features(body)
            tree = ast.parse(body)
        except (SyntaxError, ValueError):
            return
        self.features += features
        lines = body.split("\n")
        for statement in tree.body:
            first = min(
                [statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))]
            )
            source = "\n".join(lines[first - 1 : statement.end_lineno])
            if len(lines[first - 1]) - len(lines[first - 1].lstrip()) or ";" in lines[first - 1]:
                source = ast.unparse(statement)
            self._count += 1
            self._cells[self._count] = number
            self._changed |= set(_changes(statement))
            for name in _names(statement, source):
                self._statements[name] = self._count, statement, source
                self._changed.discard(name)

    def source_of(self, name: str, known: Mapping[str, str]) -> str:
        """Return the statements that define a name, with those that they stand on, in order.

        Args:
            name: What was sent.
            known: What it stood on then; see `as_sent`.

        Raises:
            LookupError: It stands on something that is computed; the text says which.
            NotAsSent: A statement is not as it was sent; the text says which cell's.
        """
        wanted: dict[int, str] = {}
        self._collect(name, wanted, set(), known, is_first=True)
        return "\n\n".join(dict.fromkeys(wanted[order] for order in sorted(wanted)))

    def _collect(
        self,
        name: str,
        wanted: dict[int, str],
        seen: set[str],
        known: Mapping[str, str],
        *,
        is_first: bool = False,
    ) -> None:
        if name in seen:
            return
        seen.add(name)
        if name not in self._statements:
            is_known = hasattr(builtins, name) or name in NAMES_OF_A_RANK
            if is_known and not is_first:
                return
            raise LookupError(f"no cell defines {name}")
        order, statement, source = self._statements[name]
        if not isinstance(statement, _STAND_ALONE) and not _is_literal(statement):
            raise LookupError(f"{name} is computed in the notebook")
        if not is_as_sent(name, statement, known):
            what = "what was sent" if is_first else f"what {name} was"
            raise NotAsSent(
                f"cell {self._cells[order]} no longer says {what}: it was defined anew by a cell"
                " that failed, or where no cell shows it"
            )
        if name in self._changed and not isinstance(statement, ast.Import | ast.ImportFrom):
            raise LookupError(f"{name} is changed in the notebook after it is made")
        for other in names_of.needed_at_once(source) & self._statements.keys():
            if self._statements[other][0] > order:
                raise LookupError(f"{other} is set again after {name} was made with it")
        wanted[order] = source
        declared = names_of.bound(source) - set(_names(statement, source))
        for other in declared & self._statements.keys():
            self._collect(other, wanted, seen, known)
        future = f"from __future__ import {', '.join(self.features)}\n" if self.features else ""
        for other in names_of.needed(future + source):
            self._collect(other, wanted, seen, known)


def _names(statement: ast.stmt, source: str) -> set[str]:
    """Return the names that a statement binds when it runs; those of `global` come with calls."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    return names_of.bound(source)


def _changes(statement: ast.stmt) -> Iterator[str]:
    """Yield names whose values a statement changes without binding them, as far as it shows."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute | ast.Subscript):
            if not isinstance(node.ctx, ast.Load):
                yield root(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _CHANGING:
            yield root(node.func)
        elif isinstance(node, ast.AugAssign):
            yield root(node.target)


def _is_literal(statement: ast.stmt) -> bool:
    """Return whether a statement gives names values that can be read off."""
    value = getattr(statement, "value", None)
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or value is None:
        return False
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True
