"""The journal of what a rank was given: run lengths, cuts, and the file that outlives it."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.engine.data.batches import Shard, part
from nbdist.engine.data.position import journal
from nbdist.engine.data.position.journal import (
    FORGOTTEN,
    GIVEN,
    LEFT_OUT,
    OVER,
    JournalEntry,
    SampleJournal,
)

SHARD = Shard(1, 2)


def give(to: SampleJournal, first: int, batches: int, loader: int = 7, size: int = 10) -> None:
    """Have `loader` give batches of `size`, number `first` and those after it, of epoch 0."""
    for serial in range(first, first + batches):
        whole = range(serial * size, (serial + 1) * size)
        to.give(loader, serial, 0, whole, part(whole.start, whole.stop, SHARD), SHARD)


def test_batches_in_a_row_are_one_entry() -> None:
    made = SampleJournal()
    give(made, 0, 5)
    assert made.entries() == [JournalEntry(7, GIVEN, 0, 0, 0, 10, 5, 5, 5, 1, 2)]


def test_loops_in_turn_over_two_loaders_have_an_entry_each() -> None:
    made = SampleJournal()
    for serial in range(4):
        give(made, serial, 1, loader=7)
        give(made, serial, 1, loader=8)
    assert [(entry.loader, entry.batches) for entry in made.entries()] == [(7, 4), (8, 4)]


def test_a_cut_forgets_what_was_given_beyond_it_and_no_other_loaders() -> None:
    made = SampleJournal()
    give(made, 0, 3)
    give(made, 0, 3, loader=8)
    made.add(JournalEntry(7, LEFT_OUT, 3, 0, 30, 2))
    made.add(JournalEntry(7, OVER, 3, 0, 32, 0))
    made.cut(7, 3)
    assert len(made.entries()) == 4  # all of it had happened by then
    made.cut(7, 2)
    assert [(e.loader, e.kind, e.batches) for e in made.entries()] == [(7, GIVEN, 2), (8, GIVEN, 3)]
    give(made, 2, 1)
    assert made.entries()[0].batches == 3


@pytest.mark.parametrize("cut", [None, 1])
def test_a_file_has_what_a_killed_process_was_given(tmp_path: Path, cut: int | None) -> None:
    path = tmp_path / "journal-x-0"
    code = f"""if True:
        import os
        from pathlib import Path
        from nbdist.engine.data.position.journal import SampleJournal
        from tests.unit.engine.data.test_journal import give
        made = SampleJournal()
        made.keep_in(Path({str(path)!r}), is_new=True)
        give(made, 0, 3)
        give(made, 0, 2, loader=8)
        os.kill(os.getpid(), 9)
    """
    ended = subprocess.run([sys.executable, "-c", code], cwd=Path.cwd(), env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    successor = SampleJournal()
    successor.keep_in(path, is_new=False)
    if cut is not None:
        successor.cut(7, cut)
    give(successor, cut or 3, 1)
    batches = [(entry.loader, entry.serial, entry.batches) for entry in journal.read(path)]
    assert batches == ([(7, 0, 4), (8, 0, 2)] if cut is None else [(7, 0, 2), (8, 0, 2)])


def test_another_cluster_begins_with_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "journal-x-0"
    before, after = SampleJournal(), SampleJournal()
    before.keep_in(path, is_new=True)
    give(before, 0, 3)
    after.keep_in(path, is_new=True)
    assert after.entries() == journal.read(path) == []


def test_what_ranks_that_left_were_given_is_taken_over_with_their_files(tmp_path: Path) -> None:
    stays = SampleJournal()
    stays.keep_in(tmp_path / "journal-x-0", is_new=True)
    for rank in (1, 2):
        left = SampleJournal()
        left.keep_in(tmp_path / f"journal-x-{rank}", is_new=True)
        give(left, 0, rank)
    stays.take_over(tmp_path, "journal-x-{}", 2)
    assert [entry.batches for entry in stays.entries()] == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal-x-0", "journal-x-1"]


def test_a_full_journal_forgets_its_oldest_epochs_and_says_which(tmp_path: Path) -> None:
    path = tmp_path / "journal-x-0"
    made = SampleJournal()
    made.keep_in(path, is_new=True)
    for epoch in range(journal.MAX_ENTRIES + 1):
        made.give(7, epoch, epoch, range(10), range(5), SHARD)
    entries = made.entries()
    assert len(entries) <= journal.MAX_ENTRIES
    marks = [entry for entry in entries if entry.kind == FORGOTTEN]
    assert [(entry.loader, entry.epoch) for entry in marks] == [(7, journal.MAX_ENTRIES // 4 - 1)]
    assert journal.read(path) == entries


def test_a_file_that_is_no_journal_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal-x-0"
    path.write_bytes(b"x" * 100)
    assert journal.read(path) == []
