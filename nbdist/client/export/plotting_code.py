"""What of a cell draws, or shows widgets, taken out where it can be. Pure.

A function that nobody calls draws nothing, cells import matplotlib beside torch, and trainings end
with a plot. So these are taken out alone; a cell stays out where a statement may do more than draw.
"""

import ast
from collections.abc import Iterator, Sequence

from nbdist.client.export import names as names_of
from nbdist.client.export.only_draws import Definition, OnlyDraws, of_package, reading_functions

_SHOWS = ("display", "clear_output")  # IPython puts the first into each cell


class PlottingCode:
    """Goes through a notebook's cells, and knows the names that draw.

    Attributes:
        reasons: Why what uses a name cannot be in a script, such as `draws, with matplotlib`.
    """

    def __init__(self) -> None:
        self.reasons = {name: f"calls {name}(), which only a notebook has" for name in _SHOWS}
        self._drawing = {*_SHOWS}  # those of `reasons` that do nothing but draw
        self._reads = reading_functions()

    def taken_out(self, code: str) -> tuple[str, tuple[str, ...], str]:
        """Return code without what draws, the statements that went, and why it cannot be at all.

        Args:
            code: Of a cell, as plain Python that compiles.
        """
        code = _one_a_line(code)
        statements = ast.parse(code).body
        lines = code.split("\n")
        without: list[str] = []
        found = ""
        for statement in statements:
            if not (reason := self._reason(statement)):
                self._note_other(statement)
                continue
            if not self._goes(statement, reason):
                found = found or reason
                # Its names are those of a cell that is left out; what they are, nobody knows.
                self._note_other(statement)
                continue
            text = ast.unparse(statement).split("\n")
            shown = next(line for line in text if not line.startswith("@")).rstrip(":")
            without.append(shown)
            first, last = _extent(statement)
            blank = [""] * (last - first)
            lines[first - 1 : last] = [f"pass  # without: {shown}", *blank]
        if without and len(without) == len(statements):
            found = found or self._reason(statements[0])
        return "\n".join(lines), tuple(without), found

    def _reason(self, statement: ast.stmt) -> str:
        """Return why a statement draws; "" where it does not."""
        imported = [of_package(name) for node in ast.walk(statement) for name in _packages(node)]
        used = names_of.needed(ast.unparse(statement)) & self.reasons.keys()
        # A training that draws says more than what it is drawn with.
        first = sorted(used, key=lambda name: (name in self._drawing, name))
        return next(filter(None, imported), "") or (self.reasons[first[0]] if first else "")

    def _goes(self, statement: ast.stmt, reason: str) -> bool:
        """Return whether a script does without a statement, and note its names if so."""
        if isinstance(statement, Definition):
            return self._of_definition(statement, reason)
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name != "*":
            self._note_drawing({alias.asname or alias.name for alias in statement.names}, reason)
            return True
        if not isinstance(statement, ast.Import):
            return self._of_drawing(statement, reason)
        (alias,) = statement.names  # `_one_a_line` has seen to that
        self._note_drawing({alias.asname or alias.name.partition(".")[0]}, reason)
        return True

    def _of_definition(self, statement: Definition, reason: str) -> bool:
        """Return whether it does nothing when it is made: what uses it stays out then."""
        walk, name = OnlyDraws(self._reads), statement.name
        if not walk.is_only_made(statement, self._drawing):
            return False
        is_drawing = walk.is_function(statement, self._drawing)
        self._note_other(statement)
        if is_drawing:
            self._note_drawing({name}, reason)
        else:
            self.reasons[name] = f"uses {name}, which {reason}"
        return True

    def _of_drawing(self, statement: ast.stmt, reason: str) -> bool:
        """Return whether a statement does nothing but draw, and note its names if so."""
        drawing = OnlyDraws(self._reads).after([statement], self._drawing)
        if drawing is None:
            return False
        self._note_other(statement)
        for name in names_of.bound(ast.unparse(statement)):
            self.reasons[name] = f"uses {name}, which is set by a line that {reason}"
            if name in drawing:
                self._note_drawing({name}, reason)
        return True

    def _note_drawing(self, names: set[str], reason: str) -> None:
        self._drawing |= names
        self.reasons |= dict.fromkeys(names, reason)

    def _note_other(self, statement: ast.stmt) -> None:
        """Note that a statement has given its names to something else."""
        names = names_of.bound(ast.unparse(statement))
        self._drawing -= names
        self._reads -= names
        for name in names:
            self.reasons.pop(name, None)


def _packages(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield node.module or ""


def _extent(statement: ast.stmt) -> tuple[int, int]:
    """Return its first line, with decorators, and its last."""
    decorators = [d.lineno for d in getattr(statement, "decorator_list", ())]
    return min([statement.lineno, *decorators]), statement.end_lineno or statement.lineno


def _one_a_line(code: str) -> str:
    """Return code in which no two statements at its top level share a line: `a = 1; b = 2`.

    And no import that draws shares its statement with others.
    """
    lines = code.split("\n")
    for group in reversed(_by_lines(ast.parse(code).body)):
        apart = [one for statement in group for one in _apart(statement)]
        if len(apart) == 1:
            continue
        first, last = _extent(group[0])[0], _extent(group[-1])[1]
        rest = lines[last - 1].encode()[group[-1].end_col_offset or 0 :].decode().strip()
        ends = ";" if rest.startswith(";") else ""  # what is not shown stays so
        lines[first - 1 : last] = [*map(ast.unparse, apart[:-1]), ast.unparse(apart[-1]) + ends]
    return "\n".join(lines)


def _by_lines(statements: Sequence[ast.stmt]) -> list[list[ast.stmt]]:
    """Return statements by the lines that they share."""
    groups: list[list[ast.stmt]] = []
    for statement in statements:
        if groups and _extent(groups[-1][-1])[1] == _extent(statement)[0]:
            groups[-1].append(statement)
        else:
            groups.append([statement])
    return groups


def _apart(statement: ast.stmt) -> list[ast.stmt]:
    """Return an import for each module, where one of them draws; else the statement."""
    if isinstance(statement, ast.Import) and any(of_package(a.name) for a in statement.names):
        return [ast.Import([alias]) for alias in statement.names]
    return [statement]
