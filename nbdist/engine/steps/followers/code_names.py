"""Read from a cell's code which names it binds in loops, leads to, and sets. Main thread."""

import ast
import dis
import itertools
import types
from collections.abc import Mapping
from typing import Any

from nbdist.engine.kernel import cell_code
from nbdist.engine.steps.followers.find_followers import is_users


def loop_targets(source: str) -> frozenset[str]:
    """Return the names that loops of a cell bind: a second run binds them, too."""
    cell = cell_code.tree(source)
    if cell is None:
        return frozenset()
    targets = [node.target for node in ast.walk(cell) if isinstance(node, ast.For)]
    names = (node for target in targets for node in ast.walk(target))
    return frozenset(node.id for node in names if isinstance(node, ast.Name))


def reached(source: str, names: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names that a cell leads to: its own, and those of functions and classes it names.

    None: not known, for it is no Python.
    """
    cell = cell_code.tree(source)
    if cell is None:
        return None
    todo = {node.id for node in ast.walk(cell) if isinstance(node, ast.Name)}
    todo.update(cell_code.words_of_magics(cell))
    found: set[str] = set()
    while todo:
        found.add(name := todo.pop())
        one = names.get(name)
        of_class = one if isinstance(one, type) else type(one)
        for member in (one, *(vars(of_class).values() if is_users(of_class) else ())):
            todo |= _names_in(getattr(member, "__code__", None)) - found
    return frozenset(found)


def stored(
    source: str, reached: frozenset[str] | None, names: Mapping[str, Any]
) -> frozenset[str] | None:
    """Return the names and attributes that a cell sets, and functions and classes it leads to.

    Of items the keys that it may set, as `['lr']`: those in code that sets items or calls `update`.
    None: not known, for it is no Python.
    """
    cell, code = cell_code.tree(source), cell_code.compiled(source)
    if cell is None or code is None or reached is None:
        return None
    found = _stored_in(code).union(cell_code.words_of_magics(cell))
    for one in map(names.get, reached):
        of_class = one if isinstance(one, type) else type(one)
        for member in (one, *(vars(of_class).values() if is_users(of_class) else ())):
            found |= _stored_in(getattr(member, "__code__", None))
    return frozenset(found)


def _stored_in(code: Any) -> set[str]:
    if not isinstance(code, types.CodeType):
        return set()
    sets = ("STORE_NAME", "STORE_GLOBAL", "STORE_ATTR")
    steps = list(dis.get_instructions(code))
    own = {step.argval for step in steps if step.opname in sets}
    if "update" in code.co_names or any(step.opname == "STORE_SUBSCR" for step in steps):
        keys = (c if isinstance(c, tuple) else (c,) for c in code.co_consts)
        own |= {f"[{key!r}]" for key in itertools.chain(*keys) if isinstance(key, str)}
    return own.union(*map(_stored_in, code.co_consts))


def _names_in(code: Any) -> set[str]:
    if not isinstance(code, types.CodeType):
        return set()
    return set(code.co_names).union(*map(_names_in, code.co_consts))
