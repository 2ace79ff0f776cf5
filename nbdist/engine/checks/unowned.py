"""Notice parameters of a model that get gradients, and that no optimizer has.

That alone may be meant: whoever trains a head need not freeze the rest. It is a mistake where the
model has got them since: the optimizer then has parameters that are in no module any more (a head
was replaced), or it had all that the model could train when this looked last (one was added, or
thawed). Or where all that the optimizer has is frozen, as after PEFT's `set_adapter`: what trains
then may have an optimizer, and another one steps. Main thread.
"""

import gc
import logging
import weakref
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from nbdist.engine.checks import model_facts
from nbdist.engine.compat import torch_live

_log = logging.getLogger("nbdist.checks")


class Complete:
    """The optimizers that had all that their model could train, as long as they live."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def made(self, optimizer: Optimizer) -> None:
        """Note one if it is one as its constructor ends, of a model that a cell has named."""
        try:
            model = model_facts.model_of(optimizer)
            owned = {id(p) for p in _parameters(optimizer)}
            if model is not None and all(id(p) in owned for _, p in _trainable(model)):
                self._known.add(optimizer)
        except Exception:  # in a constructor, which is the program's
            _log.exception("What a new optimizer has of its model is not known")

    def note(self, optimizer: Optimizer) -> None:
        """Note one of them."""
        self._known.add(optimizer)

    def has(self, optimizer: Optimizer) -> bool:
        """Return whether it ever was one."""
        return optimizer in self._known


class Unowned:
    """What one optimizer's model has that no optimizer has; of few observed steps."""

    def __init__(self, complete: Complete) -> None:
        """Begin; `complete` remembers optimizers from cell to cell."""
        self._complete = complete
        self._looks = 0
        self._suspects: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # with their versions

    def report(self, optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> dict[str, float]:
        """Return how many there are, after a step with these gradients of its parameters.

        A large model has many parameters. So they are looked at now and then, and once more where
        there are such: reported is what has got a gradient both times, and is as it was.

        Returns:
            `unowned`, a name of one as `unowned:NAME`, and `frozen` where all that this optimizer
            has is frozen, and another may have them; nothing where there is none.
        """
        self._looks += 1
        if not self._suspects and self._looks & (self._looks - 1):  # no power of two
            return {}
        before, self._suspects = self._suspects, self._found(optimizer, gradients)
        still = [
            name
            for name, (held, version) in self._suspects.items()
            if name in before and before[name][0] is held and before[name][1] == version
        ]
        if not still:
            return {}
        frozen = {"frozen": 1.0} if _is_frozen(_parameters(optimizer)) else {}
        return {"unowned": float(len(still)), f"unowned:{still[0]}": 1.0, **frozen}

    def _found(
        self, optimizer: Optimizer, gradients: Sequence[Tensor | None]
    ) -> dict[str, tuple[weakref.ref[Tensor], int]]:
        model = model_facts.model_of(optimizer)
        if model is None:
            return {}
        own = _parameters(optimizer)
        owned, is_frozen = {id(p) for p in own}, _is_frozen(own)
        others = [(n, p) for n, p in _trainable(model) if id(p) not in owned]
        if not others:
            self._complete.note(optimizer)
            return {}
        for one in () if is_frozen else torch_live.here.live(Optimizer):
            owned |= {id(p) for p in _parameters(one)}
        found = {
            name: (weakref.ref(p), p._version)
            for name, p in others
            if p.grad is not None and id(p) not in owned
        }
        if not found or is_frozen or self._complete.has(optimizer):
            return found
        idle = [p for p, grad in zip(own, gradients, strict=False) if grad is None]
        return found if any(p.requires_grad and _is_in_no_module(p) for p in idle) else {}


def _trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_frozen(parameters: Sequence[Tensor]) -> bool:
    return not any(p.requires_grad for p in parameters)


def _is_in_no_module(parameter: Tensor) -> bool:
    """Return whether nothing has a parameter by a name, as modules do. Searches the heap."""
    holders = (one for one in gc.get_referrers(parameter) if isinstance(one, dict))
    return not any(value is parameter for one in holders for value in list(one.values()))
