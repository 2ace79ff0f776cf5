"""Run a trial's cells and calls: what they show, raise and take, and what was found to be wrong.

Main thread, which a trial interrupts.
"""

import contextlib
import io
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbdist
from nbdist import CellResult, Session
from nbdist.shared.errors import Interrupted
from tests.random import sentences
from tests.random.acts import NO_FAULT, Act, Fault
from tests.random.cells import written
from tests.random.strikes import strikes

LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What must not be: a `kind` of wrong, and what was seen."""

    kind: str
    text: str


@dataclass(slots=True)
class Row:
    """One act of a trial, for the totals: what struck, what it struck, and what came of it."""

    act: str
    fault: str
    layout: str
    outcome: str = "right"
    seconds: float = 0.0


@dataclass(slots=True)
class Ran:
    """What a cell, or a call of the session, came to. `text` is all that was shown of it."""

    result: CellResult | None = None
    error: BaseException | None = None
    text: str = ""
    seconds: float = 0.0

    @property
    def is_refusal(self) -> bool:
        """Whether it says that it uses what is lost, or cannot be used any more."""
        words = ("LostStateError", "PlaceholderError", "ClusterError", "NameError")
        return self.error is not None and any(word in self.text for word in words)


class Lost(Exception):
    """The session cannot be used any more: the trial ends."""


@dataclass
class Driven:
    """What a trial came to. `story` is what was run and what was told, for people."""

    findings: list[Finding] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    story: list[str] = field(default_factory=list)


class Calls:
    """The session of a trial, and its acts so far."""

    def __init__(self, session: Session, folder: Path) -> None:
        """Begin; `folder` is where the files of faults lie that have struck."""
        self.session = session
        self.driven = Driven()
        self.row = Row("", "none", "")
        self.text = ""  # all that was told since the act began
        self._folder = folder
        self._count = 0

    def begin(self, act: Act) -> None:
        """Begin with an act."""
        self._count += 1
        self.text = ""
        fault = getattr(act, "fault", None)
        self.row = Row(type(act).__name__.lower(), fault.kind if fault else "none", "")
        self.driven.rows.append(self.row)
        self.driven.story.append(f"### {act}")

    def run(
        self, code: str, fault: Fault = NO_FAULT, *, retry: int = 0, is_told: bool = True
    ) -> Ran:
        """Run a cell; once more where a rank had died before it, and it was not run."""
        plain = code
        if is_told:
            code = written(code, random.Random(f"{self._folder.name} {self._count}"))
            self.driven.story.append(code)
        ran = self.call(
            lambda: self.session.run(
                code, retry=retry, track=False, show=True, timeout_s=LONGEST_S
            ),
            fault,
            is_told=is_told,
        )
        if "so the cell was not run." in ran.text:
            return self.run(plain, fault, retry=retry, is_told=is_told)
        return ran

    def call(
        self, call: Callable[[], Any], fault: Fault = NO_FAULT, *, is_told: bool = True
    ) -> Ran:
        """Call the session while a fault may strike; what is shown and raised is kept."""
        ran, shown, began = Ran(), io.StringIO(), time.monotonic()
        try:
            with contextlib.redirect_stdout(shown), strikes(self.session, fault, self.flag):
                ran.result = call()
        except nbdist.NBDistError as error:
            ran.error = error
        except KeyboardInterrupt as error:
            # One that came when the cell was over is no outcome of it.
            ran.error = error if isinstance(error, Interrupted) or ran.result is None else None
        except Exception as error:
            self.find("a raw exception", f"{type(error).__name__}: {error}")
            ran.error = error
        ran.seconds = time.monotonic() - began
        said = shown.getvalue()
        if ran.error is not None:
            said += f"\n{type(ran.error).__name__}: {ran.error}"
        ran.text = sentences.plain(said)
        self.text += ran.text
        self.row.seconds += ran.seconds
        if ran.text.strip() and (is_told or ran.error is not None):
            self.driven.story.append("\n".join(f"# {line}" for line in ran.text.splitlines()))
        if ran.seconds > LONGEST_S:
            self.find("a hang", f"{ran.seconds:.0f} s")
        for line in sentences.raw(ran.text):
            self.find("a raw traceback", line)
        if not self.session.is_running or self.session.broken:
            self.find("a lost session", ran.text)
            raise Lost
        return ran

    @property
    def flag(self) -> str:
        """What begins the names of the act's files."""
        return str(self._folder / f"act{self._count}")

    def has_fired(self) -> bool:
        """Return whether the act's fault has struck."""
        return any(self._folder.glob(f"act{self._count}-*"))

    def ran_well(self, code: str) -> CellResult | None:
        """Run a cell that has no reason to fail."""
        ran = self.run(code)
        if ran.error is not None:
            self.find("an error without a fault", ran.text)
        return ran.result

    def find(self, kind: str, text: str) -> None:
        """Note that something is wrong."""
        self.row.outcome = "wrong"
        self.driven.findings.append(Finding(kind, text))
        self.driven.story.append(f"#!! {kind}: {text}")
