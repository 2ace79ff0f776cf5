"""All ranks stand still after the same step, and do there what the notebook asks.

1. `hold`: from the next step's end on, a rank stands still. It answers how many it has made.
2. `go_on_to` the highest of these and one: no rank is beyond it, and each can get there, since who
   stands still before it goes on. There all stand still.
3. `act`, when all do: change a value, or evaluate an expression; again and again. Where one never
   comes, as its cell has ended, none does anything.
4. `end`: all go on, or stay `paused` until another `end`.

A notebook that says nothing for `LONGEST_S` is not waited for, but where it has paused the cell. A
step is what the cell counts (`training/steps.py`): of several optimizers the leader's.

Threads: `stand`, `cell_began` and `cell_ended` on the main one, the rest on the control thread.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

from nbdist.engine.component import Component, EndedCell
from nbdist.shared.error_text import named
from nbdist.shared.wire import CellStart

LONGEST_S: Final = 10.0  # that a rank stands still for a notebook that says nothing
_LOOK_S: Final = 0.1  # signals are heard in between

Action = Callable[..., dict[str, Any]]


class Halt(Component):
    """What the notebook has asked of the steps of the cell that runs.

    Attributes:
        is_asked: Whether it asks anything: all that a step looks at.
        step: Returns the steps of the cell that runs; None where they are not counted.
        unseen: Makes what is done within it no part of a step.
        actions: What `act` may be asked for, by name.
    """

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        """Begin without a cell."""
        self.is_asked = False
        self.step: Callable[[], int | None] = lambda: None
        self.unseen: Callable[[], AbstractContextManager[None]] = nullcontext
        self.actions: dict[str, Action] = {}
        self._longest_s = longest_s
        self._changed = threading.Condition()
        self._params: tuple[str, ...] | None = None  # of the cell that runs
        self._key = ""  # of who asks
        self._turn = 0  # moves when what was asked is over, or another thing is asked
        self._held_at = 0  # steps that were made by then
        self._target: int | None = None
        self._stands: int | None = None  # after which step
        self._is_paused = False
        self._action: Callable[[], dict[str, Any]] | None = None
        self._answer: dict[str, Any] | None = None
        self._heard_at = 0.0
        self._notices: list[str] = []

    def cell_began(self, start: CellStart) -> None:
        """Allow `hold`, until the cell ends."""
        with self._changed:
            self._end()
            self._params, self._key = tuple(start.params), ""

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Refuse it again; tell of what was not waited for."""
        with self._changed:
            self._end()
            self._params = None
            said, self._notices = tuple(self._notices), []
        return said

    # -- asked by the notebook

    def hold(self, key: str) -> dict[str, Any]:
        """Stand still after the next step, until `go_on_to` says after which all do.

        Args:
            key: Names who asks, in all further calls; others are not heard any more.

        Returns:
            `params` of the cell that runs (None without one), its `step` (None: not counted), and
            whether it is `paused` there: then it stays.
        """
        with self._changed:
            self._heard_at = time.monotonic()
            paused = self.is_paused
            if self._params is None or self.step() is None:
                return {"params": self._params, "step": None, "paused": False}
            self._key, self._action, self._answer = key, None, None
            if not paused:
                self._end()
                self.is_asked = True  # before the steps are read: the next one sees it
                self._held_at = self.step() or 0
            return {"params": self._params, "step": self.step(), "paused": paused}

    def go_on_to(self, key: str, step: int) -> None:
        """Stand still after this step."""
        with self._changed:
            if key == self._key and self.is_asked:
                self._target, self._heard_at = step, time.monotonic()
                self._changed.notify_all()

    def look(self, key: str) -> dict[str, Any]:
        """Return the cell's `step`, after which it `stands` (or None), and the action's `answer`.

        `is_on` is False where what was asked is over: the cell has ended, or was waited for no
        longer.
        """
        with self._changed:
            self._heard_at = time.monotonic()
            is_on = key == self._key and self.is_asked
            stands, answer = (self._stands, self._answer) if is_on else (None, None)
            return {"step": self.step(), "stands": stands, "answer": answer, "is_on": is_on}

    def act(self, key: str, name: str, **arguments: Any) -> None:
        """Have the main thread, which stands still, do one of `actions`; `look` has its answer."""
        with self._changed:
            if key == self._key and self._stands is not None:
                self._action, self._answer = partial(self.actions[name], **arguments), None
                self._heard_at = time.monotonic()
                self._changed.notify_all()

    def end(self, key: str | None = None, *, pause: bool = False) -> int | None:
        """Go on, or stay there until the next `end`; return after which step it stood, if it did.

        Args:
            key: Who has asked; None ends whatever was asked.
            pause: Stay.
        """
        with self._changed:
            if key not in (None, self._key):
                return None
            stood = self._stands
            if pause:
                self._is_paused = stood is not None
            else:
                self._end()
            return stood

    @property
    def is_paused(self) -> bool:
        """Whether the main thread stands still until it is told to go on."""
        return self._is_paused and self._stands is not None

    def _end(self) -> None:
        self._turn += 1
        self.is_asked = self._is_paused = False
        self._target = self._stands = self._action = self._answer = None
        self._changed.notify_all()

    # -- on the main thread

    def stand(self) -> None:
        """Stand still if this is the step to do so; called at the end of each while one asks."""
        step = self.step()
        with self._changed:
            turn = self._turn
            if step is None or step <= self._held_at:
                return  # another optimizer's part of a step that was over
            self._wait_while(turn, lambda: self._target is None)
            if self._turn != turn or self._target is None or step < self._target:
                return
            self._stands = step
        try:
            with self.unseen():
                while (action := self._next(turn)) is not None:
                    answer = _done(action)
                    with self._changed:
                        self._heard_at = time.monotonic()  # an action takes its time
                        self._answer = answer if self._turn == turn else None
        finally:
            with self._changed:
                self._stands = None
                if self._turn == turn:  # interrupted
                    self._end()

    def _next(self, turn: int) -> Callable[[], dict[str, Any]] | None:
        """Return what to do now; None to go on."""
        with self._changed:
            self._wait_while(turn, lambda: self._action is None)
            if self._turn != turn:
                return None
            action, self._action = self._action, None
            return action

    def _wait_while(self, turn: int, is_open: Callable[[], bool]) -> None:
        """Wait until something is said; a notebook that says nothing is waited for no longer."""
        while self._turn == turn and is_open():
            if not self._is_paused and time.monotonic() > self._heard_at + self._longest_s:
                self._notices.append(
                    f"The notebook had asked this rank to stand still after step {self.step()}, and"
                    f" then said nothing for {self._longest_s:.0f} s: it went on."
                )
                self._end()
            else:
                self._changed.wait(_LOOK_S)


def _done(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return action()
    except Exception as error:  # of the user's expression: the training goes on
        return {"error": named(error)}


here = Halt()
