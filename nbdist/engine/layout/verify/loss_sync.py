"""Have the ranks of a proof meet between forward and backward.

A rank whose loss fails, is invalid, or does not reach a parameter, would leave its peers in a
backward that waits for it. Here all know of it before any of them has begun.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.compat import torch_sharded
from nbdist.shared.error_text import text_of
from nbdist.shared.errors import LayoutError, NBDistError

LossFunction = Callable[[Any, Any], torch.Tensor]


class UnlikeError(Exception):
    """Ranks would compute gradients of different parameters.

    Attributes:
        missing: By rank, what it does not reach and others do, in the order of the model.
    """

    def __init__(self, missing: dict[int, list[str]]) -> None:
        super().__init__(missing)
        self.missing = missing


def checked(loss_fn: LossFunction) -> LossFunction:
    """Return a function that refuses what is no loss."""

    def loss_of(out: Any, y: Any) -> torch.Tensor:
        loss = loss_fn(out, y)
        wrong = _wrong_with(loss)
        if wrong:
            raise _refusal(f"loss_fn {wrong}.")
        return loss

    return loss_of


class Midway:
    """A loss function that ends with an exchange. Collective: all ranks have a loss."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        """Know the parameters by name.

        Args:
            model: With every parameter as an optimizer sees it.
            loss_fn: The user's.
        """
        self._model = model
        self._loss_fn = loss_fn
        self._names = {id(p): name for name, p in model.named_parameters()}

    def __call__(self, out: Any, y: Any) -> torch.Tensor:
        """Return the loss.

        Raises:
            LayoutError: It fails on some rank, or returns no loss there; on all ranks.
            UnlikeError: Ranks reach different parameters; on all ranks.
        """
        failed: Exception | None = None
        reached: set[str] = set()
        loss: Any = None
        try:
            loss = self._loss_fn(out, y)
        except NBDistError:
            raise  # of a collective in it, which all ranks know of already
        except Exception as error:
            failed = error
            wrong = f"fails: {type(error).__name__}: {(text_of(error).splitlines() or [''])[0]}"
        else:
            wrong = _wrong_with(loss)
            reached = set() if wrong else self._reached(loss)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (wrong, reached))
        for rank, (complaint, _) in enumerate(everyone):
            if complaint:
                raise _refusal(f"On rank {rank} loss_fn {complaint}.") from failed
        missing = _missing([there for _, there in everyone], list(self._names.values()))
        if missing:
            raise UnlikeError(missing)
        return loss  # type: ignore[no-any-return]

    def _reached(self, loss: torch.Tensor) -> set[str]:
        """Return the names of the parameters that a backward would come to."""
        names = dict(self._names)
        for sharded, gathered in torch_sharded.gathered(self._model):
            if id(sharded) in self._names:
                names[id(gathered)] = self._names[id(sharded)]
        return _leaves(loss, names)


def _missing(reached: list[set[str]], names: list[str]) -> dict[int, list[str]]:
    """Return the parameters that a rank does not reach, and another one does, by rank."""
    anywhere = set().union(*reached)
    return {
        rank: [name for name in names if name in anywhere - there]
        for rank, there in enumerate(reached)
        if anywhere - there
    }


def _leaves(loss: torch.Tensor, names: Mapping[int, str]) -> set[str]:
    found: set[str] = set()
    seen: set[Any] = {None}
    due: list[Any] = [loss.grad_fn]
    while due:
        node = due.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of what accumulates a gradient
        if id(variable) in names:
            found.add(names[id(variable)])
        due += [before for before, _ in node.next_functions]
    return found


def _wrong_with(loss: object) -> str:
    """Return in words why it is no loss, "" where it is one."""
    if not isinstance(loss, torch.Tensor):
        return f"returns a {type(loss).__name__}, where a tensor of one number is needed"
    if loss.numel() != 1:
        return f"returns a tensor of shape {tuple(loss.shape)}, where one number is needed"
    if not loss.is_floating_point():
        return f"returns a tensor of {loss.dtype}, which has no gradient"
    return ""


def _refusal(what: str) -> LayoutError:
    return LayoutError(what, do="verify((x, y), loss_fn) calls loss_fn(model(x), y): a mean")
