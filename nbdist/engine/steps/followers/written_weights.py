"""See that a loop itself writes weights after an optimizer's step, as it does to clip them.

Between the two the step is half done, and no object tells: `p.data.clamp_()` leaves not even a new
version. So a sample of the weights is summed as a step ends, and again as its turn does
(`followers`). That costs 0.2 ms and, on a GPU, a wait for it: in the first two turns of a cell and
then ever more seldom, unless the loop is known to write.

Main thread.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch

from nbdist.engine.compat import torch_live

Optimizer = torch.optim.Optimizer
Sums = tuple[str, ...]

_FIRST_TURNS = 2  # of a cell, which are looked at; then those of each power of two
_MOST_TENSORS = 32
_MOST_ITEMS = 4096  # of each, its first
_MOST_OPTIMIZERS = 4


@dataclass(slots=True)
class _Seen:
    """Whether weights were written in a turn of this cell that was looked at, and in each."""

    ever: bool
    always: bool


class WrittenWeights:
    """Whether weights are written after the steps of an optimizer, and have been after the last."""

    def __init__(self) -> None:
        self._stepped: WeakKeyDictionary[Optimizer, Sums] = WeakKeyDictionary()  # in this turn
        self._seen: WeakKeyDictionary[Optimizer, _Seen] = WeakKeyDictionary()  # in this cell
        self._wrote: WeakSet[Optimizer] = WeakSet()  # after whose steps a cell before wrote
        self._wrote_last: WeakSet[Optimizer] = WeakSet()  # in the turn that has ended
        self._turn = 0  # of the cell

    def begin_cell(self) -> None:
        """Look at the next turns: the cell may have another loop."""
        for optimizer, seen in list(self._seen.items()):
            (self._wrote.add if seen.ever else self._wrote.discard)(optimizer)
        self._seen.clear()
        self._stepped.clear()
        self._turn = 0

    def stepped(self, optimizer: Optimizer, *, is_looked_at: bool = False) -> None:
        """Note the weights as an optimizer's step has left them, those of others, too.

        Not in each turn, but where it `is_looked_at`.
        """
        has_room = len(self._stepped) < _MOST_OPTIMIZERS
        if has_room and (is_looked_at or self._is_due(optimizer)) and not _is_inner(optimizer):
            self._stepped[optimizer] = ()
        for one in list(self._stepped):  # this step may have changed weights of theirs
            self._stepped[one] = _sums(one)

    def turn_ended(self) -> None:
        """Note after whose steps weights have been written in the turn."""
        self._wrote_last.clear()
        for optimizer, sums in list(self._stepped.items()):
            wrote = sums != _sums(optimizer)
            seen = self._seen.setdefault(optimizer, _Seen(ever=False, always=True))
            seen.ever, seen.always = seen.ever or wrote, seen.always and wrote
            if wrote:
                self._wrote_last.add(optimizer)
        self._stepped.clear()
        self._turn += 1

    def wrote(self, optimizer: Optimizer) -> bool:
        """Return whether weights were written after its step in the turn that has ended."""
        return optimizer in self._wrote_last

    def written(self) -> list[Optimizer]:
        """Return the optimizers after whose steps a loop writes weights, as far as is known."""
        return [*(self._wrote | {o for o, seen in list(self._seen.items()) if seen.ever})]

    def missing(self) -> Iterator[tuple[Optimizer, bool]]:
        """Yield the optimizers after whose last step weights were not written, as they are else.

        With each, whether they are after every step; clipping does not always change them.
        """
        for optimizer, sums in list(self._stepped.items()):
            if self._does_write(optimizer) and sums == _sums(optimizer):
                seen = self._seen.get(optimizer)
                yield optimizer, seen is not None and seen.always

    def _is_due(self, optimizer: Optimizer) -> bool:
        turn = self._turn
        is_early = turn < _FIRST_TURNS or not turn & (turn - 1)
        return is_early or self._does_write(optimizer)

    def _does_write(self, optimizer: Optimizer) -> bool:
        seen = self._seen.get(optimizer)
        return optimizer in self._wrote or (seen is not None and seen.ever)


def _is_inner(optimizer: Optimizer) -> bool:
    """Return whether another optimizer steps with it, and writes the weights by itself."""
    return any(getattr(one, "optim", None) is optimizer for one in torch_live.here.live(Optimizer))


def _sums(optimizer: Optimizer) -> Sums:
    """Return sums of some of the weights, as texts: NaN is equal to NaN."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    every = -(-len(weights) // _MOST_TENSORS)
    parts = [getattr(weight, "_local_tensor", weight) for weight in weights[:: max(1, every)]]
    some = [part.detach().flatten()[:_MOST_ITEMS] for part in parts if _is_plain(part)]
    return tuple(str(part.abs().sum().item()) for part in some)


def _is_plain(weight: torch.Tensor) -> bool:
    """Return whether a tensor can be summed, whatever its library."""
    return (
        type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        and weight.device.type in ("cpu", "cuda")
        and weight.is_contiguous()
    )
