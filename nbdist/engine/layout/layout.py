"""What `nbdist.parallelize` hands out: a `Layout`, and which layouts are alive on this rank.

A layout lives as long as its model: the model holds it, and the return value may be dropped.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from nbdist.engine import data
from nbdist.engine.batches import Shard
from nbdist.engine.compat import torch_modules, torch_sharded
from nbdist.engine.layout import cost, cuts, load, verify, zero1
from nbdist.engine.layout.checkpointing import Checkpointed
from nbdist.engine.layout.context import Context
from nbdist.engine.layout.exchange import own_part
from nbdist.engine.layout.explain import BatchSize, Explanation
from nbdist.engine.layout.mesh import MeshShape
from nbdist.engine.layout.pipe import size_of
from nbdist.engine.layout.piped import Piped
from nbdist.engine.layout.policies import Policies
from nbdist.engine.layout.precision import Scaler
from nbdist.engine.layout.savings import FULL
from nbdist.engine.layout.stages import Stage
from nbdist.engine.layout.verdict import Proof
from nbdist.errors import LayoutError

_KEY = "_nbdist_layout"  # where a model keeps its layout; in __dict__, so no part of its state

_live: "weakref.WeakSet[Layout]" = weakref.WeakSet()
_count = itertools.count()  # of layouts made on this rank


class Layout:
    """How one model is spread over the ranks.

    Attributes:
        model: The model, the same object that was given.
        shape: Sizes of the axes.
        mesh: torch's DeviceMesh: the axes larger than 1, outermost first.
        blocks: Qualified names of the units that fsdp gathers one by one; empty without fsdp.
        size: Bytes and count of the parameters of the whole model.
        local: The same of what a rank of tp holds of it; without tp, the same as `size`.
        backend: "gloo" or "nccl": what carries this model's collectives.
        plan: What tp cuts; None without tp.
        context: What cp does; None without cp.
        policies: What was asked for beside the text.
        skeleton: The plain model as it was, without weights; None where it cannot be copied.
        no_skeleton: Why there is none.
        last_step: The last batch and loss of `step`; `%dist verify` proves with them.
        piped: The pipeline's steps; None without pp.
        scaler: A GradScaler, for `Precision("fp16")`; else it passes everything on as it is, so
            that one loop serves all: `layout.scaler.scale(loss).backward()`,
            `layout.scaler.step(opt)`, `layout.scaler.update()`.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: MeshShape,
        device_mesh: DeviceMesh,
        blocks: tuple[str, ...],
        size: cost.ModelSize,
        backend: str,
        *,
        local: cost.ModelSize | None = None,
        plan: cuts.Plan | None = None,
        policies: Policies | None = None,
        token_bytes: float | None = None,
        skeleton: nn.Module | None = None,
        no_skeleton: str = "",
        piped: Piped | None = None,
        context: Context | None = None,
        forgetting: Mapping[str, Checkpointed] | None = None,
    ) -> None:
        self.model = model
        self.shape = shape
        self.mesh = device_mesh
        self.blocks = blocks
        self.size = size
        self.local = local or size
        self.backend = backend
        self.plan = plan
        self.policies = policies or Policies()
        self.skeleton = skeleton
        self.no_skeleton = no_skeleton
        self.last_step: tuple[Any, Any, Callable[[Any, Any], torch.Tensor]] | None = None
        self.piped = piped
        self._token_bytes = token_bytes
        self.context = context
        self._forgetting = dict(forgetting or {})
        self.scaler = Scaler(
            device_mesh.device_type,
            enabled=self.policies.precision.needs_scaler,
            agrees=list(shape.axes) != ["dp"],  # replicas have the same gradients, once averaged
        )
        self._number = next(_count)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the last batch behind: a newcomer has not made that step."""
        return {**self.__dict__, "last_step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be known as a living layout on a rank that got it from another one, too."""
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        _live.add(self)
        if self.shape.shards_states:
            zero1.watch(self.model)

    @property
    def number(self) -> int:
        """How many layouts this rank had made before."""
        return self._number

    @property
    def can_follow(self) -> bool:
        """Whether all can go on with another number of ranks: each holds the whole of it."""
        return set(self.shape.axes) == {"dp"} and not self.shape.shards_states

    def follow(self) -> None:
        """Average over all ranks of the default group from here on, however many. No collective."""
        world = dist.group.WORLD
        reducer = torch_modules.reducer_of(self.model)
        assert world is not None
        assert reducer is not None, "a layout that can follow has one"
        torch_modules.move_ddp(reducer, world)
        self.shape = MeshShape(dp=dist.get_world_size())
        self.mesh = DeviceMesh.from_group(world, self.mesh.device_type, mesh_dim_names=("dp",))

    @property
    def name(self) -> str:
        """The canonical text: "ddp", "zero1", "zero3", "dp=2 fsdp=4"."""
        return self.shape.name

    def __repr__(self) -> str:
        axes = " ".join(f"{axis}={n}" for axis, n in self.shape.axes.items())
        known = "" if self.name == axes else f" ({axes})"
        units = f", {len(self.blocks)} blocks" if self.blocks else ""
        held = cost.human(cost.resident_bytes(self.local, self.shape))
        return (
            f"<Layout {self.name}{known}: {self.size.parameters:,} parameters{units}, "
            f"{held} of parameters and gradients a rank>"
        )

    def explain(self, batch: Any = None) -> "Explanation":
        """Return what the layout does to the model and what it costs a rank and step.

        Args:
            batch: What the model is called with on this rank: its size tells how much tp, cp and pp
                send. Without one they are told for each token.

        Raises:
            LayoutError: `batch` holds no tensor.
        """
        return Explanation(
            self.name,
            self.shape,
            self.blocks,
            self.size,
            self.local,
            self.backend,
            self.plan,
            self._token_bytes,
            self.piped.pipe.plan if self.piped else None,
            self.context,
            None if batch is None else BatchSize.of(batch),
            self.policies,
            {name: block.input_bytes for name, block in self._forgetting.items()},
            self._compressed(),
        )

    def _compressed(self) -> float:
        """Return the part of gradients' bytes that is sent, once compression has started."""
        policy = self.policies.compress
        if policy is None:
            return 1.0
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if policy.method == "powersgd":
            return cost.power_sgd_share([p.shape for p in trained], policy.rank)
        return 2 * sum(p.numel() for p in trained) / self.local.gradient_bytes

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the pipeline, with the names of their parameters; none without pp."""
        return self.piped.pipe.plan.stages if self.piped else ()

    def step(
        self, x: Any, y: Any, loss_fn: Callable[[Any, Any], torch.Tensor]
    ) -> torch.Tensor | None:
        """Run forward and backward on this rank's share of a batch; the optimizer is yours.

        Shares may differ in size: gradients are weighted by it, so that every sample counts once,
        where a plain loop averages ranks. Collective, as every backward. Inside of
        `torch.no_grad()` it makes the loss alone; with pp still by all ranks. With
        `Precision("fp16")` the loss is scaled, and `layout.scaler` steps the optimizer.

        Args:
            x: What the model is called with; its length is the number of samples.
            y: The targets.
            loss_fn: Makes the mean loss of `(model(x), y)`.

        Returns:
            The loss of this share, detached, a plain tensor. With `ContextParallel(loss=True)` it
            is the mean over parts of sequences. With pp it is the mean over micro-batches, for each
            of which `loss_fn` makes a mean, and None on ranks without the last stage.
        """
        data.weigh_newest()
        self.last_step = (x, y, loss_fn)
        return self._step(x, y, loss_fn)

    def _step(
        self, x: Any, y: Any, loss_fn: Callable[[Any, Any], torch.Tensor]
    ) -> torch.Tensor | None:
        trains = torch.is_grad_enabled()
        if self.piped is not None:
            weight = self._weight(size_of(x)) if trains else 1.0
            return self.piped.step(x, y, loss_fn, weight)
        with loss_parallel() if self.policies.tensor.loss else nullcontext():
            loss = loss_fn(self.model(x), self.own(y))
            if trains:
                scaled = self.scaler.scale(loss)
                scaled.backward(torch.full_like(scaled, self._weight(len(x))))
        seen = loss.detach()
        whole: torch.Tensor = seen.full_tensor() if isinstance(seen, DTensor) else seen
        if self._has_own_loss:
            dist.all_reduce(whole, group=self.mesh.get_group("cp"))
            whole /= self.shape.cp
        return whole

    def own(self, y: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of targets, along dim 1, as the model's output is.

        That is all of `y`, but for `ContextParallel(loss=True)`. No collective.
        """
        return own_part(y, 1, self.mesh["cp"]) if self._has_own_loss else y

    @property
    def _has_own_loss(self) -> bool:
        """Whether ranks of cp have the loss of their part of a sequence each."""
        return self.context is not None and self.policies.context.loss

    def _weight(self, samples: int) -> float:
        """Return the size of this rank's share, in units of the mean share."""
        if self.shape.dp * self.shape.fsdp == 1:
            return 1.0
        total = torch.tensor([samples], device=self.mesh.device_type)
        dist.all_reduce(total)
        return samples * dist.get_world_size() / int(total)

    def accumulate(self, parts: int) -> Iterator[int]:
        """Yield 0 ... parts - 1; only the last part's backward averages gradients over ranks.

            for part in layout.accumulate(4):
                (loss_of(batches[part]) / 4).backward()
            opt.step()

        With `layout.step`, let its `loss_fn` divide.

        Raises:
            LayoutError: `parts` is less than 1.
        """
        if parts < 1:
            raise LayoutError(f"accumulate({parts}) has no part.", do="use 1 or more")
        return self._accumulate(parts)

    def _accumulate(self, parts: int) -> Iterator[int]:
        switch = getattr(self.model, "set_requires_gradient_sync", lambda _is_on: None)
        if self.piped is not None:
            switch = self.piped.share
        try:
            for part in range(parts):
                switch(part == parts - 1)
                yield part
        finally:
            switch(True)

    def optimizer(
        self, kind: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """Return the model's optimizer: the same line for every layout.

            opt = layout.optimizer(torch.optim.AdamW, lr=3e-4)

        With `"zero1"` it is torch's ZeroRedundancyOptimizer, whose states are cut over the ranks;
        else `kind` itself, on the model's parameters.

        Args:
            kind: A class of optimizers, such as `torch.optim.AdamW`.
            params: Parameters, or groups of them with options of their own; all by itself.
            options: What `kind` takes.
        """
        chosen = self.model.parameters() if params is None else params
        if self.shape.shards_states:
            return zero1.make(kind, chosen, self.mesh.get_group("dp"), **options)
        return kind(chosen, **options)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their norm, over all of the model, is at most `max_norm`.

        Gradients that are still multiplied by `scaler`'s scale count without it.

        Returns:
            The norm before, a plain tensor, the same on every rank. Collective where the layout
            has shards or stages.
        """
        if self.piped is not None:
            return self.piped.clip_grad_norm_(max_norm)
        has_scale = self.scaler.is_enabled() and not torch_modules.has_unscaled(self.scaler)
        scale = self.scaler.get_scale() if has_scale else 1.0
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm * scale)
        whole: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return whole / scale

    def load_from(self, other: "Layout | nn.Module | Mapping[str, torch.Tensor] | None") -> None:
        """Copy weights and buffers into this model, by name; dtypes stay this model's. Collective.

        Optimizers keep their state, which is that of other weights: make them anew, or go on where
        the weights are nearly the same.

        Args:
            other: Another layout on the same ranks, or its model; or a plain module or a state
                dict, of which rank 0's counts, and other ranks may give None.

        Raises:
            LayoutError: Names or shapes differ; nothing was changed.
        """
        source = layout_of(other) if isinstance(other, nn.Module) else other
        if isinstance(source, Layout):
            load.from_spread(self, source)
        elif other is None or isinstance(other, nn.Module | Mapping):
            plain = torch_modules.uncompiled(other) if isinstance(other, nn.Module) else other
            load.from_one(self, plain)
        else:
            raise LayoutError(
                f"load_from got a {type(other).__name__}.",
                do="give another layout, a module or a state_dict",
            )

    def verify(
        self,
        batch: tuple[Any, Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        steps: int = 3,
    ) -> Proof:
        """Prove that the layout computes what one process does on the same split. Collective.

        Some shadow steps are made on this model and, on rank 0, on the plain one with the same
        weights. Gradients, buffers and losses are compared on every rank; then all is put back:
        weights, gradients, statistics, modes, random numbers. Optimizers are not used.

        Args:
            batch: This rank's `(x, y)`, as in `step`.
            loss_fn: Makes the mean loss of `(model(x), y)`.
            steps: How many are made.

        Returns:
            A proof, the same on every rank: `ok`, and printed, what differs, where and by how much.

        Raises:
            LayoutError: It cannot be proven; the text says why. A difference is no error.
        """
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise LayoutError(
                f"verify got a {type(batch).__name__} where (x, y) should be.",
                do="layout.verify((x, y), loss_fn) with this rank's inputs and targets",
            )
        lossy = [self.policies.precision] if self.policies.precision != FULL else []
        if lossy or self.policies.compress is not None:
            raise LayoutError(
                "verify proves a layout in full precision, and this one has "
                f"{lossy[0] if lossy else self.policies.compress}.",
                why="rounding would hide what a wrong layout makes different",
                do="verify the same layout without it, then add it",
            )
        x, y = batch
        task = verify.Task(
            (x, y),
            size_of(x),
            lambda inputs: self._step(inputs[0], inputs[1], loss_fn),
            lambda model, inputs: loss_fn(model(inputs[0]), inputs[1]),
            _whole_batch if self.piped is None else self.piped.pipe.cut,
        )
        return verify.verify(self, task, steps)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a DDP communication hook, as on `DistributedDataParallel`; before training.

        Raises:
            LayoutError: The layout has no reducer: fsdp's traffic has no such hooks.
        """
        reducer = torch_modules.reducer_of(self.model)
        if reducer is None:
            raise LayoutError(
                f'Layout "{self.name}" has no communication hooks.',
                why="they belong to DDP's reducer, and fsdp and tp communicate without it",
                do='use "ddp" for hooks',
            )
        reducer.register_comm_hook(state, hook)


def _whole_batch(inputs: Any) -> list[Any]:
    """Return a rank's part as it is: without pp it is one forward."""
    return [inputs]


def facts_of(known: Layout) -> dict[str, str]:
    """Return what a run tells of its layout."""
    return {
        "layout": known.name,
        "model": torch_sharded.plain_name(known.model),
        "parameters": str(known.size.parameters),
        "layout_explained": repr(known.explain()),
    }


def live_layouts() -> list[Layout]:
    """Return the layouts whose models are alive, in the order in which they were made."""
    return sorted(_live, key=lambda layout: layout._number)


def layout_of(model: nn.Module) -> Layout | None:
    """Return the layout that `parallelize` gave to a model, if it did."""
    known: Layout | None = torch_modules.uncompiled(model).__dict__.get(_KEY)
    return known


def attach(layout: Layout) -> None:
    """Have the model hold its layout."""
    layout.model.__dict__[_KEY] = layout


def _data_shard() -> Shard | None:
    """Return which part of every batch is this rank's, as the newest living layout says."""
    newest = max(_live, key=lambda layout: layout._number, default=None)
    if newest is None or newest.shape.world_size != dist.get_world_size():
        return None  # the group has another size since: whoever scaled it tells what follows
    return Shard(*newest.shape.data_part(dist.get_rank()))


data.shard_as(_data_shard)
