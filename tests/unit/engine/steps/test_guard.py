"""What a guarded step looks at, and what it says; on one process, without a group."""

import math
from collections.abc import Callable

import pytest
import torch

import nbdist
from nbdist.engine.compat.cuda_graphs import graphs
from nbdist.engine.component import EndedCell
from nbdist.engine.steps.guard import Guard, is_finite
from nbdist.shared.wire import CellStart

GUARDED = CellStart(1, (0,), 1, guard=True)
ENDED = EndedCell(1, "", has_succeeded=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_numbers_whose_norm_overflows_are_finite_all_the_same(dtype: torch.dtype) -> None:
    greatest = torch.full((4, 4), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite([greatest, torch.ones(3)])
    greatest[1, 1] = math.inf
    assert not is_finite([torch.ones(3), greatest])


def test_a_shard_without_numbers_and_no_gradient_at_all_are_finite() -> None:
    assert is_finite([])
    assert is_finite([torch.empty(0), torch.ones(2)])


def test_of_sparse_gradients_the_values_are_looked_at() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    (embedding(torch.tensor([1, 1])).sum() * math.nan).backward()
    assert embedding.weight.grad is not None
    assert not is_finite([embedding.weight.grad])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_a_step_that_is_left_out_changes_neither_weights_nor_states(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1, weight_decay=0.1)
    guard = Guard()
    logged: list[dict[str, float]] = []
    guard.log = lambda _, numbers: logged.append(numbers)
    guard.cell_began(GUARDED)
    weight.grad = torch.ones(3)
    optimizer.step()
    before = weight.tolist(), str(optimizer.state_dict())
    weight.grad = torch.tensor([1.0, math.nan, 1.0])
    optimizer.step()
    assert (weight.tolist(), str(optimizer.state_dict())) == before
    assert logged == [{"left_out": 1.0}]
    assert len(list(guard.cell_ended(ENDED))) == 1
    weight.grad = torch.full((3,), math.nan)
    optimizer.step()  # the cell is over, and nobody has asked for this one
    assert weight.isnan().all()


def test_the_parameters_of_one_layout_are_watched_for_one_step() -> None:
    mine, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([one], lr=0.1) for one in (mine, other)]
    guard = Guard()
    guard.cell_began(CellStart(1, (0,), 1))
    guard.arm([mine])
    for one, optimizer in zip((mine, other), optimizers, strict=True):
        one.grad = torch.full((1,), math.nan)
        optimizer.step()
    assert (mine.item(), other.isnan().item()) == (1.0, True)
    mine.grad = torch.full((1,), math.nan)
    optimizers[0].step()
    assert mine.isnan().all()
    assert list(guard.cell_ended(ENDED)) != []


def test_two_models_that_are_asked_for_before_either_steps_are_both_watched() -> None:
    guard = Guard()
    guard.cell_began(CellStart(1, (0,), 1))
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    for weight in weights:
        guard.arm([weight])
        weight.grad = torch.full((1,), math.nan)
    for optimizer in optimizers:
        optimizer.step()
    assert [weight.item() for weight in weights] == [1.0, 1.0]
    assert len(list(guard.cell_ended(ENDED))) == 1


def test_a_step_that_failed_leaves_the_others_watched() -> None:
    guard = Guard()
    guard.cell_began(GUARDED)
    failing, weight = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))

    def fail() -> float:
        raise ValueError("a closure's own")

    lives_on = torch.optim.SGD([failing], lr=0.1)
    with pytest.raises(ValueError, match="a closure's own"):
        lives_on.step(fail)
    weight.grad = torch.full((1,), math.nan)
    torch.optim.SGD([weight], lr=0.1).step()
    assert weight.item() == 1.0
    assert list(guard.cell_ended(ENDED)) != []


def test_a_step_without_parameters_ends_what_was_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard, looked = Guard(), []
    guard.cell_began(CellStart(1, (0,), 1))
    monkeypatch.setattr(guard, "_look", lambda *given: looked.append(given))
    empty = torch.optim.SGD([{"params": []}], lr=0.1)
    guard.arm([])
    empty.step()
    empty.step()  # nobody has asked for this one: other ranks do not agree on it either
    assert len(looked) == 1
    list(guard.cell_ended(ENDED))


def test_a_step_in_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = Guard()
    guard.cell_began(GUARDED)
    weight.grad = torch.ones(1)
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "is_capturing", True)
        with pytest.raises(nbdist.UsageError, match="captured in a CUDA graph cannot be left out"):
            optimizer.step()
    list(guard.cell_ended(ENDED))


def test_of_two_optimizers_the_one_that_has_stepped_is_said() -> None:
    guard = Guard()
    guard.step = lambda: 7
    guard.cell_began(GUARDED)
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    made = torch.optim.AdamW(weights[:1]), torch.optim.SGD(weights[1:])
    weights[0].grad, weights[1].grad = torch.full((1,), math.nan), torch.ones(1)
    for optimizer in made:
        optimizer.step()
    (said,) = guard.cell_ended(ENDED)
    assert "Step 7 was left out on all ranks for AdamW (1 parameter) alone" in said
    assert "In the same step SGD (1 parameter) has stepped" in said
