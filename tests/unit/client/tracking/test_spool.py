"""A run on disk: what is written is what is read, whole or cut short."""

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import IO

import pytest

from nbdist.client.tracking.folder import make_private_folder, try_lock
from nbdist.client.tracking.series import Point
from nbdist.client.tracking.spool import (
    Batch,
    Begin,
    SpooledRun,
    SpoolState,
    SpoolWriter,
    forget_old,
    spooled_runs,
)

BEGIN = Begin(
    key="00000000000000000001-1-3", uri="sqlite:///x", experiment="nb", name="a", time_ms=5
)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return make_private_folder(tmp_path / ".nbdist") / "spool"


def test_what_is_written_is_read_in_order(spool: Path) -> None:
    writer = SpoolWriter(spool, BEGIN, {})
    writer.params({"lr": "1"})
    writer.points([Point(1, 1, {"loss": 0.1}), Point(2, 2, {"loss": float("nan")})])
    writer.file("cell.py", b"pass")
    writer.tags({"t": "v"})
    writer.end("FINISHED", 9)
    writer.close()
    run = SpooledRun(spool / BEGIN.key)
    assert run.begin() == BEGIN
    first = run.read(0)
    begin, params, *points = first.entries
    assert begin["op"] == "begin"  # type: ignore[index]
    assert params == {"op": "params", "values": {"lr": "1"}}
    assert [point.step for point in points] == [1, 2]  # type: ignore[union-attr]
    second = run.read(first.offset)
    assert second.entries == [{"op": "file", "name": "cell.py"}]
    third = run.read(second.offset)
    assert third.entries == [{"op": "tags", "values": {"t": "v"}}]
    last = run.read(third.offset)
    assert last.entries == [{"op": "end", "status": "FINISHED", "time_ms": 9}]
    assert last.offset == run.ops.stat().st_size


def test_a_board_is_kept_for_its_owner_alone_and_goes_with_its_run(spool: Path) -> None:
    writer = SpoolWriter(spool, BEGIN, {})
    run = SpooledRun(spool / BEGIN.key)
    assert run.board() is None
    writer.board(b"drawn from this")
    writer.end("FINISHED", 9)
    writer.close()
    run.drop_content()
    assert run.board() == b"drawn from this"
    [board] = [path for path in run.folder.iterdir() if "board" in path.name]
    assert stat.S_IMODE(board.stat().st_mode) == 0o600
    run.save(SpoolState(is_done=True))
    for number in range(2, 502):
        (spool / f"{number:020d}-1-3").mkdir()
    forget_old(spool.parent)
    assert not run.folder.exists()


def points_of(batch: Batch) -> list[Point]:
    return [entry for entry in batch.entries if isinstance(entry, Point)]


def test_a_batch_holds_no_more_points_than_mlflow_takes(spool: Path) -> None:
    writer = SpoolWriter(spool, BEGIN, {})
    writer.points(Point(n, n, {"a": 1.0, "b": 2.0}) for n in range(7))
    writer.close()
    run = SpooledRun(spool / BEGIN.key)
    batch = run.read(0, most_points=6)
    assert len(points_of(batch)) == 3
    assert [p.step for p in points_of(run.read(batch.offset, most_points=100))] == [3, 4, 5, 6]


def test_one_wide_row_travels_whatever_its_width(spool: Path) -> None:
    writer = SpoolWriter(spool, BEGIN, {})
    writer.points([Point(1, 1, {f"k{i}": 0.0 for i in range(50)})])
    writer.close()
    run = SpooledRun(spool / BEGIN.key)
    begin = run.read(0, most_points=10)
    assert len(points_of(run.read(begin.offset, most_points=10))) == 1


def test_a_line_that_a_crash_cut_short_is_left_for_later(spool: Path) -> None:
    writer = SpoolWriter(spool, BEGIN, {})
    writer.points([Point(1, 1, {"loss": 0.1})])
    writer.close()
    run = SpooledRun(spool / BEGIN.key)
    with run.ops.open("ab") as file:
        file.write(b'[2,2,{"lo')
    batch = run.read(0)
    assert len(points_of(batch)) == 1
    assert run.read(batch.offset) == run.read(batch.offset)
    assert run.read(batch.offset).offset == batch.offset


def test_a_damaged_line_is_counted_and_the_rest_is_read(spool: Path) -> None:
    writer = SpoolWriter(spool, BEGIN, {})
    writer.close()
    run = SpooledRun(spool / BEGIN.key)
    with run.ops.open("ab") as file:
        file.write(b'\x00\x00garbage\n[1,2]\n[3,3,{"loss":1.5}]\n')
    batch = run.read(0)
    assert batch.damaged == 2
    assert points_of(batch) == [Point(3, 3, {"loss": 1.5})]


def test_a_run_belongs_to_its_kernel_until_that_closes_it(spool: Path) -> None:
    writer = SpoolWriter(spool, BEGIN, {})
    run = SpooledRun(spool / BEGIN.key)
    assert run.is_owned()
    writer.close()
    assert not run.is_owned()


def test_a_run_that_cannot_be_begun_leaves_nothing(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_old: Path, _new: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="No space"):
        SpoolWriter(spool, BEGIN, {})
    assert list(spool.iterdir()) == []


def test_what_a_kernel_left_that_was_killed_as_a_run_began_goes_unless_it_lives(
    spool: Path,
) -> None:
    left, slow, new = (spool / f".{n:020d}-1-3" for n in (1, 2, 3))
    for draft in (left, slow, new):
        draft.mkdir(parents=True)
        (draft / "owner.lock").touch()
    for draft in (left, slow):
        os.utime(draft, (0, 0))
    with try_lock(slow / "owner.lock"):
        forget_old(spool.parent)
    assert sorted(spool.iterdir()) == [slow, new]


def test_one_who_asks_whether_a_run_is_owned_is_not_taken_for_its_owner(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SpoolWriter(spool, BEGIN, {}).close()
    run, flock = SpooledRun(spool / BEGIN.key), fcntl.flock

    def lock_while_another_asks(file: IO[bytes], how: int) -> None:
        flock(file, how)
        monkeypatch.undo()
        assert not run.is_owned()

    monkeypatch.setattr(fcntl, "flock", lock_while_another_asks)
    assert not run.is_owned()


def test_state_survives_and_an_unknown_field_is_ignored(spool: Path) -> None:
    SpoolWriter(spool, BEGIN, {}).close()
    run = SpooledRun(spool / BEGIN.key)
    assert run.state() == SpoolState()
    run.save(SpoolState(offset=7, run_id="r", is_done=True))
    path = run.folder / "state.json"
    path.write_text(path.read_text().replace("{", '{"from_the_future": 1, ', 1))
    assert run.state() == SpoolState(offset=7, run_id="r", is_done=True)


def test_nobody_else_may_look_inside(spool: Path) -> None:
    writer = SpoolWriter(spool, BEGIN, {})
    writer.file("cell.py", b"pass")
    writer.summary({})
    writer.close()
    home = spool.parent
    assert (home / ".gitignore").read_text() == "*\n"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    for path in spool.rglob("*"):
        allowed = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == allowed, path


def test_runs_are_listed_newest_first(spool: Path) -> None:
    for n in (2, 1, 3):
        begin = Begin(f"{n:020d}-1-1", "sqlite:///x", "nb", "a", n)
        SpoolWriter(spool, begin, {}).close()
    assert [run.begin().time_ms for run in spooled_runs(spool.parent)] == [3, 2, 1]  # type: ignore[union-attr]
