"""Of which optimizers a cell knows that their steps alone change tensors."""

import torch

from nbdist.engine.checkpoint.saved import DefaultFolder
from nbdist.engine.checkpoint.steady import Known
from nbdist.shared.wire import CellStart


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_what_one_cell_has_proven_the_next_proves_again() -> None:
    known, first, second = Known(), optimizer(), optimizer()
    known.prove([first])
    assert known.are_proven([first])
    assert not known.are_proven([first, second])
    known.cell_began(CellStart(2, (0,), 2))
    assert not known.are_proven([first])


def test_what_was_refuted_once_is_never_proven() -> None:
    known, one = Known(), optimizer()
    known.prove([one])
    known.refute([one])
    assert not known.are_proven([one])
    known.cell_began(CellStart(2, (0,), 2))
    known.prove([one])
    assert not known.are_proven([one])


def test_a_cell_that_names_no_folder_leaves_the_one_before() -> None:
    default = DefaultFolder()
    default.lie_beside("/runs/gpt")
    default.lie_beside("")
    assert default.folder == "/runs/gpt"
