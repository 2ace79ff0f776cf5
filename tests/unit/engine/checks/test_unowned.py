"""Parameters that get gradients and that no optimizer has."""

import pytest
import torch
from torch import nn

from nbdist.engine.checks import model_facts
from nbdist.engine.checks.unowned import Complete, Unowned
from nbdist.engine.compat import torch_live
from nbdist.engine.compat.torch_live import LiveObjects


class Training:
    """A model of two layers, and an optimizer of some of its parameters."""

    def __init__(self, live: LiveObjects, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = live
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        monkeypatch.setattr(model_facts, "model_of", lambda _: self.model)
        self.complete = Complete()
        self.optimizer = self.make(self.model)

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        made = torch.optim.SGD(trained, lr=0.1)
        self.live.remember(torch.optim.Optimizer, made)
        return made

    def told(self, looks: int = 2) -> list[dict[str, float]]:
        one, found = Unowned(self.complete), []
        for _ in range(looks):
            self.model(torch.ones(1, 2)).sum().backward()
            given = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
            self.optimizer.step()
            found.append(one.report(self.optimizer, given))
        return found


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    live = LiveObjects()
    monkeypatch.setattr(torch_live, "here", live)
    return Training(live, monkeypatch)


NEW_HEAD = {"unowned": 2.0, "unowned:1.weight": 1.0}


def test_a_head_that_has_replaced_another_is_told_once_it_got_gradients_twice(
    training: Training,
) -> None:
    training.model[1] = nn.Linear(2, 3)
    assert training.told() == [{}, NEW_HEAD]


def test_a_part_that_is_added_or_thawed_after_all_was_trained_is_told(training: Training) -> None:
    training.model[0].requires_grad_(False)
    training.optimizer = training.make(training.model)
    assert training.told() == [{}, {}]
    training.model[0].requires_grad_(True)
    assert training.told()[1] == {"unowned": 2.0, "unowned:0.weight": 1.0}


def test_who_trains_a_head_alone_need_not_freeze_the_rest(training: Training) -> None:
    training.optimizer = training.make(training.model[1])
    assert training.told() == [{}, {}]


def test_what_another_optimizer_has_or_a_loop_changes_by_hand_is_not_told(
    training: Training,
) -> None:
    training.model[1] = nn.Linear(2, 3)
    other = training.make(training.model[1])
    assert training.told() == [{}, {}]
    del other
    by_hand, weight = Unowned(training.complete), training.model[1].weight
    for _ in range(2):
        training.model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            for p in training.model[1].parameters():
                p.sub_(0.1)
        given = [p.grad for group in training.optimizer.param_groups for p in group["params"]]
        assert by_hand.report(training.optimizer, given) == {}
    assert weight.grad is not None


def test_a_head_that_somebody_holds_may_be_used_elsewhere(training: Training) -> None:
    old = training.model[1]
    training.model[1] = nn.Linear(2, 3)
    assert training.told() == [{}, {}]
    assert old.weight.requires_grad


def test_what_is_thawed_or_added_between_the_optimizer_and_its_first_step_is_told(
    training: Training,
) -> None:
    training.model[0].requires_grad_(False)
    training.optimizer = training.make(training.model)
    training.complete.made(training.optimizer)
    training.model[0].requires_grad_(True)
    assert training.told() == [{}, {"unowned": 2.0, "unowned:0.weight": 1.0}]


def test_of_an_optimizer_that_was_made_for_a_part_nothing_is_told(training: Training) -> None:
    training.optimizer = training.make(training.model[1])
    training.complete.made(training.optimizer)
    assert training.told() == [{}, {}]


def test_an_optimizer_whose_parts_are_all_frozen_is_told_though_another_has_the_rest(
    training: Training,
) -> None:
    stepping = training.make(training.model[0])
    other = training.make(training.model[1])
    training.model[0].requires_grad_(False)
    training.optimizer = stepping
    assert training.told() == [{}, {**NEW_HEAD, "frozen": 1.0}]
    training.optimizer = other
    assert training.told() == [{}, {}]
