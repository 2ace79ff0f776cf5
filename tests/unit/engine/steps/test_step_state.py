"""Steps are counted whatever fails beside them: by them ranks are brought to one step."""

from collections.abc import Iterator

import pytest
import torch

from nbdist.engine.component import EndedCell
from nbdist.engine.steps.step_state import StepBoundary
from nbdist.shared.wire import CellStart

START = CellStart(1, (0,), 1)
FAILED = EndedCell(1, "1 / 0", has_succeeded=False)


@pytest.fixture
def boundary() -> Iterator[StepBoundary]:
    made = StepBoundary()
    made.install(lambda _: (), lambda *_: None)
    made.cell_began(START)
    yield made
    made.remove()


def optimizer_after(steps: int) -> torch.optim.Optimizer:
    made = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    for _ in range(steps):
        made.step()
    return made


def break_down(*_: object) -> None:
    raise ValueError("planted")


def test_what_cannot_be_recorded_costs_no_count_of_steps(boundary: StepBoundary) -> None:
    boundary.also(break_down, lambda _: None)
    optimizer = optimizer_after(3)
    assert boundary.steps[optimizer].whole == 3
    assert boundary.stepped() == [optimizer]
    (said,) = boundary.cell_ended(FAILED)
    assert "only the steps are counted" in said
    assert "ValueError: planted" in said


def test_what_cannot_be_recorded_in_one_cell_is_recorded_in_the_next(
    boundary: StepBoundary,
) -> None:
    seen: list[int] = []
    boundary.then(lambda _, steps: seen.append(steps))
    boundary.followers.after_step = break_down  # type: ignore[method-assign, assignment]
    optimizer = optimizer_after(2)
    assert seen == []
    del boundary.followers.after_step
    assert len(list(boundary.cell_ended(FAILED))) == 1
    boundary.cell_began(START)
    optimizer.step()
    assert seen == [3]
    assert list(boundary.cell_ended(FAILED)) == []


def test_of_a_turn_that_cannot_be_looked_at_nothing_is_known(boundary: StepBoundary) -> None:
    optimizer_after(1)
    boundary.followers.look = break_down  # type: ignore[method-assign]
    assert not boundary.progress().has_stepped
