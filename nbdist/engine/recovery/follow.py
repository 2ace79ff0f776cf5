"""Bring what follows the steps (`steps/followers`) to where a fault's recovery brought the step.

After models and optimizers, on the main thread of all ranks at the same time: what `decide_follow`
decides is carried out. A snapshot holds what follows, too, as of the moment when all that belongs
to its step was done.
"""

import copy
import json
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from nbdist.engine.compat import torch_modules, torch_quantized, torch_shards
from nbdist.engine.group import rendezvous
from nbdist.engine.recovery import decide_follow, model_state, send_tensors
from nbdist.engine.recovery.decide import Decision
from nbdist.engine.recovery.decide_follow import FollowReport
from nbdist.engine.recovery.wrapped_models import Unit, local
from nbdist.engine.steps import optimizer_options, step_state
from nbdist.engine.steps.followers.find_followers import has_state, state_of
from nbdist.engine.steps.followers.followers import Followers
from nbdist.engine.steps.followers.progress import Progress

TIMEOUT_S = 20.0
_SMALL_BYTES = 1 << 16  # of what has never moved, which may do so now

State = tuple[Any, list[torch.Tensor]]  # with a `TensorPlace` where each of the tensors stands


@dataclass(frozen=True, slots=True)
class Kept:
    """What followed the step of a snapshot.

    Attributes:
        states: By name.
        numbers: Likewise.
        options: Of the optimizers.
        position: As `Followers.position`.
    """

    states: dict[str, State]
    numbers: dict[str, Any]
    options: list[tuple["ref[torch.optim.Optimizer]", list[dict[str, Any]]]]
    position: Any


def keep() -> Kept:
    """Return what follows the steps, as it is now: for a snapshot."""
    followers = step_state.here().followers
    moving = set(followers.moving())
    living = followers.living()
    copies: dict[str, State] = {}
    for name, one in living.items():
        state = _readable(name, one)
        if state is not None and (name in moving or _size(state) <= _SMALL_BYTES):
            copies[name] = state[0], [tensor.clone() for tensor in state[1]]
    options = [
        (ref(optimizer), optimizer_options.options_of(optimizer))
        for optimizer in step_state.here().stepped()
    ]
    return Kept(copies, followers.numbers(), options, followers.position())


def put_back(kept: Kept) -> None:
    """Give what follows the steps what a snapshot of this rank kept."""
    followers = step_state.here().followers
    living = followers.living()
    for name, state in kept.states.items():
        if name in living:
            _put_or_tell(name, living[name], *state)
    followers.go_back(kept.numbers, kept.position)


def settle(
    units: Sequence[Unit],
    decisions: Iterable[Decision],
    progress: Progress,
    copied: Collection[torch.optim.Optimizer],
    back: Mapping[str, bool],
) -> tuple[list[str], bool]:
    """Make what follows the steps equal on the ranks that train together. All ranks.

    Args:
        units: Of this rank.
        decisions: What has been done with them.
        progress: This rank's, at the fault.
        copied: Whose step this rank has copied since.
        back: The units of which this rank has undone steps, by identity: whether all that belongs
            to the step of the snapshot is back, too.

    Returns:
        Lines for people, and whether a step stays half done.
    """
    here = step_state.here()
    decisions = list(decisions)
    rank = dist.get_rank()
    progress = here.followers.after_copy(progress, copied)
    progress = _put_back_ahead(progress, here.followers)
    report = _report(units, decisions, progress, bool(copied), back)
    heard = rendezvous.exchange("followers", json.dumps(asdict(report)), TIMEOUT_S)
    reports = {rank: FollowReport.from_plain(json.loads(text)) for rank, text in heard.items()}
    lines: list[str] = []
    is_half = False
    for decided in decide_follow.decide(reports):
        lines += decided.lines
        is_open = any(decided.lacking.values()) or decided.is_unknown
        is_half |= is_open and any(report.continues for report in reports.values())
        if rank == decided.source and decided.behind:
            frame, tensors = _collect(units, decided.names, here.followers, decided.numbers)
            for other in decided.behind:
                send_tensors.send(frame, tensors, other)
        elif rank in decided.behind:
            frame, tensors = send_tensors.receive(decided.source)
            _install(units, frame, tensors, here.followers)
        if rank in decided.put_back:
            here.followers.put_numbers(decided.put_back[rank])
    return lines, is_half


def _put_back_ahead(progress: Progress, followers: Followers) -> Progress:
    """Put back what has moved since a loop's end, for that code runs again; return what is left."""
    kept = followers.kept()
    if not isinstance(kept, Kept) or not progress.ahead:
        return progress
    living = followers.living()
    names = [name for name in progress.ahead if name in kept.states and name in living]
    for name in names:
        _put_or_tell(name, living[name], *kept.states[name])
    for held, groups in kept.options:
        if (optimizer := held()) is not None:
            optimizer_options.put_options(optimizer, groups)
    return replace(progress, ahead=tuple(n for n in progress.ahead if n not in names))


def _report(
    units: Sequence[Unit],
    decisions: Sequence[Decision],
    progress: Progress,
    has_copied: bool,
    back: Mapping[str, bool],
) -> FollowReport:
    rank = dist.get_rank()
    here = step_state.here()
    moved = {
        d.places[rank] for d in decisions if rank in d.places and d.action in ("copy", "roll back")
    }
    active = [
        unit
        for place, unit in enumerate(units)
        if place in moved or any(not here.is_idle(o) for o in unit.optimizers)
    ]
    return FollowReport(
        ranks=tuple(sorted({r for unit in active for r in unit.ranks})),
        step=max((max(unit.steps(), default=0) for unit in active), default=0),
        names=tuple(sorted({unit.name for unit in active})),
        is_alike=all(unit.is_alike and unit.kind != "apart" for unit in active),
        has_copied=has_copied,
        is_back=bool(back),
        is_whole=all(back.values()),
        progress=progress,
        continues=here.continues(),
        cut=tuple(sorted(_cut(here.followers, is_alike=all(unit.is_alike for unit in active)))),
    )


def _cut(followers: Followers, *, is_alike: bool) -> Iterable[str]:
    """Return the names of what holds a part that no other rank has."""
    for name, one in followers.living().items():
        # To read a state of shards plans operations for their mesh, which may be no more.
        is_module = isinstance(one, torch.nn.Module)
        tensors = list(one.parameters()) if is_module else _live_tensors(name, one)
        is_large = any(tensor.numel() > 1 for tensor in tensors)
        is_part = any(map(torch_shards.is_cut, tensors)) or (is_large and not is_alike)
        if is_part or not _travels(name, one):
            yield name


def _collect(
    units: Sequence[Unit], names: Iterable[str], followers: Followers, numbers: Any
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    living = followers.living()
    tensors: list[torch.Tensor] = []
    states = {}
    for name in names:
        if name in living:
            frame, its = _read(living[name])  # it was tried, for what cannot be read is `cut`
            states[name] = (frame, len(tensors), len(its))
            tensors += its
    frame = {
        "states": states,
        "options": {unit.identity: model_state.read_options(unit) for unit in units},
        "numbers": numbers,
        "position": followers.position(),
    }
    return frame, tensors


def _install(
    units: Sequence[Unit], frame: Any, tensors: list[torch.Tensor], followers: Followers
) -> None:
    living = followers.living()
    for name, (state, begin, count) in frame["states"].items():
        if name in living:
            _put_or_tell(name, living[name], state, tensors[begin : begin + count])
    for unit in units:
        if unit.identity in frame["options"] and unit.is_alike:
            model_state.put_back_options(unit, frame["options"][unit.identity])
    followers.put_numbers(frame["numbers"])
    followers.stand_at(frame["position"])


# ---- One object's state -------------------------------------------------------------------------


def _size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state[1])


def _live_tensors(name: str, one: Any) -> list[torch.Tensor]:
    return [] if _readable(name, one) is None else _tensors_in(state_of(one))


def _readable(name: str, one: Any) -> State | None:
    """Return an object's state, or None where its own code fails, which is told."""
    try:
        return _read(one)
    except Exception as error:
        step_state.here().tell(
            f"The state of {name} ({type(one).__name__}) could not be read, so it does not follow "
            f"the steps after a fault ({type(error).__name__}: {error})."
        )
        return None


def _travels(name: str, one: Any) -> bool:
    """Return whether another rank can be given an object's state."""
    state = _readable(name, one)
    try:
        pickle.dumps(None if state is None else state[0])
    except Exception:  # whoever lacks it is named, as what no other rank has
        return False
    return state is not None


def _put_or_tell(name: str, one: Any, frame: Any, tensors: list[torch.Tensor]) -> None:
    try:
        _put(one, frame, tensors)
    except Exception as error:
        step_state.here().tell(
            f"The state of {name} ({type(one).__name__}) could not be put back, and stays as the "
            f"fault has left it ({type(error).__name__}: {error})."
        )


def _read(one: Any) -> State:
    """Return an object's state: the live tensors apart, all else copied."""
    state = state_of(one)
    tensors = _tensors_in(state)
    places = {id(t): model_state.TensorPlace(at) for at, t in enumerate(tensors)}
    return copy.deepcopy(state, dict(places)), _parts(tensors)


def _parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's parts of tensors, live; of a quantized one what it consists of."""
    return [p.detach() for one in tensors for p in torch_quantized.plain(local(one))]


def _put(one: Any, frame: Any, tensors: list[torch.Tensor]) -> None:
    """Give an object a state that was read here or on another rank; its tensors stay its own."""
    live = _tensors_in(state_of(one))
    places = _found(frame, model_state.TensorPlace)
    parts = _parts(live)
    fits = [tuple(t.shape) for t in parts] == [tuple(t.shape) for t in tensors]
    if not fits and len(parts) != len(live):
        raise ValueError("its quantized weights have other sizes")
    if fits:
        with torch.no_grad():
            for part, saved in zip(parts, tensors, strict=True):
                part.copy_(saved)
    held = live if fits else [saved.clone() for saved in tensors]
    memo: dict[int, Any] = {id(place): held[place.number] for place in places}
    if isinstance(one, torch.amp.GradScaler):
        torch_modules.reset_grad_scaler(one)  # what it had begun is no part of this state
    if has_state(one):
        one.load_state_dict(copy.deepcopy(frame, memo))


def _tensors_in(state: Any) -> list[torch.Tensor]:
    """Return the tensors of a state, each once."""
    return list({id(t): t for t in _found(state, torch.Tensor)}.values())


def _found(value: Any, kind: type[Any]) -> list[Any]:
    """Return what of a kind lies in nested dicts, lists and tuples, in their order."""
    if isinstance(value, kind):
        return [value]
    items: Callable[[], Iterable[Any]]
    if isinstance(value, dict):
        items = value.values
    elif isinstance(value, list | tuple):
        items = value.__iter__
    else:
        return []
    return [one for item in items() for one in _found(item, kind)]
