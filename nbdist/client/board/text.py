"""What the board says in words: caption, spoken status, progress, table of ranks.

The caption stays in the notebook and is compared by nbval: it holds no time and no trained
number. The rest is live only.
"""

import html
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for their types alone: the view loads numpy
    from nbdist.client.board.view import Row, View

STYLE = "font: 12px/1.5 var(--jp-ui-font-family, sans-serif); font-variant-numeric: tabular-nums"
MARKDOWN = str.maketrans({c: "\\" + c for c in "\\`*_[]<>#$|~"})
REPORT_S = 0.25  # a rank's report may be late by so much on a busy machine
ENDINGS = {"finished": " over ", "failed": ", failed after ", "interrupted": ", interrupted after "}


def caption(view: "View", outcome: str) -> str:
    """Return the sentence that stands below the picture in the notebook.

    For example "Loss and communication time of 2 ranks over 80 steps."
    """
    names = {"comm_s": "communication time"}
    subjects = [names.get(panel.key, panel.key) for panel in view.panels]
    if not subjects:
        subjects = sorted({key for row in view.rows for key in row.own}) or ["training"]
    what = subjects[0] if len(subjects) == 1 else f"{', '.join(subjects[:-1])} and {subjects[-1]}"
    if what.startswith(("loss", "communication", "training")):
        what = what[0].upper() + what[1:]
    ranks = _counted(len(view.reporting), "rank")
    return f"{what} of {ranks}{ENDINGS[outcome]}{length(view)}."


def length(view: "View") -> str:
    """Return how long the cell ran, in its own count: 80 steps."""
    if view.last_step:
        return _counted(view.last_step, "step")
    return _counted(view.records, "record")


def markdown(sentence: str) -> str:
    """Return `sentence` so that Markdown shows it as it is, whatever a key is called."""
    return sentence.translate(MARKDOWN)


def status(view: "View") -> str:
    """Return one sentence for those who hear the board instead of seeing it."""
    of = f" of {view.total:,}" if view.total else ""
    parts = [f"Step {view.first_step:,}{of}" if view.last_step else "Logging"]
    losses = [row.loss for row in view.rows if row.loss is not None]
    if losses:
        bad = [row.rank for row in view.rows if row.loss is not None and not _finite(row.loss)]
        mean = sum(losses) / len(losses)
        parts.append(f"loss not finite on rank {bad[0]}" if bad else f"loss {figure(mean)}")
    waits = [row.comm_pct for row in view.rows if row.comm_pct is not None]
    if waits:
        parts.append(f"{sum(waits) / len(waits):.0f} % of a step in communication")
    if view.straggler is not None:
        parts.append(f"rank {view.straggler} makes the others wait")
    return ", ".join(parts) + "."


def progress(view: "View", elapsed_s: float) -> str:
    """Return progress as people know it from tqdm: 812/1,000 [00:24<00:05, 34.1 steps/s]."""
    done, rate = view.first_step, view.steps_per_s
    parts = [clock(elapsed_s)]
    if view.total and rate:
        parts[0] += f"<{clock((view.total - done) / rate)}"
    if rate:
        parts.append(f"{figure(rate)} steps/s")
    of = f"/{view.total:,}" if view.total else ""
    text = f"{done:,}{of} [{', '.join(parts)}]" if view.last_step else f"[{parts[0]}]"
    # Ranks tell their records every 50 ms: what they report apart they may have done together.
    if view.last_step - view.first_step > 2 + (rate or 0.0) * REPORT_S:
        last = next(row.rank for row in view.reporting if row.step == view.first_step)
        text += f" · ranks at {view.first_step:,}–{view.last_step:,}, rank {last} is last"
    return text


def table(view: "View") -> str:
    """Return an HTML table, one row a rank; scrolls when there are many."""
    own = sorted({key for row in view.rows for key in row.own})[:4]
    head = ["rank", "device", "step", "loss", "steps/s", "step ms", "comm %", "data %", *own, ""]
    lines = [_line("th", head), *(_line("td", _cells(row, own, view)) for row in view.rows)]
    return (
        f'<div style="{STYLE}; max-height: 17em; overflow: auto">'
        f'<table style="margin: 0">{"".join(lines)}</table></div>'
    )


def spoken(sentence: str) -> str:
    """Return HTML that screen readers speak when it changes (ARIA live region)."""
    return f'<div role="status">{html.escape(sentence)}</div>'


def alert(sentence: str) -> str:
    """Return HTML of a line of text that screen readers speak at once."""
    return f'<div role="alert" style="{STYLE}">{html.escape(sentence)}</div>'


def plain(sentence: str) -> str:
    """Return HTML of a line of text."""
    return f'<div style="{STYLE}">{html.escape(sentence)}</div>'


def figure(value: float) -> str:
    """Return `value` with about three digits: 0.126, 12.3, 1,240, 3.1e-05."""
    if not _finite(value):
        return "not finite"
    size = abs(value)
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def clock(seconds: float) -> str:
    """Return mm:ss, or h:mm:ss from an hour on."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def _cells(row: "Row", own: list[str], view: "View") -> list[str]:
    numbers = (row.loss, row.steps_per_s, row.step_ms)
    shares = (row.comm_pct, row.data_pct)
    return [
        str(row.rank),
        row.device,
        f"{row.step:,}",
        *("–" if number is None else figure(number) for number in numbers),
        *("–" if share is None else f"{share:.0f}" for share in shares),
        *(figure(row.own[key]) if key in row.own else "–" for key in own),
        # Last, so that the columns stay where they are when it comes and goes.
        "◀ the others wait" if row.rank == view.straggler else "",
    ]


def _line(tag: str, cells: list[str]) -> str:
    style = ' style="padding: 1px 10px; text-align: right"'
    return f"<tr>{''.join(f'<{tag}{style}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _finite(value: float) -> bool:
    return math.isfinite(value)
