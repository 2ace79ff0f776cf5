"""The private folder of a controller, and those whose owners were killed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nbdist.client.cluster.controller import ControllerFolder, remove_orphans

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
