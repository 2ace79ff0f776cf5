"""MLflow's database comes into being whole, also when its maker is killed."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from nbdist.client.tracking import ship

_COMMAND = [sys.executable, "-m", "nbdist.client.tracking.ship"]


def test_a_maker_that_is_killed_leaves_a_folder_where_the_next_one_succeeds(
    tmp_path: Path,
) -> None:
    first = subprocess.Popen(
        [*_COMMAND, str(tmp_path), "--drain", "--prepare"], stderr=subprocess.DEVNULL
    )
    unfinished = tmp_path / "mlflow.db.new"
    deadline = time.monotonic() + 60
    while not unfinished.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(10)
    assert unfinished.exists()
    assert not (tmp_path / "mlflow.db").exists()

    assert ship.main([str(tmp_path), "--drain", "--prepare"]) == 0

    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("SELECT COUNT(*) FROM experiments").fetchone() == (1,)
    assert not unfinished.exists()
