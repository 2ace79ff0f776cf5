"""The verdicts of a board as one block: who makes the others slow, what to do, and the proof.

It is above the live board and below the picture that stays, and nowhere else. Pure.
"""

import html
import re
from collections.abc import Sequence

from nbdist.client.board import palette
from nbdist.client.board.text import STYLE
from nbdist.client.metrics.analysis.advice import advice_for
from nbdist.client.metrics.analysis.values import Straggler
from nbdist.client.output.slots import Display
from nbdist.shared.text import name_ranks

ACCENT, _ = palette.PARTS["waiting"]  # that is what a verdict is about
_BLOCK = (
    f'style="{STYLE}; font-size: 14px; border-left: 4px solid {ACCENT}; margin: 6px 0; '
    'padding: 2px 0 2px 12px; max-width: 62em"'
)
_WHO = re.compile(r"\branks? \d+(?: and \d+)?", re.IGNORECASE)  # first of all in each sentence


def headline(verdicts: Sequence[Straggler]) -> str:
    """Return the verdicts in a few words, for a picture's head; "" without one."""
    if not verdicts:
        return ""
    who = name_ranks(sorted({verdict.rank for verdict in verdicts}))
    causes = dict.fromkeys(advice_for(verdict).cause for verdict in verdicts)
    verb = "slows" if len({verdict.rank for verdict in verdicts}) == 1 else "slow"
    return f"{who} {verb} the others down: {', '.join(causes)}"


def to_html(verdicts: Sequence[Straggler]) -> str:
    """Return the block, "" without a verdict; its colours are those of the page."""
    return "".join(
        f'<div role="note" {_BLOCK}><div>{_with_bold_rank(verdict.sentence)}</div>'
        f"<div>What to do: {html.escape(advice_for(verdict).do)} "
        f"<code>{_command(verdict)}</code> shows it.</div></div>"
        for verdict in verdicts
    )


def to_text(verdicts: Sequence[Straggler]) -> str:
    """Return the block as lines, "" without a verdict."""
    return "\n".join(
        f"{verdict.sentence}\nDo:  {advice_for(verdict).do} {_command(verdict)} shows it."
        for verdict in verdicts
    )


def display(verdicts: Sequence[Straggler]) -> Display:
    """Return the block as an output of its own."""
    return Display({"text/html": to_html(verdicts), "text/plain": to_text(verdicts)})


def _command(verdict: Straggler) -> str:
    return f"%dist board {advice_for(verdict).view}"


def _with_bold_rank(sentence: str) -> str:
    return _WHO.sub(lambda who: f"<b>{who[0]}</b>", html.escape(sentence), count=1)
