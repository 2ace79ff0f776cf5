"""What a `%%distributed` cell comes to in a script: its code for the ranks it ran on. Pure."""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.client.export import code as code_of
from nbdist.client.export import names as names_of
from nbdist.client.export.group_made import SILENT
from nbdist.client.export.ipython_lines import plain
from nbdist.client.export.plotting_code import PlottingCode
from nbdist.client.export.reasons import why_not
from nbdist.errors import UsageError
from nbdist.ranks import NAMES_OF_A_RANK, parse_ranks

Parse = Callable[[str], argparse.Namespace | None]

MOST_RANKS = 1 << 20
_LONGEST_LINE = 100
# What a script does without, and where it can be had.
_WITHOUT = {
    "retry": "--retry: a script starts again from nbdist.save and nbdist.restore",
    "checkpoint": "--checkpoint: call nbdist.save() in the loop, and nbdist.restore() before it",
    "profile": "--profile: use torch.profiler",
    "timeout": "--timeout: the job's time limit ends it",
    "resume": "--resume: a script keeps no runs",
}


@dataclass(frozen=True, slots=True)
class RankCode:
    """A cell's code as the script holds it, or why it holds none.

    Attributes:
        code: With its parameters and the ranks that it is for.
        reason: Why it stays out, in words that follow `cell 5: it`; `code` then binds what it would
            have bound.
        params: What its `-p` set.
        least_ranks: How many ranks it needs at least.
        without: Lines that went from it.
        notes: Options of the cell that a script does without, a sentence each.
        features: Of `__future__`, which stand above all other code.
    """

    code: str
    reason: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    least_ranks: int = 1
    without: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()


class RankCells:
    """Reads cells in their order, and remembers what those before have defined."""

    def __init__(self, parse_distributed: Parse, rank: str) -> None:
        """`rank` is the name by which conditions know the rank."""
        self._parse, self._rank = parse_distributed, rank
        self._plots = PlottingCode()
        self._silent = {*SILENT}
        self._has_underscore = False  # the ranks have a `_` of their own

    def read(self, words: str, body: str) -> RankCode | None:
        """Return what a cell comes to; None where it runs nothing.

        Args:
            words: After `%%distributed`.
            body: Below that line.
        """
        try:
            asked = self._parse(words)
            is_all = asked is None or asked.ranks == "all"
            ranks = None if asked is None or is_all else parse_ranks(asked.ranks, MOST_RANKS)
        except UsageError as error:
            return RankCode(body, f"has a wrong line: {error.what}")
        if asked is None or not body.strip():
            return None
        body, without, reason = self.as_plain(body)
        if reason:
            return RankCode(self.named(words) + body, reason)
        body, features = code_of.without_features(body)
        params = dict(asked.params)
        clash = sorted(params.keys() & NAMES_OF_A_RANK)
        if clash:
            return RankCode(body, f"sets {clash[0]}, which each rank finds set")
        if not code_of.has_statements(body):  # comments, below which an `if` or a loop has no body
            if not params and not features:
                return None
            body = f"{body}\npass"
        text = _with_params(self._with_print(body, ranks), params)
        return RankCode(
            text if ranks is None else self.only_on(ranks, text),
            params=params,
            least_ranks=1 if ranks is None else max(ranks) + 1,
            without=without,
            notes=tuple(note for name, note in _WITHOUT.items() if getattr(asked, name, None)),
            features=tuple(features),
        )

    def named(self, words: str) -> str:
        """Return code that binds what a cell's `-p` would have given, for one that is left out."""
        try:
            asked = self._parse(words)
        except UsageError:
            return ""
        return "".join(f"{name} = ...\n" for name, _ in (asked.params if asked else ()))

    def as_plain(self, body: str) -> tuple[str, tuple[str, ...], str]:
        """Return a cell's code as a script can hold it, what went from it, and why it cannot."""
        found = plain(body)
        if reason := found.reason or why_not(found.code):
            return found.code, (), reason
        code, drew, reason = self._plots.taken_out(found.code)
        return code, (*found.without, *drew), reason

    def only_on(self, ranks: Sequence[int], text: str) -> str:
        """Return code that runs on some ranks alone."""
        condition = f"== {ranks[0]}" if len(ranks) == 1 else f"in {tuple(ranks)!r}"
        return f"if {self._rank} {condition}:\n{code_of.indent(text)}"

    def _with_print(self, body: str, ranks: Sequence[int] | None) -> str:
        shown = f"{self._rank} == {ranks[0] if ranks else 0}"
        if ranks is not None and len(ranks) == 1:
            shown = ""
        self._silent |= code_of.silent_functions(body)
        # IPython leaves a `_` that a program has set.
        self._has_underscore = self._has_underscore or "_" in names_of.bound(body)
        into = "_shown" if self._has_underscore else "_"
        return code_of.with_print(body.strip("\n"), shown, self._silent, into)


def _with_params(text: str, params: Mapping[str, Any]) -> str:
    """Return code after its parameters; with lists, once for each combination of their values.

    Each run begins with all of them set anew, as in the notebook, whatever the one before has
    made of them: so combinations are written out, and the others stand inside of the loop.
    """
    single = {name: value for name, value in params.items() if not isinstance(value, list)}
    lists = {name: value for name, value in params.items() if isinstance(value, list)}
    text = "".join(f"{name} = {code_of.literal(value)}\n" for name, value in single.items()) + text
    if not lists:
        return text
    names = ", ".join(lists)
    if len(lists) == 1:
        tried = [code_of.literal(value) for value in lists[names]]
    else:
        tried = [code_of.literal(values) for values in itertools.product(*lists.values())]
    line = f"for {names} in [{', '.join(tried)}]:"
    if len(line) > _LONGEST_LINE:
        inner = "".join(f"{code_of.INDENT}{one},\n" for one in tried)
        line = f"for {names} in [\n{inner}]:"
    return f"{line}\n{code_of.indent(text)}"
