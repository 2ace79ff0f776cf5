"""The completions that Tab offers after `%dist` and `%%distributed` and in their cells: pure.

Names of runs, ranks and variables come from `Values`, which asks only for what is needed.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from nbdist.client.board import VIEWS
from nbdist.client.expect.assertion import FORMS, OVER_STEPS
from nbdist.client.metrics.checks.rules import all_rules
from nbdist.client.notebook import arguments
from nbdist.study.links import LINKS
from nbdist.study.machine import words_after

_MAGICS = ("%dist", "%%distributed")
_QUOTES = ("'", '"')
_LAYOUT = re.compile(r"\bparallelize\([^'\"\n]*,\s*(?:layout\s*=\s*)?['\"]([^'\"\n]* )?([\w=]*)$")
_PATH = re.compile(r"(?<![\w.)\]}'\"])((?:[^\W\d]\w*\.)*)([^\W\d]\w*)?$")


def _none() -> Iterable[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Values:
    """Where values of arguments come from; each may take a moment."""

    runs: Callable[[], Iterable[str]] = _none
    ranks: Callable[[], Iterable[str]] = _none
    of_ranks: Callable[[], Iterable[str]] = _none
    of_notebook: Callable[[], Iterable[str]] = _none
    metrics: Callable[[], Iterable[str]] = _none
    files: Callable[[str], Iterable[str]] = lambda _: ()  # that begin so


def complete(text: str, cursor: int, values: Values | None = None) -> list[str]:
    """Return the commands, options and values that fit at the cursor.

    Args:
        text: The whole cell.
        cursor: Index of the cursor in it.
        values: Where values come from; without, only what is always so is offered.
    """
    magic, before, last = _words(text, cursor)
    if magic not in _MAGICS:
        return []
    command = before[0] if magic == "%dist" and before else ""
    if magic == "%dist" and not before:
        return [name for name in arguments.COMMANDS if name.startswith(last)]
    parser = arguments.parser_of(magic, command)
    if parser is None:
        return []
    options = [option for action in parser._actions for option in action.option_strings]
    if last.startswith("-"):
        return [option for option in options if option.startswith(last)]
    previous = before[-1] if before else ""
    if command == "chaos" and len(before) == 1:
        return _listed(last, [*arguments.FAULTS, "off"])
    if previous == "--ignore":
        return _listed(last, _rules())
    awaits = {o: one for one in parser._actions if one.nargs != 0 for o in one.option_strings}
    offered: Iterable[str]
    if previous in awaits and awaits[previous].choices:
        offered = map(str, awaits[previous].choices or ())
    elif previous not in awaits and any(one.metavar == "PATH" for one in parser._actions):
        offered = (values or Values()).files(_plain(last))
    else:
        option = previous if previous in awaits else ""
        offered = _values(command, option, values or Values(), before)
    closed = text[cursor : cursor + 1]  # editors close a quote as soon as it is opened
    return [_as_typed(word, last, closed) for word in offered if word.startswith(_plain(last))]


def typed_word(text: str, cursor: int) -> str:
    """Return what is typed of the word that `complete` completes, with its quote if it has one."""
    return _words(text, cursor)[2]


def help_at(text: str, cursor: int) -> str:
    """Return the help of the magic whose line the cursor is in; "" in any other line."""
    magic, before, _ = _words(text, cursor, whole=True)
    if magic not in _MAGICS:
        return ""
    parser = arguments.parser_of(magic, before[0] if before else "") or arguments.parser_of(magic)
    return "" if parser is None else parser.format_help()


def word_of_ranks(text: str, cursor: int) -> tuple[str, str] | None:
    """Return what is completed in a `%%distributed` cell: what its dots lead to, and a beginning.

    `model.layers.we` gives `("model.layers", "we")`. None for another cell, the line of the magic,
    and where there is no name.
    """
    if not is_in_cell(text, cursor):
        return None
    found = _PATH.search(text[:cursor].rsplit("\n", 1)[-1])
    if found is None or not found.group():
        return None
    return found[1].rstrip("."), found[2] or ""


def layout_at(text: str, cursor: int) -> str | None:
    """Return what is typed of a word of a layout, in a `%%distributed` cell; None elsewhere."""
    found = _LAYOUT.search(text[:cursor]) if is_in_cell(text, cursor) else None
    return None if found is None else found[2]


def fitting(members: Mapping[str, str], beginning: str) -> dict[str, str]:
    """Return the names that begin so, with their kinds; private ones when `_` was typed."""
    return {
        name: members[name]
        for name in sorted(members)
        if name.startswith(beginning) and (beginning or not name.startswith("_"))
    }


def is_in_cell(text: str, cursor: int) -> bool:
    """Return whether the cursor is in a `%%distributed` cell, below its first line."""
    first, _, _ = text[:cursor].lstrip().partition("\n")
    words = first.split()
    return words[:1] == ["%%distributed"] and "\n" in text[:cursor].lstrip()


def hint(name: str, names_of_ranks: Iterable[str]) -> str | None:
    """Return what a NameError says of a name that the ranks have; None of another."""
    if name not in names_of_ranks:
        return None
    return f"`{name}` is a name of the ranks: use it in a %%distributed cell, or %dist pull {name}."


def _words(text: str, cursor: int, *, whole: bool = False) -> tuple[str, list[str], str]:
    """Return a line's magic, the whole words before the cursor, and the one it is in."""
    end = text.find("\n", cursor) if whole else cursor
    line = text[: len(text) if end < 0 else end].rsplit("\n", 1)[-1].lstrip()
    magic, space, rest = line.partition(" ")
    if not space:
        return (magic if whole else ""), [], ""
    *before, last = _split(rest)
    if whole:
        before, last = [*before, last], ""
    return magic, [_plain(word) for word in before if word], last


def _split(line: str) -> list[str]:
    """Return a line's words as they are typed, the last one perhaps with an open quote."""
    words, quote = [""], ""
    for letter in line:
        if letter == " " and not quote:
            words.append("")
            continue
        if letter == quote:
            quote = ""
        elif letter in _QUOTES and words[-1] == "":  # within a word it is an apostrophe
            quote = letter
        words[-1] += letter
    return words


def _plain(word: str) -> str:
    """Return a word without its quotes."""
    is_quoted = word[:1] in _QUOTES
    return word[1:].removesuffix(word[0]) if word and is_quoted else word


def _as_typed(word: str, last: str, closed: str) -> str:
    """Return a word as it must be typed in the line, in the quotes in which it was begun."""
    quote = last[:1] if last[:1] in _QUOTES else ""
    if not quote or quote in word:
        return shlex.quote(word)
    return f"{quote}{word}{'' if closed == quote else quote}"


def _listed(last: str, words: Iterable[str]) -> list[str]:
    """Return how a list with commas may go on."""
    *chosen, last = last.split(",")
    fit = [word for word in words if word.startswith(last) and word not in chosen]
    return [",".join([*chosen, word]) for word in fit]


def _rules() -> list[str]:
    return [rule.name for rule in all_rules()]


def _of_board(before: list[str], values: Values) -> Iterable[str]:
    """Return what may follow: a view or a run at first, then a view of that run."""
    words = [word for word in before if not word.startswith("-")]
    if not words:
        return [*VIEWS, *values.runs()]
    is_run = words[0] not in VIEWS or words[0] in values.runs() or "--run" in before
    return VIEWS if len(words) == 1 and is_run else ()


def _of_expect(before: list[str], values: Values) -> Iterable[str]:
    """Return what may follow: an assertion's first word, then what continues it."""
    if not before:
        first = (form.split()[0] for form, _ in FORMS)
        return dict.fromkeys([*first, *OVER_STEPS, *_named(values)])
    if before == ["no"]:
        return ("alarms",)
    if before == ["parity"]:
        return (name for name in values.of_ranks() if not name.startswith("_"))
    if before[0] in ("collectives", "step") and len(before) > 1:
        return ("last", "baseline")
    if before[0] == "bytes" and before[-1] == "of":
        return ("last", "baseline", "explain")
    return _named(values) if before[-1] in OVER_STEPS else ()


def _named(values: Values) -> Iterator[str]:
    """Return the metrics that an expression can name: `val/acc` is a division in it."""
    return (name for name in values.metrics() if name.isidentifier())


def _values(command: str, option: str, values: Values, before: list[str]) -> Iterable[str]:
    """Return what may follow an option, or come alone after a command."""
    if option in ("-r", "--ranks"):
        return values.ranks()
    if (option == "--run" and command != "advise") or command in ("runs", "diff"):
        return values.runs()
    if option == "--on" and command == "scaling":
        return LINKS
    if option:
        return ()
    if "--on" in before:
        return words_after(" ".join(before[before.index("--on") + 1 :]))
    if command == "board":
        return _of_board(before[1:], values)
    if command == "checks":
        return _rules()
    if command == "expect":
        return _of_expect(before[1:], values)
    of_ranks = command == "pull" or (command in ("verify", "scaling") and len(before) == 1)
    if of_ranks:
        return (name for name in values.of_ranks() if not name.startswith("_"))
    if command in ("push", "advise"):
        return (name for name in values.of_notebook() if not name.startswith("_"))
    return ()
