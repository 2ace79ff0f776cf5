"""Find the names that the loops of cells bind: what they mean now is of the loop's last turn."""

import ast
import linecache
from collections.abc import Iterator

from nbdist.engine.kernel import cell_code
from nbdist.shared import origins

_NO_LOOPS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def of_cells() -> set[str]:
    """Return those of all cells that this rank has run, as IPython remembers their source."""
    files = [file for file in list(linecache.cache) if origins.is_cell(file)]
    return {name for file in files for name in of_source("".join(linecache.getlines(file)))}


def of_source(source: str) -> set[str]:
    """Return the names that loops of a cell bind in its own namespace; none of a cell that is none.

    Pure. What a function binds is its own.
    """
    cell = cell_code.tree(source)
    if cell is None:
        return set()
    loops = (n for n in _own(cell) if isinstance(n, ast.For | ast.AsyncFor | ast.While))
    return {
        node.id
        for loop in loops
        for node in _own(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is inside of a node, but not what is a function's or a class's own."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _NO_LOOPS):
            yield child
            yield from _own(child)
