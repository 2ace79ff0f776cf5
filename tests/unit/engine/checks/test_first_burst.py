"""The first operation of a backward that bursts, in one process without a group."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.engine.checks import first_burst as checked
from nbdist.engine.checks.first_burst import first_burst, place_in
from nbdist.engine.kernel import location
from nbdist.engine.steps.forwards import Forwards, MadeLoss

HUGE = 3e38


class Layout:
    """Makes a loss again, as layouts do."""

    def loss_again(self, made: MadeLoss, output: Any, see: Callable[[torch.Tensor], None]) -> None:
        loss = made.loss_fn(output, made.y)
        see(loss)
        loss.backward()


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.detach()).square().sqrt()


def first_of(model: nn.Module, loss_fn: Callable[[Any, Any], torch.Tensor]) -> dict[str, Any]:
    layout = Layout()
    forwards = Forwards(model, lambda: None, 1 << 20)
    forwards.loss = lambda: MadeLoss.of(layout, None, loss_fn, None, None)
    model(torch.ones(2, 4))
    found = first_burst(forwards.made[0], model)
    return {} if found is None else found


def test_the_module_in_whose_forward_an_operation_was_made_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Root(), nn.Linear(4, 4)))
    found = first_of(model, lambda out, _: out.sum())
    assert (found["operation"], found["module"], found["kind"]) == ("SqrtBackward0", "1.0", "Root")
    assert not found["is_loss"]
    assert found["place"].startswith("test_first_burst.py, line ")
    assert not any(module._forward_hooks for module in model.modules())
    assert not torch.is_anomaly_enabled()


def test_an_operation_behind_the_forward_is_the_losss() -> None:
    found = first_of(nn.Linear(4, 4), lambda out, _: (out - out.detach()).square().sum().sqrt())
    assert (found["operation"], found["is_loss"], found["module"]) == ("SqrtBackward0", True, None)


def test_finite_gradients_whose_sum_is_not_are_laid_at_no_operations_door() -> None:
    def loss_fn(out: torch.Tensor, _: Any) -> torch.Tensor:
        out = out * 1.0
        return (out * HUGE + out * HUGE).sum() * 1e-30 * 1e30

    assert first_of(nn.Linear(4, 4), loss_fn)["is_given"]


def test_what_a_mask_discards_is_not_named_and_what_bursts_behind_it_is() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            safe = x.masked_fill(torch.ones(4, dtype=torch.bool), 0.0)
            return torch.where(torch.ones(4, dtype=torch.bool), x, safe.log())

    def loss_fn(out: torch.Tensor, _: Any) -> torch.Tensor:
        return out.sum()

    assert first_of(nn.Sequential(nn.Linear(4, 4), Masked()), loss_fn) == {}
    found = first_of(nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 4), Masked()), loss_fn)
    assert (found["operation"], found["module"]) == ("SqrtBackward0", "1")


def test_of_a_sound_backward_nothing_is_named_and_parameters_of_the_loss_keep_their_gradient() -> (
    None
):
    own = nn.Parameter(torch.ones(()))
    own.grad = kept = torch.full((), 7.0)
    assert first_of(nn.Linear(4, 4), lambda out, _: (out * own).sum()) == {}
    assert own.grad is kept
    assert kept == 7.0


def test_the_users_innermost_line_is_told_and_none_before_the_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = "/tmp/ipykernel_nbdist/0123456789.py"
    monkeypatch.setattr(location.here, "_prompts", {cell: 7})
    before = ['  File "/home/me/launch.py", line 3, in <module>\n    main()\n']
    ours = [f'  File "{checked.__file__}", line 50, in first_burst\n    run()\n']
    torchs = [f'  File "{nn.__file__}", line 9, in forward\n    return f(x)\n']
    in_cell = [f'  File "{cell}", line 5, in forward\n    return self.up(x)\n']
    assert place_in([*before, *ours, *torchs, *in_cell, *torchs]) == "cell 7, line 5"
    assert place_in([*before, *ours, *torchs]) == ""
    assert place_in(before) == ""


def test_a_loss_is_of_the_next_forward_alone_and_knows_of_changed_targets() -> None:
    model, y, layouts = nn.Linear(4, 4), torch.ones(2), [Layout()]
    forwards = Forwards(model, lambda: None, 1 << 20)
    forwards.loss = lambda: MadeLoss.of(layouts[0], y, lambda out, y: out.sum(), None, 2)
    for _ in range(2):
        model(torch.ones(2, 4))
    first, second = (forward.loss for forward in forwards.made)
    assert second is None
    assert first is not None
    assert not first.is_changed
    y.zero_()
    assert first.is_changed
    layouts.clear()
    assert first.layout() is None
