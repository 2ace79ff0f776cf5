"""Turn a notebook's cells into blocks of plain Python, or into a reason why not. Pure.

`%%distributed` cells are what ranks run. Of the notebook's own cells what `%dist push` has sent
becomes assignments, or the definitions that it stands on, and `%dist start` the command above the
script.
"""

import argparse
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from nbdist.client.export import code as code_of
from nbdist.client.export import names as names_of
from nbdist.client.export.blocks import Block, consistent
from nbdist.client.export.definitions import Definitions, NotAsSent
from nbdist.client.export.environment_lost import variables_in
from nbdist.client.export.group_made import SILENT
from nbdist.client.export.ipython_lines import inner, plain
from nbdist.client.export.notebook_cells import NotebookCell, Pushed
from nbdist.client.export.order import ran_later, ranks_at_the_end, without_repeats
from nbdist.client.export.rank_cells import MOST_RANKS, Parse, RankCells
from nbdist.client.export.settings_lost import settings_in
from nbdist.errors import UsageError
from nbdist.ranks import parse_ranks

# What every script imports at its beginning; nbdist where it is used.
_ALWAYS_IMPORTED = {
    "torch": f"{names_of.IMPORTED}torch",
    "dist": f"{names_of.IMPORTED}torch.distributed",
    "nbdist": f"{names_of.IMPORTED}nbdist",
}
# Commands that change what a training is, and have no part in a script.
_MEANINGLESS = {"chaos", "attach"}


@dataclass(slots=True)
class Resolved:
    """What the cells come to.

    Attributes:
        blocks: In the script's order.
        starts: The words of each `%dist start`, in order.
        written: What `%%writefile` cells have written, by the names of the files.
        rewritten: Those of them that were another text before.
        features: Of `__future__`, which stand above all other code.
        commands: `start`, `stop` and `restart` of all ranks, each with the number of its cell.
        variables: Numbers of the notebook's own cells that set variables of the environment, and
            which.
        rank: The name by which conditions know the rank; another where a cell takes that one.
        n: On how many ranks the last of them ran, where `%dist scale` has made it so; else None.
        doubts: What the order of runs may have made other than it is here, in sentences.
    """

    blocks: list[Block] = field(default_factory=list)
    starts: list[argparse.Namespace] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    rewritten: set[str] = field(default_factory=set)
    features: list[str] = field(default_factory=list)
    commands: list[tuple[int, str]] = field(default_factory=list)
    variables: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    rank: str = "rank"
    n: int | None = None
    doubts: list[str] = field(default_factory=list)

    @property
    def code(self) -> str:
        """All that the script's cells hold."""
        return "\n".join(block.code for block in self.blocks if block.code)


def resolve(
    cells: Sequence[NotebookCell],
    chosen: Sequence[int] | None,
    parse_dist: Parse,
    parse_distributed: Parse,
) -> Resolved:
    """Return what the cells come to.

    Args:
        cells: All of the notebook's, in order.
        chosen: Numbers of those to export; None takes the `%%distributed` cells.
        parse_dist: Reads the words after `%dist`.
        parse_distributed: Reads those after `%%distributed`.
    """
    for rank in ("rank", "this_rank"):
        resolver = _Resolver(chosen, parse_dist, parse_distributed, rank)
        for cell in cells:
            resolver.add(cell)
        if not any("rank" in block.binds for block in resolver.found.blocks if block.code):
            break
    found = resolver.found
    keys = {cell.number: cell.key for cell in cells}
    found.blocks = consistent(without_repeats(found.blocks, keys))
    start = getattr(found.starts[0], "n", None) if found.starts else None
    found.n, on_others = ranks_at_the_end(found.blocks, start, resolver.changes_of_n)
    found.doubts = [*ran_later(found.blocks), *on_others]
    return found


class _Resolver:
    """Goes through the cells, and knows those before."""

    def __init__(
        self, chosen: Sequence[int] | None, parse_dist: Parse, parse_distributed: Parse, rank: str
    ) -> None:
        self.found = Resolved(rank=rank)
        self._rank = rank
        self._chosen = None if chosen is None else set(chosen)
        self._parse_dist = parse_dist
        self._of_ranks = RankCells(parse_distributed, rank)
        self._definitions = Definitions()
        self._defined = 0  # how many of `NotebookCell.before` the definitions know of
        self.changes_of_n: list[tuple[int, int | None]] = []  # see `ranks_at_the_end`
        self._failed: tuple[NotebookCell, str, str] | None = None  # the last that did
        self._sent: list[Pushed] = []  # by the cell, and not in the script yet

    def add(self, cell: NotebookCell) -> None:
        cell = replace(cell, source=inner(cell.source))
        first, _, rest = cell.source.partition("\n")
        magic, _, words = first[2:].partition(" ") if first.startswith("%%") else ("", "", "")
        if magic == "distributed":
            self._add_distributed(cell, first, words, rest)
            return
        if cell.before:
            for number, source in cell.before[self._defined :]:
                self._define(number, _without_commands(inner(source)))
            self._defined = len(cell.before)
        self._sent = list(cell.pushed)
        if not magic:
            self._add_own(cell)
        elif magic == "writefile" and words.split():
            self._add_file(cell, words.split(), rest)
        elif rest.lstrip().startswith("%%distributed") and self._is_chosen(cell, by_itself=True):
            self._leave_out(cell, first, f"is a cell of %%{magic}", rest.partition("\n")[2])
        elif self._is_chosen(cell, by_itself=False):
            self._leave_out(cell, first, f"is a cell of %%{magic}")
        self._add_what_else_was_sent(cell)

    def _add_file(self, cell: NotebookCell, words: Sequence[str], text: str) -> None:
        *options, name = (word.strip("\"'") for word in words)
        before = self.found.written.get(name)
        if cell.was_edited or before not in (None, f"{text}\n"):
            self.found.rewritten.add(name)
        before = (before or "") if {"-a", "--append"} & {*options} else ""
        self.found.written[name] = f"{before}{text}\n"

    def _add_what_else_was_sent(self, cell: NotebookCell) -> None:
        """Add what the kernel knows that the notebook's own cell has sent, and no line tells."""
        for one in list(self._sent):
            self._add_push(cell, f"%dist push {one.name}", one.name, one.ranks)
        if not self._is_chosen(cell, by_itself=True):
            return
        if cell.ran:
            first = cell.source.partition("\n")[0]
            reason = "has run code on the ranks by other means than %%distributed"
            self._leave_out(cell, first, reason, *cell.ran)

    def _is_chosen(self, cell: NotebookCell, *, by_itself: bool) -> bool:
        return by_itself if self._chosen is None else cell.number in self._chosen

    def _leave_out(
        self, cell: NotebookCell, heading: str, reason: str, *bodies: str, **more: Any
    ) -> None:
        """Add a block without code, which would have given what `bodies` give."""
        binds: set[str] = set()
        sets: dict[str, None] = {}  # in their order
        for body in bodies:
            with suppress(SyntaxError, ValueError):
                code = plain(body).code
                binds |= names_of.bound(code) - self._imported_already(code)
                binds |= {"_"} if code_of.shows(code) else set()
                sets |= dict.fromkeys(settings_in(code))
        block = Block(cell.number, heading, "", reason, frozenset(binds), sets=tuple(sets), **more)
        self.found.blocks.append(block)

    def _imported_already(self, code: str) -> set[str]:
        """Return the names that code does no more than import, as the script has before it."""
        known = {name: {text} for name, text in _ALWAYS_IMPORTED.items()}
        for block in self.found.blocks:
            for name, texts in names_of.bindings(block.code).items():
                known.setdefault(name, set()).update(texts)
        found = names_of.bindings(code)
        return {
            name for name, texts in found.items() if _are_imports(texts | known.get(name, {""}))
        }

    # -- cells of the ranks

    def _add_distributed(self, cell: NotebookCell, first: str, words: str, body: str) -> None:
        if cell.has_failed:
            self._failed = cell, first, body
        if not self._is_chosen(cell, by_itself=True):
            return
        if cell.has_failed:
            named = self._of_ranks.named(words) + body
            self._leave_out(cell, first, "has failed", named, has_failed=True)
            return
        self._add_body(cell, first, words, body)

    def _add_body(self, cell: NotebookCell, first: str, words: str, body: str) -> None:
        found = self._of_ranks.read(words, body)
        if found is None:
            return
        if found.reason:
            self._leave_out(cell, first, found.reason, found.code)
            return
        self.found.features += found.features
        heading = "\n".join([first, *found.notes])
        params, least = found.params, found.least_ranks
        self._add_block(cell, heading, found.code, params, least, without=found.without)

    def _add_block(
        self,
        cell: NotebookCell,
        heading: str,
        text: str,
        params: Mapping[str, Any],
        least: int = 1,
        **more: Any,
    ) -> None:
        binds, needs = names_of.bound(text), set(names_of.taken(text))
        block = Block(
            cell.number,
            heading,
            text,
            "",
            frozenset(binds | set(params)),
            frozenset(needs - set(params)),
            least,
            runs=cell.runs,
            failures=cell.failures,
            sets=settings_in(text),
            **more,
        )
        self.found.blocks.append(block)

    # -- the notebook's own

    def _add_own(self, cell: NotebookCell) -> None:
        kept: list[str] = []
        fresh: list[str] = []  # lines of which the definitions do not know yet
        for line in cell.source.split("\n"):
            if re.match(r"%dist\b", line):
                self._define_here(cell, fresh)
                self._add_line(cell, line)
            else:
                kept.append(line)
                fresh.append(line)
        self._define_here(cell, fresh)
        body = "\n".join(kept).strip("\n")
        if not body.strip() or cell.is_past:
            return
        if self._chosen is not None and cell.number in self._chosen:
            body, without, reason = self._of_ranks.as_plain(body)
            reason = "has failed" if cell.has_failed else reason
            if reason:
                self._leave_out(cell, "", reason, body)
            else:
                body, features = code_of.without_features(body)
                self.found.features += features
                text = code_of.with_print(body, f"{self._rank} == 0", SILENT)
                self._add_block(cell, "", text, {}, without=without)
        elif self._chosen is None:
            reason = "has failed" if cell.has_failed else "runs in the notebook, not on ranks"
            self._leave_out(cell, "", reason, is_notebooks=True)
        if not self._is_chosen(cell, by_itself=False):
            self.found.variables.append((cell.number, variables_in(plain(body).code)))

    def _define_here(self, cell: NotebookCell, lines: list[str]) -> None:
        """Take in lines of a cell, unless it has failed, or its runs tell what counts and when."""
        if not cell.has_failed and (cell.before is None or cell.has_sent):
            self._define(cell.number, "\n".join(lines))
        lines.clear()

    def _define(self, number: int, source: str) -> None:
        if not source.startswith("%%"):
            self._definitions.add(plain(source).code, number)

    def _add_line(self, cell: NotebookCell, line: str) -> None:
        try:
            asked = self._parse_dist(line.removeprefix("%dist").strip())
        except UsageError:
            return
        if asked is None:
            return
        is_of_all = getattr(asked, "ranks", "all") == "all"
        if asked.command in ("start", "stop", "restart") and is_of_all and not cell.has_failed:
            self.found.commands.append((cell.number, asked.command))
        if asked.command == "start":
            self.found.starts.append(asked)
            self.changes_of_n += [] if cell.has_failed else [(cell.number, None)]
        elif asked.command == "scale" and not cell.has_failed:
            self.changes_of_n.append((cell.number, asked.n))
        elif asked.command == "push" and not cell.has_failed:
            for name in asked.names:
                self._add_push(cell, line, name, asked.ranks)
        elif asked.command == "run" and not cell.ran and self._is_chosen(cell, by_itself=True):
            self._leave_out(cell, line, f"runs {asked.path} on the ranks")
        elif asked.command == "retry" and self._failed is not None and not cell.has_failed:
            failed, first, body = self._failed
            if cell.retried not in (None, failed.number):
                return  # of a run whose cell has succeeded since, or before
            self._failed = None
            gone = self.found.blocks
            self.found.blocks = [b for b in gone if b.code or b.number != failed.number]
            if self._chosen is None or failed.number in self._chosen:
                words = first.partition(" ")[2]
                again = replace(failed, number=cell.number, failures=1)
                self._add_body(again, first, words, body)
        elif asked.command in _MEANINGLESS or (asked.command == "restart" and not is_of_all):
            self._leave_out(cell, line, f"has {line!r}, which has no meaning in a script")

    def _add_push(self, cell: NotebookCell, line: str, name: str, words: str) -> None:
        known = next((one for one in self._sent if one.name == name), None)
        if known is not None:
            self._sent.remove(known)  # a name may be sent more than once
        text, reason = self._value_of(name, known)
        if not text:
            binds = frozenset({name})
            reason = f"pushes {name}: {reason}"
            block = Block(cell.number, line, "", reason, binds, pushes=name)
            self.found.blocks.append(block)
            return
        least = 1
        if words != "all":
            try:
                ranks = parse_ranks(words, MOST_RANKS)
            except UsageError as error:
                self._leave_out(cell, line, f"has a wrong line: {error.what}", f"{name} = 0")
                return
            least, text = max(ranks) + 1, self._of_ranks.only_on(ranks, text)
        self._add_block(cell, line, text, {}, least, pushes=name)

    def _value_of(self, name: str, known: Pushed | None) -> tuple[str, str]:
        """Return the code that gives what was pushed, or why there is none."""
        if known is not None and known.literal:
            return f"{name} = {known.literal}", ""
        try:
            source = self._definitions.source_of(name, known.known if known else {})
        except NotAsSent as error:
            return "", str(error)
        except LookupError as error:
            if known is None:
                return "", f"{error}; the kernel knows its value: %dist export in the notebook"
            return "", f"{known.why_none}, and {error}"
        self.found.features += self._definitions.features
        return source, ""


def _are_imports(texts: Set[str]) -> bool:
    """Return whether a name has been given by one import alone, once or more often."""
    return len(texts) == 1 and next(iter(texts)).startswith(names_of.IMPORTED)


def _without_commands(source: str) -> str:
    return "\n".join(line for line in source.split("\n") if not re.match(r"%dist\b", line))
