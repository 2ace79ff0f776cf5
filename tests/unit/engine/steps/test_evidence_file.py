"""A file of left-out steps: whole and bounded, and the folder of such files."""

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.engine.steps import evidence_file
from nbdist.engine.steps.forwards import Forward, GivenBatch, MadeLoss
from nbdist.engine.steps.kept_step import KeptStep
from nbdist.engine.steps.optimizer_states import States
from nbdist.engine.steps.sound_steps import Norms, SoundStep, Training
from nbdist.shared.errors import UsageError

MODEL = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))


def step_of(*args: object, given: GivenBatch | None = None) -> KeptStep:
    forward = Forward.of(args, {}, given, None)
    return KeptStep(1, 3, math.nan, {"0": None}, True, lambda: MODEL, (True,) * 3, None, [forward])


def again(step: KeptStep, folder: Path, *trained: Any) -> KeptStep:
    packed = {"format": evidence_file.FORMAT, "step": evidence_file.pack(step)}
    evidence_file.write(folder, 0, packed)
    read = evidence_file.read(folder, 0)
    assert read is not None
    return evidence_file.unpack(read["step"], MODEL, *trained)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ".nbdist" / "evidence" / "one"


def test_a_forward_runs_again_on_its_inputs_and_random_numbers(folder: Path) -> None:
    import numpy

    numpy.random.rand()
    x = torch.randn(3, 4)
    given = GivenBatch({"x": x}, 2, range(4, 7), lambda: [9, 8, 7])
    step = step_of({"x": x, "n": (1, None)}, given=given)
    drawn = torch.rand(2), numpy.random.rand(2)
    found = again(step, folder)
    (forward,) = found.forwards
    assert (found.step, found.is_of_all, found.model()) == (3, True, MODEL)
    assert forward.args[0]["x"].equal(x)
    assert forward.args[0]["n"] == (1, None)
    assert forward.given is not None
    assert (forward.given.positions, forward.given.samples()) == (range(4, 7), [9, 8, 7])
    assert not forward.is_changed
    drawn_again = forward.run(lambda _: (torch.rand(2), numpy.random.rand(2)))
    assert drawn_again[0].equal(drawn[0])
    assert (drawn_again[1] == drawn[1]).all()


def test_of_a_view_the_rest_of_its_storage_is_not_written(folder: Path) -> None:
    dataset = torch.ones(100_000, 4)
    again(
        step_of(dataset[8:12], given=GivenBatch(dataset[8:12], 0, range(4), lambda: None)), folder
    )
    assert (folder / "rank0.pt").stat().st_size < 50_000


class Alone:
    """Stands for a layout, with the loss of its newest step."""

    last_step = (None, None, nn.functional.mse_loss)


def test_a_sound_step_has_its_loss_and_its_start_again_but_for_code(folder: Path) -> None:
    optimizer = torch.optim.Adam(MODEL.parameters(), lr=0.1)
    MODEL(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    layout = Alone()
    y = torch.ones(3, 2)
    made = MadeLoss.of(layout, y, lambda out, y: None, None, 3, averages=False)
    made.value = torch.tensor(0.5)
    norms = Norms((0, 1), torch.tensor([1.0, 2.0]))
    clips = (((0.5,), {"foreach": False}),)
    options = [{"lr": 0.1, "betas": (0.9, 0.99), "hook": print}]
    training = Training(optimizer, MODEL)
    states = States.of(optimizer)
    sound = SoundStep(training, 7, options, norms, clips, states=states)
    step = step_of(torch.ones(3, 4))
    step.sound = sound
    step.forwards = [replace(step.forwards[0], loss=made)]
    found = again(step, folder, optimizer, layout)
    assert found.sound is not None
    assert found.sound.states is not None
    assert (found.sound.number, found.sound.clips, found.sound.why_not) == (7, clips, "")
    assert found.sound.options == [{"lr": 0.1, "betas": (0.9, 0.99)}]
    assert found.sound.norms.equal(norms)
    assert found.sound.states.entries == states.entries
    assert all(map(torch.equal, found.sound.states.copies, states.copies))
    loss = found.forwards[0].loss
    assert loss is not None
    assert (loss.y.tolist(), loss.averages, loss.value) == (y.tolist(), False, 0.5)
    assert loss.loss_fn is nn.functional.mse_loss
    unknown = again(step, folder, optimizer)
    assert unknown.forwards[0].loss is None
    assert unknown.sound is not None
    assert "is code, which is not on disk" in unknown.sound.why_not


def test_inputs_that_would_need_unpickling_are_not_written_and_that_is_said(folder: Path) -> None:
    found = again(step_of(torch.ones(3, 4), Path("a")), folder)
    assert found.forwards == []
    assert found.why_not == "its inputs hold a PosixPath, which evidence on disk does not"


def test_a_batch_that_was_changed_in_place_is_not_written_as_it_was(folder: Path) -> None:
    x = torch.ones(3, 4)
    step = step_of(x)
    x.zero_()
    assert "changed in place" in again(step, folder).why_not


def test_a_misfit_names_the_first_module_or_tensor_that_is_another() -> None:
    was = evidence_file.form_of(MODEL)
    assert evidence_file.misfit(was, evidence_file.form_of(MODEL)) == ""
    wider = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2))
    assert evidence_file.misfit(was, evidence_file.form_of(wider)) == (
        "0.weight is [2, 5] torch.float32 now, and was [2, 4] torch.float32"
    )
    other = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    said = evidence_file.misfit(was, evidence_file.form_of(other))
    assert said == "1 is ReLU now, and was BatchNorm1d"


def test_old_folders_go_and_of_new_ones_the_newest_eight_stay(tmp_path: Path) -> None:
    evidence = tmp_path / ".nbdist" / "evidence"
    for number in range(11):
        folder = evidence / f"cell-{number}"
        evidence_file.write(folder, 0, {"format": evidence_file.FORMAT})
        age_s = 8 * 86400 if number == 10 else 100 - number
        os.utime(folder, (time.time() - age_s,) * 2)
    evidence_file.expire(evidence)  # the eleventh took the place of another as it was new
    assert sorted(one.name for one in evidence.iterdir()) == [f"cell-{n}" for n in range(3, 10)]
    assert evidence_file.find(evidence / "last").name == "cell-9"
    with pytest.raises(UsageError, match="No evidence is kept in"):
        evidence_file.find(evidence / "cell-10")


def test_a_file_that_cannot_be_written_leaves_the_one_before(folder: Path) -> None:
    evidence_file.write(folder, 0, {"format": evidence_file.FORMAT, "step": 1})
    with pytest.raises(Exception, match="pickle"):
        evidence_file.write(folder, 0, {"step": lambda: None})
    assert evidence_file.read(folder, 0) == {"format": evidence_file.FORMAT, "step": 1}
    assert [file.name for file in folder.iterdir()] == ["rank0.pt"]
