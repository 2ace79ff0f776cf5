"""Weights that stages on several ranks use: a copy each, and one gradient for all.

An embedding whose weight is the head's, too, is on the first stage and on the last. Each makes the
gradient of its own uses; behind the last backward of a step they are added up, in the order of the
ranks, so that every copy gets the same to the bit.

Main thread. Collective among the ranks that have a copy.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_pipeline
from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.layout.axes.pp.stages import Stage


def shared_by(stages: tuple[Stage, ...]) -> dict[str, list[int]]:
    """Return the places on the axis pp of each weight that has several, in order."""
    places: dict[str, set[int]] = {}
    for stage in stages:
        for name in stage.parameters:
            places.setdefault(name, set()).add(stage.rank)
    return {name: sorted(has) for name, has in places.items() if len(has) > 1}


class SharedWeights:
    """Those that this rank has a copy of."""

    def __init__(
        self, model: nn.Module, shared: Mapping[str, list[int]], group: dist.ProcessGroup
    ) -> None:
        """Take the model with its stages cut.

        Args:
            model: Its names are those of the plain model.
            shared: From `shared_by`.
            group: Of the axis pp.
        """
        self._model = model
        self._group = group
        self._place = dist.get_rank(group)
        self._is_any = bool(shared)
        self._shared = {name: has for name, has in shared.items() if self._place in has}
        for name, places in self._shared.items():
            torch_pipeline.note_copies(model.get_parameter(name), len(places))

    def mean_bytes(self) -> float:
        """Return what a rank sends a step, on average over the axis. Collective on it."""
        if not self._is_any:
            return 0.0
        sent = 0.0
        for name, places in self._shared.items():
            own = local_part(self._model.get_parameter(name))
            sent += (own.nbytes + own.itemsize) * (len(places) - 1)
        everyone: list[float] = [0.0] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, sent, group=self._group)
        return sum(everyone) / len(everyone)

    def counted_elsewhere(self) -> set[int]:
        """Return, by `id`, parameters that another rank counts in what is summed over stages."""
        names = (name for name, places in self._shared.items() if places[0] != self._place)
        return {id(self._model.get_parameter(name)) for name in names}

    @torch.no_grad()
    def add_up(self) -> None:
        """Make every copy's gradient the sum of all."""
        for name, places in self._shared.items():
            parameter = self._model.get_parameter(name)
            if parameter.requires_grad:
                self._add_up(parameter, places)

    def _add_up(self, parameter: nn.Parameter, places: list[int]) -> None:
        gradient: Any = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = parameter.grad = gradient.to_dense()
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            # A stage may have a whole gradient, of a table that is looked up, of a cut weight.
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
        own = local_part(torch.zeros_like(parameter) if gradient is None else gradient)
        # Behind the numbers: whether there is a gradient at all.
        mine = torch.cat([own.reshape(-1), own.new_full((1,), float(gradient is not None))])
        found = {place: torch.empty_like(mine) for place in places if place != self._place}
        sent = [
            dist.P2POp(kind, tensor, group=self._group, group_peer=place)
            for place, room in found.items()
            for kind, tensor in ((dist.isend, mine), (dist.irecv, room))
        ]
        for work in dist.batch_isend_irecv(sent):
            work.wait()
        found[self._place] = mine
        total = torch.stack([found[place] for place in places]).sum(0)
        if not total[-1]:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local_part(parameter.grad).copy_(total[:-1].view_as(own))
