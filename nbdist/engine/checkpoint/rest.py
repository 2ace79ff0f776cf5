"""What of a training is no tensor: told by every rank that saves, put back by those that restore.

What follows the steps and what is kept step after the optimizer, and are read when it next steps;
random numbers and loaders are of the moment itself. Main thread.
"""

import gc
import hashlib
import io
import logging
import random
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbdist.engine.checkpoint import trained_models, training_state
from nbdist.engine.checkpoint.agreement import together
from nbdist.engine.checkpoint.fit import Fit
from nbdist.engine.checkpoint.training_state import Training, real
from nbdist.engine.compat import torch_live, torch_sharded
from nbdist.engine.data.batches import mix
from nbdist.engine.data.position import position, resume
from nbdist.engine.data.position.passes import Draws, Position
from nbdist.engine.group import ddp_buckets
from nbdist.engine.steps import keep, random_states, step_state
from nbdist.engine.steps.optimizer_wrapper import Wrapper
from nbdist.engine.steps.step_state import StepState
from nbdist.shared.errors import CheckpointError
from nbdist.shared.text import counted

Facts = dict[str, Any]

_log = logging.getLogger("nbdist.checkpoint")

# How an optimizer computes, which follows from where it runs and not from what it has learned.
_OF_THE_DEVICE = frozenset({"foreach", "fused", "capturable", "differentiable"})


# ---- Saved --------------------------------------------------------------------------------------


def moment(training: Training) -> Facts:
    """Return what the next batch moves: this rank's random numbers, and where loaders stand."""
    newest = position.here.newest()
    mark = step_state.here().random_numbers()
    return {
        "random": (mark.rng, mark.cuda_rng, tuple(mark.plain_rng)),
        "loaders": [loader.saved() for loader in training.loaders],
        "held": [loader.is_held for loader in training.loaders],
        "names": position.names_of(training.loaders, keep.here.named()),
        "plans": [[p and tuple(p) for p in one.trail.plan()] for one in training.loaders],
        "newest": next((i for i, one in enumerate(training.loaders) if one is newest), None),
        # A loader that is kept (torchdata's) has given the next batch when the optimizer steps.
        "kept": {name: frozen(loader.state_dict()) for name, loader in _kept_loaders(training)},
    }


def _kept_loaders(training: Training) -> list[tuple[str, Any]]:
    return [(name, one) for name, one in training.kept.items() if isinstance(one, DataLoader)]


def facts_of(training: Training, of_moment: Facts) -> Facts:
    """Return all that is no tensor; `of_moment` was noted when the tensors were copied."""
    counts = step_state.here().steps
    later = training.kept.keys() - of_moment["kept"].keys()
    kept = of_moment["kept"] | {name: frozen(training.kept[name].state_dict()) for name in later}
    return {
        **of_moment,
        "optimizers": training_state.options(training),
        "states": training_state.states(training)[1],
        "wrappers": {
            str(i): training_state.wrapper_values(o)
            for i, o in enumerate(training.optimizers)
            if isinstance(o, Wrapper)
        },
        "aliases": {model.name: model.aliases for model in training.models},
        "buckets": {
            model.name: ddp_buckets.here.order_of(ddp)
            for model in training.models
            if (ddp := trained_models.ddp_of(model.module)) is not None
        },
        "apart": [model.name for model in training.models if model.is_apart],
        "called": {
            "models": {model.name: training.names_of(model) for model in training.models},
            "optimizers": [training.names_of(optimizer) for optimizer in training.optimizers],
        },
        "holds": holds(training, of_moment),
        "follows": {n: _optimizer_of(training, one) for n, one in training.followers.items()},
        "followers": {
            name: (type(one).__name__, frozen(one.state_dict()))
            for name, one in _moving(training).items()
        },
        "kept": {name: (hashlib.sha256(state).hexdigest(), state) for name, state in kept.items()},
        "steps": [counts[o].whole if o in counts else 0 for o in training.optimizers],
    }


def holds(training: Training, of_moment: Facts) -> Facts:
    """Return what a checkpoint says that it holds: names and classes, and where loaders stand."""
    optimizers = [(training.names_of(o), type(real(o)).__name__) for o in training.optimizers]
    places = zip(of_moment["names"], of_moment["loaders"], strict=True)
    others = _moving(training) | training.kept
    return {
        "models": {
            model.name: [training.names_of(model), torch_sharded.plain_name(model.module)]
            for model in training.models
        },
        "others": [*optimizers, *(([name], type(one).__name__) for name, one in others.items())],
        "loaders": [(sorted(names), at["epoch"], at["consumed"]) for names, at in places],
    }


def _optimizer_of(training: Training, follower: Any) -> int | None:
    """Return the number of the optimizer that something follows alone; None: it follows none."""
    followed = training_state.follows(follower)
    every = enumerate(training.optimizers)
    return next((i for i, o in every if followed in (o, real(o))), None)


def frozen(state: Any) -> bytes:
    """Return a state as it is now, for what it holds may change before it is written."""
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def thawed(state: bytes) -> Any:
    """Return what was `frozen`."""
    return torch.load(io.BytesIO(state), map_location="cpu", weights_only=False)


def _moving(training: Training) -> dict[str, Any]:
    """Return what follows the steps, without models that do not: a teacher, say.

    That a model stands still is seen on the CPU alone: a write by `.data` has no new version.
    """
    still = {
        id(one)
        for one in step_state.here().followers.still()
        if isinstance(one, nn.Module) and all(p.device.type == "cpu" for p in one.parameters())
    }
    return {name: one for name, one in training.followers.items() if id(one) not in still}


# ---- Restored -----------------------------------------------------------------------------------


def fit(facts: Sequence[Facts], rank: int, found: Fit, *, is_alike: bool) -> None:
    """Add to `found` what is put back beside tensors, or why it cannot be. Changes nothing."""
    training, mine = found.training, facts[rank % len(facts)]
    _fit_followers(training, facts, rank, found, is_alike=is_alike)
    _fit_kept(training, facts, rank, found)
    found.puts.append(lambda: _put_options(training, facts, found))
    found.puts.append(lambda: _put_counts(training, mine["steps"], found))


def _fit_followers(
    training: Training, facts: Sequence[Facts], rank: int, found: Fit, *, is_alike: bool
) -> None:
    every = [_followers_in(rank_facts) for rank_facts in facts]
    there = every[rank % len(facts)]
    if found.is_part:
        there = _of_part(there, facts[rank % len(facts)].get("follows", {}), found)
    pairs, missing, by_order = _matched(there, training.followers)
    if missing:
        lacking = ", ".join(f"{name} (a {there[name][0]})" for name in missing)
        others = [n for n in training.followers if n not in pairs.values()]
        found.complaints.append(
            f"it has {lacking}, and the training here no such object by that name, or the only one "
            f"of its class (it has {', '.join(others) or 'none'} beside what fits)"
        )
        found.alone = training.asked_by()
        return
    if by_order:
        found.notes.append(
            f"no name tells which of {', '.join(by_order)} is which: they have gone by the order "
            "in which they were made"
        )
    for name, here in pairs.items():
        kind, state = there[name]
        if not is_alike and _is_cut(thawed(state)):
            found.complaints.append(
                f"{here} (a {kind}) was saved cut over ranks, each with its own part, and ranks or "
                "layout are others here"
            )
        elif len(facts) != dist.get_world_size() and any(
            rank_facts.get(name, there[name])[1] != state for rank_facts in every
        ):
            found.notes.append(f"{here} differed between {counted(len(facts), 'rank')}: it stays")
        else:
            found.loads.append((training.followers[here], state))
    for name in training.followers:
        if name not in pairs.values():
            found.notes.append(f"{name} is here and not there: it stays as it is")


def _of_part(
    there: dict[str, tuple[str, bytes]], follows: Mapping[str, int | None], found: Fit
) -> dict[str, tuple[str, bytes]]:
    """Return of what followed the steps that of this part: by its optimizers, or by its name."""
    own = set(found.optimizers.values())
    its = {
        name: one
        for name, one in there.items()
        if follows.get(name) in own
        or (follows.get(name) is None and name in found.training.followers)
    }
    loose = [n for n in there if n not in its and follows.get(n) is None]
    if loose:
        found.notes.append(f"left out is {', '.join(loose)}")
    return its


def _followers_in(rank_facts: Facts) -> dict[str, tuple[str, bytes]]:
    """Return what followed the steps of a rank, by name; without names those of before."""
    if "followers" in rank_facts:
        return dict(rank_facts["followers"])
    # Formerly without names, in the order of making: those of a class are told apart by it.
    unnamed = [*rank_facts["schedulers"], *rank_facts["scalers"]]
    return {f"#{number}": one for number, one in enumerate(unnamed)}


def _matched(
    there: Mapping[str, tuple[str, bytes]], here: Mapping[str, Any]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return what here each saved one is: by name, else the only one of its class; and the rest.

    Last, which of those here went by their order alone, as older checkpoints have no names.
    """
    kinds = {name: type(one).__name__ for name, one in here.items()}
    pairs = {name: name for name, (kind, _) in there.items() if kinds.get(name) == kind}
    missing, by_order = [], []
    for kind in dict.fromkeys(kind for kind, _ in there.values()):
        theirs = [n for n, (other, _) in there.items() if other == kind and n not in pairs]
        mine = [n for n, other in kinds.items() if other == kind and n not in pairs.values()]
        is_in_order = all(name.startswith("#") for name in theirs)
        mine.sort(key=lambda name: _made(here[name]))
        if len(mine) == len(theirs) and (len(theirs) == 1 or is_in_order):
            pairs.update(zip(theirs, mine, strict=True))
            by_order += mine if len(mine) > 1 else []
        else:
            missing += theirs
    return pairs, missing, by_order


def _made(one: Any) -> int:
    """Return when a scheduler or scaler was made."""
    kinds = (LRScheduler, torch.amp.GradScaler)
    return max((torch_live.here.number_of(k, one) for k in kinds if isinstance(one, k)), default=0)


def _is_cut(state: Any) -> bool:
    """Return whether a state holds tensors that are cut over ranks."""
    if isinstance(state, dict):
        return any(map(_is_cut, state.values()))
    if isinstance(state, list | tuple):
        return any(map(_is_cut, state))
    return isinstance(state, DTensor)


class Loads:
    """Objects that get their states, or keep those they have: it is their code that may fail.

    Args:
        asked: Objects with `load_state_dict`, and their frozen states.
    """

    def __init__(self, asked: Sequence[tuple[Any, bytes]]) -> None:
        self._asked = asked
        self._before: list[tuple[Any, bytes]] = []

    def load(self) -> None:
        """Have each object load its state.

        Raises:
            CheckpointError: One refuses it.
        """
        for one, state in self._asked:
            try:
                before = frozen(one.state_dict())
                self._before.append((one, before))
                one.load_state_dict(thawed(state))
            except Exception as error:
                raise CheckpointError(
                    f"A {type(one).__name__} cannot load what was saved of it, and nothing was "
                    "restored.",
                    why=f"{type(error).__name__}: {error}",
                    do='change it, or take the weights alone: nbdist.restore(only="model")',
                ) from error

    def undo(self) -> None:
        """Have each object be what it was."""
        for one, before in reversed(self._before):
            try:
                one.load_state_dict(thawed(before))
            except Exception:
                _log.warning("%s is not what it was", type(one).__name__, exc_info=True)


def _fit_kept(training: Training, facts: Sequence[Facts], rank: int, found: Fit) -> None:
    is_own = len(facts) == dist.get_world_size()
    mine = facts[rank % len(facts)]["kept"]
    for name in sorted(training.kept.keys() - mine.keys()):
        found.notes.append(f"{name} is kept here and not there: it stays as it is")
    for name in sorted(mine.keys() - training.kept.keys()):
        found.notes.append(f"{name} was saved, and nothing here is kept by that name")
    for name in sorted(mine.keys() & training.kept.keys()):
        digest, state = mine[name]
        if not is_own and isinstance(training.kept[name], DataLoader):
            found.complaints.append(
                f"{name} is a {type(training.kept[name]).__name__}, whose position is one of "
                f"{counted(len(facts), 'rank')}' own, and there are {dist.get_world_size()} ranks "
                f"(nbdist.loader resumes on any number; nbdist.keep({name}=None) restores without)"
            )
        elif is_own or all(rank_facts["kept"][name][0] == digest for rank_facts in facts):
            found.loads.append((training.kept[name], state))
        else:
            found.notes.append(f"{name} differed between {counted(len(facts), 'rank')}: it stays")


def _put_options(training: Training, facts: Sequence[Facts], fitted: Fit) -> None:
    """Give every group the options of the group that has had its parameters."""
    for here, number in fitted.optimizers.items():
        options = {
            name: group["options"]
            for rank in facts
            for group in rank["optimizers"][number]["groups"]
            for name in group["names"]
        }
        for group in training.optimizers[here].param_groups:
            own = [training.names.get(id(p), "").partition(".") for p in group["params"]]
            known = (options.get(f"{fitted.models.get(model)}.{name}") for model, _, name in own)
            for what, value in (next((o for o in known if o is not None), {})).items():
                if what not in _OF_THE_DEVICE:
                    _put_option(group, what, value)


def _put_option(group: dict[str, Any], what: str, value: Any) -> None:
    live = group.get(what)
    if isinstance(live, torch.Tensor):  # a compiled step holds it
        live.fill_(value)
    else:
        group[what] = value


def _put_counts(training: Training, steps: Sequence[int], fitted: Fit) -> None:
    counts = step_state.here().steps
    for here, number in fitted.optimizers.items():
        optimizer = training.optimizers[here]
        counts.setdefault(optimizer, step_state.OptimizerSteps()).settle(steps[number])


def put_moment(facts: Sequence[Facts], fitted: Fit, *, is_alike: bool, repeats: bool) -> list[str]:
    """Have random numbers and loaders go on. Collective; returns what is otherwise, in sentences.

    Args:
        facts: Of every rank that saved it.
        fitted: What each one here is of what was saved.
        is_alike: Whether it is spread over as many ranks, in the same layouts.
        repeats: Whether the cell that saved is run again: passes that were done get nothing.
    """
    rank, training = dist.get_rank(), fitted.training
    mine = facts[rank % len(facts)]
    notes = []
    if is_alike:
        _put_random(mine["random"])
        _put_buckets(training, mine["buckets"], fitted)
    else:
        _derive_random(facts[0]["random"])
        notes.append(
            "ranks or layout are others: sums are rounded otherwise, and random numbers follow "
            "from the first rank's"
        )
    resumed = _put_loaders(training, facts[0], repeats=repeats, is_part=fitted.is_part)
    return notes + _say_places(resumed)


def _say_places(loaders: Sequence[position.LoaderPosition]) -> list[str]:
    """Return where loaders are that have been put beyond the begin of their first epoch."""
    found = []
    for one, names in zip(loaders, position.names_of(loaders, keep.here.named()), strict=True):
        at = one.trains_on_at
        if at.epoch or at.consumed:
            found.append((f"loader {min(names)}" if names else "a loader", at))
    places = [f"sample {at.consumed:,} of epoch {at.epoch}" for _, at in found]
    if len(places) < 2:
        return [f"its loader is at {place}" for place in places]
    return [f"{name} is at {place}" for (name, _), place in zip(found, places, strict=True)]


def _put_buckets(training: Training, rank_facts: Mapping[str, Any], fitted: Fit) -> None:
    """Have gradients summed in the order of the training that was saved."""
    for model in training.models:
        ddp = trained_models.ddp_of(model.module)
        buckets = rank_facts.get(fitted.models[model.name])
        if ddp is not None and buckets:
            ddp_buckets.continue_with(ddp, buckets)


def _put_random(states: tuple[Any, ...]) -> None:
    cpu, cuda, plain = states
    torch.default_generator.set_state(cpu)
    random_states.put_back(random_states.States(*plain))
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def _derive_random(first: tuple[Any, ...]) -> None:
    """Draw on as the first rank did, or what follows from it; ranks that drew the same still do."""
    mine = torch.default_generator.get_state().numpy().tobytes()
    every = together(lambda: zlib.crc32(mine))
    number = list(dict.fromkeys(every)).index(every[dist.get_rank()])
    if not number:
        _put_random(first)
        return
    seed = mix(zlib.crc32(first[0].numpy().tobytes()), number)
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _put_loaders(
    training: Training, rank_facts: Mapping[str, Any], *, repeats: bool, is_part: bool
) -> list[position.LoaderPosition]:
    """Have each loader go on where the one of its name, it itself, or the newest like it stood.

    One that the cell has yet to make goes on as well, unless it may be that of what is left out.

    Returns:
        Those that go on, in the order of making.
    """
    here = step_state.here().random_numbers()
    gc.collect()  # a loader that only a reference cycle keeps is gone: another has its place
    states = rank_facts["loaders"]
    names = rank_facts.get("names", [frozenset()] * len(states))  # of a later version than the rest
    saved = [
        position.SavedPosition(*one) for one in zip(states, rank_facts["held"], names, strict=True)
    ]
    chosen = position.matched(saved, training.loaders, keep.here.named())
    restored = []
    for number in reversed(range(len(states))):
        mark: StepState | None = here if number == rank_facts["newest"] else None
        passes = [p and Position(*p) for p in rank_facts["plans"][number]]
        plan = passes if repeats else []
        at = Position(states[number]["epoch"], states[number]["consumed"])
        restored.append(resume.Restored(chosen[number], passes, at, Draws(mark)))
        if (one := chosen[number]) is not None:
            one.resume(states[number], mark, plan)
        elif not is_part:
            position.here.resume_later(states[number], mark, plan)
    resume.here.stay_where_restored(reversed(restored))
    return [one for one in training.loaders if any(one is other for other in chosen)]
