"""An example of a batch, as policies take it: what it means, and the line that gives one."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from nbdist.engine.layout.plan.inputs import Inputs, as_inputs
from nbdist.engine.steps import keep

# What `example` of a policy takes, for people.
BATCH = (
    "a small batch as the model is called with: a tensor, a tuple of arguments or a dict of "
    "keywords"
)


def of_example(model: nn.Module, example: Any) -> Inputs:
    """Return the inputs in an example: all of it, or of a loader's batch what the model takes.

    That is its first part, where a forward does not take so many arguments, and of a dict the keys
    that it takes: the rest are targets.
    """
    taken = inspect.signature(model.forward).parameters.values()
    kinds = {one.kind for one in taken}
    if isinstance(example, Mapping) and inspect.Parameter.VAR_KEYWORD not in kinds:
        names = {one.name for one in taken}
        return Inputs((), {name: one for name, one in example.items() if name in names})
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    most = sum(one.kind in by_place for one in taken)
    is_more = isinstance(example, tuple | list) and len(example) > most > 0
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds
    return as_inputs(example[0] if is_more and not takes_any else example)


def ask_for(policy: str) -> str:
    """Return the line that gives a policy an example: of the one loader that the cells have."""
    found = {id(one): name for name, one in keep.here.names().items() if _is_loader(name, one)}
    line = f"nbdist.parallelize(model, layout, nbdist.{policy}(example="
    if len(found) != 1:
        return f"{line}batch)), {BATCH}"
    (name,) = found.values()
    return f"{line}next(iter({name})))), the first batch of your loader"


def _is_loader(name: str, value: object) -> bool:
    return isinstance(value, DataLoader) and not name.startswith("_")
