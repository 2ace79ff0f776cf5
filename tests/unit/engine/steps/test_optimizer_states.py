"""An optimizer that steps from a copy of its state, and has its own again."""

import pytest
import torch
from torch import nn

from nbdist.engine.steps import optimizer_states
from nbdist.engine.steps.optimizer_states import States, bytes_of_state

KINDS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=torch.tensor(0.1), centered=True, foreach=False),
}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> list[list[float]]:
    for _ in range(times):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return [p.flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_it_steps_again_as_it_has_and_goes_on_as_if_it_had_not(kind: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = KINDS[kind](model.parameters())
    stepped(model, optimizer, 2)
    states = States.of(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    then = stepped(model, optimizer, 3)
    held = {name: v for s in optimizer.state.values() for name, v in s.items()}
    with optimizer_states.unharmed(optimizer), torch.no_grad():
        states.put_into(optimizer)
        for parameter, weights in zip(model.parameters(), before, strict=True):
            parameter.copy_(weights)
        optimizer.param_groups[0]["lr"] = 0.1
        with torch.enable_grad():
            assert stepped(model, optimizer, 3) == then
    assert states.fit(optimizer)
    again = {name: v for s in optimizer.state.values() for name, v in s.items()}
    assert all(again[name] is value for name, value in held.items()), "the same tensors"


def test_before_its_first_step_there_is_no_state_and_none_stays() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    states = States.of(optimizer)
    assert (states.entries, bytes_of_state(optimizer)) == ([None, None], 0)
    stepped(model, optimizer, 1)
    with optimizer_states.unharmed(optimizer):
        states.put_into(optimizer)
        assert not optimizer.state
    assert len(optimizer.state) == 2


def test_a_state_that_is_no_tensor_and_no_number_is_named() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.state[model.weight]["d"] = [torch.ones(1)]
    with pytest.raises(TypeError, match="a list"):
        States.of(optimizer)
