"""Give new ranks what a living rank holds: its namespace, its models, the position in its data.

    source                                     replacement rank
    dump the namespace           ── names, streams, buffers ─▶  load it beside its own
    dump again without these    ◀── what could not be built ──  (nothing, as a rule)
    tell every rank what came    ──────── the answer ────────▶  take it over

Nothing goes through the notebook, and no collective is run. Every rank learns what came, and
refuses the models whose state died with a rank.

Main thread only, on all ranks at once, after `group.reform` and `reset.reset_state`.
"""

import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from IPython import get_ipython
from torch import nn

from nbdist.engine.compat import torch_pipeline, torch_sharded
from nbdist.engine.compat.groups.torch_groups import ranks_of
from nbdist.engine.data.batches import mix
from nbdist.engine.data.loaders import Loader
from nbdist.engine.group import ddp_hook_state, group_names, group_record, rendezvous, state
from nbdist.engine.kernel.placeholder import Placeholder
from nbdist.engine.recovery import disabled, name_record
from nbdist.engine.recovery.clone import (
    fingerprint,
    pickler,
    shards,
    sources,
    torch_rebuild,
    unpickler,
)
from nbdist.engine.recovery.clone.p2p import P2PTransfer
from nbdist.engine.recovery.clone.recipes import recipes
from nbdist.engine.steps import keep
from nbdist.shared.errors import ClusterError, LostStateError
from nbdist.shared.wire import NAMES_OF_A_RANK

# IPython's: In, Out, _, __, _i, _ii, _3, _i3, _oh, _dh, ...
_OF_IPYTHON = re.compile(
    r"In|Out|exit|quit|open|get_ipython|_+|_i+|_i?\d+|_[iod]h|__\w+__|_exit_code"
)


@lru_cache(4096)  # all names of a rank are looked at after each cell
def _is_of_ipython(name: str) -> bool:
    return _OF_IPYTHON.fullmatch(name) is not None


_MOST_ROUNDS = 8  # each leaves out what the one before could not build; one is the rule, two happen


_PART = "nbdist."  # before the names of what is in no namespace


@dataclass(frozen=True, slots=True)
class Part:
    """What travels that is in no namespace, in the same pickle: what it shares stays so.

    Attributes:
        name: For messages, such as `steps`.
        hand_over: Called on the source; returns what travels, each value by itself.
        take_over: Called on a replacement rank, with those that came whole.
    """

    name: str
    hand_over: Callable[[], dict[str, Any]]
    take_over: Callable[[dict[str, Any]], None]

    @property
    def prefix(self) -> str:
        """What its names begin with on their way."""
        return f"{_PART}{self.name}/"


def clone_each(
    replacements: Iterable[int],
    *,
    namespace: dict[str, Any] | None = None,
    step: int = 0,
    parts: Iterable[tuple[int, ...]] = (),
    beside: Sequence[Part] = (),
    arrived: Callable[[], None] = lambda: None,
) -> dict[str, Any] | None:
    """Give each new rank what the living rank holds that is most like it. All ranks, main threads.

    Args:
        replacements: Ranks that hold nothing yet.
        namespace: As `clone`.
        step: As `clone`.
        parts: Of each model that is cut over ranks, those that hold the same part as this one.
        beside: What travels that is in no namespace; the same on all ranks.
        arrived: Called on a new rank when all has come, and others are yet to get theirs.

    Returns:
        As `clone`: on a new rank what it got, on others what one got; None when no rank lives.
        In it `differ`: names that came, and whose values are not the same on all living ranks.

    Raises:
        As `clone`.
    """
    replacements = sorted(replacements)
    here, result = dist.get_rank(), None
    marks = _compare(replacements, namespace)
    names, own = _group_names(replacements, namespace)
    is_new = here in replacements
    ties = sources.exchange({} if is_new else _CloneContext.of(namespace).names(), parts)
    chosen = sources.choose(ties, replacements)
    # One by one: what one replacement rank cannot build another may.
    for source, replacement in ((source, one) for source, its in chosen.items() for one in its):
        answer = clone(
            source, replacement, dead=replacements, namespace=namespace, step=step, beside=beside
        )
        if here == replacement:
            arrived()
            missed = _name_missed(_CloneContext.of(namespace).namespace, ties, source)
            answer["inexact"] += missed
            answer["inexact"] += _name_own(_CloneContext.of(namespace), source)
        if result is None or here == replacement:
            if here == replacement:
                _name_groups(
                    _CloneContext.of(namespace).namespace, own, names, answer["placeholders"]
                )
            said = {*answer["placeholders"], *answer["lost"]}
            differ = [name for name in fingerprint.differing(marks, source) if name not in said]
            result = {**answer, "differ": differ}
    return result


def _compare(
    replacements: list[int], namespace: dict[str, Any] | None
) -> dict[int, dict[str, str]]:
    """Return the fingerprints of every living rank's names, by rank."""
    is_new = dist.get_rank() in replacements
    mine = {} if is_new else fingerprint.of_names(_CloneContext.of(namespace).names())
    heard = rendezvous.exchange("names", json.dumps(mine), rendezvous.FORM_TIMEOUT_S)
    return {rank: json.loads(text) for rank, text in heard.items() if rank not in replacements}


def _name_missed(
    namespace: dict[str, Any], ties: Mapping[int, sources.Ties], source: int
) -> list[str]:
    """Put placeholders for the models that came from no rank, and return what is said of them."""
    here = dist.get_rank()
    lines = []
    for model in sources.missed(ties, here, source):
        why = f"rank {source}, from which rank {here} was cloned, does not hold it"
        for name in model.names:
            namespace[name] = Placeholder(model.kind, why, is_state=True)
        called = ", ".join(model.names) or model.kind
        lines.append(f"Rank {here} has no {called}: {why}. Create it again on its ranks.")
    return lines


def _name_own(place: "_CloneContext", source: int) -> list[str]:
    """Put placeholders for what only this rank's predecessor held; return what is said of it."""
    here, client = dist.get_rank(), state.here.member().client
    before, _ = name_record.read(client, here)
    names = name_record.missed(
        before, place.namespace, frozenset().union(*name_record.read(client, source))
    )
    if not names:
        return []
    why = f"rank {source}, from which rank {here} was cloned, does not hold it"
    for name in names:
        place.namespace[name] = Placeholder("what the process before held", why)
    line = (
        f"Rank {here} is without {', '.join(names)}: rank {source}, from which it was cloned, does "
        "not hold what the process before did. Make it again there."
    )
    return [line]


def namespace() -> dict[str, Any]:
    """Return the namespace in which cells run on this rank."""
    return keep.here.names()


def written_names(namespace: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank writes the names of at a cell's end (`name_record`)."""
    return _CloneContext(namespace, {}).names()


def _group_names(
    replacements: list[int], namespace: dict[str, Any] | None
) -> tuple[list[group_names.Names], group_names.Names]:
    """Return what the cells of the living ranks call groups, and those of this rank's predecessor.

    The latter on a replacement rank only, and as far as it was written down.
    """
    mine = group_record.SurvivorReport({})
    if not (is_new := dist.get_rank() in replacements):
        mine = group_record.here.report(_CloneContext.of(namespace).names())
    heard = rendezvous.exchange("group names", json.dumps(asdict(mine)), rendezvous.FORM_TIMEOUT_S)
    survivors = [group_record.SurvivorReport(**json.loads(text)) for text in heard.values()]
    own: group_names.Names = {}
    if is_new:
        own = group_record.names_before(state.here.member().client, dist.get_rank(), survivors)
    return [one.names for one in survivors], own


def _name_groups(
    namespace: dict[str, Any],
    own: group_names.Names,
    names: Iterable[group_names.Names],
    placeholders: dict[str, str],
) -> None:
    """Give a new rank's groups their names; `placeholders` are the names that did not come."""
    found, unknown = group_names.restore(namespace, own, names)
    for name in found:
        placeholders.pop(name, None)
    for name in unknown:
        placeholders.setdefault(name, "it is unknown which process group this rank had here")


def clone(
    source: int,
    replacement: int,
    *,
    dead: Iterable[int] = (),
    namespace: dict[str, Any] | None = None,
    step: int = 0,
    beside: Sequence[Part] = (),
) -> dict[str, Any]:
    """Give a replacement rank what `source` holds. All ranks at once, main threads.

    Args:
        source: A living rank.
        replacement: A rank whose process is new, and has joined.
        dead: All ranks whose processes are new; this one alone by itself.
        namespace: Where cells run on this rank; that of the rank's kernel by itself.
        step: Optimizer steps made so far: replacement ranks derive their random state from it.
        beside: As `clone_each`.

    Returns:
        On every rank `source`, `names` (that came), `placeholders` (names and why these did not
        come whole), `lost` (names whose state died), `random` (`seed` and `step`: with its rank
        they make each new rank's random state), `inexact` (sentences about what the new rank
        trains on with, and is not what its predecessor had).

    Raises:
        RuntimeError: A rank let go meanwhile. Replacement ranks have taken nothing over.
        ClusterError: A replacement rank cannot build the namespace.
    """
    here = dist.get_rank()
    place = _CloneContext.of(namespace)
    if here == source:
        answer = _give(place, replacement, step, beside)
    elif here == replacement:
        answer = _take(place, source, here, beside)
    else:
        answer = P2PTransfer(source).receive()
    if here != replacement:  # what has come there is whole
        torch_rebuild.restart_static_graphs([replacement])
        _refuse_lost(place, answer, source, replacement)
    keys = ("source", "names", "placeholders", "lost", "random", "inexact")
    return {key: answer[key] for key in keys}


@dataclass(frozen=True, slots=True)
class _CloneContext:
    """Where cells run on this rank, and what every rank has of its own."""

    namespace: dict[str, Any]
    anchors: dict[str, Any]  # by keys that all ranks share

    @classmethod
    def of(cls, namespace: dict[str, Any] | None) -> "_CloneContext":
        anchors = {**torch_rebuild.anchors(), "__main__": sys.modules.get("__main__")}
        if namespace is None:
            namespace, shell = keep.here.names(), get_ipython()
            assert shell is not None, "only a rank's own namespace is cloned in place"
            anchors |= {"IPython's shell": shell, "the cells' module": shell.user_module}
        return cls(namespace, {**anchors, "namespace": namespace})

    def keys(self) -> dict[int, str]:
        """Return the keys of the anchors, by the `id` of each.

        Torch's mark for non-members is one of them, and no new rank has it: that this rank is not
        in a group says nothing of another one.
        """
        mark = f"a process group that rank {dist.get_rank()} is not in"
        keys = {id(value): key for key, value in self.anchors.items()}
        return {**keys, id(dist.GroupMember.NON_GROUP_MEMBER): mark}

    def names(self) -> dict[str, Any]:
        """Return what travels of the namespace."""
        return {
            name: value
            for name, value in self.namespace.items()
            if name not in NAMES_OF_A_RANK and not _is_of_ipython(name)
        }


# ---- The source ------------------------------------------------------------------------------


def _give(
    place: _CloneContext, replacement: int, step: int, beside: Sequence[Part]
) -> dict[str, Any]:
    channel = P2PTransfer(replacement)
    sent = place.names()
    for part in beside:
        sent |= {f"{part.prefix}{key}": value for key, value in part.hand_over().items()}
    anchors = place.keys()
    refused, excluded = dict[int, str](), dict[str, str]()
    kept = []  # what was refused: another object may not get its id
    for attempt in range(_MOST_ROUNDS):
        parcel = pickler.dump(
            sent,
            anchors,
            recipes(dist.get_rank(), replacement),
            user_globals=place.namespace,
            refused=refused,
            excluded=excluded,
        )
        channel.send(_header(parcel))
        channel.send_buffers([memoryview(s) for s in parcel.streams] + parcel.buffers)
        reply = channel.receive()
        failures, broken = reply["failures"], reply["broken"]
        parcel.placeholders |= reply["missing"]
        if not failures and not broken:
            break
        excluded |= broken
        if attempt == 0:
            kept = [parcel.objects[failure.serial] for failure in failures]
            refused |= {id(one): f.why for one, f in zip(kept, failures, strict=True)}
        else:  # an object that is made for the pickle alone is another one each time
            excluded |= pickler.names_of(parcel, failures)
    else:
        raise ClusterError(
            f"Rank {replacement} cannot build what rank {dist.get_rank()} holds.",
            why=next(iter((*broken.values(), *(failure.why for failure in failures)))),
            do="%dist restart",
        )
    answer = _answer(parcel, replacement, _seed(sent), step)
    for rank in range(dist.get_world_size()):
        if rank != dist.get_rank():
            P2PTransfer(rank).send(answer)
    return answer


def _header(parcel: pickler.Parcel) -> dict[str, Any]:
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it has been deleted: the replacement rank stays where it began
        folder = ""
    return {
        "names": parcel.names,
        # Code that cells run may have changed both, and modules are imported by their names.
        "path": sys.path,
        "folder": folder,
        "hooks": torch_rebuild.hooks_counted(),
    }


def _seed(sent: Mapping[str, Any]) -> int:
    """Return the seed of the first loader, or that of torch's own generator on this rank."""
    loaders = (value for value in sent.values() if isinstance(value, Loader))
    loader = next(loaders, None)
    return torch.initial_seed() if loader is None else int(loader.state_dict()["seed"])


def _answer(parcel: pickler.Parcel, replacement: int, seed: int, step: int) -> dict[str, Any]:
    def users(names: Iterable[str]) -> list[str]:
        return [name for name in names if not name.startswith(_PART)]

    return {
        "source": dist.get_rank(),
        "names": [name for name in users(parcel.names) if name not in parcel.lost],
        "placeholders": {name: parcel.placeholders[name] for name in users(parcel.placeholders)},
        "lost": users(parcel.lost),
        "random": {"seed": seed, "step": step},
        "inexact": _say_inexact(replacement),
    }


def _say_inexact(replacement: int) -> list[str]:
    """Return what a new rank trains on with that is not what its predecessor had, in sentences."""
    if not any(replacement in ranks_of(d.process_group) for d in ddp_hook_state.differs_by_rank()):
        return []
    said = (
        f"Rank {replacement} went on with rank {dist.get_rank()}'s error feedback of PowerSGD, for "
        "what it had is lost: training is valid, but not bit-equal to an undisturbed run."
    )
    return [said]


# ---- A new rank ------------------------------------------------------------------------------


def _take(place: _CloneContext, source: int, here: int, beside: Sequence[Part]) -> dict[str, Any]:
    channel = P2PTransfer(source)
    values = _load_from(channel, place)
    answer: dict[str, Any] = channel.receive()
    for part in beside:
        mine = [key for key in values if key.startswith(part.prefix)]
        came = {key.removeprefix(part.prefix): values.pop(key) for key in mine}
        part.take_over({k: value for k, value in came.items() if type(value) is not Placeholder})
    place.namespace.update(values)
    ddp_hook_state.here.snapshot()  # the source's hooks stand at a boundary
    seed_anew({**answer["random"], "rank": here})
    return answer


def _load_from(channel: P2PTransfer, place: _CloneContext) -> dict[str, Any]:
    for _ in range(_MOST_ROUNDS):
        header = channel.receive()
        buffers = channel.receive_buffers()
        _follow(header)
        names = header["names"]
        streams = [bytes(buffer) for buffer in buffers[: len(names)]]
        loaded = unpickler.load(
            names, streams, buffers[len(names) :], place.anchors, place.namespace
        )
        del buffers
        reply = {"failures": loaded.failures, "missing": loaded.missing, "broken": loaded.broken}
        channel.send(reply)
        if loaded.is_whole:
            return loaded.values
        loaded.values.clear()  # before the next round brings the same once more
    raise ClusterError(
        "This rank cannot build what the others hold.",
        why=next(iter((*loaded.broken.values(), *(failure.why for failure in loaded.failures)))),
        do="%dist restart",
    )


def _follow(header: Mapping[str, Any]) -> None:
    """Import from where the source does, and work in its folder, if that is here as well.

    Hooks that are set from here on leave those alone that come.
    """
    torch_rebuild.count_hooks_from(header["hooks"])
    sys.path.extend(folder for folder in header["path"] if folder not in sys.path)
    if os.path.isdir(header["folder"]):
        os.chdir(header["folder"])


def seed_anew(position: Mapping[str, int]) -> None:
    """Begin the stream of random numbers that follows from a `seed`, a `rank` and a `step`."""
    seed = mix(position["seed"], position["rank"], position["step"])
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


# ---- All ranks -------------------------------------------------------------------------------


def _refuse_lost(
    place: _CloneContext, answer: Mapping[str, Any], source: int, replacement: int
) -> None:
    """Refuse, on this rank, the models of which the new rank's part is gone."""

    def is_gone(module: nn.Module) -> bool:
        held = replacement in torch_rebuild.holders(module)
        return held and not shards.here.comes_whole(module, source, replacement)

    models: dict[nn.Module, str] = {}
    roots = [module for module, _ in torch_sharded.live_fsdp2_roots()]
    for module in (*roots, *torch_pipeline.here.laid_models()):
        if is_gone(module):
            models[module] = torch_sharded.plain_name(module)
    for name in answer["lost"]:
        value: Any = place.namespace.get(name)
        if torch_rebuild.is_sharded_module(value) and is_gone(value):
            models[value] = name
    for module, name in models.items():
        parts = "stages" if torch_rebuild.is_staged(module) else "shards"
        error = LostStateError(
            f"The {parts} of `{name}` that rank {replacement} held are lost.",
            why="each rank held a part of its parameters, and that process died",
            do="build it again in a cell; nbdist.restore() then brings back its contents",
        )
        disabled.here.refuse(module, error)
