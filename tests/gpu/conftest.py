"""Where the sessions of these tests lie."""

from pathlib import Path

import pytest


@pytest.fixture
def beside_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs, logs and checkpoints lie in a folder of the test, and ranks import this nbdist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
