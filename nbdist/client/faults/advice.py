"""What to do after a fault, as it is true of what ran: a cell, or a script.

An `Advice` has its sentences for people; whoever decides asks its `kind`. A script of `%dist run`
has a name, is fixed in its file, makes what it needs again each time, and has no `%%distributed`
line for options. Pure.
"""

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Final

CELL: Final = "the cell"
_KEPT: Final = "all ranks kept their variables"
_MAKE_AGAIN: Final = (
    "run the cells that create what is lost again (if a cell checks that a name exists, `del` it "
    "first, on all ranks)"
)


class AdviceKind(StrEnum):
    """What is to be done."""

    FIX = "fix"  # the code, the data or the machine, and run it again
    RETRY = "retry"  # it was well: %dist retry, or run it again; says where its loops go on
    MAKE_AGAIN = "make again"  # what is lost
    RESTORE = "restore"  # a checkpoint, for what is lost
    RESTART = "restart"  # processes


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do after a fault: of which kind, and in sentences."""

    kind: AdviceKind
    text: str

    @property
    def is_about_losses(self) -> bool:
        """Whether it is how what is lost comes back."""
        return self.kind in (AdviceKind.MAKE_AGAIN, AdviceKind.RESTORE)


@dataclass(frozen=True, slots=True)
class WhatRan:
    """What ran on the ranks: a cell, or a script.

    Attributes:
        script: Its file, as `%dist run` finds it from here; "" for a cell.
        words: Those after it.
        module: What `-m` called it; "" where its file was named.
    """

    script: str = ""
    words: tuple[str, ...] = ()
    module: str = ""

    @property
    def name(self) -> str:
        """In the midst of a sentence: `the cell`, `train.py`."""
        return PurePath(self.script).name or CELL

    @property
    def title(self) -> str:
        """At the beginning of a sentence."""
        return PurePath(self.script).name or "The cell"

    @property
    def this(self) -> str:
        """As who reads of it sees it: `this cell`."""
        return PurePath(self.script).name or "this cell"

    @property
    def run(self) -> str:
        """After `run the cells before, then`."""
        if not self.script:
            return "this one"
        what = ("-m", self.module) if self.module else (self.script,)
        return f"%dist run {shlex.join([*what, *self.words])}"

    @property
    def itself(self) -> str:
        """What to run by hand, rather than again as it was."""
        return f"{self.name} by %dist run" if self.script else "the %%distributed cell itself"

    def again(self, *, kept: bool = False) -> str:
        """Return the clause that asks for another run; `kept` adds what that finds."""
        run = f"{self.run} again" if self.script else "run the cell again"
        return f"{run}; {_KEPT}" if kept else run

    def fix(self, place: str) -> Advice:
        """Return what to do about an error of its own; `place` is where, `train.py, line 3`."""
        if not self.script:
            return Advice(AdviceKind.FIX, f"fix the cell and run it again; {_KEPT}.")
        file, _, line = place.partition(", ")
        where = f"{line} of {file}" if line.startswith("line ") else self.name
        return Advice(AdviceKind.FIX, f"fix {where}, then {self.again(kept=True)}.")

    @property
    def look_at_words(self) -> Advice:
        """What to do about words that a script has refused."""
        return Advice(
            AdviceKind.FIX,
            f"look at the words after {self.name}: sys.exit(2) is how argparse refuses them, and "
            f"what it said stands above; {_KEPT}.",
        )

    def loops(self, *, unchanged: bool = False) -> str:
        """Return what follows where loops over loaders were in its midst.

        With `unchanged` there is nothing to fix in it.
        """
        if self.script:
            again = f"{self.again()}: it" if unchanged else "It"
            return (
                f"{again} starts over where it creates its optimizer; one that calls nbdist.save, "
                "and nbdist.restore(missing_ok=True) before its loop, goes on from there."
            )
        if unchanged:
            return (
                "%dist retry runs the cell again, and its loops continue where they stopped, "
                "unless it creates its optimizer again; run by hand, they start over, and batches "
                "are skipped or repeated."
            )
        return (
            "With %%distributed --go-on the cell's loops continue where they stopped, unless it "
            "creates its optimizer again (to rerun it unchanged: %dist retry); without it they "
            "start over, and batches are skipped or repeated."
        )

    @property
    def retry(self) -> Advice:
        """What to do when nothing is lost and nothing is wrong with it."""
        return Advice(AdviceKind.RETRY, f"{self._retry()}.")

    @property
    def retry_loops(self) -> Advice:
        """The same, where loops over loaders were in its midst."""
        return Advice(AdviceKind.RETRY, self.loops(unchanged=True))

    @property
    def retry_on_fewer(self) -> Advice:
        """The same, where there are fewer ranks than before."""
        return Advice(
            AdviceKind.RETRY,
            f"{self._retry()} on the ranks that are left; %dist scale N tries the lost host again.",
        )

    @property
    def run_again(self) -> Advice:
        """What to do when nothing is wrong with it and no rank was replaced."""
        return Advice(AdviceKind.RETRY, f"{self.again(kept=True)}.")

    def _retry(self) -> str:
        return f"%dist retry runs {self.name} again"

    def make_again(self, then: str = "", *, and_loader: bool = False) -> Advice:
        """Return how what is lost comes back; `then` says what to run, by default this.

        `and_loader`: of what was sharded a loader is a part.
        """
        what = f"{_MAKE_AGAIN} and its loader" if and_loader else _MAKE_AGAIN
        text = f"{what}, then {then or 'this one'}."
        if self.script and not then:
            text = (
                f"{self.again()}: what it creates itself, it creates anew. Where it uses what "
                f"cells had created, first {_MAKE_AGAIN}."
            )
        return Advice(AdviceKind.MAKE_AGAIN, text)

    def restore(self, *, saves_itself: bool) -> Advice:
        """Return how a model gets its contents back, of which checkpoints had been begun.

        `saves_itself`: the cell was given `--checkpoint`.
        """
        otherwise = f"Where there is none, {self.make_again().text}"
        if saves_itself:
            text = (
                f"{self._retry()}, and its first loop over an nbdist.loader goes on from the "
                f"newest checkpoint of {self.this}. {otherwise}"
            )
        elif self.script:
            text = (
                f"{self.again()}: nbdist.restore(), called as nbdist.save was, before its loop, "
                "brings back the newest checkpoint."
            )
        else:
            text = (
                "nbdist.restore(), called as nbdist.save was, brings back the newest checkpoint: "
                "in a cell of its own and then %dist retry, or before the loop of a cell that "
                f"builds its model itself. {otherwise}"
            )
        return Advice(AdviceKind.RESTORE, text)

    @property
    def out_of_time(self) -> str:
        """What to do when it ran longer than it was given."""
        return f"raise {self.limit}, or drop it."

    @property
    def limit(self) -> str:
        """The option that gives it a time."""
        return "timeout_s" if self.script else "--timeout"

    @property
    def checkpoint(self) -> str:
        """The option with which its training is saved."""
        return (
            "session.run_script(..., checkpoint=STEPS)"
            if self.script
            else "%%distributed --checkpoint"
        )

    @property
    def after_leaving(self) -> str:
        """What to do when its training was saved, as its hosts leave."""
        what = self.again() if self.script else "run the cells again"
        return f"%dist stop, %dist start, and {what}, with nbdist.restore() before the loop."

    @property
    def stopped(self) -> str:
        """What is said when the ranks were stopped under it."""
        return (
            f"The ranks were stopped while {self.this} ran (nbdist stop), and what they held is "
            "gone. %dist start begins anew."
        )


A_CELL: Final = WhatRan()
