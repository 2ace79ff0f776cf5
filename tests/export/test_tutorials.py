"""Each tutorial leaves the notebook: its script under torchrun has bit-equal losses on its ranks.

A cell more, the first, notes every loss that `backward` is called on and a digest of what each
optimizer's step leaves: it runs in the notebook, and, exported like the others, in the script.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.export.torchrun import ROOT, torchrun

NOTE = """\
%%distributed --no-track
import atexit
import hashlib
import json
import os
from torch.optim.optimizer import register_optimizer_step_post_hook

noted = []
native_backward = torch.Tensor.backward


def backward(self, *args, **kwargs):
    noted.append(self.item().hex())
    return native_backward(self, *args, **kwargs)


def note_step(optimizer, args, kwargs):
    digest = hashlib.sha1()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mine = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            digest.update(mine.detach().contiguous().numpy().tobytes())
    noted.append(digest.hexdigest())


def write_noted(where):
    with open(f"{where}-{rank}.json", "w") as file:
        json.dump(noted, file)


torch.Tensor.backward = backward
register_optimizer_step_post_hook(note_step)
if "NOTED" in os.environ:
    atexit.register(write_noted, os.environ["NOTED"])
"""
# After the export, and so not in the script: what the notebook's ranks have noted.
TELL = '%%distributed --no-track\nwrite_noted("notebook")'


@dataclass(frozen=True, slots=True)
class Tutorial:
    """A notebook, as far as it is run.

    Attributes:
        name: Its file's, without the ending.
        n: Ranks.
        until: In the last cell that runs; "" runs all. What follows it is timing's, or ends ranks.
        only_last: Faults on purpose make steps twice: what counts is where rank 0 ends.
    """

    name: str
    n: int
    until: str = ""
    only_last: bool = False


TUTORIALS = [
    Tutorial("02_train_with_ddp", 2),
    Tutorial("03_fsdp_language_model", 2),
    Tutorial("04_when_things_go_wrong", 3, only_last=True),
    Tutorial("05_where_does_the_time_go", 3),
    Tutorial("06_every_layout", 4, "proof = layout.verify"),
    Tutorial("07_slow_networks", 2, "--run seldom"),
    Tutorial("08_resume_anywhere", 4, "--run undisturbed"),
    Tutorial("09_data_at_scale", 2, "--run fed"),
    Tutorial("13_fine_tune_a_language_model", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda one: one.name)
def test_a_tutorials_script_has_the_losses_of_its_cells(
    tutorial: Tutorial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBDIST_STATIC", "1")
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = prepared(tutorial)
    ran = torchrun_before_it_stops(notebook, tutorial, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for rank in range(1 if tutorial.only_last else tutorial.n):
        here, there = (
            json.loads((tmp_path / f"{where}-{rank}.json").read_text())
            for where in ("notebook", "script")
        )
        assert len(there) > 40
        if tutorial.only_last:
            here, there = here[-1:], there[-1:]
        assert here == there


def prepared(tutorial: Tutorial) -> Any:
    """Return the notebook with what notes its losses, and the export before it stops."""
    notebook: Any = nbformat.read(ROOT / "notebooks" / f"{tutorial.name}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    last = next(i for i, cell in enumerate(cells) if is_last(cell.source, tutorial))
    cells = cells[: last + 1] if tutorial.until else cells[:last]
    started = next(i for i, cell in enumerate(cells) if "%dist start" in cell.source) + 1
    new = nbformat.v4.new_code_cell
    notebook.cells = [
        *cells[:started],
        new(NOTE),
        *cells[started:],
        new("%dist export train.py"),
        new(TELL),
    ]
    return notebook


def is_last(source: str, tutorial: Tutorial) -> bool:
    return tutorial.until in source if tutorial.until else source.startswith("%dist stop")


def torchrun_before_it_stops(notebook: Any, tutorial: Tutorial, folder: Path) -> Any:
    """Run the notebook in a folder, and its script while what it has served or made is there."""
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        # Else a script that restores by name goes on where the notebook ended.
        shutil.rmtree(folder / ".nbdist" / "checkpoints", ignore_errors=True)
        return torchrun(folder / "train.py", tutorial.n, NOTED="script")
