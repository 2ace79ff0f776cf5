"""Learning rates that a loop sets beside a scheduler, told from those that the scheduler sets."""

from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR

from nbdist.engine.steps.followers.tuned_by_hand import TunedByHand


def made() -> tuple[torch.optim.SGD, StepLR, TunedByHand]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    tuned = TunedByHand()
    tuned.watch([scheduler])
    return optimizer, scheduler, tuned


def test_a_rate_that_a_scheduler_has_set_is_the_schedulers() -> None:
    optimizer, scheduler, tuned = made()
    optimizer.step()
    scheduler.step()
    tuned.turn_ended()
    assert tuned.is_scheduled(optimizer)
    assert list(tuned.missing()) == []


def test_a_rate_that_a_loop_sets_after_the_scheduler_is_missing_until_it_is_set_again() -> None:
    optimizer, scheduler, tuned = made()
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[0]["lr"] *= 0.8
    tuned.turn_ended()
    assert not tuned.is_scheduled(optimizer)
    assert list(tuned.missing()) == []
    scheduler.step()
    assert list(tuned.missing()) == [(optimizer, 0, True)]
    tuned.turn_ended()
    assert list(tuned.missing()) == [(optimizer, 0, False)]


def test_a_group_that_is_newer_than_the_scheduler_is_nobodys() -> None:
    optimizer, _, tuned = made()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.3})
    tuned.turn_ended()
    assert tuned.is_scheduled(optimizer)


def test_of_a_schedule_of_the_users_own_it_is_not_known_what_it_has_set() -> None:
    class Own:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    optimizer, _, tuned = made()
    own = Own(optimizer)
    tuned.watch([own])
    optimizer.param_groups[0]["lr"] = 0.7
    tuned.turn_ended()
    assert tuned.is_scheduled(optimizer)
    assert list(tuned.missing()) == []
