"""`nbdist.advise`: which layout to train with on a machine, before it is paid for.

Closed formulas choose among all layouts (`study/advice`); the best few are estimated from the
model's own code, and what that refuses is dropped.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nbdist.client.advice.answer import Advice
from nbdist.client.advice.estimate import EstimatePool
from nbdist.client.advice.facts import Training, estimated, job_of, overlap_of, training
from nbdist.shared.errors import UsageError
from nbdist.study.accelerators import ACCELERATORS
from nbdist.study.advice import Candidate, Choice, Dropped, Job, candidates, choose
from nbdist.study.machine import Machine, parse_machine
from nbdist.study.prices import PRICES, Price, read_prices

_FEW = 2  # families that are estimated beside the best
_ROUNDS = 3  # in which a refused one is replaced


def advise(
    model_factory: Callable[[], Any],
    batch: Any,
    machine: str | Machine,
    *,
    global_batch: int | None = None,
    samples: int = 0,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: type | None = None,
    options: Mapping[str, Any] | None = None,
    prices: str | Path | Mapping[str, Price] | None = None,
    saving_s: float = 60.0,
) -> Advice:
    """Return which layout trains a model best on a machine. Needs no cluster.

        nbdist.advise(make, batch, "8 h100 nvlink4, 2 hosts ib400", global_batch=256)

    Candidates are one device, one host and all hosts, with all mixes of dp, fsdp, tp, cp, ep and
    pp that divide them; micro-batches, accumulation and activation checkpoints come with each. The
    best few are run without numbers, as `nbdist.estimate` does: some seconds each.

    Args:
        model_factory: As in `estimate`.
        batch: As in `estimate`; its samples are the batch for which your learning rate is right.
        machine: `"8 h100 nvlink4, 2 hosts ib400"`, or a `Machine`.
        global_batch: Samples in a step over all ranks; by default those of `batch`.
        samples: Of the whole run, for its cost, and to know whether it is short; 0: unknown.
        loss: As in `estimate`.
        optimizer: As in `estimate`.
        options: As in `estimate`.
        prices: A price table, or the TOML file with one (`study/prices`), instead of list prices.
        saving_s: Seconds that training stands still for a checkpoint.

    Returns:
        What is advised; it prints with its reasons, and `code` is to be pasted.

    Raises:
        UsageError: An argument is none, the batch is no pair where there is a loss, or the
            model's step cannot run without numbers.
    """
    on = parse_machine(machine) if isinstance(machine, str) else machine
    price = _price(prices, on)
    with EstimatePool() as pool:
        what = training(model_factory, batch, loss, optimizer, options, pool)
        wanted = what.samples if global_batch is None else global_batch
        for name, value, least in (("global_batch", wanted, 1), ("samples", samples, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}={value!r} is no number of samples: {least} or more.")
        job = job_of(what, on, wanted, samples)
        choice = _chosen(what, job, on)
    names = (_name(model_factory, "make_model"), _loss(loss), _class(optimizer))
    return Advice(choice, job, on, price, names, what.samples, saving_s)


def _chosen(what: Training, job: Job, machine: Machine) -> Choice:
    """Return the choice among estimated candidates; a refused one is replaced by the next."""
    known: dict[tuple[object, ...], Candidate] = {}
    refused: dict[str, Dropped] = {}
    # Gradients that wait whole, beside shards, are no part of an estimate or of the code.
    every = [
        one
        for one in candidates(job, machine, overlap_of(machine))
        if one.parts == 1 or one.spread.fsdp == 1 or not one.once
    ]
    first = choose(job, machine, every)
    for _ in range(_ROUNDS):
        allowed = [known.get(_key(one), one) for one in every if one.spread.family not in refused]
        choice = choose(job, machine, allowed, refused.values())
        asked = [choice.best] if choice.best else []
        # What fits by a formula may not by an estimate, so the others have to be known, too.
        # One device tells what more of them are worth.
        asked += [*choice.others[:_FEW], *(o for o in choice.others if o.spread.world_size == 1)]
        asked = [one for one in dict.fromkeys(asked) if not one.is_estimated]
        if not asked:
            break
        for one, found in zip(asked, estimated(what, machine, asked), strict=True):
            if isinstance(found, Dropped):
                refused[found.name] = found
            else:
                known[_key(one)] = found
    final = choose(job, machine, known.values(), refused.values())
    # Families of which formulas know that nothing fits, or that they are slower, were never
    # estimated.
    known_families = {one.spread.family for one in known.values()}
    listed = {one.name for one in final.dropped} | known_families
    more = [one for one in first.dropped if one.name not in listed]
    if job.no_experts and machine.world_size > 1:
        more.append(Dropped("ep", "refused", said=job.no_experts))
    if first.best is not None:
        shortest_s = min(one.time.total_s for one in (first.best, *first.others))
        more += [
            Dropped(one.spread.family, "slower", one.time.total_s / shortest_s)
            for one in first.others
            if one.spread.family not in listed
        ]
    return Choice(final.best, final.others, (*final.dropped, *more), final.why, final.gain)


def _key(one: Candidate) -> tuple[object, ...]:
    return (one.spread, one.micro_batch, one.parts, one.checkpoint, one.once)


def _price(prices: str | Path | Mapping[str, Price] | None, machine: Machine) -> Price | None:
    word = next((w for w, one in ACCELERATORS.items() if one == machine.accelerator), "")
    return price_table(prices).get(word)


def price_table(prices: str | Path | Mapping[str, Price] | None) -> Mapping[str, Price]:
    """Return a table, that of a TOML file, or list prices.

    Raises:
        UsageError: The file cannot be read, or holds no such table.
    """
    if not isinstance(prices, str | Path):
        return PRICES if prices is None else prices
    try:
        return read_prices(Path(prices).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"The price table {prices} cannot be read.", why=error.strerror or str(error)
        ) from error


def _name(thing: Any, other: str) -> str:
    name = getattr(thing, "__name__", "")
    return name if name.isidentifier() else other


def _loss(loss: Callable[[Any, Any], Any] | None) -> str | None:
    if loss is None:
        return None
    name = _name(loss, "loss")
    functions = sys.modules.get("torch.nn.functional")
    return f"torch.nn.functional.{name}" if getattr(functions, name, None) is loss else name


def _class(optimizer: type | None) -> str:
    if optimizer is None:
        return "torch.optim.AdamW"
    in_torch = re.match(r"torch\.optim\.", optimizer.__module__)
    return f"torch.optim.{optimizer.__name__}" if in_torch else optimizer.__name__
