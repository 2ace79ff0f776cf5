"""What a notebook's cells come to in a script: their code, or why they stay out. Pure."""

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from nbdist.client.export.cells import NotebookCell, Parse
from nbdist.client.export.plain_code import INDENT, awaited, does_nothing, indented, plain
from nbdist.client.export.sent import literal
from nbdist.shared.errors import UsageError
from nbdist.shared.text import parse_ranks
from nbdist.shared.wire import NAMES_OF_A_RANK

_MOST_RANKS = 1 << 20
RANK = "this_rank"  # in conditions: `rank` and `dist` are names that cells may give to others
_LONGEST_LINE = 100
# What a script does without, and where it can be had.
_WITHOUT = {
    "retry": "--retry: a script starts again from nbdist.save and nbdist.restore",
    "checkpoint": "--checkpoint: call nbdist.save() in the loop, and nbdist.restore() before it",
    "guard": "--guard: give layout.step(skip_nonfinite=True) in the loop",
    "keep": "--keep: a script keeps no evidence; give layout.step(skip_nonfinite=True) in the loop",
    "profile": "--profile: use torch.profiler",
    "timeout": "--timeout: the job's time limit ends it",
    "resume": "--resume: a script keeps no runs",
}
_STEPS = re.compile(r"\.step\(|\.fit\(|rainer\w*\.train\(")  # an optimizer's, or a library's


@dataclass(frozen=True, slots=True)
class Part:
    """What a cell comes to in the script.

    Attributes:
        number: The cell's.
        heading: Comment above the code.
        code: Plain Python; "" where it stays out.
        reason: Why it does, in words that follow `cell 5`.
        source: As it stood in the notebook.
        without: Lines that were commented out.
        least_ranks: How many ranks it needs.
        features: Of `__future__`.
        brings: Names that functions which were sent read, each with the statement that gives it.
    """

    number: int
    heading: str
    code: str = ""
    reason: str = ""
    source: str = ""
    without: tuple[str, ...] = ()
    least_ranks: int = 1
    features: tuple[str, ...] = ()
    brings: Mapping[str, str] = field(default_factory=dict)


def name_cells(numbers: Sequence[int]) -> str:
    """Return `cell 3`, or `cells 3, 5, 9`."""
    return f"cell{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def parts_of(
    cells: Sequence[NotebookCell], chosen: Set[int] | None, skipped: Set[int], parse: Parse
) -> list[Part]:
    """Return what the cells come to, in their order.

    Args:
        cells: The notebook's.
        chosen: Numbers of those to export; None takes the `%%distributed` cells and those that have
            sent something.
        skipped: Numbers of those to leave out.
        parse: Reads the words after `%%distributed`.
    """
    found: list[Part] = []
    for cell in cells:
        is_asked = cell.is_of_ranks if chosen is None else cell.number in chosen
        is_event = chosen is None and (cell.sent or cell.ran_code)
        if not (is_asked or is_event):
            continue
        trouble = "is skipped" if cell.number in skipped else cell.trouble
        if cell.ran_code and not is_asked:
            trouble = trouble or "ran code on the ranks by other means than %%distributed"
        if trouble:
            found.append(_left_out(cell, trouble))
            continue
        found += [_of_code(cell, parse)] if is_asked else []
        found += [_of_sent(cell)] if cell.sent else []
    return [part for part in found if part.code or part.reason]


def trains(text: str) -> bool:
    """Return whether code lets an optimizer step, itself or by a library's trainer."""
    return bool(_STEPS.search(text))


def _left_out(cell: NotebookCell, reason: str) -> Part:
    return Part(cell.number, "", "", reason, cell.source)


def _of_code(cell: NotebookCell, parse: Parse) -> Part:
    """Return the code that a cell has run on ranks, or would."""
    try:
        asked = parse(cell.line) if cell.is_of_ranks else argparse.Namespace(ranks="all", params=())
        is_all = asked is None or asked.ranks == "all"
        ranks = None if asked is None or is_all else parse_ranks(asked.ranks, _MOST_RANKS)
    except UsageError as error:
        return _left_out(cell, f"has a wrong line: {error.what}")
    if asked is not None and getattr(asked, "dry", False):
        return _left_out(cell, "was only checked, by --dry")
    found = plain(cell.body)
    if found.reason or asked is None:
        return _left_out(cell, found.reason or "shows a help")
    params = dict(asked.params)
    if clash := sorted(params.keys() & NAMES_OF_A_RANK):
        return _left_out(cell, f"sets {clash[0]}, which each rank finds set")
    try:
        code = awaited(found.code) if found.awaits else found.code
    except SyntaxError as error:
        return _left_out(cell, f"awaits outside of a function, and a function cannot: {error.msg}")
    if (params or ranks is not None) and does_nothing(code):
        code = f"{code}\npass".lstrip("\n")
    code = _with_params(code, params)
    notes = [note for name, note in _WITHOUT.items() if getattr(asked, name, None)]
    line = f"%%distributed {cell.line}".rstrip() if cell.is_of_ranks else ""
    return Part(
        cell.number,
        "\n".join([line, *notes, *cell.changes]),
        code if ranks is None else _only_on(ranks, code),
        without=tuple(line for line in found.without if not line.startswith("%dist push")),
        least_ranks=1 if ranks is None else max(ranks) + 1,
        features=found.features,
    )


def _of_sent(cell: NotebookCell) -> Part:
    """Return the assignments and definitions by which ranks have what a cell has sent."""
    codes: list[str] = []
    newest: dict[str, str] = {}  # what gives a name by then
    brings: dict[str, str] = {}
    lost: list[str] = []
    least = 1
    for one in cell.sent:
        if one.trouble:
            lost.append(f"{one.name}: {one.trouble}")
        elif one.ranks != "all":
            ranks = parse_ranks(one.ranks, _MOST_RANKS)
            least = max(least, max(ranks) + 1)
            codes.append(_only_on(ranks, "\n".join(code for _, code in one.code)))
            for name, _ in one.code:
                newest.pop(name, None)
        else:
            codes += [code for name, code in one.code if newest.get(name) != code]
            newest |= dict(one.code)
            brings |= {name: code for name, code in one.code if name != one.name}
    names = ", ".join(dict.fromkeys(one.name for one in cell.sent))
    heading = "\n".join([f"sent to the ranks: {names}", *(f"without {one}" for one in lost)])
    if not codes:
        return Part(cell.number, "", "", f"sends {'; '.join(lost)}")
    return Part(
        cell.number,
        heading,
        "\n".join(_spaced(codes)),
        without=tuple(f"the push of {one}" for one in lost),
        least_ranks=least,
        brings=brings,
    )


def _spaced(codes: Sequence[str]) -> Iterator[str]:
    """Yield statements, those of several lines apart."""
    before = ""
    for code in codes:
        is_apart = "\n" in code or "\n" in before
        yield f"\n\n{code}" if before and is_apart else code
        before = code


def _only_on(ranks: Sequence[int], text: str) -> str:
    condition = f"== {ranks[0]}" if len(ranks) == 1 else f"in {tuple(ranks)!r}"
    return f"if {RANK} {condition}:\n{indented(text)}"


def _with_params(text: str, params: Mapping[str, Any]) -> str:
    """Return code after its parameters; with lists, once for each combination of their values.

    Each run begins with all of them set again, as in the notebook, whatever the one before has
    made of them: so combinations are written out, and the others stand inside of the loop.
    """
    single = {name: value for name, value in params.items() if not isinstance(value, list)}
    lists = {name: value for name, value in params.items() if isinstance(value, list)}
    text = "".join(f"{name} = {literal(value)}\n" for name, value in single.items()) + text
    if not lists:
        return text
    names = ", ".join(lists)
    values = lists[names] if len(lists) == 1 else list(itertools.product(*lists.values()))
    tried = [literal(value) for value in values]
    line = f"for {names} in [{', '.join(tried)}]:"
    if len(line) > _LONGEST_LINE:
        inner = "".join(f"{INDENT}{one},\n" for one in tried)
        line = f"for {names} in [\n{inner}]:"
    return f"{line}\n{indented(text)}"
