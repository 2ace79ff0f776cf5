"""How a checkpoint's tensors fit the training that is here: what each rank reads, and to where.

Tensors have the names of the plain model, so any layout finds its parts. All that can be refused is
found here, before anything is changed. Each rank by itself; no collective.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbdist.engine.checkpoint import training_state
from nbdist.engine.checkpoint.pairing import Names, Paired, paired
from nbdist.engine.checkpoint.trained_models import Optimizer, TrainedModel, parameters_of
from nbdist.engine.checkpoint.training_state import Training
from nbdist.engine.compat import torch_hooks, torch_shards
from nbdist.engine.compat.checkpoints.torch_checkpoint import SavedTensor, WantedPart, part_of
from nbdist.engine.steps.optimizer_wrapper import Wrapper

_SHOWN = 3

States = dict[str, dict[str, Any]]


@dataclass
class Fit:
    """What one rank reads.

    Attributes:
        training: What is restored: models here that the checkpoint has, and what hangs on them.
        is_part: Whether the rest of the checkpoint is left out, as the call has asked for.
        parts: By the key of a saved tensor; several tensors here may be the same one there.
        puts: What is done with them when all have been read.
        used: Names of tensors of models that this rank holds.
        complaints: Why it does not fit, in sentences.
        notes: What is otherwise than it was saved, in sentences.
        is_same_model: Whether it is only something else that does not fit.
        loads: What `load_state_dict` is called of, and with what, as `rest` has frozen it.
        models: The saved name of each model here, by its name.
        optimizers: The saved number of each optimizer here, by its number.
        alone: By what names the models here can be asked for that fit, where others are lacking.
    """

    training: Training
    is_part: bool = False
    parts: dict[str, list[WantedPart]] = field(default_factory=dict)
    puts: list[Callable[[], None]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_same_model: bool = False
    loads: list[tuple[Any, bytes]] = field(default_factory=list)
    models: dict[str, str] = field(default_factory=dict)
    optimizers: dict[int, int] = field(default_factory=dict)
    alone: list[str] = field(default_factory=list)

    @property
    def pairs(self) -> str:
        """Which of the checkpoint's each one here is, for ranks to compare."""
        return f"{self.models}, {self.optimizers}"

    def want(self, key: str, offsets: Sequence[int], room: torch.Tensor) -> None:
        """Have a part of a saved tensor read."""
        self.parts.setdefault(key, []).append(WantedPart(tuple(offsets), room))


class SavedTraining:
    """What lies in a checkpoint.

    Args:
        tensors: By key.
        facts: Of every rank that saved it.
    """

    def __init__(self, tensors: Mapping[str, SavedTensor], facts: Sequence[dict[str, Any]]) -> None:
        self.tensors = tensors
        self.facts = facts
        self.aliases: dict[str, dict[str, str]] = {}
        for of_rank in facts:
            for model, aliases in of_rank["aliases"].items():
                self.aliases.setdefault(model, {}).update(aliases)
        self.apart = frozenset(name for of_rank in facts for name in of_rank["apart"])
        self.models = sorted(self.aliases, key=_order)
        self.optimizers = max(len(of_rank["optimizers"]) for of_rank in facts)
        self.called: dict[str, Any] = facts[0].get("called", {"models": {}, "optimizers": []})

    def trained(self, number: int) -> set[str]:
        """Return the names of what an optimizer trained, on all ranks."""
        groups = [g for of_rank in self.facts for g in of_rank["optimizers"][number]["groups"]]
        return {name for group in groups for name in group["names"] if name}

    def prefix(self, model: str, rank: int) -> str:
        """Return where the tensors lie that a rank reads of a model."""
        return f"apart.{rank % len(self.facts)}." if model in self.apart else ""

    def keys(self, start: str) -> dict[str, SavedTensor]:
        """Return the tensors below a name, without that name."""
        size = len(start)
        return {key[size:]: t for key, t in self.tensors.items() if key.startswith(start)}


def fit(
    training: Training, saved: SavedTraining, rank: int, *, only_model: bool, is_part: bool = False
) -> Fit:
    """Return how the checkpoint fits this rank's training."""
    found = Fit(training, is_part)
    _pair_models(training, saved, rank, found)
    if found.complaints:
        return found
    training = found.training = training.part(found.models)
    for model in training.models:
        _fit_model(model, found.models[model.name], saved, rank, found)
    found.is_same_model = not found.complaints
    if only_model or not found.is_same_model:
        return found
    _pair_optimizers(training, saved, found)
    for number in found.optimizers:
        _fit_optimizer(training, number, saved, rank, found)
    return found


def unexpected(saved: SavedTraining, models: Iterable[str], used: Iterable[set[str]]) -> list[str]:
    """Return the names of tensors of these saved models that no rank has a place for."""
    known = set().union(*used)
    found = []
    for model in models:
        prefix = saved.prefix(model, 0)
        aliases = saved.aliases[model]
        tied = {name for name, first in aliases.items() if f"{model}.{first}" in known}
        names = saved.keys(f"{prefix}model.{model}.")
        found += [n for n in names if f"{model}.{n}" not in known and n not in tied]
    return found


def some_of(names: Sequence[str]) -> str:
    """Return a few names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


# ---- Which is which -----------------------------------------------------------------------------


def _pair_models(training: Training, saved: SavedTraining, rank: int, found: Fit) -> None:
    """Note the saved name of each model here: of its class, and the only one or called the same."""
    called = {model.name: training.names_of(model) for model in training.models}
    was_called = {name: saved.called["models"].get(name, []) for name in saved.models}
    if len(called) == len(was_called) == 1:
        found.models[training.models[0].name] = saved.models[0]
        return
    for kind in dict.fromkeys(map(_kind, called)):
        here = [model for model in training.models if _kind(model.name) == kind]
        there = [name for name in saved.models if _kind(name) == kind]
        fits = {(m.name, t) for m in here for t in there if _is_fit(m, t, saved, rank)}
        one = paired([model.name for model in here], there, fits, called, was_called)
        found.models |= one.pairs
        _tell(one, called, was_called, found)
    if not found.complaints:
        _tell_lacking(called, was_called, found)


def _tell_lacking(called: Names, was_called: Names, found: Fit) -> None:
    """Complain of models that are there and not here, and note those that are here alone."""
    more = [name for name in called if name not in found.models]
    if len(found.models) < len(was_called) and not found.is_part:
        found.complaints.append(f"it has {_all(was_called)}; the training here {_all(called)}")
        found.alone = found.training.asked_by(found.models)
    elif more and found.is_part:
        found.complaints.append(f"it has {_all(was_called)}, and no {_all(called, more)}")
    elif more:
        what = "it stays as it is" if len(more) == 1 else "they stay as they are"
        found.notes.append(f"here and not there is {_all(called, more)}: {what}")


def _pair_optimizers(training: Training, saved: SavedTraining, found: Fit) -> None:
    """Note the saved number of each optimizer here: what trains the same is the same."""
    models = set(found.models.values())
    every = {f"optimizer {number + 1}": saved.trained(number) for number in range(saved.optimizers)}
    trained = {n: its for n, its in every.items() if not its or models & {*map(_model_of, its)}}
    trains = {
        f"optimizer {number + 1}": _trains(optimizer, training, found)
        for number, optimizer in enumerate(training.optimizers)
    }
    if len(trains) != len(trained):
        found.complaints.append(
            f"it has {len(trained)} optimizers, the training here {len(trains)}"
        )
        return
    names = saved.called["optimizers"] or [[]] * saved.optimizers
    was_called = {name: names[_number_of(name)] for name in trained}
    called = {n: training.names_of(training.optimizers[_number_of(n)]) for n in trains}
    fits = {(h, t) for h in trains for t in trained if _is_one_in_other(trains[h], trained[t])}
    one = paired(list(trains), list(trained), fits, called, was_called)
    found.optimizers |= {_number_of(h): _number_of(t) for h, t in one.pairs.items()}
    _tell(one, called, was_called, found)


def _model_of(name: str) -> str:
    return name.partition(".")[0]


def _number_of(optimizer: str) -> int:
    return int(optimizer.rpartition(" ")[2]) - 1


def _trains(optimizer: Optimizer, training: Training, found: Fit) -> set[str]:
    """Return the saved names of what an optimizer trains on this rank."""
    own = (training.names.get(id(p), "").partition(".") for p in parameters_of(optimizer))
    return {f"{found.models[model]}.{name}" for model, _, name in own if model}


def _is_one_in_other(some: set[str], others: set[str]) -> bool:
    return bool(some) == bool(others) and (some <= others or others <= some)


def _tell(one: Paired, called: Names, was_called: Names, found: Fit) -> None:
    """Complain of those whose names leave a choice, and note where there are no names."""
    if one.undecided:
        found.complaints.append(
            f"it has {_all(was_called, one.free)}, the training here "
            f"{_all(called, one.undecided)}, each of which fits each: a name that is there and "
            "here tells which is which"
        )
    if one.by_order:
        found.notes.append(
            f"no name tells which of {', '.join(one.by_order)} is which: they have gone by the "
            "order in which they were made"
        )


def _kind(name: str) -> str:
    return name.partition("-")[0]


def _order(name: str) -> tuple[str, int]:
    """Return a saved model's class, and its number in the order of making."""
    kind, _, number = name.partition("-")
    return kind, int(number or 1)


def _all(called: Names, among: Iterable[str] | None = None) -> str:
    """Return these with the names that cells call them by."""
    chosen = list(called if among is None else among)
    return ", ".join(n + (f" ({', '.join(called[n])})" if called[n] else "") for n in chosen)


# ---- Models -------------------------------------------------------------------------------------


def _fit_model(model: TrainedModel, name: str, saved: SavedTraining, rank: int, found: Fit) -> None:
    start = f"{saved.prefix(name, rank)}model.{name}."
    keys = _keys_of(model, name, saved, rank)
    found.complaints += _misfits(model, keys, saved.keys(start))
    if found.complaints:
        return
    for own, key in keys.items():
        tensor = model.tensors[own]
        found.used |= {f"{name}.{key}", f"{name}.{own}"}
        offsets, shape = part_of(tensor)
        local = torch_hooks.local_part(tensor.detach())
        room = torch.empty(shape, dtype=tensor.dtype)
        found.want(f"{start}{key}", offsets, room)
        found.puts.append(_copy(local, room))


def _keys_of(
    model: TrainedModel, name: str, saved: SavedTraining, rank: int
) -> dict[str, str | None]:
    """Return by what names the tensors of a model here were saved as another's; None: not."""
    there = saved.keys(f"{saved.prefix(name, rank)}model.{name}.")
    return {own: _saved_name(own, model, there, saved.aliases[name]) for own in model.tensors}


def _misfits(
    model: TrainedModel, keys: Mapping[str, str | None], there: Mapping[str, SavedTensor]
) -> list[str]:
    """Return why a saved model does not fit one here, in sentences."""
    missing = [own for own, key in keys.items() if key is None]
    shapes = {own: (there[k].shape, model.tensors[own].shape) for own, k in keys.items() if k}
    other = [f"{o} is {tuple(a)} there, {tuple(b)} here" for o, (a, b) in shapes.items() if a != b]
    lacks = [f"it lacks {some_of(missing)} of {model.name}"] if missing else []
    return lacks + ([some_of(other)] if other else [])


def _is_fit(model: TrainedModel, name: str, saved: SavedTraining, rank: int) -> bool:
    there = saved.keys(f"{saved.prefix(name, rank)}model.{name}.")
    return not _misfits(model, _keys_of(model, name, saved, rank), there)


def _saved_name(
    own: str, model: TrainedModel, there: Mapping[str, Any], aliases: Mapping[str, str]
) -> str | None:
    """Return the name under which a tensor was saved: its own, or another of a tied one."""
    mine = {own, *(alias for alias, first in model.aliases.items() if first == own)}
    if own in model.aliases:
        mine.add(model.aliases[own])
    candidates = [own, *sorted(mine), *(aliases[n] for n in sorted(mine) if n in aliases)]
    return next((name for name in candidates if name in there), None)


def _copy(target: torch.Tensor, room: torch.Tensor) -> Callable[[], None]:
    def put() -> None:
        with torch.no_grad():
            target.copy_(room.reshape(target.shape))

    return put


# ---- Optimizers ---------------------------------------------------------------------------------


def _fit_optimizer(
    training: Training, number: int, saved: SavedTraining, rank: int, found: Fit
) -> None:
    optimizer, names = training.optimizers[number], found.models
    number = found.optimizers[number]
    there = saved.facts[rank % len(saved.facts)]["optimizers"][number]["class"]
    here = type(training_state.real(optimizer)).__name__
    if there != here:
        found.complaints.append(f"it was trained by {there}, and is to be by {here}")
        return
    others: States = {}
    for of_rank in saved.facts:
        others.update(of_rank["states"].get(str(number), {}))
    models = {model.name: model for model in training.models}
    by_parameter = {name: _states_of(saved, name, number, rank) for name in saved.models}
    real = training_state.real(optimizer)
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for group in real.param_groups:
        for parameter in group["params"]:
            own = training.names.get(id(parameter))
            if own is None:
                continue
            model, _, name = own.partition(".")
            saved_model = names[model]
            key = _saved_name(
                name, models[model], by_parameter[saved_model], saved.aliases[saved_model]
            )
            tensors = {} if key is None else by_parameter[saved_model][key]
            state = dict(others.get(f"{saved_model}.{key or name}", {}))
            for what, (where, facts) in tensors.items():
                offsets, room = _room(parameter, facts)
                found.want(where, offsets, room)
                state[what] = _as_state(room, parameter, facts, group)
            if state:
                states[parameter] = state
    found.puts.append(_replace(real, states))
    if isinstance(optimizer, Wrapper):
        _fit_wrapper(optimizer, number, saved, rank, found)


def _states_of(
    saved: SavedTraining, model: str, number: int, rank: int
) -> dict[str, dict[str, tuple[str, SavedTensor]]]:
    """Return a model's saved states: by parameter and what it is, with its key."""
    start = f"{saved.prefix(model, rank)}optim.{number}.{model}."
    found: dict[str, dict[str, tuple[str, SavedTensor]]] = {}
    for rest, facts in saved.keys(start).items():
        parameter, _, what = rest.rpartition(".")
        found.setdefault(parameter, {})[what] = start + rest, facts
    return found


def _room(parameter: torch.Tensor, facts: SavedTensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Return what this rank needs of a state, and room for it."""
    if facts.shape == parameter.shape:
        offsets, shape = part_of(parameter)
        return offsets, torch.empty(shape, dtype=facts.dtype)
    return (0,) * len(facts.shape), torch.empty(facts.shape, dtype=facts.dtype)


def _as_state(
    room: torch.Tensor, parameter: torch.Tensor, facts: SavedTensor, group: Mapping[str, Any]
) -> torch.Tensor:
    """Return the room as an optimizer keeps it; counts of steps stay on the CPU where it does."""
    is_like = facts.shape == parameter.shape
    is_on_device = is_like or facts.shape.numel() > 1
    if is_on_device or group.get("capturable") or group.get("fused"):
        device = torch_hooks.local_part(parameter).device
        if device.type != "cpu":
            return _Later(room, parameter, facts, device)  # type: ignore[return-value]
    return _as_on(parameter, room, facts)


def _as_on(parameter: torch.Tensor, room: torch.Tensor, facts: SavedTensor) -> torch.Tensor:
    """Return a state cut as its parameter is; of another shape each rank has all of it."""
    if not isinstance(parameter, DTensor):
        return room
    if facts.shape == parameter.shape:
        return training_state.like(room, parameter)
    return torch_shards.on_each(room, parameter) if room.numel() > 1 else room


@dataclass
class _Later:
    """A state that goes to its device when it has been read."""

    room: torch.Tensor
    parameter: torch.Tensor
    facts: SavedTensor
    device: torch.device

    def there(self) -> torch.Tensor:
        return _as_on(self.parameter, self.room.to(self.device), self.facts)


def _replace(
    optimizer: Optimizer, states: dict[torch.Tensor, dict[str, Any]]
) -> Callable[[], None]:
    def put() -> None:
        optimizer.state.clear()
        for parameter, state in states.items():
            optimizer.state[parameter] = {
                what: value.there() if isinstance(value, _Later) else value
                for what, value in state.items()
            }

    return put


def _fit_wrapper(
    wrapper: Wrapper, number: int, saved: SavedTraining, rank: int, found: Fit
) -> None:
    if wrapper.unsaved:
        found.notes.append(f"{wrapper.name}: {wrapper.unsaved}")
    place = rank % len(saved.facts)
    values = saved.facts[place]["wrappers"].get(str(number))
    if values is None:
        found.puts.append(wrapper.restart)
        return
    state = dict(values)
    for what, live in training_state.wrapper_tensors(wrapper).items():
        start = f"apart.{place}.wrapper.{number}.{what}."
        there = saved.keys(start)
        if there.keys() != live.keys() or any(there[i].shape != live[i].shape for i in live):
            found.complaints.append(f"{wrapper.name} keeps other {what} there")
            return
        rooms = [torch.empty(live[i].shape, dtype=live[i].dtype) for i in live]
        for i, room in zip(live, rooms, strict=True):
            found.want(start + i, (0,) * room.ndim, room)
        state[what] = rooms
    found.puts.append(lambda: _load(wrapper, state))


@torch.no_grad()
def _load(wrapper: Wrapper, state: dict[str, Any]) -> None:
    wrapper.load_own_state(state)
