"""What is kept of a step that was left out, in one process without a group."""

import copy
import gc
import math
import pickle
from collections.abc import Iterator
from weakref import ref

import pytest
import torch
from torch import nn

from nbdist.engine.component import EndedCell
from nbdist.engine.steps import evidence, forwards
from nbdist.engine.steps.forwards import Forwards, GivenBatch
from nbdist.engine.steps.guard import Guard
from nbdist.engine.steps.kept_step import norms_by_module
from nbdist.shared.wire import MOST_LEFT_OUT, CellStart

ENDED = EndedCell(1, "", has_succeeded=True)


class Trained:
    """A guarded cell that trains one linear layer behind a dropout."""

    def __init__(self) -> None:
        self.linear = nn.Linear(4, 2)
        self.model = nn.Sequential(nn.Dropout(0.5), self.linear)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.guard = Guard()
        self.guard.evidence.find_model = lambda optimizer: self.model
        self.guard.evidence.loss = lambda: 7.0
        self.begin(1)
        self.guard.evidence.note_made(self.optimizer)

    def begin(self, cell: int) -> None:
        self.guard.cell_began(CellStart(cell, (0,), cell, guard=True))
        self.guard.evidence.note_made(self.optimizer)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)
        out.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return out.detach()


@pytest.fixture
def trained() -> Iterator[Trained]:
    one = Trained()
    yield one
    list(one.guard.cell_ended(ENDED))


def bad(rows: int = 3) -> torch.Tensor:
    return torch.full((rows, 4), math.nan)


def test_a_sound_step_leaves_nothing_and_one_that_is_left_out_its_forward(trained: Trained) -> None:
    trained.step(torch.ones(3, 4))
    assert trained.guard.evidence.steps == []
    x = bad()
    trained.step(x)
    (kept,) = trained.guard.evidence.steps
    assert (kept.cell, kept.step, kept.loss, kept.model()) == (1, 1, 7.0, trained.model)
    assert [one.args[0].data_ptr() for one in kept.forwards] == [x.data_ptr()]
    assert kept.gradients == {"1": None}


def test_a_kept_forward_draws_what_it_drew_and_has_the_weights_that_it_had(
    trained: Trained,
) -> None:
    x = torch.ones(3, 4)
    x[0, 0] = math.inf
    out = trained.step(x)
    trained.step(torch.ones(3, 4))
    (kept,) = trained.guard.evidence.steps
    assert kept.weights is not None
    now = [p.detach().clone() for p in trained.model.parameters()]
    kept.weights.put_into(trained.model)
    assert not torch.equal(now[0], trained.linear.weight)
    with torch.no_grad():
        again = kept.forwards[0].run(trained.model)
    assert str(again.tolist()) == str(out.tolist()), "nan, too, where there was nan"


def test_steps_of_another_cell_take_the_place_of_those_before(trained: Trained) -> None:
    trained.step(bad())
    list(trained.guard.cell_ended(ENDED))
    trained.begin(2)
    assert [one.cell for one in trained.guard.evidence.steps] == [1]
    trained.step(bad())
    assert [one.cell for one in trained.guard.evidence.steps] == [2]


def test_the_newest_steps_are_kept_and_share_weights_that_have_not_changed(
    trained: Trained,
) -> None:
    for _ in range(MOST_LEFT_OUT + 2):
        trained.step(bad())
    kept = trained.guard.evidence.steps
    assert len(kept) == MOST_LEFT_OUT
    assert len({id(one.weights) for one in kept}) == 1
    trained.step(torch.ones(3, 4))
    trained.step(bad())
    kept = trained.guard.evidence.steps
    assert [one.weights is None for one in kept] == [True, True, True, False]


def test_what_is_too_large_is_not_kept(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "WEIGHT_BYTES", 10)
    monkeypatch.setattr(evidence, "INPUT_BYTES", 100)
    for _ in range(3):
        trained.step(bad())
    kept = trained.guard.evidence.steps
    assert all(one.weights is None for one in kept)
    assert [(len(one.forwards), one.unkept) for one in kept] == [(0, 1), (1, 0), (1, 0)]


def test_of_one_step_a_bounded_part_of_its_inputs_is_held() -> None:
    model = nn.Linear(4, 2)
    made = Forwards(model, lambda: None, 100)
    for _ in range(4):
        model(torch.ones(3, 4))  # 48 bytes
    assert (len(made.made), made.unkept) == (2, 2)
    made.stepped()
    model(torch.ones(3, 4))
    assert (len(made.made), made.unkept) == (1, 0)
    made.remove()
    assert not model._forward_pre_hooks


def test_micro_batches_beyond_a_number_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "MOST_FORWARDS", 2)
    model = nn.Linear(4, 2)
    made = Forwards(model, lambda: None, 1 << 20)
    for _ in range(5):
        model(torch.ones(3, 4))
    assert (len(made.made), made.unkept) == (2, 3)


def test_forwards_that_do_not_train_are_not_recorded(trained: Trained) -> None:
    with torch.no_grad():
        trained.model(torch.ones(3, 4))
    trained.step(bad())
    assert len(trained.guard.evidence.steps[0].forwards) == 1


def test_inputs_that_are_changed_in_place_are_known_to_be(trained: Trained) -> None:
    x = bad()
    trained.step(x)
    (forward,) = trained.guard.evidence.steps[0].forwards
    assert not forward.is_changed
    x.zero_()
    assert forward.is_changed


def test_a_forward_has_its_autocast_again() -> None:
    model = nn.Linear(4, 2)
    made = Forwards(model, lambda: None, 1 << 20)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(3, 4))
    assert made.made[0].run(model).dtype == torch.bfloat16


def test_inputs_that_cannot_be_recorded_do_not_end_the_training() -> None:
    model = nn.Linear(4, 2)
    made = Forwards(model, lambda: None, 1 << 20)
    for x in (torch.eye(4).to_sparse(), torch.ones(3, 4)):
        assert model(x).isfinite().all()
    assert made.made == []


def test_a_copy_of_the_model_records_nothing_and_neither_keeps_the_other_alive() -> None:
    model = nn.Linear(4, 2)
    made = Forwards(model, lambda: None, 1 << 20)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(3, 4))
    assert made.made == []
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_after_the_cell_nothing_is_recorded_and_no_hook_is_left(trained: Trained) -> None:
    trained.guard.evidence.gave(GivenBatch(bad(), 0, range(3), lambda: None))
    trained.step(torch.ones(3, 4))
    list(trained.guard.cell_ended(ENDED))
    assert not trained.model._forward_pre_hooks
    assert not trained.guard.evidence.is_on


def test_where_no_rank_can_be_asked_nothing_is_kept() -> None:
    guard, weight = Guard(), nn.Parameter(torch.ones(1))
    guard.cell_began(CellStart(1, (0,), 1, guard=True))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = bad(1)[0, :1]
    optimizer.step()
    assert guard.evidence.steps == []
    list(guard.cell_ended(ENDED))


def test_a_step_is_left_out_also_where_its_evidence_fails(trained: Trained) -> None:
    def fail() -> float:
        raise ValueError("no loss")

    trained.guard.evidence.loss = fail
    before = trained.linear.weight.tolist()
    trained.step(bad())
    assert trained.linear.weight.tolist() == before
    assert trained.guard.evidence.steps == []


def test_norms_are_those_of_each_module_in_the_order_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first, second, third, _ = parameters = list(model.parameters())
    stranger = nn.Parameter(torch.ones(1))
    first.grad, second.grad = torch.full((1, 1), 3.0), torch.full((1,), 4.0)
    third.grad = torch.full((1, 1), math.inf)
    stranger.grad = torch.ones(1)
    found = norms_by_module([stranger, *reversed(parameters)], model)
    assert found == {"0": 5.0, "1": None, "parameter 0": 1.0}
    assert list(found) == ["0", "1", "parameter 0"]
