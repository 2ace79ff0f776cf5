"""Read what `%dist expect` asserts: pure.

One line is one assertion: a phrase of `PHRASES`, or a comparison, which is a Python expression of
numbers, texts and names. Nothing but these is evaluated.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.shared.errors import UsageError

_NAME = r"[^\W\d]\w*"
_NUMBER = r"(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)"

PHRASES = (
    (
        "parity",
        "the newest layout computes what one process does, as %dist verify proves it",
        rf"parity(?:\s+(?P<of>{_NAME}))?",
    ),
    (
        "collectives == last",
        "the same collectives a step as the last run of that name",
        r"collectives\s*==\s*(?P<of>last|baseline)",
    ),
    (
        "bytes 1 %",
        "as many bytes on the wire a step as the last run, within 1 %",
        rf"bytes\s+{_NUMBER}\s*%(?:\s+of\s+(?P<of>last|baseline))?",
    ),
    (
        "bytes 1 % of explain",
        "as many as layout.explain says",
        rf"bytes\s+{_NUMBER}\s*%\s+of\s+(?P<of>explain)",
    ),
    (
        "no alarms",
        "nothing goes wrong in the training, and no rank makes the others wait",
        r"no alarms",
    ),
    (
        "step <= 1.1 x baseline",
        "no slower than the stored baseline, beyond its noise",
        rf"step(?:_ms)?\s*<=?\s*(?:{_NUMBER}\s*[x*]\s*)?(?P<of>last|baseline)",
    ),
)
"""Each as people write it, what it means, and its pattern."""

FORMS = (
    ("loss < 0.3", "a number: loss, step_ms, a name of nbdist.log, or a variable of the ranks"),
    *((form, meaning) for form, meaning, _ in PHRASES),
)

OVER_STEPS: Mapping[str, str] = {
    "final": "the value of the last step, the mean of the ranks; what a bare name means",
    "first": "the first value, the mean of the ranks",
    "mean": "the mean over steps and ranks",
    "min": "the least of any step and rank",
    "max": "the greatest of any step and rank",
    "spread": "how far the newest values of the ranks lie apart",
    "each": "the newest value of each rank, which must hold on all of them",
}
"""What may stand before a name, as `max(loss)` or `max loss`."""

_TEXT_OR_PREFIX = re.compile(
    rf"""("[^"]*"|'[^']*')|\b({"|".join(OVER_STEPS)})\s+(?!(?:and|or|in|is)\b)({_NAME})"""
)
_COMPARISONS = ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq
_ARITHMETIC = ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd
_ALLOWED = ast.Compare, *_COMPARISONS, ast.BoolOp, ast.And, ast.Or, ast.Not, *_ARITHMETIC


@dataclass(frozen=True, slots=True)
class Phrase:
    """A phrase of `PHRASES`: the first word of its form, and what it leaves open.

    `of` is the layout, or the run that is compared with; empty where it is the newest, or last.
    """

    text: str
    kind: str
    number: float = 1.0
    of: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A Python expression, in which the name `loss` is "final loss", and `max(loss)` "max loss"."""

    text: str
    tree: ast.expr
    names: tuple[str, ...]

    @property
    def has_text(self) -> bool:
        """Whether something is compared with a text."""
        return any(
            isinstance(node, ast.Constant) and isinstance(node.value, str)
            for node in ast.walk(self.tree)
        )

    def holds(self, values: Mapping[str, object]) -> bool:
        """Evaluate it; none holds where NaN is compared, or something is divided by zero."""
        sides: list[ast.expr] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Compare):
                sides += node.left, *node.comparators
        try:
            # Python's `!=` is true of NaN; here nothing is.
            compared = _evaluate(ast.Tuple(sides, ast.Load()), values)
            return all(one == one for one in compared) and _evaluate(self.tree, values)
        except ZeroDivisionError:
            return False
        except TypeError as error:
            raise UsageError(
                f"%dist expect {self.text}: of a text and a number is none the greater."
            ) from error


def _evaluate(tree: ast.expr, values: Mapping[str, object]) -> Any:
    code = ast.fix_missing_locations(ast.Expression(tree))
    return eval(compile(code, "<expect>", "eval"), {"__builtins__": {}}, values)


def parse(text: str) -> Phrase | Comparison:
    """Return what a line asserts.

    Raises:
        UsageError: It is none of `FORMS`; the text says what is right.
    """
    if not isinstance(text, str):
        raise UsageError(f"What is expected is a text, such as 'loss < 0.3', not {text!r}.")
    if '"' in text or "'" in text:  # no phrase has quotes, within which spaces count
        return _comparison(text.strip())
    line = " ".join(text.split())
    for form, _, pattern in PHRASES:
        if found := re.fullmatch(pattern, line):
            parts = {key: value for key, value in found.groupdict().items() if value}
            number = float(parts.get("number", 1))
            return Phrase(line, form.split()[0], number, parts.get("of", ""))
    _refuse_nearly(line)
    return _comparison(line)


def _refuse_nearly(line: str) -> None:
    """Raise UsageError for what is nearly a phrase; metrics may be called as its first word."""
    first = line.partition(" ")[0]
    is_meant = first in ("parity", "no") or re.search(r"%|\b(last|baseline)\b", line)
    near = next((form for form, _, _ in PHRASES if form.split()[0] == first), None)
    if is_meant and near:
        raise UsageError(f"%dist expect {line}: write it as %dist expect {near}.")


def _comparison(line: str) -> Comparison:
    called = _TEXT_OR_PREFIX.sub(lambda found: found[1] or f"{found[2]}({found[3]})", line)
    try:
        tree = ast.parse(called, mode="eval").body
    except SyntaxError:
        raise UsageError(f"%dist expect {line}: {_misread(line)}") from None
    if isinstance(tree, ast.Tuple):
        raise UsageError(f"%dist expect {line}: one assertion a line; write two, or say and.")
    for part in _parts(tree):
        ops = part.ops if isinstance(part, ast.Compare) else [None]
        if not all(isinstance(op, _COMPARISONS) for op in ops):
            raise UsageError(f"%dist expect {line}: {_misread(ast.unparse(part))}")
    reader = _Names(line)
    tree = reader.visit(tree)
    if not reader.names:
        raise UsageError(f"%dist expect {line}: it names nothing; write it as in loss < 0.3.")
    return Comparison(line, tree, tuple(dict.fromkeys(reader.names)))


def _parts(tree: ast.expr) -> Iterator[ast.expr]:
    """Yield what `and`, `or` and `not` join."""
    if isinstance(tree, ast.BoolOp):
        for part in tree.values:
            yield from _parts(part)
    elif isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
        yield from _parts(tree.operand)
    else:
        yield tree


class _Names(ast.NodeTransformer):
    """Refuse what is no arithmetic, and make one name of each value, such as "max loss"."""

    def __init__(self, line: str) -> None:
        self._line = line
        self.names: list[str] = []

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._named("final", node.id)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(ast.Name(over), [ast.Name(name)], []) if over in OVER_STEPS:
                return self._named(over, name)
        raise UsageError(
            f"%dist expect {self._line}: {ast.unparse(node)} is not known; use "
            f"{', '.join(OVER_STEPS)} of a name, or compute it in a cell and compare the variable."
        )

    def generic_visit(self, node: ast.AST) -> ast.AST:
        is_value = isinstance(node, ast.Constant) and type(node.value) in (int, float, str)
        if is_value or isinstance(node, _ALLOWED):
            return super().generic_visit(node)
        raise UsageError(
            f"%dist expect {self._line}: {ast.unparse(node)} is no number and no name; compute it "
            "in a cell, and compare the variable."
        )

    def _named(self, over: str, name: str) -> ast.Name:
        self.names.append(f"{over} {name}")
        return ast.Name(self.names[-1], ast.Load())


def _misread(line: str) -> str:
    if re.search(r"(?<![<>=!])=(?!=)", line):
        return f"write == to compare: {re.sub(r'(?<![<>=!])=(?!=)', '==', line)}."
    if line.isidentifier():
        return f"compare it with a number, as in {line} < 0.3."
    return f"it is one of {', '.join(form for form, _ in FORMS)}."
