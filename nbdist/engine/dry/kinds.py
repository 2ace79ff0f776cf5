"""Which ranks a cell cannot tell apart, by what its code asks of their numbers. Pure.

An expression of ranks and constants alone, such as `rank == 17` or `rank % 2`, is computed for
every rank: those for which all give the same are of one kind. Where a rank is only printed, or
seeds random numbers, it may differ. Any other mention of one, and of what else could tell a rank,
makes each rank a kind of its own; so does another meaning of a name that is known here.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_TELLS = re.compile(
    r"rank|world_size|coordinate|environ|getenv|getpid|uuid|secrets|globals|locals|getframe"
    r"|__main__|new_group|new_subgroups|DeviceMesh|\b(random|vars|eval|exec|inspect)\b"
)
_NAMES = ("rank", "this_rank", "local_rank", "world_size")
_ASKED = ("get_rank", "get_world_size")  # of torch.distributed
_PURE = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Tuple)
_SIGNS = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)
_SAMPLER = "torch.utils.data.DistributedSampler"
# What names that are known here mean: cells may import them from there, and bind them otherwise
# nowhere.
_MEANS = {
    "torch": ("torch",),
    "dist": ("torch.distributed",),
    "DistributedSampler": (_SAMPLER, "torch.utils.data.distributed.DistributedSampler"),
    "manual_seed": ("torch.manual_seed",),
    "print": (),
}


class _UnclearError(Exception):
    pass


def kinds_of(
    codes: Iterable[str], ranks: Sequence[int], world_size: int, ranks_on_host: int
) -> list[list[int]]:
    """Return ranks by kind, those of each in order.

    Args:
        codes: Of all cells that run.
        ranks: That run them.
        world_size: Ranks that there are.
        ranks_on_host: Of them, on a host.
    """
    found: dict[object, list[int]] = {}
    try:
        cells = [ast.parse(code) for code in codes]
        if any(_renames(node) for cell in cells for node in ast.walk(cell)):
            raise _UnclearError
        asked = [one for cell in cells for one in _asked(cell)]
        for rank in ranks:
            names = dict.fromkeys(_NAMES, rank) | {"world_size": world_size}
            names["local_rank"] = rank % ranks_on_host
            answers = tuple(repr(eval(one, {"__builtins__": {}}, names)) for one in asked)
            found.setdefault(answers, []).append(rank)
    except (_UnclearError, SyntaxError, ArithmeticError, TypeError, ValueError):
        return [[rank] for rank in ranks]
    return list(found.values())


def _renames(node: ast.AST) -> bool:
    """Return whether it gives a name that is known here another meaning."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        return any(_imports_other(origin, one) for one in node.names)
    if isinstance(node, ast.Attribute):  # torch.manual_seed = f
        return not isinstance(node.ctx, ast.Load) and getattr(node.value, "id", "") in _MEANS
    is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    is_bound = not (is_read or isinstance(node, ast.alias | ast.keyword | ast.Constant))
    return is_bound and any(word in _MEANS for word in _words(node))


def _imports_other(origin: str, one: ast.alias) -> bool:
    if one.name == "*":
        return not origin.startswith("torch.")
    name, meant = one.asname or one.name, origin + one.name
    if not (one.asname or origin):  # `import torch.nn` binds torch
        name = meant = one.name.partition(".")[0]
    return name in _MEANS and meant not in _MEANS[name]


def _asked(node: ast.AST) -> Iterator[Any]:
    """Yield what a cell asks of a rank, compiled.

    Raises:
        _UnclearError: A rank comes to where it cannot be followed.
    """
    is_constant = not any(isinstance(one, ast.Name | ast.Call) for one in ast.walk(node))
    if _is_pure(node) and not is_constant:
        plain = ast.Expression(_Plain().visit(node))
        yield compile(ast.fix_missing_locations(plain), "<ranks>", "eval")
    elif not (_only_names(node) or (isinstance(node, ast.Expr) and is_constant)):
        if any(_TELLS.search(word) for word in _words(node)):
            raise _UnclearError
        for child in _parts(node):
            yield from _asked(child)


def _only_names(node: ast.AST) -> bool:
    """Return whether it is such as `rank = dist.get_rank()`, or the import for it."""
    if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
        return all(one.name in _ASKED and not one.asname for one in node.names)
    if not isinstance(node, ast.Assign):
        return False
    names = [getattr(one, "id", "") for one in node.targets]
    return (names in (["rank"], ["this_rank"]) and _is_call(node.value, "get_rank")) or (
        names == ["world_size"] and _is_call(node.value, "get_world_size")
    )


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node but those where a rank may differ."""
    called = node.func if isinstance(node, ast.Call) else node
    name = getattr(called, "attr", "") or getattr(called, "id", "")
    for part in ast.iter_child_nodes(node):
        if part is getattr(node, "test", None) and isinstance(part, ast.expr) and _is_pure(part):
            part = ast.UnaryOp(ast.Not(), part)  # which way it goes is asked, and no more
        if isinstance(node, ast.Call) and (
            (name == "print" and isinstance(called, ast.Name) and _is_pure(part))
            or (name.startswith("manual_seed") and _is_own(part))
            or (name == "DistributedSampler" and _is_own(getattr(part, "value", part)))
        ):
            continue
        if name == "print" and isinstance(part, ast.JoinedStr):
            shown = [one.value for one in part.values if isinstance(one, ast.FormattedValue)]
            yield from (one for one in shown if not _is_pure(one))
        else:
            yield part


def _is_own(node: ast.AST) -> bool:
    """Return whether it is another number for each rank: a rank, or it added to what all share."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [(node.left, node.right), (node.right, node.left)]
        return any(_is_own(one) and not _TELLS.search(ast.dump(other)) for one, other in sides)
    return getattr(node, "id", "") in ("rank", "this_rank") or _is_call(node, "get_rank")


def _is_pure(node: ast.AST) -> bool:
    """Return whether it is an expression of ranks and constants alone."""
    if isinstance(node, ast.Name):
        return node.id in _NAMES and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Call):
        return any(_is_call(node, name) for name in _ASKED)
    parts = (one for one in ast.iter_child_nodes(node) if not isinstance(one, _SIGNS))
    return isinstance(node, _PURE) and all(map(_is_pure, parts))


class _Plain(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = "rank" if _is_call(node, "get_rank") else "world_size"
        return ast.Name(name, ast.Load())


def _is_call(node: ast.AST, name: str) -> bool:
    """Return whether it is such as `dist.get_rank()`."""
    if not isinstance(node, ast.Call) or node.args or node.keywords:
        return False
    return ast.unparse(node.func) in (name, f"dist.{name}", f"torch.distributed.{name}")


def _words(node: ast.AST) -> list[str]:
    """Return the names and texts of a node alone."""
    found: list[str] = []
    for name, value in ast.iter_fields(node):
        words = value if isinstance(value, list) else [value]
        found += [one for one in words if isinstance(one, str) and (name, one) != ("attr", "eval")]
    return found
