"""`nbdist.parallelize`: read the layout, check, spread the model in place, hand out a `Layout`.

    parse ─▶ MeshShape ─▶ check everything ─▶ DeviceMesh ─▶ equal weights ─▶ one step an axis

All that can be refused is refused before the model is touched. The axes' order is fixed: what
cuts a weight (tp) comes before what shards the pieces (fsdp) or copies them (dp), and a pipeline
takes the result apart last. dp, fsdp and tp have modules of their own so far.

A layout lives as long as its model: the model holds it, and the return value may be dropped.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from nbdist.engine import data
from nbdist.engine.batches import Shard
from nbdist.engine.compat import torch_modules, torch_sharded
from nbdist.engine.layout import cost, cuts, ddp, fsdp, mesh, random_numbers, tp, weights
from nbdist.engine.layout.blocks import find_blocks
from nbdist.engine.layout.explain import Explanation
from nbdist.engine.layout.mesh import MeshShape
from nbdist.engine.layout.policies import TensorParallel, tensor_parallel
from nbdist.errors import LayoutError

_KEY = "_nbdist_layout"  # where a model keeps its layout; in __dict__, so no part of its state

_live: "weakref.WeakSet[Layout]" = weakref.WeakSet()
_count = itertools.count()  # of layouts made on this rank
_meshes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]]" = (
    weakref.WeakKeyDictionary()
)


def _tell_nobody(**_facts: str) -> None:
    """Where facts go until the rank has a recorder."""


_tell: Callable[..., None] = _tell_nobody


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
        policy: How tp was asked to.
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
        policy: TensorParallel | None = None,
        token_bytes: float | None = None,
    ) -> None:
        self.model = model
        self.shape = shape
        self.mesh = device_mesh
        self.blocks = blocks
        self.size = size
        self.local = local or size
        self.backend = backend
        self.plan = plan
        self.policy = policy or TensorParallel()
        self._token_bytes = token_bytes
        self._number = next(_count)
        _live.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be known as a living layout on a rank that got it from another one, too."""
        self.__dict__.update(state)
        _live.add(self)

    @property
    def can_follow(self) -> bool:
        """Whether the model can go on with another number of ranks: each holds the whole of it."""
        return set(self.shape.axes) == {"dp"}

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
        """The canonical text: "ddp", "zero3", "dp=2 fsdp=4"."""
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

    def explain(self) -> "Explanation":
        """Return what the layout does to the model and what it costs a rank and step."""
        return Explanation(
            self.name,
            self.shape,
            self.blocks,
            self.size,
            self.local,
            self.backend,
            self.plan,
            self._token_bytes,
        )

    def step(self, x: Any, y: Any, loss_fn: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
        """Run forward and backward on this rank's share of a batch; the optimizer is yours.

        Shares may differ in size: gradients are weighted by it, so that every sample counts once,
        where a plain loop averages ranks. Collective, as every backward.

        Args:
            x: What the model is called with; its length is the number of samples.
            y: The targets.
            loss_fn: Makes the mean loss of `(model(x), y)`.

        Returns:
            The loss of this share, detached, a plain tensor.
        """
        with loss_parallel() if self.policy.loss else nullcontext():
            loss = loss_fn(self.model(x), y)
            loss.backward(torch.full_like(loss, self._weight(len(x))))
        seen = loss.detach()
        whole: torch.Tensor = seen.full_tensor() if isinstance(seen, DTensor) else seen
        return whole

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

        Raises:
            LayoutError: `parts` is less than 1.
        """
        if parts < 1:
            raise LayoutError(f"accumulate({parts}) has no part.", do="use 1 or more")
        return self._accumulate(parts)

    def _accumulate(self, parts: int) -> Iterator[int]:
        switch = getattr(self.model, "set_requires_gradient_sync", lambda _is_on: None)
        try:
            for part in range(parts):
                switch(part == parts - 1)
                yield part
        finally:
            switch(True)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their norm, over all of the model, is at most `max_norm`.

        Returns:
            The norm before, a plain tensor, the same on every rank. Collective where the layout
            has shards.
        """
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        whole: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return whole

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


def parallelize(model: nn.Module, layout: str, *policies: object) -> Layout:
    """Spread `model` over all ranks, in place, and return how.

    Every rank calls it with the same model and layout; weights and buffers become rank 0's. The
    optimizer comes after it. The same call again returns the same `Layout`.

    Args:
        model: A plain module, on the rank's device or to be moved there.
        layout: `"ddp"`, `"zero2"`, `"zero3"`, or a mesh string such as `"dp=2 fsdp=-1"` or
            `"fsdp=2 tp=2"`.
        policies: `nbdist.TensorParallel(...)` says how tp cuts, where it should not decide.

    Raises:
        LayoutError: The text, the ranks and the model do not fit, or the model is spread already.
    """
    if not isinstance(model, nn.Module):
        raise LayoutError(
            f"parallelize got a {type(model).__name__} where a model should be.",
            do='nbdist.parallelize(model, "ddp") with a torch.nn.Module',
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise LayoutError(
            "There is no process group here, so there are no ranks to spread a model over.",
            why="parallelize runs on the ranks",
            do="call it in a %%distributed cell",
        )
    shape = mesh.parse(layout, dist.get_world_size())
    policy = tensor_parallel(policies, shape.tp > 1)
    known = layout_of(model)
    if known is not None and known.shape == shape and str(known.policy) == str(policy):
        return known
    _refuse_later(shape)
    _refuse_spread(model, known, shape)
    check = fsdp.check if shape.fsdp > 1 else ddp.check
    check(model)
    if shape.tp > 1 and shape.fsdp == 1:
        fsdp.refuse_old_optimizers(model, "tp")
    result = _spread(model, shape, policy)
    model.__dict__[_KEY] = result
    _tell(**facts_of(result))
    return result


def facts_of(known: Layout) -> dict[str, str]:
    """Return what a run tells of its layout."""
    return {
        "layout": known.name,
        "model": torch_sharded.plain_name(known.model),
        "parameters": str(known.size.parameters),
        "layout_explained": repr(known.explain()),
    }


def live_layouts() -> list[Layout]:
    """Return the layouts whose models are alive."""
    return list(_live)


def hand_over() -> dict[Any, DeviceMesh]:
    """Return the meshes that layouts share: a newcomer makes no new groups where others do not."""
    return dict(_meshes.get(_world(), {}))


def take_over(meshes: dict[Any, DeviceMesh]) -> None:
    """Share, on a newcomer, the meshes that `hand_over` returned."""
    whole = {key: made for key, made in meshes.items() if isinstance(made, DeviceMesh)}
    _meshes.setdefault(_world(), {}).update(whole)


def layout_of(model: nn.Module) -> Layout | None:
    """Return the layout that `parallelize` gave to a model, if it did."""
    known: Layout | None = model.__dict__.get(_KEY)
    return known


def tell_facts_to(tell: Callable[..., None]) -> None:
    """Have the facts of a run told to `tell`, as texts by keyword: layout, model, parameters.

    The rank gives its recorder's `fact` here when it boots.
    """
    global _tell
    _tell = tell


def _spread(model: nn.Module, shape: MeshShape, policy: TensorParallel) -> Layout:
    """Change the model: equal weights first, then one step an axis in their fixed order."""
    device_type, backend = _device_type(model)
    asked = shape.name + (f" {policy}" if shape.tp > 1 else "")
    weights.check_same_model(model, asked, device_type)
    model.to(device_type)  # "cuda" is this rank's current device
    weights.broadcast(model)
    device_mesh = _device_mesh(device_type, shape)
    shares_batches = shape.dp * shape.fsdp > 1
    blocks = find_blocks(model) if shape.fsdp > 1 or shape.tp > 1 else {}
    size = _size(model, blocks)
    plan, token_bytes = None, None
    if shape.tp > 1:
        plan = tp.find_plan(model, policy, device_mesh["tp"], blocks)
        if cuts.is_known(plan):
            summed, gathered = cuts.token_widths(plan, model)
            token_bytes = cost.token_bytes(summed, [] if policy.loss else gathered, shape.tp)
        tp.apply(model, plan, policy, device_mesh["tp"], blocks)
        random_numbers.align(device_mesh["tp"], shape.data_part(dist.get_rank())[0])
    local = _size(model, blocks)
    if shape.fsdp > 1:
        inner = device_mesh["dp", "fsdp"] if shape.dp > 1 else device_mesh["fsdp"]
        reshard = shape.reshard_after_forward
        fsdp.apply(model, blocks.values(), inner, reshard_after_forward=reshard)
    elif shape.tp == 1:
        ddp.apply(model, device_mesh, device_type)
    elif shares_batches:
        for unit in (*blocks.values(), model):
            torch_sharded.replicate_sharded(unit, device_mesh["dp"])
    weights.BufferSync(model)
    return Layout(
        model,
        shape,
        device_mesh,
        tuple(blocks) if shape.fsdp > 1 else (),
        size,
        backend,
        local=local,
        plan=plan,
        policy=policy,
        token_bytes=token_bytes,
    )


def _size(model: nn.Module, blocks: dict[str, nn.Module]) -> cost.ModelSize:
    """Return what of a model lies on this rank."""
    return cost.ModelSize(
        parameter_bytes=_bytes(model.parameters()),
        gradient_bytes=_bytes(p for p in model.parameters() if p.requires_grad),
        block_bytes=sum(_bytes(block.parameters()) for block in blocks.values()),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def _data_shard() -> Shard | None:
    """Return which part of every batch is this rank's, as the newest living layout says."""
    newest = max(_live, key=lambda layout: layout._number, default=None)
    if newest is None or newest.shape.world_size != dist.get_world_size():
        return None  # the group has another size since: whoever scaled it tells what follows
    return Shard(*newest.shape.data_part(dist.get_rank()))


data.shard_as(_data_shard)


def _refuse_later(shape: MeshShape) -> None:
    """Refuse what the interface names and this version does not do yet: the one place."""
    for axis in mesh.LATER_AXES:
        if shape.sizes[axis] > 1:
            raise LayoutError(
                f"Axis {axis} comes with a later version of nbdist.",
                why="this version spreads models over dp, fsdp and tp",
                do='"zero3" cuts parameters, gradients and optimizer states over all ranks',
            )


def _refuse_spread(model: nn.Module, known: Layout | None, shape: MeshShape) -> None:
    """Refuse a model that is spread already, by us or by torch."""
    if known is not None:
        other = "other policies" if known.shape == shape else f'"{shape.name}"'
        raise LayoutError(
            f'This model has the layout "{known.name}" and cannot get {other} as well.',
            why="a layout changes the model in place",
            do="build the model again, then parallelize the new one",
        )
    inner = next((name for name, m in model.named_modules() if _KEY in m.__dict__), None)
    if inner is not None:
        raise LayoutError(
            f"A part of this model, {inner}, has a layout of its own.",
            do="build the model again and parallelize it as a whole",
        )
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    if wrapped or fsdp.is_sharded(model) or torch_modules.reducer_of(model) is not None:
        by = "DistributedDataParallel" if wrapped else "torch's fully_shard or replicate"
        raise LayoutError(
            f"This model is spread already, by {by}.",
            why="nbdist shows and heals such a model as it is; a second layout would average twice",
            do="leave parallelize out, or build the model again without that wrapper",
        )
    if any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
        raise LayoutError(
            "The model is on the meta device and has no weights yet.",
            do="build it on the CPU; a factory built on meta comes with a later version",
        )


def _device_type(model: nn.Module) -> tuple[str, str]:
    """Return where the model shall be and what carries its collectives.

    A model on a GPU stays there. One on the CPU moves to the GPU where the group has nccl, as
    nbdist starts it with one GPU a rank.
    """
    # "cpu:gloo,cuda:nccl", or the name of one backend for everything.
    config = str(dist.get_backend_config())
    on_gpu = any(p.is_cuda for p in model.parameters())
    has_nccl = "nccl" in config and torch.cuda.is_available()
    if on_gpu or has_nccl:
        return "cuda", "nccl" if has_nccl else "gloo"
    return "cpu", "gloo"


def _device_mesh(device_type: str, shape: MeshShape) -> DeviceMesh:
    """Return the mesh, one a shape and process group: each new one would make new groups."""
    made = _meshes.setdefault(_world(), {})
    key = (device_type, tuple(shape.axes.items()))
    if key not in made:
        made[key] = init_device_mesh(
            device_type, tuple(shape.axes.values()), mesh_dim_names=tuple(shape.axes)
        )
    return made[key]


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return sum(part.numel() * part.element_size() for part in parts)
