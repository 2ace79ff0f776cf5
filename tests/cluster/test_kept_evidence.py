"""`--keep`: what a left-out step was called with outlives ranks, and is replayed from disk."""

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist import Session
from tests.cluster.conftest import LONGEST_S, Kernel
from tests.cluster.test_replay import MAKE, PLAIN, run

DIE = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def train(session: Session, text: str = "ddp", **more: object) -> None:
    params = {"text": text, "planted": "nan"} | more
    session.run(MAKE + "train()", params=params, keep=True, timeout_s=4 * LONGEST_S)


def newest() -> Path:
    return max(Path(".nbdist/evidence").iterdir(), key=lambda folder: folder.stat().st_mtime)


@pytest.mark.parametrize(
    "text", ["zero3", *(pytest.param(text, marks=pytest.mark.slow) for text in ("ddp", "tp=2"))]
)
def test_a_step_is_replayed_alike_after_a_rank_was_killed(session: Session, text: str) -> None:
    train(session, text)
    before = str(session.replay())
    with pytest.raises(nbdist.RankError):
        session.run(DIE, "1", timeout_s=2 * LONGEST_S)
    with pytest.raises(nbdist.UsageError, match="Rank 1 has nothing of step 3 any more") as lost:
        session.replay()
    assert "--from last" in lost.value.do
    run(session, MAKE, text=text, planted="nan")
    *found, where = str(session.replay(saved="last")).splitlines()
    assert "\n".join(found) == before
    assert where == f"Kept in {newest().absolute()}, {where.rpartition(', ')[2]}"
    assert where.endswith(" kB a rank.")


def test_a_rank_that_is_killed_in_the_cell_leaves_what_it_has_kept(session: Session) -> None:
    code = f"{MAKE}train()\nif rank == 1:\n    {DIE}\ntrain()"
    params = {"text": "ddp", "planted": "nan"}
    with pytest.raises(nbdist.RankError):
        session.run(code, params=params, keep=True, timeout_s=4 * LONGEST_S)
    found = session.replay(saved="last")  # its new process has the other's model
    assert (found.step, found.ran, found.is_older) == (3, True, False)
    assert found.ranks[0].forwards[0].samples == (19,)
    assert str(found.ranks[0].forwards[0].module) == "0 (Log)"
    assert found.ranks[1].forwards[0].module is None


def test_what_is_no_folder_is_refused(session: Session) -> None:
    wrong: Any
    for wrong in ("", 3):
        with pytest.raises(nbdist.UsageError, match="saved is a folder"):
            session.replay(saved=wrong)


def test_it_can_be_read_by_its_owner_alone(session: Session) -> None:
    train(session)
    folder = newest()
    assert sorted(file.name for file in folder.iterdir()) == ["rank0.pt", "rank1.pt"]
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (folder.parent, folder, *folder.iterdir())]
    assert modes == [0o700, 0o700, 0o600, 0o600]


def test_without_keep_nothing_is_written(session: Session) -> None:
    before = len(list(Path(".nbdist").glob("evidence/*")))
    run(session, MAKE + "train()", text="ddp", planted="nan")
    assert len(list(Path(".nbdist").glob("evidence/*"))) == before


def test_a_rank_that_died_within_the_step_is_named(session: Session) -> None:
    train(session)
    (newest() / "rank1.pt").unlink()
    with pytest.raises(nbdist.UsageError, match=r"is not complete: .* nothing of rank 1"):
        session.replay(saved="last")


def test_another_model_and_another_layout_are_refused(session: Session) -> None:
    train(session)
    session.restart()  # the model that it is of is gone for certain
    run(session, MAKE, text="zero3", planted="nan")
    with pytest.raises(nbdist.UsageError, match="No model of ranks 0-1 is the one") as error:
        session.replay(saved=newest())
    assert "its layout was 'ddp'" in error.value.why


def test_what_is_damaged_is_refused_and_nothing_else_is_unpickled(session: Session) -> None:
    train(session)
    (newest() / "rank0.pt").write_bytes(b"cos\nsystem\n(S'touch harmed'\ntR.")
    with pytest.raises(nbdist.UsageError, match=r"rank0.pt cannot be read .*\(on rank 0\)"):
        session.replay(saved="last")
    assert not Path("harmed").exists()


def test_it_goes_after_a_week(session: Session) -> None:
    train(session)
    folder = newest()
    os.utime(folder, (time.time() - 7.1 * 86400,) * 2)
    with pytest.raises(nbdist.UsageError, match="No evidence is kept in") as error:
        session.replay(saved=folder.name)
    assert "7 days" in error.value.why
    assert not folder.exists()


@pytest.mark.slow
def test_a_new_cluster_replays_a_plain_loop_of_the_one_before(notebook: Kernel) -> None:
    code = PLAIN.replace("spread", "True")
    kept = notebook.cell(code.replace("first", "2"), "--keep")
    assert "for this account alone: %dist replay --from last." in kept.text
    before = notebook.run("%dist replay").text
    notebook.run("%dist stop")
    notebook.run("%dist start -n 2 --device cpu", timeout_s=2 * LONGEST_S)
    early = notebook.run("%dist replay --from last")
    assert early.error is not None
    assert "run the cell that builds it" in str(early.error)
    assert notebook.cell(code.replace("first", "9")).error is None
    found = notebook.run("%dist replay --from last").text
    assert found.startswith(before)
    assert "sample 1 of its batch" in found


def test_where_it_cannot_be_written_training_goes_on_and_that_is_said(notebook: Kernel) -> None:
    place = notebook.folder / ".nbdist" / "evidence"
    if place.exists():
        place.rename(place.with_name("before"))
    place.write_text("no folder")
    code = PLAIN.replace("spread", "True").replace("first", "2")
    ran = notebook.cell(code, "--keep")
    place.unlink()
    assert ran.error is None
    assert "is not on disk: FileExistsError" in ran.text
    assert "--from last" not in ran.text
    assert "sample 1 of its batch" in notebook.run("%dist replay").text
