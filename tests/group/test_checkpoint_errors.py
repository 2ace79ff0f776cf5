"""What is said where a checkpoint cannot be written or restored, and that nothing has changed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.group import checkpoint_trouble
from tests.group.engines import Cluster, cluster
from tests.group.parity_cases import Case

CASE = Case(2, "zero3", model="dropping")
FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "training.pt")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


@pytest.fixture(scope="module")
def saved(ranks: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    ranks.run(checkpoint_trouble.save_at, str(folder), CASE, [2, 4])
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def restored(ranks: Cluster, folder: object, **how: Any) -> str:
    """Return what restoring says: the same on all ranks, where nothing has changed."""
    told = ranks.run(checkpoint_trouble.error_of_restore, str(folder), CASE, how)
    assert all(one["is_unchanged"] for one in told)
    return the_same(told, folder)


def saved_in(ranks: Cluster, folder: object, **how: Any) -> str:
    """Return what saving says: the same on all ranks."""
    return the_same(ranks.run(checkpoint_trouble.error_of_save, str(folder), CASE, how), folder)


def the_same(told: list[dict[str, Any]], folder: object) -> str:
    texts = {one["error"] for one in told}
    assert len(texts) == 1
    return str(texts.pop()).replace(str(folder), "RUN")


# ---- Damaged files ------------------------------------------------------------------------------


def cut(file: Path) -> str:
    size = file.stat().st_size
    os.truncate(file, size - 3)
    return f"{file.name} has {size - 3:,} of {size:,} bytes"


def flip(file: Path) -> str:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return f"{file.name} has another checksum than when it was written"


def remove(file: Path) -> str:
    file.unlink()
    return f"{file.name} is missing"


@pytest.mark.parametrize(
    ("damage", "name"), [(cut, FILES[1]), (flip, FILES[0]), *((remove, file) for file in FILES[1:])]
)
def test_a_damaged_file_is_named_and_the_last_good_checkpoint_too(
    ranks: Cluster, run: Path, damage: Callable[[Path], str], name: str
) -> None:
    told = damage(run / "step-00000004" / name)
    said = restored(ranks, run).replace(" (on rank 0)", "").replace(" (on rank 1)", "")
    assert said == (
        f"CheckpointError: RUN/step-00000004 is damaged, and nothing was restored from it: {told}."
        "\nDo:  restore the last good one before it: nbdist.restore(which=2)"
    )


@pytest.mark.slow
def test_the_named_checkpoint_is_the_training_that_it_was(ranks: Cluster, run: Path) -> None:
    flip(run / "step-00000004" / "__0_0.distcp")
    for told in ranks.run(checkpoint_trouble.resumed_like, str(run), CASE, 2):
        assert told["resumed"] == told["unbroken"]


def test_a_damaged_commit_is_not_passed_over(ranks: Cluster, run: Path) -> None:
    (run / "step-00000004" / "checkpoint.json").write_text("{")
    assert restored(ranks, run) == (
        "CheckpointError: RUN/step-00000004 is damaged, and nothing was restored from it: "
        "checkpoint.json is not what was written.\n"
        "Do:  restore the last good one before it: nbdist.restore(which=2)"
    )


# ---- What does not fit --------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused(
    ranks: Cluster, tmp_path: Path, saved: Path
) -> None:
    other = Case(2, "zero3", model="conv")
    told = ranks.run(checkpoint_trouble.error_of_restore, str(saved), other, {})
    assert all(one["is_unchanged"] for one in told)
    said = the_same(told, saved)
    assert said.startswith(
        "CheckpointError: RUN/step-00000004 does not fit the training here, and nothing was "
        "restored from it: it lacks "
    )
    assert 'nbdist.restore(only="model")' not in said


@pytest.mark.slow
def test_other_shapes_and_more_layers_are_named(ranks: Cluster, saved: Path) -> None:
    for change, words in {
        "wider": "head.weight is (36, 32) there, (37, 32) here",
        "less": "head.weight, which the model here has not",
    }.items():
        told = ranks.run(checkpoint_trouble.error_of_restore, str(saved), CASE, {}, change)
        assert all(one["is_unchanged"] for one in told)
        assert words in the_same(told, saved), change


def test_another_optimizer_is_refused_but_not_for_the_model_alone(
    ranks: Cluster, saved: Path
) -> None:
    told = ranks.run(checkpoint_trouble.error_of_restore, str(saved), CASE, {}, "sgd")
    assert all(one["is_unchanged"] for one in told)
    assert "it was trained by AdamW, and is to be by SGD" in the_same(told, saved)
    for one in ranks.run(
        checkpoint_trouble.error_of_restore, str(saved), CASE, {"only": "model"}, "sgd"
    ):
        assert one["error"] == "nothing was raised"


def test_a_state_that_a_kept_object_refuses_leaves_all_as_it_was(
    ranks: Cluster, saved: Path
) -> None:
    told = ranks.run(checkpoint_trouble.error_of_restore, str(saved), CASE, {}, "refusing")
    assert all(one["is_unchanged"] for one in told)
    assert the_same(told, saved) == (
        "CheckpointError: A Refusing cannot load what was saved of it, and nothing was restored.\n"
        "Why: ValueError: this object refuses its state\n"
        'Do:  change it, or take the weights alone: nbdist.restore(only="model")'
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_one_rank_cannot_read_ends_the_save_of_all(
    ranks: Cluster, run: Path, rank: int
) -> None:
    told = ranks.run(checkpoint_trouble.error_of_unreadable, str(run), CASE, rank)
    assert the_same(told, run) == (
        f"CheckpointError: What is saved beside tensors could not be read (on rank {rank}).\n"
        "Why: ValueError: this object tells nothing\n"
        "Do:  its state_dict is to return what torch.save can write"
    )
    assert sorted(path.name for path in run.iterdir()) == [
        "latest",
        "step-00000002",
        "step-00000004",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_for_its_copies_has_nobody_wait(
    ranks: Cluster, run: Path, rank: int
) -> None:
    told = ranks.run(checkpoint_trouble.error_of_no_memory, str(run), CASE, rank)
    assert told[rank]["error"] == "MemoryError: no memory for copies"
    assert "Why: MemoryError: no memory for copies" in told[1 - rank]["error"]
    assert saved_in(ranks, run) == "nothing was raised"
    assert sorted(path.name for path in run.iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000002",
        "step-00000004",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_that_is_interrupted_leaves_no_checkpoint_of_what_changes_then(
    ranks: Cluster, tmp_path: Path, rank: int
) -> None:
    told = ranks.run(checkpoint_trouble.error_of_interrupt, str(tmp_path / "run"), CASE, rank)
    assert told[rank]["error"] == "interrupted"
    assert told[1 - rank]["error"].startswith(
        "CheckpointError: The checkpoint was not written: waiting for it was interrupted"
    )
    assert told[0]["count"] == []


def test_a_newer_format_is_refused(ranks: Cluster, run: Path) -> None:
    (run / "step-00000004" / "checkpoint.json").write_text('{"format": 2, "nbdist": "9.0"}')
    assert restored(ranks, run) == (
        "CheckpointError: RUN/step-00000004 was written by nbdist 9.0, in a format that this "
        "version cannot read.\nDo:  update nbdist where the ranks run"
    )


def test_where_there_is_no_training_nothing_is_saved(ranks: Cluster, tmp_path: Path) -> None:
    said = set(ranks.run(checkpoint_trouble.error_without_a_training, str(tmp_path / "run")))
    (text,) = said
    assert text.startswith("CheckpointError: There is no training here: no optimizer trains a mod")
    assert not list(tmp_path.iterdir())


# ---- Words --------------------------------------------------------------------------------------


def test_what_is_not_there_is_said_with_what_is(
    ranks: Cluster, saved: Path, tmp_path: Path
) -> None:
    assert restored(ranks, saved, which=7) == (
        "CheckpointError: RUN has no checkpoint of step 7.\nDo:  it has those of step 2, 4"
    )
    assert "There is no checkpoint in RUN" in restored(ranks, tmp_path / "none")
    assert restored(ranks, tmp_path / "none", missing_ok=True) == "nothing was raised"
    assert "No checkpoint in RUN was saved with a metric" in restored(ranks, saved, which="best")


def test_arguments_that_make_no_sense_are_refused(
    ranks: Cluster, saved: Path, tmp_path: Path
) -> None:
    assert restored(ranks, saved, which="bset").startswith(
        'UsageError: nbdist.restore takes "latest", "best" or a step, not \'bset\''
    )
    assert restored(ranks, saved, only="optimizer") == (
        'UsageError: nbdist.restore takes only="model", or a list of models and optimizers or the '
        "names of their variables, not only='optimizer'."
    )
    for keep in (0, -1, True, 2.5):
        assert saved_in(ranks, tmp_path / "run", keep=keep) == (
            f"UsageError: nbdist.save keeps 1 checkpoint or more, not {keep!r}; None keeps all."
        )
    assert saved_in(ranks, "run ").startswith("UsageError: nbdist.save takes a name")
    assert not list(tmp_path.iterdir())


def test_what_ranks_ask_for_differently_is_refused_by_all(ranks: Cluster, saved: Path) -> None:
    for rank, only in enumerate((None, "model")):
        ranks.engines[rank].post(
            checkpoint_trouble.error_of_restore, str(saved), CASE, {"only": only}
        )
    told = ranks.results()
    assert all(one["is_unchanged"] for one in told)
    assert the_same(told, saved) == (
        "UsageError: Ranks call nbdist.restore differently: rank 0 with name='RUN', "
        "which='latest', only=None, rank 1 with name='RUN', which='latest', only='model'.\n"
        "Do:  call it on all ranks with the same arguments"
    )


def test_what_ranks_save_in_different_places_is_refused_by_all(
    ranks: Cluster, tmp_path: Path
) -> None:
    for rank in (0, 1):
        ranks.engines[rank].post(
            checkpoint_trouble.error_of_save, str(tmp_path / f"run-{rank}"), CASE, {}
        )
    said = the_same(ranks.results(), tmp_path)
    assert said.startswith("UsageError: Ranks call nbdist.save differently: rank 0 with RUN/run-0")
    assert not list(tmp_path.iterdir())


# ---- Places -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [restored, saved_in])
def test_urls_that_nothing_opens_say_what_to_install(
    ranks: Cluster, what: Callable[..., str]
) -> None:
    said = what(ranks, "nowhere://bucket/run")
    assert said == (
        "CheckpointError: RUN cannot be opened.\nWhy: Protocol not known: nowhere\n"
        "Do:  install fsspec's package for it (s3fs, gcsfs, adlfs) where the ranks run"
    )


def test_a_password_in_a_url_is_not_repeated(ranks: Cluster) -> None:
    said = saved_in(ranks, "sftp://me:hidden@127.0.0.1/run")
    assert said.startswith("UsageError: A URL with a password")
    assert "hidden" not in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "file", ["__0_0.distcp", "__1_0.distcp", "training.pt", "checkpoint.json", "latest"]
)
def test_a_disk_that_fills_up_while_writing_leaves_the_checkpoint_before(
    ranks: Cluster, run: Path, file: str
) -> None:
    """The kernel says so of every write to /dev/full, to which this file leads."""
    told = ranks.run(checkpoint_trouble.error_of_full_disk, str(run), CASE, file)
    said = the_same(told, run)
    assert said.startswith("CheckpointError: The disk is full: RUN/step-00000001 could not be wri")
    assert said.endswith("Do:  make room, or give nbdist.save another folder")
    assert sorted(path.name for path in run.iterdir() if path.suffix != ".tmp") == [
        "latest",
        "step-00000002",
        "step-00000004",
    ]
    assert (run / "latest").read_text() == "step-00000004"
    assert saved_in(ranks, run) == "nothing was raised"
    assert (run / "latest").read_text() == "step-00000001"


def test_a_disk_that_is_full_is_told_of(ranks: Cluster, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=200k"):
        said = saved_in(ranks, tmp_path / "small")
    assert said.startswith("CheckpointError: A checkpoint takes ")
    assert "left.\nDo:  make room" in said


def test_a_folder_without_rights_is_told_of(ranks: Cluster, run: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        with mounted(tmp_path / "fixed", "ro"):
            said = saved_in(ranks, tmp_path / "fixed")
        assert "RUN may not be written or read: Read-only file system." in said
        return
    run.chmod(0o500)
    try:
        assert "RUN may not be written or read: Permission denied" in saved_in(ranks, run)
    finally:
        run.chmod(0o700)


def mounted(folder: Path, options: str) -> Any:
    """Mount a file system in memory, or skip the test: few machines let root do so."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root mounts file systems")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "nbdist-test", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    return _Mounted(folder)


class _Mounted:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self._folder)], check=True)


def test_a_file_in_the_folders_place_is_told_of(ranks: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for what in (restored, saved_in):
        assert what(ranks, tmp_path / "file").startswith("CheckpointError: ")


def test_afterwards_saving_and_restoring_work(ranks: Cluster, tmp_path: Path) -> None:
    assert saved_in(ranks, tmp_path / "run") == "nothing was raised"
    resumed = ranks.run(checkpoint_trouble.restore_and_go_on, str(tmp_path / "run"), CASE, 1, {})
    assert [one["step"] for one in resumed] == [1, 1]
