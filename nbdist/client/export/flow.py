"""Which names code reads before it has bound them itself, as it runs from top to bottom. Pure.

Of an `if` without an `else` nobody knows whether it ran, so what it binds may still be an older
cell's. A loop is taken to run at least once: what it leaves is read after it in every training.
What functions read is not looked at, for that is read when they are called.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_ENDS = ast.Raise | ast.Return | ast.Break | ast.Continue


@dataclass(frozen=True, slots=True)
class Flow:
    """What code does with names.

    Attributes:
        reads: Read before the code has surely bound them.
        binds: Surely bound when it has ended.
    """

    reads: frozenset[str]
    binds: frozenset[str]


def flow_of(code: str) -> Flow:
    """Return what code does with names at its top level."""
    body = ast.parse(code).body
    futures = [n for n in body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    features = {alias.name for node in futures for alias in node.names}
    walk = _Walk(has_annotations="annotations" not in features)
    binds, _ = walk.block(body, frozenset())
    return Flow(frozenset(walk.reads), binds)


def before_each(code: str) -> list[frozenset[str]]:
    """Return for each statement at the top level of code what is surely bound before it runs."""
    walk, bound, found = _Walk(has_annotations=True), frozenset[str](), []
    for statement in ast.parse(code).body:
        found.append(bound)
        bound, _ = walk.block([statement], bound)
    return found


@dataclass(slots=True)
class _Walk:
    """Goes through statements; `bound` is what they have surely bound so far."""

    has_annotations: bool  # which are evaluated, and not kept as texts
    reads: set[str] = field(default_factory=set)

    def block(self, body: Sequence[ast.stmt], bound: frozenset[str]) -> tuple[frozenset[str], bool]:
        """Return what is bound after `body`, and whether what follows it is reached."""
        for statement in body:
            bound, goes_on = self._statement(statement, bound)
            if not goes_on:
                return bound, False
        return bound, True

    def _statement(self, node: ast.stmt, bound: frozenset[str]) -> tuple[frozenset[str], bool]:
        if isinstance(node, ast.If):
            bound = self._read([node.test], bound)
            return _either([self.block(node.body, bound), self.block(node.orelse, bound)])
        if isinstance(node, ast.Match):
            bound = self._read([node.subject], bound)
            return _either([*(self._case(case, bound) for case in node.cases), (bound, True)])
        if isinstance(node, ast.Try | ast.TryStar):
            return self._try(node, bound)
        if isinstance(node, ast.For | ast.AsyncFor):
            bound = self._read([node.iter], bound)
            bound = self._read([node.target], bound) | _stored(node.target)
            bound, _ = self.block(node.body, bound)
            return self.block(node.orelse, bound)
        if isinstance(node, ast.While):
            bound, _ = self.block(node.body, self._read([node.test], bound))
            return self.block(node.orelse, bound)
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                bound = self._read([item.context_expr], bound)
                if item.optional_vars is not None:
                    bound = self._read([item.optional_vars], bound) | _stored(item.optional_vars)
            return self.block(node.body, bound)
        return self._simple(node, bound), not isinstance(node, _ENDS)

    def _simple(self, node: ast.stmt, bound: frozenset[str]) -> frozenset[str]:
        if isinstance(node, _FUNCTIONS):
            bound = self._read([*node.decorator_list, *_defaults(node.args)], bound)
            return self._annotation(_annotations(node), bound) | {node.name}
        if isinstance(node, ast.ClassDef):
            bound = self._read([*node.decorator_list, *node.bases, *node.keywords], bound)
            self.block(node.body, bound)  # its own names are gone after it
            return bound | {node.name}
        if isinstance(node, ast.Import | ast.ImportFrom):
            return bound | {(a.asname or a.name).partition(".")[0] for a in node.names}
        if isinstance(node, ast.Delete):
            gone = {name for target in node.targets for name in _names(target, ast.Del)}
            self.reads |= gone - bound
            return self._read(node.targets, bound) - gone
        if isinstance(node, ast.AugAssign):
            self.reads |= set(_names(node.target, ast.Store)) - bound
        if isinstance(node, ast.AnnAssign):
            bound = self._annotation([node.annotation], self._read([node.value], bound))
            bound = self._read([node.target], bound)
            return bound if node.value is None else bound | _stored(node)
        return self._read([node], bound) | _stored(node)

    def _annotation(self, nodes: Iterable[ast.AST], bound: frozenset[str]) -> frozenset[str]:
        return self._read(nodes, bound) if self.has_annotations else bound

    def _case(self, case: ast.match_case, bound: frozenset[str]) -> tuple[frozenset[str], bool]:
        bound = bound | {
            name
            for node in ast.walk(case.pattern)
            for name in (getattr(node, "name", None), getattr(node, "rest", None))
            if name
        }
        return self.block(case.body, self._read([case.pattern, case.guard], bound))

    def _try(
        self, node: ast.Try | ast.TryStar, bound: frozenset[str]
    ) -> tuple[frozenset[str], bool]:
        within, goes_on = self.block(node.body, bound)
        ways = [self.block(node.orelse, within) if goes_on else (within, False)]
        for handler in node.handlers:
            caught = self._read([handler.type], bound)
            named = {handler.name} if handler.name else set()
            left, goes_on = self.block(handler.body, caught | named)
            ways.append((left - named, goes_on))
        bound, goes_on = _either(ways)
        after, ends = self.block(node.finalbody, bound)
        return after, goes_on and ends

    def _read(self, nodes: Iterable[ast.AST | None], bound: frozenset[str]) -> frozenset[str]:
        """Note what expressions read; return what is bound when they have been evaluated."""
        for node in nodes:
            if node is not None:
                assigned = {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}
                self.reads |= set(_loaded(node)) - bound - assigned
                bound |= assigned
        return bound


def _either(ways: Sequence[tuple[frozenset[str], bool]]) -> tuple[frozenset[str], bool]:
    """Return what is bound whichever way was taken, of those from which the code goes on."""
    on = [bound for bound, goes_on in ways if goes_on]
    return frozenset.intersection(*(on or [bound for bound, _ in ways])), bool(on)


def _defaults(args: ast.arguments) -> list[ast.expr]:
    return [one for one in (*args.defaults, *args.kw_defaults) if one is not None]


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    found = [node.returns, *(one.annotation for one in every if one is not None)]
    return [one for one in found if one is not None]


def _loaded(node: ast.AST) -> Iterator[str]:
    """Yield names that an expression reads at once."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load):
            yield node.id
        return
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    own: frozenset[str] = frozenset()
    if isinstance(node, ast.Lambda):
        inner = _defaults(node.args)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        own = frozenset().union(*(_stored(one.target) for one in node.generators))
    for child in inner:
        yield from (name for name in _loaded(child) if name not in own)


def _names(node: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, context):
            yield one.id


def _stored(node: ast.AST) -> frozenset[str]:
    """Return the names that a statement or a target binds, those of its comprehensions left out."""
    if isinstance(node, ast.Assign):
        targets: list[ast.AST] = [*node.targets]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.stmt):
        targets = []
    else:
        targets = [node]
    return frozenset(name for target in targets for name in _names(target, ast.Store))
