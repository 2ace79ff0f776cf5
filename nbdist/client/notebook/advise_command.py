"""What `%dist advise` does: names of the notebook, a machine, and what comes back."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nbdist.client.advice.advise import advise as advice_for
from nbdist.client.advice.answer import Advice
from nbdist.client.advice.facts import training
from nbdist.client.advice.here import machine_of, measured_s
from nbdist.client.advice.options import PASSING, options_of
from nbdist.client.notebook.current import current, is_running
from nbdist.shared.errors import UsageError
from nbdist.study.machine import parse_machine


def advise(asked: Namespace, names: Mapping[str, Any]) -> Advice:
    """Return advice for names of the notebook; with `--run` the best is measured, too.

    Raises:
        NBDistError: A name or a word is wrong, or the model's step cannot run without numbers.
    """
    model, batch = _value(asked.model, names), _value(asked.batch, names)
    loss = _value(asked.loss, names) if asked.loss else None
    optimizer = _value(asked.optimizer, names) if asked.optimizer else None
    if asked.on is None and not is_running():
        raise UsageError(
            "%dist advise needs a machine: no ranks are running.",
            do='--on "8 h100 nvlink4, 2 hosts ib400", or %dist start, for advice on this one',
        )
    if asked.run and asked.on is not None:
        raise UsageError("--run is for the running ranks, and --on for other machines.")
    what = training(model, batch, loss, optimizer, None)  # refuses before the seconds of a probe
    machine = parse_machine(asked.on) if asked.on is not None else None
    print(PASSING, flush=True)
    machine = machine or machine_of(current())
    others = options_of(asked)
    found = advice_for(model, batch, machine, loss=loss, optimizer=optimizer, **others)
    if not asked.run:
        return found
    return replace(found, measured_s=measured_s(current(), machine, found.best, what))


def _value(text: str, names: Mapping[str, Any]) -> Any:
    """Return what a name of the notebook means, such as `make` or `torch.optim.SGD`.

    Raises:
        UsageError: There is none.
    """
    first, *parts = text.split(".")
    if first not in names:
        raise UsageError(f'There is no "{first}" in this notebook.')
    value = names[first]
    for part in parts:
        if not hasattr(value, part):
            raise UsageError(f'There is no "{text}" in this notebook.')
        value = getattr(value, part)
    return value
