"""What ranks do after a step, while all stand still: evaluate an expression, or set a value.

Main thread, of all ranks at the same step; see `engine/steps/halt.py`.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_live
from nbdist.engine.steps import step_state
from nbdist.engine.training import training
from nbdist.shared import plain, wire

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from nbdist.engine.kernel.records import Recorder
    from nbdist.engine.rank.rank import Rank

LR: Final = "lr"
MOST_CHARACTERS: Final = 2000  # of a value's repr

Action = Callable[..., dict[str, Any]]


def actions(rank: "Rank") -> dict[str, Action]:
    """Return what the notebook may ask of ranks that stand still, by name."""

    def names() -> dict[str, Any]:
        found: dict[str, Any] = rank.kernel.shell.user_ns
        return found

    return {
        "peek": lambda expression: peek(expression, names()),
        "change": lambda values, params: change(values, params, names(), rank.recorder),
    }


def peek(expression: str, names: dict[str, Any]) -> dict[str, Any]:
    """Return the `text` of an expression's value, by the names of the cells.

    It may run collectives: all ranks are here. Random generators draw afterwards what they would
    have drawn without it. What it raises the training does not.
    """
    code = compile(expression, "<peek>", "eval")
    with torch.no_grad(), _same_random_numbers():
        return {"text": text_of(eval(code, names))}


def text_of(value: object) -> str:
    """Return a value's repr, cut where it is long; of a tensor of one element the number.

    Of a DTensor that is the number of all ranks, as the norm of a sharded weight: a collective.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        value = whole.item()
    text = repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    boundary = step_state.here()
    mark = boundary.random_numbers()
    try:
        yield
    finally:
        boundary.start_over(mark)


def change(
    values: Mapping[str, Any], params: Mapping[str, Any], names: dict[str, Any], record: "Recorder"
) -> dict[str, Any]:
    """Set values, and report them as a fact of the cell.

    Args:
        values: By name, as `plain` encodes them; `lr` is that of all optimizers that have stepped
            in this cell, and the variable, too, where the cell was given one.
        params: Names that the cell was given by `-p`.
        names: Those of the cells.
        record: Takes the fact.

    Returns:
        `changes`, each the fields of the notebook's `Change`; `overwritten_by`: classes of
        schedulers that will set `lr` anew, whatever it is now.
    """
    step, made, overwriting = training.here.current_step(), [], list[str]()
    for name, encoded in values.items():
        new, old = plain.decode(encoded), ""
        if name in params:
            old = text_of(names.get(name))
            names[name] = new
        if name == LR:
            optimizers = step_state.here().stepped()
            old = ", ".join(dict.fromkeys(_rates(optimizers))) or old
            overwriting = set_rate(optimizers, float(new))
        made.append((step, name, old, text_of(new), encoded))
    before = json.loads(record.facts.get(wire.CHANGES, "[]"))
    record.fact(**{wire.CHANGES: json.dumps([*before, *made])})
    record.add("change", step, {})  # facts travel with records
    return {"changes": made, "overwritten_by": overwriting}


def _rates(optimizers: list[torch.optim.Optimizer]) -> list[str]:
    groups = [group for one in optimizers for group in one.param_groups]
    return [f"{float(group[LR]):.6g}" for group in groups if LR in group]


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> list[str]:
    """Set the learning rate of all groups; return the classes of schedulers that overwrite it.

    Most schedulers go on from it: they compute the next rate from the present one. Those that do
    not, as LambdaLR, get `base_lrs` with which they do. One that has other sources, as OneCycleLR,
    overwrites it.
    """
    found = [
        one
        for one in torch_live.here.live(torch.optim.lr_scheduler.LRScheduler)
        if any(_has(one, optimizer) for optimizer in optimizers)
    ]
    before = [_computed(one) for one in found]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group.get(LR), torch.Tensor):
                group[LR].fill_(rate)  # a compiled step holds it
            elif LR in group:
                group[LR] = rate
    for one in found:  # what it tells as its last ones, and a loop that sets rates is known by
        one.get_last_lr()[:] = [_copied(group[LR]) for group in one.optimizer.param_groups]
    overwriting = [
        type(one).__name__
        for one, was in zip(found, before, strict=True)
        if was and _computed(one) == was and not _goes_on_from(one, was, rate)
    ]
    return list(dict.fromkeys(overwriting))


def _goes_on_from(scheduler: "LRScheduler", was: list[float], rate: float) -> bool:
    """Scale `base_lrs` from the rates that it computed to `rate`; return whether that is enough."""
    base = scheduler.base_lrs
    if all(was):
        scheduler.base_lrs = [one * rate / old for one, old in zip(base, was, strict=True)]
        if all(math.isclose(one, rate) for one in _computed(scheduler) or [math.nan]):
            return True
        scheduler.base_lrs = base
    return was == [rate] * len(was)


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _has(scheduler: "LRScheduler", optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scheduler sets this optimizer's rates; wrappers share the groups."""
    return scheduler.optimizer.param_groups is optimizer.param_groups


def _computed(scheduler: "LRScheduler") -> list[float] | None:
    """Return the rates that a scheduler computes for now; None where it computes none."""
    try:
        with warnings.catch_warnings():  # that it is called outside of a scheduler's step
            warnings.simplefilter("ignore")
            return [float(rate) for rate in scheduler.get_lr()]
    except Exception:  # such as of ReduceLROnPlateau, which changes what is there
        return None
