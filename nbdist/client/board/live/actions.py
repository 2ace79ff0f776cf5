"""What pages ask of a cell that runs: where ranks are, what watching costs, an interrupt.

Any thread, as a rule a subshell's: each may wait for ranks.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from nbdist.shared.errors import NBDistError

HALT_S = 60.0  # until all ranks have come to the end of a step
AT_A_STEP = frozenset({"pause", "peek or change"})  # what waits for the end of one
_ALL = -1  # the choice of all ranks
_CHANGE = re.compile(r"\s*\w+\s*=(?!=)")  # an assignment, and no comparison

_log = logging.getLogger("nbdist.board")


class Halts(Protocol):
    """What a board asks of all ranks at the same step; each returns what prints as the answer."""

    @property
    def paused_at(self) -> int | None:
        """The step after which all ranks were paused; None where they were not, or went on."""

    def pause(self, timeout_s: float) -> object:
        """Let all ranks stand still."""

    def resume(self) -> str:
        """Let them go on."""

    def peek(self, expression: str, timeout_s: float) -> object:
        """Evaluate an expression on all ranks."""

    def change_as_typed(self, word: str, timeout_s: float) -> object:
        """Set a value on all ranks, given as `lr=0.01`."""


@dataclass(frozen=True, slots=True)
class CellActions:
    """What the buttons of a running cell do. Each is called on any thread, and may wait for ranks.

    Attributes:
        stacks: Returns where the ranks are.
        cost: Returns what watching costs.
        interrupt: Interrupts one rank, or with None the cell; returns what there is to say. It
            reaches no other cell, however late it is called.
        halts: What is asked of all ranks at the same step.
    """

    stacks: Callable[[], str]
    cost: Callable[[], str]
    interrupt: Callable[[int | None], str]
    halts: "Halts"

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what a page asks; return what it is told."""
        match asked:
            case {"what": "stacks"}:
                return _answer("Stacks", self.stacks)
            case {"what": "cost"}:
                return _answer("Cost of watching", self.cost)
            case {"what": "interrupt", "rank": int(rank)}:
                return _remark(lambda: self.interrupt(None if rank == _ALL else rank))
            case {"what": "pause"}:
                return _remark(lambda: str(self.halts.pause(HALT_S)))
            case {"what": "continue"}:
                return _remark(self.halts.resume)
            case {"what": "peek or change", "text": str(text)} if _CHANGE.match(text):
                return _remark(lambda: str(self.halts.change_as_typed(text, HALT_S)))
            case {"what": "peek or change", "text": str(text)}:
                return _answer("Peek", lambda: str(self.halts.peek(text, HALT_S)))
            case _:
                return {"kind": "remark", "text": "This kernel's nbdist does not know that button."}


def _remark(action: Callable[[], str]) -> dict[str, Any]:
    return {"kind": "remark", "text": _said(action)}


def _answer(title: str, action: Callable[[], str]) -> dict[str, Any]:
    said = _said(action)
    return {"kind": "answer", "title": f"{title} at {time.strftime('%H:%M:%S')}", "text": said}


def _said(action: Callable[[], str]) -> str:
    try:
        return action()
    except NBDistError as error:
        return str(error)
    except Exception as error:
        _log.exception("A button of the board failed")
        return f"It failed: {type(error).__name__}: {error}"
