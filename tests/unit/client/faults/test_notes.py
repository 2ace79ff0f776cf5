"""What a cell says of ranks that have not stopped yet, with a slot that remembers its text."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.client.faults.notes import CellNotes, deaf
from nbdist.client.faults.poll import Round
from nbdist.client.faults.rank_state import Inactive, RankState, Wait
from tests.unit.fakes import FakeCluster

WAITS = RankState("waiting", Wait("all_reduce"))
COMPUTES = RankState("computing", line=2)


class Note:
    """A live text of which only the note counts; drawn when a test says so."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.is_drawn = False
        self.told: list[str] = []

    def note(self, note: str | None) -> None:
        self.text = note

    def tell(self, line: str) -> None:
        self.told.append(line)

    def has_shown(self, note: str) -> bool:
        return self.is_drawn


def commentary() -> tuple[CellNotes, Note]:
    note: Any = Note()
    return CellNotes(note, FakeCluster()), note


def attend(said: CellNotes, doing: dict[int, RankState], **more: Any) -> None:
    now = time.monotonic()
    last = Round(began=now, said=doing)
    watch: Any = SimpleNamespace(last=last, moved_at=0.0, silent=lambda now: [])
    times = dict.fromkeys(("quiet_since", "failed_at", "interrupted_at", "cut_at"))
    times |= {"culprits": {}}
    said.attend(watch, sorted(doing), {}, **{**times, **more})


def test_a_second_interrupt_kills_only_after_its_warning_was_drawn() -> None:
    said, note = commentary()
    attend(said, {0: COMPUTES}, interrupted_at=time.monotonic())
    assert note.text is None
    assert not said.named
    attend(said, {0: COMPUTES}, interrupted_at=time.monotonic() - 60)
    assert note.text is not None
    assert "interrupt again to kill" in note.text
    assert not said.named
    note.is_drawn = True
    assert said.named == {0}


def test_ranks_that_only_wait_are_not_named_and_so_not_killed() -> None:
    said, note = commentary()
    note.is_drawn = True
    at = time.monotonic() - 4
    attend(said, {0: WAITS, 1: COMPUTES}, interrupted_at=at, cut_at=at)
    assert note.text is not None
    assert note.text.startswith("Rank 1 is still busy")
    attend(said, {0: COMPUTES, 1: COMPUTES}, interrupted_at=at, cut_at=at)  # 0 was freed
    assert said.named == {1}


@pytest.mark.parametrize(
    ("doing", "waited", "for_s", "freed_for_s", "expected"),
    [
        (COMPUTES, False, 1.0, 0.5, False),  # it has not had its time
        (COMPUTES, False, 2.0, 1.0, True),
        (WAITS, True, 4.0, 3.0, False),  # it is being freed
        (COMPUTES, True, 4.0, 3.0, False),  # it was freed, and is on its way
        (RankState("computing"), False, 4.0, 3.0, False),  # it has left the cell's code
        (None, False, 4.0, 3.0, False),  # it has not answered
        (None, False, 9.0, 8.0, True),
        (WAITS, True, 9.0, 8.0, True),
        (None, False, 9.0, 0.0, False),  # nobody has freed it so far
    ],
)
def test_a_rank_is_deaf_when_it_says_that_it_computes_or_freeing_it_should_be_over(
    doing: RankState | None, waited: bool, for_s: float, freed_for_s: float, expected: bool
) -> None:
    said = {} if doing is None else {0: doing}
    found = deaf([0], said, {0} if waited else set(), for_s=for_s, freed_for_s=freed_for_s)
    assert found == ([0] if expected else [])


def test_where_nothing_is_live_a_wait_is_told_and_again_when_it_has_lasted_twice_as_long() -> None:
    said, note = commentary()
    for ago in (9, 11, 15, 21, 23):
        attend(said, {0: WAITS, 1: COMPUTES}, quiet_since=time.monotonic() - ago)
    assert [line.partition(" s:")[0] for line in note.told] == [
        "No progress for 11",
        "No progress for 23",
    ]


def test_where_nothing_is_live_another_wait_is_told_as_the_first_one_was() -> None:
    said, note = commentary()
    for ago in (11, 12, 1, 12):
        attend(said, {0: WAITS, 1: COMPUTES}, quiet_since=time.monotonic() - ago)
    assert [line.partition(" s:")[0] for line in note.told] == [
        "No progress for 11",
        "No progress for 12",
    ]


def test_where_nothing_is_live_a_deaf_rank_is_named_once() -> None:
    said, note = commentary()
    for _ in range(3):
        attend(said, {0: WAITS, 1: COMPUTES}, interrupted_at=time.monotonic() - 4)
    (line,) = note.told
    assert line.startswith("Rank 1 is still busy")


def test_ranks_that_wait_do_not_still_compute() -> None:
    said, note = commentary()
    failed = {"failed_at": time.monotonic() - 60, "culprits": {1: Inactive("died", "SIGKILL")}}
    attend(said, {0: WAITS, 2: COMPUTES}, **failed)
    assert note.text is not None
    assert note.text.startswith("rank 1 died (SIGKILL); rank 2 still computes")
    attend(said, {0: WAITS, 2: WAITS}, **failed)
    assert note.text is None


def test_a_message_that_still_comes_after_a_failure_is_named_until_the_links_are_cut() -> None:
    said, note = commentary()
    at = time.monotonic() - 60
    receives = RankState("waiting", Wait("broadcast", seconds=60.0), quiet_s=0.1)
    failed = {"failed_at": at, "culprits": {1: Inactive("failed", "ValueError")}}
    attend(said, {0: receives}, **failed)
    assert note.text is not None
    assert note.text.startswith("rank 1 failed (ValueError); rank 0 still sends or receives in")
    attend(said, {0: receives}, **failed, cut_at=at + 1)
    assert note.text is None


def test_when_the_cell_has_ended_nothing_is_said_of_running_ranks() -> None:
    said, note = commentary()
    attend(said, {0: COMPUTES}, interrupted_at=time.monotonic() - 60)
    said.end()
    assert note.text is None


def test_a_cell_that_is_paused_says_how_it_goes_on_until_a_rank_is_heard_of_again() -> None:
    said, note = commentary()
    paused = {0: RankState("paused", step=120), 1: RankState("paused", step=120)}
    attend(said, paused, quiet_since=time.monotonic() - 60)
    assert note.text is not None
    assert note.text.startswith("Paused after step 120. It goes on by %dist continue")
    attend(said, paused, quiet_since=time.monotonic())
    assert note.text is None
