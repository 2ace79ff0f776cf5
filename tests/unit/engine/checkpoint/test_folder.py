"""Which checkpoints count, which are deleted, and what an interrupted save leaves."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.engine.checkpoint import folder, manifest
from nbdist.engine.checkpoint.folder import COMMIT, WRITING, CheckpointFolder
from nbdist.engine.checkpoint.manifest import Manifest
from nbdist.shared.errors import CheckpointError, UsageError

NOBODY = 2**22 + 1  # a pid that no Linux and no macOS gives


def commit(step: int, saved_at: float | None = None, metric: float | None = None) -> Manifest:
    when = float(step) if saved_at is None else saved_at
    return Manifest(step, when, 2, {"GPT": "zero3"}, {}, metric)


def saved(place: CheckpointFolder, step: int, metric: float | None = None) -> str:
    """Save a checkpoint of one file, and return its name."""
    name = manifest.name_of(step, place.names())
    place.begin(name, 10)
    files = {"__0_0.distcp": place.write(name, "__0_0.distcp", b"tensors")}
    place.commit(name, Manifest(step, float(step), 1, {"GPT": "ddp"}, files, metric))
    return name


@pytest.fixture
def place(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(str(tmp_path / "run"))


def in_words(error: BaseException) -> str:
    return str(folder.reason(error, "/data/run"))


# ---- Names --------------------------------------------------------------------------------------


def test_folders_are_named_by_step_and_how_often_it_was_saved() -> None:
    taken: list[str] = []
    for expected in ("step-00000100", "step-00000100-2", "step-00000100-3"):
        assert manifest.name_of(100, taken) == expected
        taken.append(expected)
    assert [manifest.order(name) for name in taken] == [(100, 1), (100, 2), (100, 3)]
    assert manifest.order(manifest.name_of(123_456_789, [])) == (123_456_789, 1)


@pytest.mark.parametrize("name", ["latest", "step-1", "step-00000100.tmp", "step-00000100-x", ""])
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert manifest.order(name) is None


# ---- What stays ---------------------------------------------------------------------------------


def test_the_newest_stay_and_the_best() -> None:
    there = {f"step-0000000{n}": commit(n) for n in range(1, 6)}
    gone = manifest.to_delete(there, 2, best="step-00000001", newest="step-00000005")
    assert gone == ["step-00000002", "step-00000003"]
    assert manifest.to_delete(there, None, None, "step-00000005") == []


def test_what_was_saved_last_is_the_newest_also_where_training_has_gone_back() -> None:
    there = {
        "step-00000008": commit(8, saved_at=1.0),
        "step-00000009": commit(9, saved_at=2.0),
        "step-00000003": commit(3, saved_at=3.0),
    }
    assert manifest.to_delete(there, 1, None, "step-00000003") == ["step-00000008", "step-00000009"]


def test_what_a_newer_version_has_written_is_never_deleted() -> None:
    newer = Manifest(0, 0.0, 0, {}, {}, format=manifest.FORMAT + 1)
    there = {"step-00000001": newer, "step-00000002": commit(2), "step-00000003": commit(3)}
    assert manifest.to_delete(there, 1, None, "step-00000003") == ["step-00000002"]


def test_the_best_has_the_lowest_metric_and_is_the_newest_of_several() -> None:
    there = {
        "a": commit(1, metric=0.5),
        "b": commit(2, metric=0.25),
        "c": commit(3, metric=0.25),
        "d": commit(4),
        "e": commit(5, metric=float("nan")),
    }
    assert manifest.best_of(there) == "c"
    assert manifest.best_of({"d": commit(4), "e": commit(5, metric=float("nan"))}) is None


# ---- A commit -----------------------------------------------------------------------------------


def test_a_commit_is_read_as_it_was_written() -> None:
    written = Manifest(7, 1.5, 2, {"GPT": "zero3"}, {"a": (3, 9), "b": (4, 1)}, 0.1, "0.1", "2.13")
    assert Manifest.from_json(written.to_json()) == written
    assert written.nbytes == 7


def test_no_bit_of_a_commit_may_differ() -> None:
    text = Manifest(7, 1.5, 2, {"GPT": "zero3"}, {"a": (3, 9)}).to_json().encode()
    for place in range(len(text)):
        for bit in (1, 16):
            other = bytes([*text[:place], text[place] ^ bit, *text[place + 1 :]])
            try:
                read = Manifest.from_json(other)
            except (ValueError, KeyError, TypeError):
                continue
            # White space, or a format that is then unknown.
            assert read.format != manifest.FORMAT or read.to_json().encode() == text


def test_of_a_newer_format_only_the_version_is_known() -> None:
    told = {"format": manifest.FORMAT + 1, "nbdist": "9.0", "stripes": 3}
    read = Manifest.from_json(json.dumps(told))
    assert (read.format, read.nbdist, read.files) == (manifest.FORMAT + 1, "9.0", {})


# ---- A place ------------------------------------------------------------------------------------


def test_a_folder_counts_from_its_commit_on(place: CheckpointFolder, tmp_path: Path) -> None:
    place.begin("step-00000001", 10)
    assert (place.names(), place.committed(), place.pointer("latest")) == (
        ["step-00000001"],
        {},
        None,
    )
    place.commit("step-00000001", commit(1))
    assert list(place.committed()) == ["step-00000001"]
    assert place.pointer("latest") == "step-00000001"
    assert sorted(os.listdir(tmp_path / "run" / "step-00000001")) == [COMMIT]


def test_folders_are_the_owners_own(place: CheckpointFolder) -> None:
    place.begin("step-00000001", 10)
    assert os.stat(place.folder("step-00000001")).st_mode & 0o077 == 0


def test_a_checkpoint_for_which_there_is_no_room_is_not_begun(place: CheckpointFolder) -> None:
    with pytest.raises(CheckpointError, match=r"^A checkpoint takes .* left\.\nDo:  make room"):
        place.begin("step-00000001", 1 << 60)
    assert place.names() == []


def test_a_checkpoint_is_deleted_whole(place: CheckpointFolder, tmp_path: Path) -> None:
    name = saved(place, 1)
    place.delete(name)
    place.delete(name)
    assert sorted(os.listdir(tmp_path / "run")) == ["latest"]


def _dies_in(where: str) -> Callable[[CheckpointFolder, str], None]:
    """Return what leaves a folder as a process that is killed does; `where` it is."""

    def killed(place: CheckpointFolder, name: str) -> None:
        if where == "making it":
            os.makedirs(place.folder(name))
            return
        if where == "writing who it is":
            os.makedirs(place.folder(name))
            Path(place.folder(name), f"{WRITING}.tmp").write_text('{"ho')
            return
        place.begin(name, 10)
        place.write(name, "__0_0.distcp", b"tens")
        if where == "writing the commit":
            Path(place.folder(name), f"{COMMIT}.tmp").write_text('{"st')

    return killed


def _sign_as(place: CheckpointFolder, name: str, **who: object) -> None:
    known = {"host": socket.gethostname(), "pid": NOBODY, "since": 1.0, "at": time.time()}
    if Path(place.folder(name), WRITING).exists():
        place.write(name, WRITING, json.dumps({**known, **who}).encode())


@pytest.mark.parametrize(
    "where", ["making it", "writing who it is", "writing tensors", "writing the commit"]
)
def test_what_a_killed_save_leaves_is_no_checkpoint_and_is_deleted(
    place: CheckpointFolder, where: str
) -> None:
    good = saved(place, 1)
    _dies_in(where)(place, "step-00000002")
    _sign_as(place, "step-00000002")
    assert list(place.committed()) == [good]
    assert place.delete_interrupted(good) == ["step-00000002"]
    assert place.names() == [good]


def test_a_deletion_that_was_killed_as_it_began_is_made_again(place: CheckpointFolder) -> None:
    name, newest = saved(place, 1), saved(place, 2)
    Path(place.folder(name), f"{WRITING}.tmp").write_text('{"ho')
    assert list(place.committed()) == [name, newest]
    place.delete(name)
    assert place.names() == [newest]


@pytest.mark.parametrize("left", [(), (COMMIT,), (COMMIT, "__0_0.distcp")])
def test_what_a_killed_deletion_leaves_is_deleted(
    place: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, left: tuple[str, ...]
) -> None:
    name, newest = saved(place, 1), saved(place, 2)
    deleted: list[str] = []
    files = place._fs
    remove = {"rm": files.rm, "rm_file": files.rm_file}

    def rm_until(how: str) -> Callable[..., None]:
        def rm(path: str, **more: bool) -> None:
            if len(deleted) == len(left):
                raise KeyboardInterrupt
            deleted.append(path)
            remove[how](path, **more)

        return rm

    with monkeypatch.context() as patch:
        patch.setattr(files, "rm", rm_until("rm"))
        patch.setattr(files, "rm_file", rm_until("rm_file"))
        with pytest.raises(KeyboardInterrupt):
            place.delete(name)
    if not left:
        assert list(place.committed()) == [name, newest]  # it is as whole as before
        return
    assert list(place.committed()) == [newest]
    _sign_as(place, name)
    assert place.delete_interrupted(newest) == [name]


def test_what_is_being_written_is_left_alone(place: CheckpointFolder) -> None:
    others: dict[str, dict[str, object]] = {
        "step-00000001": {"pid": os.getppid(), "since": folder._started(os.getppid())},
        "step-00000002": {"host": "another"},
        "step-00000003": {"host": "another", "at": time.time() - 25 * 3600},
    }
    for name, who in others.items():
        place.begin(name, 10)
        _sign_as(place, name, **who)
    place.begin("step-00000004", 10)
    assert place.delete_interrupted("step-00000004") == ["step-00000003"]


def test_damage_is_told_file_by_file(place: CheckpointFolder) -> None:
    name = saved(place, 1)
    found = place.committed()[name]
    file = Path(place.folder(name), "__0_0.distcp")
    assert place.damage(name, found, found.files).found == ()
    file.write_bytes(b"tensirs")
    assert place.damage(name, found, found.files).found == (
        "__0_0.distcp has another checksum than when it was written",
    )
    file.write_bytes(b"tens")
    assert place.damage(name, found, found.files).found == ("__0_0.distcp has 4 of 7 bytes",)
    file.unlink()
    assert place.damage(name, found, found.files).found == ("__0_0.distcp is missing",)


def test_a_damaged_commit_is_no_missing_one(place: CheckpointFolder) -> None:
    good, other = saved(place, 1), saved(place, 2)
    Path(place.folder(other), COMMIT).write_text("{")
    assert place.survey()[1] == [other]
    assert list(place.committed()) == [good]
    assert place.delete_interrupted(good) == []


# ---- URLs and errors ----------------------------------------------------------------------------


def test_paths_are_absolute_and_a_home_is_found(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        patch.chdir(tmp_path)
        assert (
            CheckpointFolder("~/run").url
            == CheckpointFolder("run").url
            == CheckpointFolder(f"file://{tmp_path}/run").url
        )


def test_options_of_the_library_are_theirs_before_ours() -> None:
    theirs = {"key": "k", "config_kwargs": {"read_timeout": 7}}
    merged = folder._merged(folder._OPTIONS["s3"], theirs)
    assert merged["key"] == "k"
    assert merged["config_kwargs"]["read_timeout"] == 7
    assert merged["config_kwargs"]["connect_timeout"] == 5


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        CheckpointFolder("sftp://me:hidden@host/run")
    assert "hidden" not in str(caught.value)


def test_an_unknown_protocol_says_what_to_install() -> None:
    with pytest.raises(CheckpointError, match=r"^nowhere://x cannot be opened\.\nWhy: .*\nDo:  in"):
        CheckpointFolder("nowhere://x")


def test_a_server_that_is_silent_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        there = CheckpointFolder(
            "s3://bucket/run", {"endpoint_url": where, "key": "k", "secret": "s"}
        )
        with pytest.raises(TimeoutError) as caught:
            there.names()
    assert in_words(caught.value).startswith("/data/run does not answer.")


def test_errors_of_files_say_what_to_do() -> None:
    assert in_words(OSError(28, "No space left")) == (
        "The disk is full: /data/run could not be written.\n"
        "Do:  make room, or give nbdist.save another folder"
    )
    assert in_words(PermissionError(13, "Permission denied")).startswith(
        "/data/run may not be written or read: Permission denied."
    )
    assert in_words(OSError("first line\nsecond")) == (
        "/data/run could not be reached or used.\nWhy: OSError: first line\n"
        "Do:  try it again, or give nbdist another folder"
    )


def test_a_folder_that_another_process_has_just_begun_is_left_to_it(
    place: CheckpointFolder,
) -> None:
    place.begin("step-00000003", 10)
    with pytest.raises(CheckpointError, match="was begun by another process a moment ago"):
        place.begin("step-00000003", 10)
    assert place.names() == ["step-00000003"]


def test_the_memory_of_one_process_is_no_place_for_several_ranks() -> None:
    with pytest.raises(UsageError, match="memory of one process, and ranks are several"):
        CheckpointFolder("memory://run")


def test_a_server_that_refuses_at_once_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"ftp://127\.0\.0\.1:9/run could not be reached"):
        CheckpointFolder("ftp://127.0.0.1:9/run")
