"""The private folder of a controller, and those whose owners were killed."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nbdist.client.cluster.controller import ControllerFolder, remove_orphans
from nbdist.host import controller as host_controller
from nbdist.shared.processes import lifeline
from nbdist.shared.processes.key_folder import OWNER_LOCK

KILLED = """
import os
from nbdist.client.cluster.controller import ControllerFolder
mine = ControllerFolder()
print(mine.path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_keys_whose_owner_was_killed_go_with_the_next_start(temp: Path) -> None:
    command = [sys.executable, "-c", KILLED]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    orphan = Path(ran.stdout.strip())
    assert orphan.parent == temp
    assert orphan.stat().st_mode & 0o777 == 0o700
    mine = ControllerFolder()
    assert os.listdir(temp) == [Path(mine.path).name]
    mine.remove()
    assert os.listdir(temp) == []


def test_keys_whose_owner_lives_stay_and_other_folders_too(temp: Path) -> None:
    mine = ControllerFolder()
    (temp / "nbdist-of-somebody").mkdir()
    remove_orphans(temp)
    another = ControllerFolder()
    assert sorted(os.listdir(temp)) == sorted(
        [Path(mine.path).name, Path(another.path).name, "nbdist-of-somebody"]
    )
    mine.remove()
    another.remove()


@pytest.mark.parametrize("ended", ["by its kernel", "by its controller", "by the next start"])
def test_keys_go_before_the_lock_that_proves_whose_they_were(
    ended: str, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ControllerFolder()
    lock = Path(mine.path) / OWNER_LOCK
    keys = mine.connection_file("engine")
    keys.parent.mkdir()
    keys.touch()
    left: list[tuple[bool, bool]] = []
    remove_tree = shutil.rmtree

    def remove_and_look(path: Any, ignore_errors: bool) -> None:
        remove_tree(path, ignore_errors)
        left.append((keys.exists(), lock.exists()))

    monkeypatch.setattr(shutil, "rmtree", remove_and_look)
    if ended == "by its kernel":
        mine.remove()
    elif ended == "by its controller":
        monkeypatch.setattr(lifeline, "end_own_session", lambda: None)
        host_controller._end(mine.path)
    else:
        mine.leave()
        remove_orphans(temp)
    assert left == [(False, True), (False, False)]
