"""`nbdist.scale_lr`: let the learning rate follow the global batch, with a warm-up.

A batch k times as large makes a k-th of the steps, each with less noise: the *linear* rule makes
each step k times as long. The *sqrt* rule, k ** 0.5, keeps the variance of a step, and suits
Adam's kind. At first a long step does harm, so the rate rises from that of the reference batch in
`warmup_steps` equal parts.

Sources: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2 (linear, gradual warm-up);
Krizhevsky, "One weird trick", 2014, and You et al., "LAMB", 2019 (square root).

The rates of the reference batch are kept in the optimizer's groups, as `reference_lr` beside
torch's `initial_lr`: plain numbers that travel with its state, and are always what is scaled.
"""

from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from nbdist.shared.errors import UsageError

RULES = {"linear": 1.0, "sqrt": 0.5}  # exponent of global_batch / reference_batch


class BatchScaledLR(LinearLR):
    """torch's LinearLR from the reference batch's rates to the scaled ones.

    Attributes:
        global_batch: Samples in a step, over all ranks.
        reference_batch: The samples for which the optimizer's rates were found.
        rule: "linear" or "sqrt".
        warmup_steps: Steps until the scaled rate is reached.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        global_batch: int,
        reference_batch: int,
        rule: str,
        warmup_steps: int,
    ) -> None:
        self.global_batch, self.reference_batch = global_batch, reference_batch
        self.rule, self.warmup_steps = rule, warmup_steps
        growth = factor(global_batch, reference_batch, rule)
        rises = warmup_steps > 0 and growth > 1
        # Without a rise it is constant: torch would keep the first factor if there were no steps.
        start = 1 / growth if rises else 1.0
        super().__init__(optimizer, start_factor=start, total_iters=warmup_steps if rises else 1)
        here.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be known on a rank that got it from another one, too."""
        self.__dict__.update(state)
        here.add(self)

    def __repr__(self) -> str:
        times = factor(self.global_batch, self.reference_batch, self.rule)
        rise = f" after {self.warmup_steps} steps" if self.total_iters > 1 else ""
        return (
            f"<BatchScaledLR: {times:g} x the rate{rise}, by the {self.rule} rule for batches of "
            f"{self.global_batch} instead of {self.reference_batch} samples>"
        )

    def is_for(self, optimizer: Optimizer, asked: tuple[int, int, str, int]) -> bool:
        """Return whether it does what is asked."""
        mine = (self.global_batch, self.reference_batch, self.rule, self.warmup_steps)
        return self.optimizer is optimizer and mine == asked


def factor(global_batch: int, reference_batch: int, rule: str) -> float:
    """Return what the rates of the reference batch are multiplied by."""
    return float((global_batch / reference_batch) ** RULES[rule])


def scale_lr(
    optimizer: Optimizer,
    *,
    global_batch: int,
    reference_batch: int,
    rule: str = "linear",
    warmup_steps: int = 0,
) -> BatchScaledLR:
    """Scale an optimizer's learning rates to the global batch; return the warm-up's scheduler.

    Call it right after the optimizer is made, and `step()` what it returns after each step of the
    optimizer. A schedule of your own is made after it and begins at the scaled rate: step both
    (`torch.optim.lr_scheduler.ChainedScheduler([warmup, own])`), or one after the other
    (`SequentialLR(optimizer, [warmup, own], [warmup_steps])`, which is the way for a `LambdaLR`).

    Rates never scale twice: the same call on the same optimizer changes nothing and returns the
    same scheduler, so a cell may be run again; a call with other numbers starts over from the
    rates of the reference batch.

    Args:
        optimizer: Its rates are those found for `reference_batch`.
        global_batch: Samples in one step over all ranks: that of `nbdist.loader`, times the
            batches that are accumulated.
        reference_batch: The samples in a step for which the rates are right.
        rule: "linear", or "sqrt" for the square root.
        warmup_steps: Steps in which the rates rise from the reference batch's. Where the batch
            is no larger than the reference's there is nothing to rise to, and none.

    Raises:
        UsageError: No optimizer, a batch or a number of steps that is none, an unknown rule, or a
            scheduler was made before and has noted the rates as they were. Nothing was changed.
    """
    _check(optimizer, global_batch, reference_batch, rule, warmup_steps)
    asked = (global_batch, reference_batch, rule, warmup_steps)
    times = factor(global_batch, reference_batch, rule)
    is_scaled = all(group.get("lr_factor") == times for group in optimizer.param_groups)
    if is_scaled and (known := here.find(optimizer, asked)) is not None:
        return known
    for group in optimizer.param_groups:
        group["global_batch"] = global_batch
        if group.get("lr_factor") == times and not warmup_steps:
            continue  # scaled already; a schedule may have moved it since
        reference = group.setdefault("reference_lr", _copy(group["lr"]))
        group["lr_factor"] = times
        group["initial_lr"] = reference * times
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(reference * times)  # a captured graph reads this very tensor
        else:
            group["lr"] = reference * times
    return BatchScaledLR(optimizer, *asked)


def scaled_for(optimizer: Optimizer) -> int | None:
    """Return the global batch that an optimizer's rates were last scaled for, if they were."""
    batch: int | None = optimizer.param_groups[0].get("global_batch")
    return batch


def _copy(rate: float | torch.Tensor) -> float | torch.Tensor:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _check(
    optimizer: object, global_batch: object, reference_batch: object, rule: str, warmup: object
) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"nbdist.scale_lr scales an optimizer's rates, and got a {type(optimizer).__name__}.",
            do="nbdist.scale_lr(optimizer, global_batch=256, reference_batch=64)",
        )
    for name, value in (("global_batch", global_batch), ("reference_batch", reference_batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(
                f"{name}={value!r} is not a batch size.",
                why="it counts samples in one step: 1 or more",
            )
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise UsageError(
            f"warmup_steps={warmup!r} is not a number of steps.", why="it counts steps: 0 or more"
        )
    if rule not in RULES:
        raise UsageError(f'rule="{rule}" is not a known rule.', do=f"use one of {', '.join(RULES)}")
    if any("initial_lr" in g and "reference_lr" not in g for g in optimizer.param_groups):
        raise UsageError(
            "A scheduler of this optimizer was made before its rates are scaled.",
            why="it has noted the rates as they were, and would bring them back",
            do="call nbdist.scale_lr right after the optimizer, and make the scheduler after it",
        )


class Schedulers:
    """The schedulers of this kind that live on a rank: the same call returns the same one."""

    def __init__(self) -> None:
        self._live: WeakSet[BatchScaledLR] = WeakSet()

    def add(self, one: BatchScaledLR) -> None:
        """Note one that was made here, or has come from another rank."""
        self._live.add(one)

    def find(self, optimizer: Optimizer, asked: tuple[int, int, str, int]) -> BatchScaledLR | None:
        """Return the one that does what is asked."""
        return next((one for one in self._live if one.is_for(optimizer, asked)), None)


here = Schedulers()
