"""What is listed of the checkpoints of a place, from their small files alone."""

import subprocess
import sys
from pathlib import Path

import pytest

import nbdist
from nbdist.engine.checkpoint.folder import COMMIT, CheckpointFolder
from nbdist.engine.checkpoint.manifest import Manifest

HOLDS = {
    "models": {"GPT": [["model", "net"], "GPT"], "GPT-2": [[], "GPT"]},
    "others": [[["opt"], "AdamW"], [[], "SGD"], [[], "SGD"], [["ema"], "Average"]],
    "loaders": [[["train"], 2, 1280], [[], 0, 0]],
}


@pytest.fixture
def place(tmp_path: Path) -> CheckpointFolder:
    made = CheckpointFolder(str(tmp_path / "run"))
    layouts = {"GPT": "zero3", "GPT-2": "ddp"}
    for step, holds, metric in ((20, HOLDS, 0.5), (1000, {}, 0.75)):
        name = f"step-{step:08d}"
        made.begin(name, 0)
        made.commit(name, Manifest(step, 1e9 + step, 4, layouts, {}, metric, holds=holds))
    return made


def test_names_classes_layouts_and_positions_are_plain_values(place: CheckpointFolder) -> None:
    first, older = nbdist.saved(place.url)
    assert (first.step, first.saved_at, first.world_size) == (20, 1e9 + 20, 4)
    assert first.models == {"model": "GPT", "GPT-2": "GPT"}
    assert first.others == {"opt": "AdamW", "SGD": "SGD", "SGD-2": "SGD", "ema": "Average"}
    assert first.layouts == {"model": "zero3", "GPT-2": "ddp"}
    assert first.loaders == (("train", 2, 1280), ("loader", 0, 0))
    assert (first.is_best, older.is_best) == (True, False)
    # One that tells no names, as older versions wrote.
    assert older.models == {"GPT": "GPT", "GPT-2": "GPT"}
    assert not older.loaders


def test_they_are_shown_as_a_table_with_what_is_wrong(place: CheckpointFolder) -> None:
    Path(place.folder("step-00001000"), COMMIT).write_text("{")
    lines = repr(nbdist.saved(place.url)).splitlines()
    assert lines[0] == f"In {place.url}:"
    assert lines[1].split() == ["step", "saved", "ranks", "models", "with", "loaders"]
    assert lines[2].startswith("  20  2001-09-")
    assert "model (GPT, zero3), GPT-2 (GPT, ddp)" in lines[2]
    assert "train at sample 1,280 of epoch 2" in lines[2]
    assert lines[2].endswith("metric 0.500, best")
    assert lines[3].endswith("step-00001000: checkpoint.json is not what was written")


def test_the_notebook_may_ask_without_torch(place: CheckpointFolder) -> None:
    code = f"import sys, nbdist; print(len(nbdist.saved({place.url!r})), 'torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.split() == ["2", "False"]


def test_an_empty_place_says_so(tmp_path: Path) -> None:
    assert repr(nbdist.saved(tmp_path / "none")) == f"There is no checkpoint in {tmp_path}/none."
