"""Hide secrets in what a run keeps: a cell, a param, an error. Pure.

Two rules. *What belongs to a name that sounds secret is hidden*, whoever holds it: a variable, a
key of a dict, a keyword, a header, a query of a URL. In code the parsed code says what belongs to
which name, in any other text what stands beside it. *What has the form of a credential is hidden*
wherever it stands.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

HIDDEN: Final = "(hidden)"
# A cell's lines that are IPython's do not parse, and are few; of a text that is no Python the rest
# is left to the rule for any text.
_MOST_UNREAD_LINES: Final = 40

# Words of names, as `db_password`, `X-Api-Key` and `HFToken` have them.
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORD: Final = re.compile(
    r"secrets?|\w*passw(or)?ds?|\w*passphrase|pwd|credentials?|auth|authorization|bearer|cookies?"
    r"|(api|access|private)keys?"
)
_KEYS: Final = re.compile(r"(api|access|account|private|signing|encryption|subscription) keys?")
# A token is a credential's when it looks like one: tokenizers have words, and a "<pad>".
_OF_A_TOKEN: Final = re.compile(r"\w\S{3,}")

_FORMS: Final = (
    re.compile(r"\b(?:hf|ghp|gho|ghs|glpat|dapi|xox[abp])[_-]?[A-Za-z0-9_-]{16,}"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{20,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}"),
    re.compile(r"(?<=\bBearer )[\w.~+/=-]{4,}"),
    # A URL's user and password, or a token in their place.
    re.compile(r"(?<=://)(?:[^/\s'\"]*:[^/\s'\"]+|[^/\s:@'\"]{20,})(?=@)"),
)
_QUERY: Final = re.compile(r"(?<=[?&;])([\w.-]{1,60})=([^&\s'\"\\#]+)")
_QUERY_WORD: Final = re.compile(r"key|sig|signature")
# A literal beside a name, in a file of settings, in JSON, in code that does not parse.
_GIVEN: Final = re.compile(
    r"([\w-]{2,80})([\\\"'\]]{0,6}\s{0,4}[=:,]\s{0,4}\\?[\"'])((?:(?!\\?[\"'])[^\n]){4,200})"
)
# The same in the words of a line for IPython or a shell: `%env HF_TOKEN=...`, `!curl --token ...`.
_COMMAND: Final = re.compile(r"(?m)^[ \t]*(?:# ?)?[%!].*$")
_BETWEEN: Final = re.compile(r"([ \t=]+)")
_SCHEMES: Final = {"bearer", "basic"}


def sounds_secret(name: str) -> bool:
    """Return whether a name says that its value is a secret: `HF_TOKEN`, `X-Api-Key`."""
    words = [word.lower() for word in _WORD.findall(name)]
    return "token" in words or _is_secret(words)


def is_secret(name: str, value: str) -> bool:
    """Return whether `value`, which belongs to `name`, is a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if _is_secret(words):
        return bool(value.strip())
    return "token" in words and _OF_A_TOKEN.fullmatch(value) is not None


def _is_secret(words: Sequence[str]) -> bool:
    return any(_SECRET_WORD.fullmatch(word) for word in words) or any(
        _KEYS.fullmatch(" ".join(pair)) for pair in pairwise(words)
    )


def hide_secrets(text: str) -> str:
    """Return any text without what looks like a credential, or stands beside such a name."""
    for form in _FORMS:
        text = form.sub(HIDDEN, text)
    text = _QUERY.sub(_hide_query, text)
    text = _COMMAND.sub(_hide_words, text)
    return _GIVEN.sub(_hide_given, text)


def _hide_query(found: re.Match[str]) -> str:
    name, value = found.groups()
    is_one = sounds_secret(name) or _QUERY_WORD.fullmatch(name.lower())
    return f"{name}={HIDDEN if is_one else value}"


def _hide_words(line: re.Match[str]) -> str:
    words, name = _BETWEEN.split(line[0]), ""
    for index in range(0, len(words), 2):  # between them stands what divides them
        word = words[index]
        if name and is_secret(name, word):
            words[index] = HIDDEN
        name = name if word.lower() in _SCHEMES else word
    return "".join(words)


def _hide_given(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    return f"{name}{between}{HIDDEN if is_secret(name, value) else value}"


def hide_in_code(source: str) -> str:
    """Return a cell's code without secrets; what of it is no Python is read as any other text."""
    lines = source.splitlines(keepends=True)
    tree = _parsed(lines)
    spans = sorted(_span(node) for node in _secrets(tree)) if tree is not None else []
    for (row, start), (end_row, end) in reversed(spans):
        first, last = lines[row].encode(), lines[end_row].encode()
        quoted = first[start:].decode()
        prefix = "b" if re.match(r"(?i)r?b", quoted) else ""
        hidden = f'{prefix}"{HIDDEN}"'.encode()
        lines[row : end_row + 1] = [(first[:start] + hidden + last[end:]).decode()]
    return hide_secrets("".join(lines))


def _parsed(lines: Sequence[str]) -> ast.AST | None:
    """Return the code's tree, without the lines that do not parse; None if those are many."""
    left = list(lines)
    for _ in range(_MOST_UNREAD_LINES):
        try:
            return ast.parse("".join(left))
        except SyntaxError as error:
            row = (error.lineno or 0) - 1
            if not 0 <= row < len(left) or left[row].strip() == "pass":
                return None
            line = left[row]
            left[row] = line[: len(line) - len(line.lstrip())] + "pass\n"
        except (ValueError, RecursionError, MemoryError):  # a null byte; nested too deeply
            return None
    return None


def _span(node: ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where a literal begins and ends: (row, byte) twice."""
    end_row, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    return (node.lineno - 1, node.col_offset), (end_row - 1, end)


def _secrets(tree: ast.AST) -> set[ast.expr]:
    """Return the literals that belong to a name that sounds secret."""
    return {
        literal
        for node in _walk(tree)
        for owner, value in _belongings(node)
        for name in _names(owner)
        if sounds_secret(name)
        for literal in _made_of(value)
        if is_secret(name, _text(literal))
    }


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree's nodes, but those within f-strings: Python 3.11 does not say where they are."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def _belongings(node: ast.AST) -> Iterator[tuple[ast.expr | str | None, ast.expr]]:
    """Yield what a node gives to whom: (owner, value)."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _assigned(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                yield key, value
        case ast.keyword(arg=str(name), value=value):
            yield name, value
        case ast.Compare(left=left, comparators=[right]):
            yield left, right
            yield right, left
        case ast.Tuple(elts=[ast.Constant() as key, value]):
            yield key, value
        case ast.Call(func=function, args=values, keywords=keywords):
            yield from ((key, value) for key, value in pairwise(values) if _is_text(key))
            yield from ((function, value) for value in values)
            if "login" in "".join(_names(function)).lower():
                by_key = [keyword.value for keyword in keywords if keyword.arg == "key"]
                yield from (("password", value) for value in [*values, *by_key])
        case ast.arguments(args=args, defaults=defaults):
            every = [*node.posonlyargs, *args]
            for arg, value in zip(every[len(every) - len(defaults) :], defaults, strict=True):
                yield arg.arg, value
            for arg, default in zip(node.kwonlyargs, node.kw_defaults, strict=True):
                if default is not None:
                    yield arg.arg, default


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    match target, value:
        case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())) if len(target.elts) == len(
            value.elts
        ):
            for one, its in zip(target.elts, value.elts, strict=True):
                yield from _assigned(one, its)
        case _:
            yield target, value


def _names(owner: ast.expr | str | None) -> Iterator[str]:
    """Yield what an owner is called: `headers["X-Api-Key"]` by its key."""
    match owner:
        case str(name) | ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Constant(value=str(name)):
            yield name
        case ast.Constant(value=bytes(name)):
            yield name.decode(errors="replace")
        case ast.Subscript(slice=key):
            yield from _names(key)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            for element in elements:
                yield from _names(element)


def _made_of(value: ast.expr) -> Iterator[ast.expr]:
    """Yield the literals that a value is made of; not the names by which it is looked up."""
    match value:
        case ast.Constant(value=str() | bytes()) | ast.JoinedStr():
            yield value
        case ast.BinOp(left=left, right=right):
            yield from (*_made_of(left), *_made_of(right))
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*_made_of(body), *_made_of(orelse))
        case ast.BoolOp(values=parts) | ast.Dict(values=parts):
            for part in parts:
                yield from _made_of(part)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            for part in parts:
                yield from _made_of(part)
        case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.Await(value=inner):
            yield from _made_of(inner)
        case ast.Call(func=function, args=args):
            if isinstance(function, ast.Attribute):
                yield from _made_of(function.value)
            for arg in args:
                # `os.getenv("API_KEY")` names the secret, and does not tell it.
                if not (_is_text(arg) and _text(arg).isupper() and sounds_secret(_text(arg))):
                    yield from _made_of(arg)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _text(literal: ast.expr) -> str:
    """Return what a literal says itself; of a formatted one what is not filled in."""
    match literal:
        case ast.Constant(value=bytes(value)):
            return value.decode(errors="replace")
        case ast.JoinedStr(values=parts):
            text = "".join(_text(part) for part in parts if _is_text(part))
            return re.sub(r"(?i)^(bearer|basic|token)\s+", "", text)
        case ast.Constant(value=str(value)):
            return value
    return ""
