"""Run one forward through all stages, and give every rank of the pipeline its last logits.

For text, token by token: no micro-batches, no schedule, no gradients. Each stage sends what is
alive at its end to the next, and the last one's logits are broadcast, so that all choose the same
token.
"""

# B batch, T sequence, V vocabulary

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from nbdist.engine.compat import torch_sharded
from nbdist.engine.layout.axes.pp.alive import Crossing, TensorSpec
from nbdist.engine.layout.axes.pp.schedule_runner import ScheduleRunner, as_specified
from nbdist.engine.layout.axes.pp.stage_trace import Call, ForwardTrace
from nbdist.engine.layout.plan.inputs import Inputs

_TRIED = 2, 3  # lengths of sequences: what follows the length is seen by what differs


class AllStages:
    """The forwards of one text. Main thread, on all ranks of the pipeline together.

    Args:
        runner: The pipeline.
        name: The keyword of the model's ids; None where it is called as `model(ids)`.
        is_sharded: Whether fsdp gathers for each forward what is to be given back.
    """

    def __init__(self, runner: ScheduleRunner, name: str | None, *, is_sharded: bool) -> None:
        self._runner = runner
        self._name = name
        self._is_sharded = is_sharded
        self._traces: dict[int, list[ForwardTrace]] = {}  # by number of samples
        self._form: tuple[int, torch.dtype] | None = None  # V, and the dtype of logits

    @property
    def is_within(self) -> bool:
        """Whether the model is being called for a part of a forward."""
        return self._runner.forward.active is not None

    def run(self, inputs: Inputs, ids_BT: Tensor) -> Tensor:
        """Return the logits of the last token, (B, 1, V), on all ranks. Collective.

        Args:
            inputs: What the model is called with, the same on all ranks; caches are a rank's own.
            ids_BT: The ids among them.
        """
        runner, seen = self._runner, self._at_length(*ids_BT.shape)
        stages = runner.plan.stages
        given: tuple[Tensor, ...] = ()
        logits: Tensor | None = None
        for stage in (stage for stage in stages if stage.rank == runner.rank):
            if stage.index and not given:
                given = self._received(seen.crossings[stage.first], stages[stage.index - 1].rank)
            made = runner.forward.run(stage.first, stage.end, inputs, seen, given)
            given = ()
            if stage is stages[-1]:
                logits = getattr(made, "logits", made)[:, -1:].contiguous()
                continue
            sent = as_specified(made, seen.crossings[stage.end], stage)
            after = stages[stage.index + 1].rank
            if after == runner.rank:
                given = sent
                continue
            for tensor in sent:
                dist.send(tensor, group=runner.group, group_dst=after)
        if self._is_sharded:
            torch_sharded.reshard(runner.model)
        return self._shared(logits, len(ids_BT))

    def _received(self, crossings: tuple[Crossing, ...], source: int) -> tuple[Tensor, ...]:
        received = tuple(crossing.spec.zeros(self._runner.device) for crossing in crossings)
        for tensor in received:
            dist.recv(tensor, group=self._runner.group, group_src=source)
        return received

    def _shared(self, logits: Tensor | None, samples: int) -> Tensor:
        source, group = self._runner.plan.stages[-1].rank, self._runner.group
        if self._form is None:
            form = [None if logits is None else (logits.shape[-1], logits.dtype)]
            dist.broadcast_object_list(form, group=group, group_src=source)
            self._form = form[0]
        assert self._form is not None, "the last stage has logits"
        words, dtype = self._form
        if logits is None:
            logits = torch.empty(samples, 1, words, dtype=dtype, device=self._runner.device)
        dist.broadcast(logits, group=group, group_src=source)
        return logits

    def _at_length(self, samples: int, length: int) -> ForwardTrace:
        """Return the record of a forward without a cache of ids of this shape."""
        if samples not in self._traces:
            self._traces[samples] = [self._traced(samples, tried) for tried in _TRIED]
        one, other = self._traces[samples]

        def at(here: Any, there: Any) -> Any:
            if not isinstance(here, TensorSpec):
                return here
            sizes = zip(here.shape, there.shape, strict=True)
            shape = [a + (length - _TRIED[0]) * (b - a) for a, b in sizes]
            return TensorSpec(torch.Size(shape), here.dtype)

        def call(here: Call, there: Call) -> Call:
            return replace(here, output=tree_map(at, here.output, there.output))

        def crossing(here: Crossing, there: Crossing) -> Crossing:
            return replace(here, spec=at(here.spec, there.spec))

        return replace(
            one,
            calls={n: tuple(map(call, of_one, other.calls[n])) for n, of_one in one.calls.items()},
            crossings={
                n: tuple(map(crossing, sent, other.crossings[n]))
                for n, sent in one.crossings.items()
            },
        )

    def _traced(self, samples: int, length: int) -> ForwardTrace:
        ids = torch.zeros(samples, length, dtype=torch.long, device=self._runner.device)
        if self._name is None:
            return self._runner.traced(Inputs((ids,), {}))
        return self._runner.traced(Inputs((), {self._name: ids, "use_cache": False}))
