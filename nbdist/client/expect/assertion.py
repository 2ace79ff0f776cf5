"""Read what `%dist expect` asserts: pure.

One line is one assertion. Numbers are compared as Python compares them, `loss < 0.3`, and texts in
quotes, `name == "sgd"`; the others have words of their own.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nbdist.errors import UsageError

Other = Literal["last", "baseline", "explain"]

FORMS = (
    ("loss < 0.3", "a number: loss, step_ms, a name of nbdist.log, or a variable of the ranks"),
    ("parity", "the newest layout computes what one process does, as %dist verify proves it"),
    ("collectives == last", "the same collectives a step as the last run of that name"),
    ("bytes 1 %", "as many bytes on the wire a step as the last run, within 1 %"),
    ("bytes 1 % of explain", "as many as layout.explain says"),
    ("no alarms", "nothing goes wrong in the training, and no rank makes the others wait"),
    ("step <= 1.1 x baseline", "no slower than the stored baseline, beyond its noise"),
)

OVER_STEPS: Mapping[str, str] = {
    "final": "the newest value, the mean of the ranks; what a bare name means",
    "first": "the first value, the mean of the ranks",
    "mean": "the mean over steps and ranks",
    "min": "the least of any step and rank",
    "max": "the greatest of any step and rank",
    "spread": "how far the newest values of the ranks lie apart",
    "each": "the newest value of each rank, which must hold on all of them",
}
"""What may stand before a name, as `max(loss)` or `max loss`."""

_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)"
_COLLECTIVES = re.compile(r"collectives\s*==\s*(last|baseline)")
_BYTES = re.compile(rf"bytes\s+{_NUMBER}\s*%(?:\s+of\s+(last|baseline|explain))?")
_STEP = re.compile(rf"step(?:_ms)?\s*(<=?)\s*(?:{_NUMBER}\s*[x*]\s*)?(last|baseline)")
_PARITY = re.compile(r"parity(?:\s+([^\W\d]\w*))?")
_TEXT = re.compile(r"""([^\W\d]\w*)\s*(==|!=)\s*("[^"]*"|'[^']*')""")
_PREFIX = re.compile(rf"\b({'|'.join(OVER_STEPS)})\s+([^\W\d]\w*)")
_COMPARED = re.compile(r"[<>=!]")
_ARITHMETIC = ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd
_OPERATORS = ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq


@dataclass(frozen=True, slots=True)
class Numbers:
    """A comparison of numbers.

    `names` are those that it is about, each as (what of its steps, name): `("final", "loss")`.
    """

    text: str
    compare: ast.Compare
    names: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SameText:
    """A variable of the ranks is this text, or another value where not `is_equal`."""

    text: str
    name: str
    value: str
    is_equal: bool


@dataclass(frozen=True, slots=True)
class LayoutParity:
    """A layout computes what one process does; `handle` names it, None is the newest."""

    handle: str | None


@dataclass(frozen=True, slots=True)
class SameCollectives:
    """The collectives of a step are those of another run."""

    other: Other


@dataclass(frozen=True, slots=True)
class BytesWithin:
    """The bytes of a step are those of another run, but for a share."""

    share: float
    other: Other


@dataclass(frozen=True, slots=True)
class NoAlarms:
    """Nothing went wrong."""


@dataclass(frozen=True, slots=True)
class StepWithin:
    """A step takes no longer than so many times another run's."""

    factor: float
    other: Other


Assertion: TypeAlias = (
    Numbers | SameText | LayoutParity | SameCollectives | BytesWithin | NoAlarms | StepWithin
)


def parse(text: str) -> Assertion:
    """Return what a line asserts.

    Raises:
        UsageError: It is none of `FORMS`; the text says what is right.
    """
    if not isinstance(text, str):
        raise UsageError(f"What is expected is a text, such as 'loss < 0.3', not {text!r}.")
    if found := _TEXT.fullmatch(text.strip()):
        return SameText(text.strip(), found[1], ast.literal_eval(found[3]), found[2] == "==")
    line = " ".join(text.split())
    if found := _PARITY.fullmatch(line):
        return LayoutParity(found[1])
    if line == "no alarms":
        return NoAlarms()
    if found := _COLLECTIVES.fullmatch(line):
        return SameCollectives(_other(found[1]))
    if found := _BYTES.fullmatch(line):
        return BytesWithin(float(found[1]) / 100, _other(found[2] or "last"))
    if found := _STEP.fullmatch(line):
        return StepWithin(float(found[2] or 1), _other(found[3]))
    first = line.partition(" ")[0]
    for form, _ in FORMS[1:]:
        is_compared = re.search(r"\b(last|baseline)\b", line) is not None
        if first == form.partition(" ")[0] and (first != "bytes" or "%" in line or is_compared):
            if first in ("collectives", "step") and not is_compared:
                break  # a number that is logged may be called so
            raise UsageError(f"%dist expect {line}: write it as %dist expect {form}.")
    return _numbers(line)


def _other(word: str) -> Other:
    return "baseline" if word == "baseline" else "explain" if word == "explain" else "last"


def _numbers(line: str) -> Numbers:
    try:
        tree = ast.parse(_PREFIX.sub(r"\1(\2)", line), mode="eval").body
    except SyntaxError:
        raise UsageError(f"%dist expect {line}: {_misread(line)}") from None
    if isinstance(tree, ast.BoolOp | ast.Tuple):
        raise UsageError(f"%dist expect {line}: one assertion a line; write two.")
    if not isinstance(tree, ast.Compare) or not all(isinstance(o, _OPERATORS) for o in tree.ops):
        raise UsageError(f"%dist expect {line}: {_misread(line)}")
    names: list[tuple[str, str]] = []
    for side in (tree.left, *tree.comparators):
        _collect(side, names, line)
    if not names:
        raise UsageError(f"%dist expect {line}: it names nothing; write it as in loss < 0.3.")
    return Numbers(line, tree, tuple(dict.fromkeys(names)))


def _collect(node: ast.expr, names: list[tuple[str, str]], line: str) -> None:
    """Add the names of one side; raises UsageError for what is no arithmetic of numbers."""
    if isinstance(node, ast.Name):
        names.append(("final", node.id))
    elif isinstance(node, ast.Call):
        names.append(called(node, line))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
        _collect(node.left, names, line)
        _collect(node.right, names, line)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, _ARITHMETIC):
        _collect(node.operand, names, line)
    elif not (isinstance(node, ast.Constant) and type(node.value) in (int, float)):
        raise UsageError(
            f"%dist expect {line}: {ast.unparse(node)} is no number and no name; compute it in a "
            "cell, and compare the variable."
        )


def called(node: ast.Call, line: str) -> tuple[str, str]:
    """Return a call such as `max(loss)` as ("max", "loss").

    Raises:
        UsageError: It is another call.
    """
    of, over = node.func, node.args
    is_known = isinstance(of, ast.Name) and of.id in OVER_STEPS
    if is_known and len(over) == 1 and isinstance(over[0], ast.Name) and not node.keywords:
        assert isinstance(of, ast.Name)
        return of.id, over[0].id
    raise UsageError(
        f"%dist expect {line}: {ast.unparse(node)} is not known; use {', '.join(OVER_STEPS)} of a "
        "name, or compute it in a cell and compare the variable."
    )


def _misread(line: str) -> str:
    if re.search(r"(?<![<>=!])=(?!=)", line):
        return f"write == to compare: {re.sub(r'(?<![<>=!])=(?!=)', '==', line)}."
    if not _COMPARED.search(line) and line.isidentifier():
        return f"compare it with a number, as in {line} < 0.3."
    return f"it is one of {', '.join(form for form, _ in FORMS)}."
