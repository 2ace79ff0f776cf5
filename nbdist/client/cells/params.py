"""The names and values of `-p KEY=VALUE`: what may be given, and how it is read from a line. Pure.

A value is a Python literal, read as it was typed: its quotes stay, and so do spaces in brackets,
which a shell would split at.
"""

import ast
import keyword
import shlex
from collections.abc import Mapping
from typing import Any

from nbdist.shared import plain
from nbdist.shared.errors import UsageError
from nbdist.shared.wire import NAMES_OF_A_RANK

_OPEN, _CLOSED = "([{", ")]}"


def require_params(params: Mapping[str, Any]) -> None:
    """Check what a cell is given, before anything runs.

    Raises:
        UsageError: A name is none of Python's, or one that each rank finds set for itself; or a
            value is not plain.
    """
    if not isinstance(params, Mapping):
        raise UsageError(f"A cell takes a dict of names and their values, not {params!r}.")
    for name, value in params.items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(f"-p {name}: {name!r} is not a name that Python allows.")
        if name in NAMES_OF_A_RANK:
            raise UsageError(
                f"-p {name} would replace what cells find as {name} on each rank; choose another "
                f"name, such as my_{name}."
            )
        if not plain.is_plain(value):
            raise UsageError(
                f"-p {name} takes None, bool, numbers, text, and lists, tuples and dicts of "
                f"these, up to 64 KiB, not a {type(value).__name__}; %dist push takes anything."
            )


def drop_comment(line: str) -> str:
    """Return a magic's line up to its comment: a `#` at a word's beginning, outside of quotes."""
    quote = ""
    for place, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def split_line(line: str) -> list[str]:
    """Return the words of a `%%distributed` line, as a shell splits it, but for what `-p` takes.

    That is left as it was typed, and extends to its closing bracket.

    Raises:
        ValueError: A quote or a bracket is not closed.
    """
    words: list[str] = []
    word, quote, depth, is_escaped = "", "", 0, False
    for character in f"{line} ":
        takes = _takes_value(words, word)
        if is_escaped:
            is_escaped = False
        elif character == "\\" and (takes or quote != "'"):
            is_escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif takes and character in _OPEN:
            depth += 1
        elif takes and character in _CLOSED:
            depth -= 1
        elif character.isspace() and depth <= 0:
            if word:
                words.append(word if takes else shlex.split(word)[0])
            word, depth = "", 0
            continue
        word += character
    if quote:
        raise ValueError("No closing quotation")
    if word.strip():
        raise ValueError("No closing bracket")
    return words


def read_param(word: str, after: str = "-p") -> tuple[str, Any]:
    """Return the name and the value of one `KEY=VALUE`, as it was typed.

    Args:
        word: What was typed.
        after: The word before it, by which a message names it.

    Raises:
        ValueError: It is not of that form; the message says what to type.
    """
    key, equals, typed = word.partition("=")
    if not key.isidentifier():  # all of it may be in quotes, as in a shell
        key, equals, typed = "".join(shlex.split(word)[:1]).partition("=")
    if not equals or not key.isidentifier():
        raise ValueError(f"{after} takes KEY=VALUE, not {word!r}")
    try:
        return key, _without_outer_quotes(ast.literal_eval(typed))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        hint = f'; for text type {after} {key}="{typed}"' if typed.isidentifier() else ""
        raise ValueError(f"{after} {key} takes a Python literal, not {typed!r}{hint}") from None


def _takes_value(words: list[str], word: str) -> bool:
    return bool(words and words[-1] == "-p") or (word.startswith("-p") and len(word) > 2)


def _without_outer_quotes(value: Any) -> Any:
    """Return a text without its inner quotes: a shell's user may quote twice."""
    if isinstance(value, str) and value[:1] in ("'", '"'):
        try:
            inner = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
        return inner if isinstance(inner, str) else value
    return value
