"""A model's steps under a layout in a dry world, and what they hold and send.

The code that runs is that of a layout on real ranks: what an axis gathers, keeps and sends is seen
here, not computed from a formula.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from nbdist.engine.compat import torch_dry, torch_fakes, torch_modules, torch_sharded
from nbdist.engine.dry.collectives import Call, CollectiveLog
from nbdist.engine.dry.flops import Flops
from nbdist.engine.dry.live_bytes import LiveBytes, storages
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.plan import mesh
from nbdist.engine.layout.plan.inputs import as_inputs
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.plan.trace import place
from nbdist.engine.layout.policies import compress
from nbdist.engine.layout.policies.efficiency import Compress
from nbdist.engine.layout.policies.policies import Policies, read
from nbdist.engine.layout.policies.two_levels import with_groups
from nbdist.engine.layout.spread import spread
from nbdist.shared.collectives import rounds, sent_bytes
from nbdist.shared.error_text import named
from nbdist.shared.errors import LayoutError
from nbdist.study.estimate import RankEstimate, TensorShape, Traffic

# gloo reduces all of it, of which each rank keeps a part.
_COPIED_BY_GLOO = frozenset({"_reduce_scatter_base_", "reduce_scatter_"})

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be known.

    Attributes:
        factory: Makes the model.
        batch: What a rank's step gets: the model's inputs, and with `loss` a pair of inputs and
            targets.
        layout: As `parallelize` takes it.
        policies: As `parallelize` takes them.
        world_size: Ranks.
        ranks_on_host: Of them, on a host.
        loss: Makes the loss of `(outputs, targets)`; None takes the outputs' `loss`, else a mean.
        optimizer: Its class.
        options: The arguments of it.
        backend: "gloo" or "nccl".
    """

    factory: Callable[[], nn.Module]
    batch: Any
    layout: str
    policies: tuple[object, ...]
    world_size: int
    ranks_on_host: int
    loss: LossFunction | None
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    backend: str = "gloo"


def shape_of(asked: Asked) -> MeshShape:
    """Return the sizes of the axes.

    Raises:
        LayoutError: The text does not fit the ranks.
    """
    return mesh.parse(asked.layout, asked.world_size, asked.ranks_on_host)


def kinds_of_ranks(shape: MeshShape) -> list[int]:
    """Return a rank of each kind that holds or sends something else: one of each stage of pp."""
    return [stage * shape.world_size // shape.pp for stage in range(shape.pp)]


def notes_of(shape: MeshShape) -> list[str]:
    """Return what is assumed for want of numbers, in words."""
    return ["experts get an even share of tokens"] if shape.ep > 1 else []


@dataclass(frozen=True, slots=True)
class DryRank:
    """A rank that has run its steps.

    Attributes:
        held: What it held and sent.
        model: The class of its model.
        parameter_count: Of the whole model.
        experts: Of each mixture, under ep.
    """

    held: RankEstimate
    model: str
    parameter_count: int
    experts: int


def measure(asked: Asked, rank: int) -> DryRank:
    """Return what a rank of a layout would hold and send. Main thread of a process of its own.

    Raises:
        LayoutError: The layout refuses the model, or a step asks for numbers.
    """
    try:
        return _measure(asked, rank)
    except torch_fakes.ASKED_NUMBERS as error:
        raise LayoutError(
            "The step decides by the numbers in a tensor, so there is no estimate.",
            why=f"{place(error)} needs them, and tensors have only shapes here",
            do="give a model and a loss that decide by shapes or by plain values",
        ) from error


def _measure(asked: Asked, rank: int) -> DryRank:
    is_gloo = asked.backend == "gloo"
    with torch_dry.fake_group(asked.world_size, rank), torch_dry.fake_tensors():
        live = LiveBytes(1, _COPIED_BY_GLOO) if is_gloo else LiveBytes(512)
        held = RankEstimate(rank)
        batch = tree_map_only(TensorShape, _zeros, asked.batch)
        with live.following():
            live.add(tree_leaves(batch))
            shape = shape_of(asked)
            x = batch if asked.loss is None else batch[0]
            policies = policies_of(asked.policies, shape, asked.ranks_on_host).with_example(x)
            if policies.compress is not None:
                policies = replace(policies, compress=_at_once(policies.compress, asked.backend))
            model = torch_modules.uncompiled(_made(asked.factory))
            layout = spread(model, shape, policies)
            optimizer = layout.optimizer(asked.optimizer, **asked.options)
            flops = Flops()
            run = _Run(asked, layout, optimizer, batch, live, flops, held)
            held.parameters = _bytes([*model.parameters(), *model.buffers()])
            # They make the optimizer's states, the buckets, and what compression remembers.
            for _ in range(1 if policies.compress is None else 1 + policies.compress.start):
                run.step()
            with ExitStack() as stack:
                log = stack.enter_context(CollectiveLog())
                stack.enter_context(flops)
                live.restart()
                run.step()
                held.peak, held.buffers = live.peak, live.gathered
            held.flops = flops.total
            held.optimizer = _bytes(_tensors_of(optimizer))
            held.traffic = _traffic(log.calls, shape, asked.backend)
            named = torch_sharded.plain_name(model), layout.size.parameters, layout.experts
            return DryRank(held, *named)


def policies_of(given: tuple[object, ...], shape: MeshShape, ranks_on_host: int) -> Policies:
    """Return the policies of a dry layout.

    Raises:
        LayoutError: One does not go with the layout, or cannot run without numbers.
    """
    policies = with_groups(read(given, shape), shape.world_size, ranks_on_host)
    if policies.compress is not None:
        compress.check(policies.compress, policies.precision, shape)
    if policies.offload is not None:
        raise LayoutError(
            "There is no estimate with Offload yet.",
            why="it moves tensors between a GPU's memory and the host's, and in an estimate there "
            "is one memory",
            do="leave it out of the estimate",
        )
    return policies


def _at_once(asked: Compress, backend: str) -> Compress:
    """Return a compression that starts as soon as torch lets it.

    Raises:
        LayoutError: Its buckets are not known.
    """
    if asked.method == "powersgd" and backend != "gloo":
        raise LayoutError(
            'There is no estimate of Compress("powersgd") on GPUs yet.',
            why="it has several buckets there, and in an estimate one, as on CPUs",
            do='device="cpu", or Compress("bf16")',
        )
    return replace(asked, start=2)


def _made(factory: Callable[[], Any]) -> nn.Module:
    """Return the model.

    Raises:
        LayoutError: There is none.
    """
    try:
        model = factory()
    except Exception as error:
        wants_gpu = "cuda" in str(error).lower()
        raise LayoutError(
            f"The factory made no model: {named(error)}.",
            do='leave .cuda() out of it, and give device="cuda"' if wants_gpu else "",
        ) from error
    if not isinstance(model, nn.Module):
        raise LayoutError(
            f"The factory made no model, but a {type(model).__name__}.",
            do="give a function that returns a torch.nn.Module, such as lambda: Model(config)",
        )
    return model


def _zeros(tensor: TensorShape) -> Tensor:
    return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))


@dataclass(slots=True)
class _Run:
    asked: Asked
    layout: Layout
    optimizer: torch.optim.Optimizer
    batch: Any
    live: LiveBytes
    flops: Flops
    held: RankEstimate

    def step(self) -> None:
        """Run forward, backward and the optimizer."""
        x, y = self.batch if self.asked.loss is not None else (self.batch, None)
        loss_of = self.asked.loss or _loss_of_outputs
        if self.layout.shape.pp > 1:
            with torch_dry.settled_pipelines():
                self.layout.step(x, y, loss_of)
        else:
            before = self.live.now
            outputs = as_inputs(x).run(self.layout.model)
            loss = loss_of(outputs, y)
            self.held.activations = self.live.now - before
            del outputs
            loss.backward()
        self.held.launches = self.flops.launches
        gradients = [p.grad for p in self.layout.model.parameters() if p.grad is not None]
        self.held.gradients = _bytes(gradients)
        del gradients
        self.optimizer.step()
        self.optimizer.zero_grad()


def _loss_of_outputs(outputs: Any, _targets: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
    return floats[0].float().mean()


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(storage.nbytes() for storage in storages(tensors))


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    own = getattr(optimizer, "optim", optimizer)  # of a ZeroRedundancyOptimizer
    return tree_leaves([list(state.values()) for state in own.state.values()])


def _traffic(calls: list[Call], shape: MeshShape, backend: str) -> dict[str, Traffic]:
    """Return collectives and bytes by the axes whose ranks they join."""
    found: dict[str, Traffic] = {}
    for call in calls:
        sent = found.setdefault(" x ".join(axes_between(call.ranks, shape.axes)), Traffic())
        sent.count += 1
        sent.payload += call.nbytes
        sent.nbytes += sent_bytes(call.kind, call.nbytes, len(call.ranks), backend)
        sent.rounds += rounds(call.kind, len(call.ranks), backend)
        sent.ranks = max(sent.ranks, len(call.ranks))
    return found


def axes_between(ranks: Sequence[int], sizes: Mapping[str, int]) -> list[str]:
    """Return the axes along which ranks differ; the last one's are neighbours."""
    names, step = [], 1
    for name, size in reversed(list(sizes.items())):
        if len({rank // step % size for rank in ranks}) > 1:
            names.append(name)
        step *= size
    return names[::-1]
