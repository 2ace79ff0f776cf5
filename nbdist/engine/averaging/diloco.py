"""`nbdist.DiLoCo`: many independent steps, then one outer step by the mean of all ranks' changes.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023). Every
rank trains from the same *anchor* for `every` steps; the mean over ranks of how far they have moved
from it, the pseudo-gradient, is the gradient of an outer SGD with Nesterov momentum on the anchor,
from which all continue. With `every=1`, `outer_lr=1`, no momentum and plain SGD inside it computes
the same as DDP.

The anchor and the outer momentum take twice the parameters' memory, and are equal on all ranks.
Main thread.
"""

from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.engine.averaging import fit
from nbdist.engine.averaging.average import average
from nbdist.engine.averaging.local_sgd import InRounds
from nbdist.engine.averaging.rounds import Rounds
from nbdist.shared.errors import LayoutError


class DiLoCo(InRounds):
    """Wrap an optimizer, so that ranks make one outer step together every so many steps.

        opt = nbdist.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-3), every=50)

    The model is a plain module; every rank's weights and buffers become rank 0's here. All ranks
    call it, and make the same number of steps.

    Args:
        optim: The inner optimizer, AdamW in the paper.
        every: Inner steps per outer one.
        outer_lr: The outer learning rate.
        outer_momentum: Nesterov's; 0 for none.

    Raises:
        LayoutError: A number does not fit, ranks bring different models, or the model exchanges its
            gradients already.
    """

    def __init__(
        self, optim: Optimizer, every: int, outer_lr: float = 0.7, outer_momentum: float = 0.9
    ) -> None:
        fit.check(optim, "DiLoCo")
        rounds = Rounds(every)
        if not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise LayoutError(
                f"outer_lr={outer_lr} and outer_momentum={outer_momentum} are out of range.",
                why="the rate is above 0, the momentum from 0 to below 1",
                do="the paper uses outer_lr=0.7, outer_momentum=0.9",
            )
        words = f"every={every}, outer_lr={outer_lr:g}, outer_momentum={outer_momentum:g}"
        super().__init__(optim, rounds, f"DiLoCo({type(optim).__name__}, {words})")
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self._anchors = [p.detach().clone() for p in self.parameters()]
        self._momenta = [torch.zeros_like(anchor) for anchor in self._anchors]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse more parameters: there is no common anchor for them."""
        if "optim" in self.__dict__:
            raise LayoutError(
                "DiLoCo cannot take parameters later.",
                why="the outer optimizer began with those of the inner one",
                do="add the group to the inner optimizer, then wrap that again",
            )
        super().add_param_group(param_group)

    def own_state(self) -> dict[str, Any]:
        """Return the steps, the anchor and the outer momentum (the live tensors)."""
        return {**super().own_state(), "anchors": self._anchors, "momenta": self._momenta}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Load steps, anchor and outer momentum."""
        super().load_own_state(state)
        for live, saved in (
            (self._anchors, state["anchors"]),
            (self._momenta, state["momenta"]),
        ):
            for mine, its in zip(live, saved, strict=True):
                mine.copy_(its)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin from the present weights."""
        for anchor, momentum, parameter in zip(
            self._anchors, self._momenta, self.parameters(), strict=True
        ):
            anchor.copy_(parameter)
            momentum.zero_()

    @torch.no_grad()
    def _meet(self) -> None:
        """Make the outer step, and continue from its result."""
        parameters = [p.detach() for p in self.parameters()]
        moved = [anchor - p for anchor, p in zip(self._anchors, parameters, strict=True)]
        average([*moved, *fit.statistics_of(self.modules).values()])
        self._step_outside(moved)
        torch._foreach_copy_(parameters, self._anchors)

    def _step_outside(self, gradients: list[torch.Tensor]) -> None:
        """Step as `SGD(nesterov=True)` does, on the anchor."""
        if self.outer_momentum:
            torch._foreach_mul_(self._momenta, self.outer_momentum)
            torch._foreach_add_(self._momenta, gradients)
            torch._foreach_add_(gradients, self._momenta, alpha=self.outer_momentum)
        torch._foreach_add_(self._anchors, gradients, alpha=-self.outer_lr)
