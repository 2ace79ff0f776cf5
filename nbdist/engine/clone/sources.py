"""Choose whom each newcomer is cloned from: the living rank that trains the same models.

In a group of two, or along one axis of a mesh, only the other members hold the replica that died.
What is called alike on all ranks (`mine = new_group(...)`) is the newcomer's own on such a rank.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from nbdist.engine import meeting
from nbdist.engine.compat import torch_compat, torch_modules

Ranks = tuple[int, ...]  # global


@dataclass(frozen=True, slots=True)
class Ties:
    """What binds a rank to others: the ranks of each replicated model and of each group it has."""

    models: tuple[Ranks, ...]
    groups: tuple[Ranks, ...]


def choose(ties: Mapping[int, Ties], newcomers: Iterable[int]) -> dict[int, list[int]]:
    """Return the newcomers of each source.

    The source shares most models with the newcomer, then most groups; of equals the lowest rank.

    Args:
        ties: Of every rank.
        newcomers: Ranks that hold nothing yet.
    """
    new = sorted(newcomers)
    living = sorted(set(ties) - set(new))
    chosen: dict[int, list[int]] = {}
    for newcomer in new if living else ():
        source = min(living, key=lambda rank: (*_strangeness(ties[rank], newcomer), rank))
        chosen.setdefault(source, []).append(newcomer)
    return chosen


def agree(newcomers: Iterable[int]) -> dict[int, list[int]]:
    """Return `choose` on what the ranks tell of themselves. All ranks, main thread.

    Raises:
        ClusterError: A rank told nothing in time.
        ReleasedError: `group.abort` was called meanwhile.
    """
    models = tuple(torch_compat.ranks_of(d.process_group) for d in torch_modules.live_ddps())
    groups = tuple(live.ranks for live in torch_compat.live_groups())
    said = json.dumps(asdict(Ties(models, groups)))
    heard = meeting.exchange("ties", said, meeting.FORM_TIMEOUT_S)
    ties = {rank: json.loads(text) for rank, text in heard.items()}
    return choose({rank: Ties(**told) for rank, told in ties.items()}, newcomers)


def _strangeness(ties: Ties, newcomer: int) -> tuple[int, int]:
    """Return less the more models and then groups are shared."""
    models = sum(newcomer in ranks for ranks in ties.models)
    groups = sum(newcomer in ranks for ranks in ties.groups)
    return -models, -groups
