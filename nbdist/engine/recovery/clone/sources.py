"""Choose whom each replacement rank is cloned from: the living rank that trains the same models.

In a group of two, or along one axis of a mesh, only the other members hold the replica that died.
What has the same name on all ranks (`mine = new_group(...)`) is the new rank's own on such a rank.
A rank that trained one model with one peer and another with a second one gets what the first holds;
what it misses of the second is named.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat import torch_modules, torch_sharded
from nbdist.engine.compat.groups import torch_groups
from nbdist.engine.group import identity, rendezvous

Ranks = tuple[int, ...]  # global


@dataclass(frozen=True, slots=True)
class Model:
    """A replicated model that a rank trains.

    Attributes:
        identity: Its name among ranks.
        kind: The class that the user wrote.
        ranks: Who trains it together.
        names: What the cells of this rank call it.
    """

    identity: str
    kind: str
    ranks: Ranks
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ties:
    """What binds a rank to others.

    Attributes:
        models: Each replicated model that it trains.
        groups: The ranks of each group it has.
        parts: Of each model that is cut over ranks, those that hold the same part as this one.
    """

    models: tuple[Model, ...]
    groups: tuple[Ranks, ...]
    parts: tuple[Ranks, ...] = ()


def choose(ties: Mapping[int, Ties], replacements: Iterable[int]) -> dict[int, list[int]]:
    """Return the replacement ranks of each source.

    The source holds most of the new rank's own parts, as no other rank may, then shares most
    models with it, then most groups; of equals it is the lowest rank.

    Args:
        ties: Of every rank.
        replacements: Ranks that hold nothing yet.
    """
    new = sorted(replacements)
    living = sorted(set(ties) - set(new))
    chosen: dict[int, list[int]] = {}
    for replacement in new if living else ():
        source = min(living, key=lambda rank: (*_strangeness(ties[rank], replacement), rank))
        chosen.setdefault(source, []).append(replacement)
    return chosen


def exchange(names: Mapping[str, Any], parts: Iterable[Ranks] = ()) -> dict[int, Ties]:
    """Return what binds each rank to others. All ranks, main thread.

    Args:
        names: What the cells of this rank have named.
        parts: See `Ties`.

    Raises:
        ClusterError: A rank did not answer in time.
        ReleasedError: `group.abort` was called meanwhile.
    """
    models = tuple(_model(ddp, names) for ddp in torch_modules.live_ddps())
    groups = tuple(live.ranks for live in torch_groups.live_groups())
    said = json.dumps(asdict(Ties(models, groups, tuple(parts))))
    heard = rendezvous.exchange("ties", said, rendezvous.FORM_TIMEOUT_S)
    return {rank: _ties(json.loads(text)) for rank, text in heard.items()}


def missed(ties: Mapping[int, Ties], replacement: int, source: int) -> list[Model]:
    """Return the models that the new rank's predecessor trained, and that its source does not hold.

    Args:
        ties: Of every rank.
        replacement: Whose models.
        source: The rank that it is cloned from.
    """
    held = {model.identity for model in ties[source].models}
    found = {
        model.identity: model
        for rank in sorted(ties)
        for model in ties[rank].models
        if model.identity not in held and replacement in model.ranks
    }
    return list(found.values())


def _model(ddp: DistributedDataParallel, names: Mapping[str, Any]) -> Model:
    module = torch_modules.replicated_by(ddp) or ddp
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    called = tuple(name for name, value in names.items() if value is module or value is inner)
    kind = torch_sharded.plain_name(inner)
    return Model(identity.here.of(ddp), kind, torch_groups.ranks_of(ddp.process_group), called)


def _ties(plain: Mapping[str, Any]) -> Ties:
    models = (
        Model(m["identity"], m["kind"], tuple(m["ranks"]), tuple(m["names"]))
        for m in plain["models"]
    )
    groups, parts = (tuple(map(tuple, plain[name])) for name in ("groups", "parts"))
    return Ties(tuple(models), groups, parts)


def _strangeness(ties: Ties, replacement: int) -> tuple[int, int, int]:
    """Return less the more parts, then models, then groups are shared."""
    parts = sum(replacement in ranks for ranks in ties.parts)
    models = sum(replacement in model.ranks for model in ties.models)
    groups = sum(replacement in ranks for ranks in ties.groups)
    return -parts, -models, -groups
