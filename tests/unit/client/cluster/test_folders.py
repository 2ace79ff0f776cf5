"""The folders of a cluster's logs, and what of a log stands in an error."""

import os
import tempfile
from pathlib import Path

import pytest

from nbdist.client.cluster.folders import (
    current_folder,
    fix_for_start,
    last_lines,
    living_logs,
    log_folder,
    project_folder,
    say_where,
    work_folders,
)


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temp folder of this test's own."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_of_a_log_only_lines_that_tell_something_stand_in_an_error(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("Not using CurveZMQ security\nMemoryError\ndebugpy_stream undefined\n")
    assert last_lines(log) == "MemoryError"
    log.write_text("Not using CurveZMQ security\n")
    assert last_lines(log) == f"its log {log} has no relevant lines"


def test_of_a_large_log_the_end_alone_is_read(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    with log.open("w") as file:
        file.truncate(1 << 40)  # a terabyte, which takes no room
        file.seek(0, os.SEEK_END)
        file.write("\nMemoryError\nended\n")
    assert last_lines(log, 2) == "MemoryError\n     ended"


def test_the_private_folder_is_beside_the_notebook(tmp_path: Path) -> None:
    folder = project_folder(tmp_path)
    assert folder == tmp_path / ".nbdist"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert say_where(folder, tmp_path) == ""


def test_a_private_folder_that_is_there_already_is_private_and_ignored_too(tmp_path: Path) -> None:
    folder = tmp_path / ".nbdist"
    folder.mkdir()
    folder.chmod(0o755)
    ignore = folder / ".gitignore"
    ignore.touch()  # its maker was killed as it wrote
    assert project_folder(tmp_path) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert ignore.read_text() == "*\n"
    ignore.write_text("*\n!profiles\n")
    project_folder(tmp_path)
    assert ignore.read_text() == "*\n!profiles\n"


def test_where_it_cannot_be_made_it_is_one_in_the_temp_folder_each_time(
    temp: Path, tmp_path: Path
) -> None:
    # As a read-only folder, also for root.
    (tmp_path / ".nbdist").write_text("a file")
    folder = project_folder(tmp_path)
    assert folder.parent.parent == temp
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert project_folder(tmp_path) == folder
    assert say_where(folder, tmp_path) == (
        f"{tmp_path}/.nbdist cannot be written to: logs and runs are kept in {folder}."
    )
    assert log_folder(folder).is_dir()


def test_a_folder_in_temp_that_is_no_folder_of_ours_is_not_used(temp: Path, tmp_path: Path) -> None:
    (tmp_path / ".nbdist").write_text("a file")
    planned = project_folder(tmp_path).parent
    other = tmp_path / "of somebody else"
    planned.rename(other)
    planned.symlink_to(other)
    assert project_folder(tmp_path).parent not in (planned, other)


def test_logs_that_were_deleted_are_made_again_beside_the_notebook(
    temp: Path, tmp_path: Path
) -> None:
    place = tmp_path / "notebook"
    place.mkdir()
    logs = log_folder(project_folder(place))
    assert living_logs(logs) == logs
    for path in (logs, logs.parent):
        path.rmdir()
    anew = living_logs(logs)
    assert anew.is_dir()
    assert anew.is_relative_to(place)


def test_a_notebooks_folder_that_was_deleted_is_not_made_again(
    temp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "notebook"
    place.mkdir()
    logs = log_folder(project_folder(place))
    monkeypatch.chdir(place)
    os.rename(place, tmp_path / "renamed")
    assert current_folder() == tmp_path / "renamed"
    assert living_logs(logs).is_relative_to(tmp_path / "renamed" / ".nbdist")
    import shutil

    shutil.rmtree(tmp_path / "renamed")
    try:
        assert current_folder() is None
        assert living_logs(logs).is_relative_to(temp)
        assert not place.exists()
        assert work_folders(place)[:2] == [str(place), str(Path.home())]
    finally:
        os.chdir(tmp_path)


@pytest.mark.parametrize(
    ("why", "do"),
    [
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
        ("rank 0: AcceleratorError: CUDA error: out of memory", "nvidia-smi shows which"),
        ("rank 0: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "-c DEFAULT"),
        ("rank 0: ValueError: no", "%dist doctor"),
    ],
)
def test_a_start_that_failed_is_mended_by_what_its_reason_calls_for(why: str, do: str) -> None:
    assert do in fix_for_start(why)
