"""Say what was recorded, in a sentence, and what it sums up to, as text and HTML. Pure."""

import html
from collections.abc import Mapping, Sequence

from nbdist.client.metrics.profile.chosen import ChosenSteps, name_steps
from nbdist.client.metrics.profile.summary import KINDS, OpTotal, RankSummary
from nbdist.shared.text import aligned, begin_with_ranks, counted, milliseconds, name_ranks

HOW_TO_OPEN = "https://ui.perfetto.dev or chrome://tracing opens it"
_MOST_OPERATORS = 15
_NAME_LENGTH = 60
_STYLE = "text-align:right;padding:1px 8px;font-variant-numeric:tabular-nums"

_ENDS = {
    "cell": "the cell ended",
    "limit": "recording ended because it took too long",
    "memory": "recording ended because it used too much memory",
    "own": "the cell started its own profiler",
}

Table = tuple[list[str], list[list[str]]]  # header, rows; the last column is text


def what_was_recorded(
    chosen: ChosenSteps,
    recorded: Mapping[int, tuple[Sequence[int], str]],
    missing: Mapping[int, str],
    steps_made: int,
) -> str:
    """Return what the traces hold, in sentences.

    Args:
        chosen: The steps that were asked for.
        recorded: Rank to the steps it recorded whole, and how its recording ended.
        missing: Ranks without a trace, and why, where that is known.
        steps_made: Optimizer steps of the cell, of the rank that made most.
    """
    if not recorded:
        return _nothing(chosen, missing, steps_made)
    steps, end = max(recorded.values(), key=lambda one: len(one[0]))
    said = _recorded(chosen, steps, end, steps_made)
    for why in dict.fromkeys(missing.values()):
        ranks = [rank for rank, text in missing.items() if text == why]
        said += f" {begin_with_ranks(ranks)} recorded no trace{f' ({why})' if why else ''}."
    return said


def _nothing(chosen: ChosenSteps, missing: Mapping[int, str], steps_made: int) -> str:
    whys = list(dict.fromkeys(why for why in missing.values() if why))
    if whys:
        return f"Nothing was recorded: {'; '.join(whys)}."
    if 0 < steps_made < chosen.first:
        ended = f"The cell ended after {counted(steps_made, 'step')}"
        return f"{ended}, so {chosen} could not be recorded."
    return "Nothing was recorded, because no rank finished a recording."


def _recorded(chosen: ChosenSteps, steps: Sequence[int], end: str, steps_made: int) -> str:
    if len(steps) == chosen.last - chosen.first + 1:
        said = f"{str(chosen).capitalize()} were recorded" if len(steps) > 1 else ""
        said = said or f"{str(chosen).capitalize()} was recorded"
        return f"{said}, which adds overhead."
    why = _ENDS[end]
    if steps:
        done = name_steps(range(steps[0], steps[-1] + 1))
        return f"Of {chosen}, {done} {'were' if len(steps) > 1 else 'was'} recorded, then {why}."
    if steps_made >= chosen.first - 1 and steps_made > 0:
        return f"Step {chosen.first} was recorded until {why}."
    whole = "only its beginning was recorded" if end == "limit" else "all of it was recorded"
    return f"The cell made no step, so {whole}."


def as_text(ranks: Sequence[RankSummary]) -> str:
    """Return the tables as text of fixed width."""
    parts = []
    for title, (header, rows) in _tables(ranks):
        to_the_right = [True] * (len(header) - 1) + [False]
        parts.append("\n".join([title, *aligned([header, *rows], to_the_right)]))
    return "\n\n".join(parts)


def as_html(ranks: Sequence[RankSummary]) -> str:
    """Return the tables as HTML."""
    parts = []
    for title, (header, rows) in _tables(ranks):
        head = "".join(f'<th style="{_STYLE}">{html.escape(cell)}</th>' for cell in header)
        body = "".join(
            "<tr>"
            + "".join(f'<td style="{_STYLE}">{html.escape(cell)}</td>' for cell in row[:-1])
            + f'<td style="text-align:left">{html.escape(row[-1])}</td></tr>'
            for row in rows
        )
        caption = f'<caption style="text-align:left">{html.escape(title)}</caption>'
        parts.append(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    return "".join(parts)


def _tables(ranks: Sequence[RankSummary]) -> list[tuple[str, Table]]:
    if not ranks:
        return []
    has_steps = any(one.steps for one in ranks)
    of = "mean of a step" if has_steps else "the whole recording"
    mean = name_ranks(one.rank for one in ranks)
    return [
        (f"Main thread by kind, {of}, in ms; all comm.: also beside other work", _by_kind(ranks)),
        (f"Operators by self time, {of}, in ms, mean of {mean}", _ops(ranks)),
    ]


def _by_kind(ranks: Sequence[RankSummary]) -> Table:
    gpu = list(next((one.gpu for one in ranks if one.gpu), {}))
    header = ["rank", "step" if ranks[0].steps else "all", *KINDS, "all comm."]
    rows = [
        [str(one.rank), milliseconds(one.step_ms)]
        + [milliseconds(one.by_kind[kind]) for kind in KINDS]
        + [milliseconds(one.communication_ms)]
        + [milliseconds(one.gpu.get(kind, 0.0)) for kind in gpu]
        + [""]
        for one in ranks
    ]
    return [*header, *(f"GPU {kind}" for kind in gpu), ""], rows


def _ops(ranks: Sequence[RankSummary]) -> Table:
    names = {name for one in ranks for name in one.ops}
    none = OpTotal()

    def self_ms(one: RankSummary, name: str) -> float:
        return one.ops.get(name, none).self_us / max(1, len(one.steps)) / 1000

    def mean_ms(name: str) -> float:
        return sum(self_ms(one, name) for one in ranks) / len(ranks)

    rows = []
    for name in sorted(names, key=lambda name: (-mean_ms(name), name))[:_MOST_OPERATORS]:
        calls = sum(one.ops.get(name, none).calls / max(1, len(one.steps)) for one in ranks) / len(
            ranks
        )
        slowest = max(ranks, key=lambda one: self_ms(one, name))
        slow = [str(slowest.rank), milliseconds(self_ms(slowest, name))]
        short = name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1] + "…"
        rows.append([milliseconds(mean_ms(name)), f"{calls:.4g}", *slow, short])
    return ["self", "calls", "slowest rank", "its self", "operator"], rows
