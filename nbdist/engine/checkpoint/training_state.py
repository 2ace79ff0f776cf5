"""What a training is made of on this rank, found without lists: models, optimizers, all else.

A model is what a living optimizer trains, or what `nbdist.keep` names. Main thread.
"""

import gc
import inspect
import sys
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from nbdist.engine.checkpoint import trained_models
from nbdist.engine.checkpoint.trained_models import Optimizer, TrainedModel, parameters_of
from nbdist.engine.compat import torch_live, torch_sharded
from nbdist.engine.data.position import position
from nbdist.engine.data.position.position import LoaderPosition
from nbdist.engine.steps import keep, step_state
from nbdist.engine.steps.followers import find_followers
from nbdist.engine.steps.optimizer_wrapper import Wrapper
from nbdist.shared.errors import CheckpointError, UsageError


@dataclass
class Training:
    """All that a training needs to go on.

    Attributes:
        models: In the order of making.
        optimizers: Likewise, without those inside others.
        followers: What else has a state to put back, by the name that leads there: schedulers,
            scalers, averages, the user's own.
        kept: What `nbdist.keep` names, but modules.
        loaders: Of every living `nbdist.loader`, in the order of making.
        called: By what names cells call models and optimizers, by ids of modules and optimizers.
        left_out: Models that cells can reach, and that are no part of it.
        whole: What is trained here, in words, where a call has asked for this part of it.
    """

    models: list[TrainedModel]
    optimizers: list[Optimizer]
    followers: dict[str, Any]
    kept: dict[str, Any]
    loaders: list[LoaderPosition]
    names: dict[int, str] = field(default_factory=dict)  # "GPT.head.weight", by id of parameters
    called: dict[int, set[str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    whole: str = ""

    def __str__(self) -> str:
        optimizers = ", ".join(type(real(optimizer)).__name__ for optimizer in self.optimizers)
        models = ", ".join(model.name for model in self.models)
        return f"{models or 'no model'}, trained by {optimizers or 'none'}"

    @property
    def step(self) -> int:
        """Steps of the optimizer that has made most."""
        counts = step_state.here().steps
        return max((counts[o].whole for o in self.optimizers if o in counts), default=0)

    def names_of(self, one: TrainedModel | Optimizer) -> list[str]:
        """Return by what names cells call it: first its own variables, then what is around it."""
        key, names = one.module if isinstance(one, TrainedModel) else one, _names_here()
        return sorted(
            self.called.get(id(key), ()),
            key=lambda name: (names.get(name) is not key, not name.isidentifier(), name),
        )

    def asked_by(self, among: Collection[str] | None = None) -> list[str]:
        """Return a name of each model, or of those `among` them; none where one has none."""
        wanted = [model for model in self.models if among is None or model.name in among]
        names = [self.names_of(model)[:1] for model in wanted]
        return [name for one in names for name in one] if all(names) else []

    def part(self, names: Collection[str]) -> "Training":
        """Return of it the models of these names, and what hangs on them alone or on nothing."""
        models = [model for model in self.models if model.name in names]
        own = {id(p) for model in models for p in model.module.parameters()}
        optimizers = [o for o in self.optimizers if any(id(p) in own for p in parameters_of(o))]
        around = {id(None), *(id(one) for o in optimizers for one in (o, real(o)))}
        its = {name: one for name, one in self.followers.items() if id(follows(one)) in around}
        return replace(self, models=models, optimizers=optimizers, followers=its)


def find(among: Collection[Optimizer] | None = None) -> Training:
    """Return the training of this rank.

    Args:
        among: The optimizers that belong to it; None: all that cells can reach, themselves or what
            they train, so none of a cell that failed, which only its traceback keeps alive.

    Raises:
        CheckpointError: There is nothing to save, or something that cannot be.
    """
    found = _find(_belonging() if among is None else among)
    if not found.models:
        raise CheckpointError(
            "There is no training here: no optimizer trains a model, and nbdist.keep names none.",
            do="build model and optimizer first, or name what there is: nbdist.keep(model=model)",
        )
    return found


def of_cell() -> Training:
    """Return what the running cell trains, or, before any step in it, all that cells can reach.

    Its optimizers are those that have stepped in it, those that were made in the same cells as they
    (of two that take turns one may not have begun), and what else trains their models.

    Raises:
        CheckpointError: As `find`.
    """
    here = step_state.here()
    stepped = {id(o) for o in here.stepped()}
    known = stepped | {id(o) for o in _belonging()}
    living = [o for o in _optimizers() if {id(o), id(real(o))} & known]
    own = [o for o in living if {id(o), id(real(o))} & stepped]
    cells = {here.made_in.get(o) for o in own}
    found = find([o for o in living if here.made_in.get(o) in cells] if own else living)
    trained = {id(p) for model in found.models for p in model.module.parameters()}
    among = [o for o in living if any(id(p) in trained for p in parameters_of(o))]
    if len(among) > len(found.optimizers):
        found = find(among)
    others = [o for o in living if all(o is not mine for mine in found.optimizers)]
    found.left_out = _left_out(found, others) if others else ()
    return found


def _left_out(found: Training, others: list[Optimizer]) -> tuple[str, ...]:
    """Return by what names, or else of what class, the models are called that these train."""
    inside = {id(model.module) for model in found.models}
    models = [m for m in trained_models.modules(others) if id(m) not in inside]
    called = _called(models, [])
    return tuple(min(called.get(id(m), {torch_sharded.plain_name(m)})) for m in models)


def asked(every: Training, what: Collection[Any], call: str) -> Training:
    """Return the part of a training that a call asks for: models or optimizers, or their names.

    Raises:
        UsageError: One of them is none, or not here.
    """
    ones: list[TrainedModel | Optimizer] = [*every.models, *every.optimizers]
    names = [model.name for model in every.models]
    found: list[str] = []
    for one in what:
        mine = [part for part in ones if _is_asked(one, part, every)]
        if not mine:
            known = sorted(name for part in ones for name in every.names_of(part)) or names
            raise UsageError(
                f"{call} takes models and optimizers that are trained here, or the names of their "
                f"variables, not {one if isinstance(one, str) else type(one).__name__}.",
                do=f"those here are {', '.join(known)}{_keep_it(one)}",
            )
        for part in mine:
            own = {id(p) for p in _parameters(part)}
            found += [m.name for m in every.models if own & {id(p) for p in _parameters(m)}]
    return replace(every.part(found), whole=str(every))


def _keep_it(one: Any) -> str:
    """Return how a model that nothing trains becomes a part of the training, if `one` is one."""
    names = _names_here()
    module = trained_models.model_in(names.get(one) if isinstance(one, str) else one)
    if module is None:
        return ""
    named = (n for n, v in names.items() if n[:1] != "_" and trained_models.model_in(v) is module)
    name = next(named, "model")
    return f"; nbdist.keep({name}={name}) adds a model that is not trained"


def _is_asked(one: Any, part: TrainedModel | Optimizer, every: Training) -> bool:
    if isinstance(one, str):
        return one in every.names_of(part)
    if isinstance(part, TrainedModel):
        return trained_models.model_in(one) is part.module
    return one is part


def _parameters(one: TrainedModel | Optimizer) -> list[torch.Tensor]:
    return list(one.module.parameters()) if isinstance(one, TrainedModel) else parameters_of(one)


def _belonging() -> list[Optimizer]:
    """Return the optimizers that belong to what cells have; where none is reached, all.

    From the names of cells, of running functions and of the user's modules, and what is kept. Not
    through schedulers: one of a model that was made before keeps that one alive. `Out` does, too.
    """
    living = _optimizers()
    kinds = {id(o): {id(o), id(real(o)), *map(id, parameters_of(o))} for o in living}
    modules = [vars(m) for n, m in list(sys.modules.items()) if find_followers.is_users_module(n)]
    spaces = [_names_here(), *modules]
    roots = [v for s in spaces for n, v in list(s.items()) if n[:1] != "_" and n not in _IPYTHONS]
    # Whatever leads to IPython leads to these, and to all that was ever shown.
    closed = [keep.here.names(), *modules, keep.here.names().get("Out")]
    reached = _reached([*keep.here.kept().values(), *roots], list(kinds.values()), closed)
    return [o for o in living if kinds[id(o)] & reached] or living


def _reached(roots: list[Any], wanted: list[set[int]], closed: list[Any]) -> set[int]:
    """Return the ids of what is held by `roots`, not through `closed`, until one of each wanted."""
    missing = {one: group for group in wanted for one in group}
    left = {id(group) for group in wanted}
    reached = {id(one) for one in closed}
    todo = deque(roots)
    while todo and left:
        one = todo.popleft()
        if id(one) in reached:
            continue
        reached.add(id(one))
        if id(one) in missing:
            left.discard(id(missing[id(one)]))
        if isinstance(one, FunctionType):  # its globals are the whole namespace
            todo.extend([*(one.__closure__ or ()), *(one.__defaults__ or ())])
        elif isinstance(one, type):
            is_own = find_followers.is_users_module(one.__module__)
            todo.extend(vars(one).values() if is_own else ())
        elif not isinstance(one, _LEADS_NOWHERE):
            todo.extend(held for held in gc.get_referents(one) if gc.is_tracked(held))
    return reached


_IPYTHONS = ("In", "Out", "exit", "quit", "get_ipython")

# A frame or a traceback is one of a cell that is over.
_LEADS_NOWHERE = (ModuleType, FrameType, TracebackType, BaseException, LRScheduler)


def _find(among: Collection[Optimizer] | None) -> Training:
    chosen = None if among is None else {id(optimizer) for optimizer in among}
    optimizers = [o for o in _optimizers() if chosen is None or id(o) in chosen]
    modules = trained_models.modules(optimizers)
    counts: dict[str, int] = {}
    models = []
    for module in modules:
        kind = torch_sharded.plain_name(module)
        counts[kind] = counts.get(kind, 0) + 1
        name = kind if counts[kind] == 1 else f"{kind}-{counts[kind]}"
        models.append(trained_models.model(name, module, optimizers))
    names = {
        id(tensor): f"{model.name}.{name}"
        for model in models
        for name, tensor in model.tensors.items()
    }
    return Training(
        models,
        optimizers,
        _followers(models, optimizers),
        {n: v for n, v in keep.here.kept().items() if not isinstance(v, nn.Module | Optimizer)},
        position.here.in_order(),
        names,
        _called([model.module for model in models], optimizers),
    )


def _called(models: list[nn.Module], optimizers: list[Optimizer]) -> dict[int, set[str]]:
    known = {id(model): id(model) for model in models}
    known |= {id(inner): id(o) for o in optimizers for inner in (o, real(o))}

    def which(one: Any) -> int | None:
        model = trained_models.model_in(one)
        return known.get(id(one if model is None else model))

    return find_followers.names_of(keep.here.kept(), _names_here(), which)


# ---- Optimizers and what follows them -----------------------------------------------------------


def real(optimizer: Optimizer) -> Any:
    """Return the optimizer that holds the state: the one inside of another."""
    inner = getattr(optimizer, "optim", None)  # of ZeroRedundancyOptimizer and wrappers
    return inner if isinstance(inner, Optimizer) else optimizer


def _has_inner(optimizer: Optimizer) -> bool:
    return real(optimizer) is not optimizer


def _optimizers() -> list[Optimizer]:
    """Return the living optimizers in the order of making; of one parameter, the newest."""
    living = torch_live.here.live(Optimizer)
    inner = {id(real(o)) for o in living if _has_inner(o)}
    held: set[int] = set()
    found = []
    for optimizer in reversed([o for o in living if id(o) not in inner]):
        its = {id(p) for p in parameters_of(optimizer)}
        if not its <= held:
            found.append(optimizer)
            held |= its
    return found[::-1]


def _followers(models: list[TrainedModel], optimizers: list[Optimizer]) -> dict[str, Any]:
    """Return what follows the steps of these optimizers, or of none, by name.

    What `nbdist.keep` names, what is of a model, and what says nothing of its state is left out.
    """
    own = {id(o) for o in optimizers} | {id(real(o)) for o in optimizers}
    found = find_followers.search(keep.here.kept(), _names_here(), torch_live.here.live(Optimizer))
    every = found.followers | find_followers.loose_schedulers(
        found, torch_live.here.live(Optimizer)
    )
    known = {id(one) for one in keep.here.kept().values()}
    known |= {id(part) for model in models for part in model.module.modules()}

    def is_part(one: Any) -> bool:
        is_own = (followed := follows(one)) is None or id(followed) in own
        return find_followers.has_state(one) and id(one) not in known and is_own

    return {name: one for name, one in every.items() if is_part(one)}


def follows(one: Any) -> Optimizer | None:
    """Return the optimizer whose steps alone something follows, as a scheduler does."""
    optimizer = getattr(one, "optimizer", None)
    return optimizer if isinstance(optimizer, Optimizer) else None


def _names_here() -> dict[str, Any]:
    """Return the names that cells see where they have come to: of functions, the innermost first.

    Names of code that is installed, torch's or IPython's, are none of the user's.
    """
    found: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
        if is_function and find_followers.is_users_module(frame.f_globals.get("__name__", "")):
            found = {**frame.f_locals, **found}
        frame = frame.f_back
    return {**keep.here.names(), **found}


def options(training: Training) -> list[dict[str, Any]]:
    """Return each optimizer's class and groups: the options, and names of the parameters."""
    return [
        {
            "class": type(real(optimizer)).__name__,
            "groups": [
                {
                    "names": [training.names.get(id(p), "") for p in group["params"]],
                    "options": {k: _plain_number(v) for k, v in group.items() if k != "params"},
                }
                for group in optimizer.param_groups
            ],
        }
        for optimizer in training.optimizers
    ]


def _plain_number(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_number else value


def states(
    training: Training,
) -> tuple[dict[str, dict[str, dict[str, torch.Tensor]]], dict[str, dict[str, dict[str, Any]]]]:
    """Return the optimizers' states, tensors and all else: by optimizer, parameter, state's name.

    Raises:
        CheckpointError: A state has no place in the whole.
    """
    tensors: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    others: dict[str, dict[str, dict[str, Any]]] = {}
    for number, optimizer in enumerate(training.optimizers):
        of_one, rest = tensors.setdefault(str(number), {}), others.setdefault(str(number), {})
        for parameter, state in real(optimizer).state.items():
            name = training.names.get(id(parameter))
            if name is None:
                continue
            of_one[name] = {
                key: _as_parameter(value, parameter, f"{name}'s {key}")
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            }
            plain = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
            if plain:
                rest[name] = plain
    return tensors, others


def _as_parameter(state: torch.Tensor, parameter: Any, what: str) -> torch.Tensor:
    """Return a state as a part of the whole, as its parameter is one."""
    if isinstance(state, DTensor) or not isinstance(parameter, DTensor) or state.numel() == 1:
        return state
    if state.shape == parameter.to_local().shape:
        return like(state, parameter)
    raise CheckpointError(
        f"{what} of {tuple(state.shape)} is of a shard, and it is unknown of which part of the "
        "whole.",
        why="its optimizer keeps plain tensors beside parameters that are cut over ranks",
        do='use the layout "ddp" with this optimizer',
    )


def like(local: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Return a tensor that is cut as `parameter` is, of which this rank has `local`."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def tree(training: Training, rank: int) -> dict[str, Any]:
    """Return all tensors of the training as nested dicts.

    What ranks train apart, or only one of them remembers, stands below `apart` and the rank.
    """
    apart = {model.name for model in training.models if model.is_apart}
    shared: dict[str, Any] = {"model": {}, "optim": {}}
    own: dict[str, Any] = {"model": {}, "optim": {}}
    for model in training.models:
        place = own if model.is_apart else shared
        place["model"][model.name] = model.saved
    for optimizer, of_one in states(training)[0].items():
        for name, state in of_one.items():
            place = own if name.partition(".")[0] in apart else shared
            place["optim"].setdefault(optimizer, {})[name] = state
    for number, one in enumerate(training.optimizers):
        if isinstance(one, Wrapper) and (kept := wrapper_tensors(one)):
            own.setdefault("wrapper", {})[str(number)] = kept
    if apart or "wrapper" in own:
        shared["apart"] = {str(rank): own}
    return shared


def wrapper_tensors(wrapper: Wrapper) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors that a wrapper itself remembers: by what they are, and their number."""
    return {
        key: {str(i): tensor.detach() for i, tensor in enumerate(value)}
        for key, value in wrapper.own_state().items()
        if _is_tensors(value)
    }


def wrapper_values(wrapper: Wrapper) -> dict[str, Any]:
    """Return all else that it remembers."""
    return {k: v for k, v in wrapper.own_state().items() if not _is_tensors(v)}


def _is_tensors(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(one, torch.Tensor) for one in value)


def layouts(training: Training) -> Mapping[str, str]:
    """Return how each model is spread, by its name."""
    return {model.name: model.spread_as for model in training.models}
