"""Which steps stay, and which become starts."""

import gc
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nbdist.engine.compat import torch_reducers
from nbdist.engine.component import EndedCell
from nbdist.engine.steps import evidence, sound_steps
from nbdist.engine.steps.guard import Guard
from nbdist.engine.steps.kept_step import KeptStep
from nbdist.engine.steps.sound_steps import LENGTHS, MOST_SOUND, Training, newest_since_older_start
from nbdist.shared.wire import CellStart


def starts(sizes: list[int], most: int = 4800) -> list[int]:
    """Return which steps become starts, by their inputs' sizes; those of size 0 cannot run."""
    training = Training(None, nn.Linear(1, 1))
    due = [training.needs_start(size, most, can_run=size > 0) for size in sizes]
    return [number for number, is_due in enumerate(due) if is_due]


def test_a_start_is_made_every_so_many_steps() -> None:
    assert starts([1] * 50) == [0, 24, 48]


def test_where_inputs_are_large_starts_are_closer_and_in_step_with_those_of_other_ranks() -> None:
    assert starts([150] * 25) == [0, 12, 24], "2 x 12 x 150 fit into 4800, and 2 x 24 x 150 do not"
    assert starts([3000] * 3) == [0, 1, 2]
    for longer, shorter in itertools.pairwise(LENGTHS):
        assert longer % shorter == 0


def test_a_step_that_cannot_run_is_no_start_and_the_next_that_can_is_one() -> None:
    assert starts([0, 0, 1, 1, 0, 1]) == [2, 5]


def test_steps_stay_since_the_older_of_two_starts() -> None:
    assert newest_since_older_start([True, False, False]) == 0
    assert newest_since_older_start([True, False, True, False]) == 0
    assert newest_since_older_start([True, False, True, False, True, False]) == 2
    assert newest_since_older_start([False] * (MOST_SOUND + 3)) == 3, "else their number grows"


def test_a_step_is_a_start_once_ddp_has_laid_its_buckets_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    laid = iter([False, False, True])
    monkeypatch.setattr(sound_steps, "_reducer_of", lambda model: model)
    monkeypatch.setattr(torch_reducers, "has_rebuilt_buckets", lambda _: next(laid))
    model = nn.Linear(1, 1)
    training, found = Training(None, model), []
    for _ in range(3):
        laid_anew = training.sums_otherwise()
        found.append((laid_anew, training.needs_start(1, 9999, can_run=True)))
    assert found == [(False, True), (True, True), (False, False)]


class Trained:
    """A cell that keeps its steps."""

    def __init__(self) -> None:
        self.linear = nn.Linear(4, 2)
        self.model = nn.Sequential(nn.Dropout(0.5), self.linear)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.guard = Guard()
        self.guard.evidence.find_model = lambda _: self.model
        self.guard.cell_began(CellStart(1, (0,), 1, guard=True, evidence="somewhere"))
        self.guard.evidence.note_made(self.optimizer)

    def step(self, x: torch.Tensor | None = None) -> None:
        self.model(torch.randn(3, 4) if x is None else x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def steps(self) -> list[KeptStep]:
        return self.guard.evidence.steps


@pytest.fixture
def trained() -> Iterator[Trained]:
    one = Trained()
    yield one
    list(one.guard.cell_ended(EndedCell(1, "", has_succeeded=True)))


def test_a_start_has_the_weights_and_the_state_that_its_step_began_with(trained: Trained) -> None:
    for _ in range(24):
        trained.step()
    weights = [p.detach().clone() for p in trained.model.parameters()]
    moments = [trained.optimizer.state[p]["exp_avg"].clone() for p in trained.model.parameters()]
    trained.step()
    first, newest = (one for one in trained.steps if one.weights is not None)
    assert (first.step, newest.step) == (1, 25)
    assert newest.weights is not None
    assert newest.sound is not None
    assert newest.sound.states is not None
    assert all(map(torch.equal, newest.weights.copies, weights))
    entries = newest.sound.states.entries
    found = [newest.sound.states.copies[entry["exp_avg"][0]] for entry in entries if entry]
    assert all(map(torch.equal, found, moments))


def test_of_three_starts_the_oldest_gives_its_memory_and_its_steps_go(trained: Trained) -> None:
    trained.step()
    assert trained.steps[0].weights is not None
    memory = [tensor.data_ptr() for tensor in trained.steps[0].weights.copies]
    for _ in range(48):
        trained.step()
    assert [one.step for one in trained.steps] == list(range(25, 50))
    newest = trained.steps[-1].weights
    assert newest is not None
    assert [tensor.data_ptr() for tensor in newest.copies] == memory


def test_a_model_that_is_too_large_has_no_start_and_it_is_said(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "START_BYTES", 10)
    trained.step()
    (kept,) = trained.steps
    assert kept.weights is None
    assert kept.sound is not None
    assert "take more than" in kept.sound.of.why_not


def test_a_left_out_step_has_no_place_among_the_others(trained: Trained) -> None:
    trained.step()
    trained.step(torch.full((3, 4), float("nan")))
    trained.step()
    assert [one.sound and one.sound.number for one in trained.steps] == [0, None, 1]


def test_another_optimizer_in_the_cell_is_known(trained: Trained) -> None:
    trained.step()
    other = torch.optim.SGD([trained.linear.bias], lr=0.1)
    trained.model(torch.ones(3, 4)).sum().backward()
    other.step()
    (kept,) = trained.steps
    assert kept.sound is not None
    assert kept.sound.of.why_not == "several optimizers step in its cell"


def test_why_no_more_steps_are_kept_is_said_and_training_goes_on(trained: Trained) -> None:
    def fail() -> float:
        raise ValueError("no loss")

    trained.guard.evidence.loss = fail
    before = trained.linear.weight.tolist()
    trained.step()
    assert trained.linear.weight.tolist() != before
    (said,) = trained.guard.cell_ended(EndedCell(1, "", has_succeeded=True))
    assert said.endswith("are no longer kept: ValueError: no loss.")


def test_a_model_that_nothing_names_is_said_to_be_unknown(trained: Trained) -> None:
    trained.guard.evidence.find_model = lambda _: None
    trained.step()
    (said,) = trained.guard.cell_ended(EndedCell(1, "", has_succeeded=True))
    assert "names the model" in said


def test_what_is_kept_keeps_no_model_alive() -> None:
    trained = Trained()
    trained.step()
    list(trained.guard.cell_ended(EndedCell(1, "", has_succeeded=True)))
    kept, guard = trained.steps[0], trained.guard
    guard.evidence.find_model = None
    del trained
    gc.collect()
    assert kept.model() is None
    assert kept.norms() == {}
