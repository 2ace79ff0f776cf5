"""The baseline beside a notebook: what is stored is read again, and what is not ours stays."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.client.expect import baseline
from nbdist.client.expect.baseline import baseline_file, store_run, stored_run
from nbdist.client.metrics.usual_step import RunFigures, StepTime
from nbdist.shared.errors import TrackingError

RUN = RunFigures(2, 40, ({"all_reduce": 1}, {}), (41, 0), 644.0, StepTime(5.25, 0.02, 0.0, 30))


def test_a_run_is_read_as_it_was_stored(tmp_path: Path) -> None:
    file = tmp_path / "train.baseline.json"
    assert stored_run(file, "small", 2) is None
    store_run(file, "small", RUN)
    stored = stored_run(file, "small", 2)
    assert stored is not None
    assert stored.figures == RUN
    assert stored_run(file, "small", 4) is None
    assert stored_run(file, "large", 2) is None
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_other_runs_and_times_of_other_machines_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.baseline.json"
    store_run(file, "small", RUN)
    store_run(file, "large", RUN)
    monkeypatch.setattr(baseline, "machine", lambda: "another, 8 cores")
    elsewhere = stored_run(file, "small", 2)
    assert elsewhere is not None
    assert elsewhere.figures.time is None
    store_run(file, "small", replace(RUN, time=StepTime(1.0, 0.1, 0.0, 20)))
    again = stored_run(file, "small", 2)
    assert again is not None
    assert again.figures.time == StepTime(1.0, 0.1, 0.0, 20)
    assert len(again.machines) == 2
    assert stored_run(file, "large", 2) is not None


def test_the_file_is_named_after_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert baseline_file() == tmp_path / "notebook.baseline.json"
    monkeypatch.setenv("JPY_SESSION_NAME", "folder/train.ipynb")
    assert baseline_file() == tmp_path / "train.baseline.json"


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"version": 99, "runs": {}})])
def test_a_file_that_cannot_be_read_is_named_with_the_way_out(tmp_path: Path, content: str) -> None:
    file = tmp_path / "train.baseline.json"
    file.write_text(content)
    with pytest.raises(TrackingError, match=r"train.baseline.json cannot be read") as failed:
        stored_run(file, "small", 2)
    assert "git checkout train.baseline.json" in failed.value.do


def test_a_damaged_run_is_named_too(tmp_path: Path) -> None:
    file = tmp_path / "train.baseline.json"
    store_run(file, "small", RUN)
    content = json.loads(file.read_text())
    del content["runs"]["small"]["2 ranks"]["in_all"]
    file.write_text(json.dumps(content))
    with pytest.raises(TrackingError, match="cannot be read"):
        stored_run(file, "small", 2)
