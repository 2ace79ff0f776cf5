"""What a cell says of ranks that have not stopped yet, with a slot that remembers its text."""

import time
from types import SimpleNamespace
from typing import Any

from nbdist.client.commentary import Commentary
from nbdist.client.doing import Doing, Gone, Wait
from nbdist.client.watch import Round

WAITS = Doing("waiting", Wait("all_reduce"))
COMPUTES = Doing("computing", line=2)


class Note:
    """A live text of which only the note counts; drawn when a test says so."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.is_drawn = False

    def note(self, note: str | None) -> None:
        self.text = note

    def has_shown(self, note: str) -> bool:
        return self.is_drawn


def commentary() -> tuple[Commentary, Note]:
    note: Any = Note()
    cluster: Any = SimpleNamespace(options=SimpleNamespace(quiet_s=10.0))
    return Commentary(note, cluster), note


def attend(said: Commentary, doing: dict[int, Doing], **more: Any) -> None:
    watch: Any = SimpleNamespace(last=Round(said=doing), moved_at=0.0, silent=lambda now: [])
    times = {"quiet_since": None, "failed_at": None, "interrupted_at": None, "culprits": {}}
    said.attend(watch, sorted(doing), {}, **{**times, **more})


def test_a_second_interrupt_kills_only_after_its_warning_was_drawn() -> None:
    said, note = commentary()
    attend(said, {0: COMPUTES}, interrupted_at=time.monotonic())
    assert note.text is None
    assert not said.has_warned
    attend(said, {0: COMPUTES}, interrupted_at=time.monotonic() - 60)
    assert note.text is not None
    assert "interrupt again to kill" in note.text
    assert not said.has_warned
    note.is_drawn = True
    assert said.has_warned


def test_ranks_that_wait_do_not_still_compute() -> None:
    said, note = commentary()
    failed = {"failed_at": time.monotonic() - 60, "culprits": {1: Gone("died", "SIGKILL")}}
    attend(said, {0: WAITS, 2: COMPUTES}, **failed)
    assert note.text is not None
    assert note.text.startswith("rank 1 died (SIGKILL); rank 2 still computes")
    attend(said, {0: WAITS, 2: WAITS}, **failed)
    assert note.text is None


def test_when_the_cell_has_ended_nothing_is_said_of_running_ranks() -> None:
    said, note = commentary()
    attend(said, {0: COMPUTES}, interrupted_at=time.monotonic() - 60)
    said.end()
    assert note.text is None
