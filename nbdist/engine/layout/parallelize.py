"""`nbdist.parallelize`: read the layout, check, spread the model in place, hand out a `Layout`.

    parse ─▶ MeshShape ─▶ check everything ─▶ DeviceMesh ─▶ equal weights ─▶ one step an axis

All that can be refused is refused before the model is touched.
"""

import os
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from nbdist.engine.compat import torch_modules
from nbdist.engine.component import Component
from nbdist.engine.layout import wrapped
from nbdist.engine.layout.axes import old_optimizers
from nbdist.engine.layout.axes.pp.stages import makes_halves
from nbdist.engine.layout.axes.registry import axes_of
from nbdist.engine.layout.layout import Layout, attach, layout_facts, layout_of
from nbdist.engine.layout.plan import mesh
from nbdist.engine.layout.plan.axis_facts import FACTS
from nbdist.engine.layout.plan.blocks import find_blocks
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies import (
    activation_checkpoint,
    compress,
    eight_bits,
    offload,
    precision,
    two_levels,
)
from nbdist.engine.layout.policies.policies import read
from nbdist.engine.layout.spread import spread
from nbdist.engine.layout.weights import factory
from nbdist.engine.layout.weights.factory import WeightSource
from nbdist.shared import side
from nbdist.shared.errors import LayoutError
from nbdist.shared.wire import CellStart


def parallelize(
    model: nn.Module | Callable[[], nn.Module], layout: str, *policies: object
) -> Layout:
    """Spread `model` over all ranks, in place, and return how.

    Every rank calls it with the same model and layout; weights and buffers become rank 0's. The
    optimizer comes after it. The same call again returns the same `Layout`.

    Args:
        model: A plain module, on the rank's device or to be moved there. Of `torch.compile(module)`
            the module inside is spread, and its wrapper still compiles it when called:
            `Layout.step` calls the module, which `module.compile()` compiles in place. Or a
            function that makes one, as `lambda: Model(config)`: the model is `layout.model` then,
            the cell can be run again with any layout, and with shards ranks never hold the whole.
        layout: `"ddp"`, `"zero1"`, `"zero2"`, `"zero3"`, `"hsdp"`, or a mesh string such as
            `"dp=2 fsdp=-1"` or `"fsdp=2 tp=2"`. With `"zero1"` the optimizer is made by
            `layout.optimizer`.
        policies: What the text leaves open: `nbdist.TensorParallel`, `ContextParallel` and
            `Pipeline` for axes, `Precision`, `ActivationCheckpoint`, `Offload`,
            `Compress`.

    Raises:
        LayoutError: The text, the ranks and the model do not fit, or the model is spread already.
        UsageError: This is the notebook.
    """
    if not (isinstance(model, nn.Module) or callable(model)):
        raise LayoutError(
            f"parallelize got a {type(model).__name__} where a model should be.",
            do='nbdist.parallelize(model, "ddp") with a torch.nn.Module, or lambda: Model(config)',
        )
    return with_weights(lambda: _built(model), layout, policies)


def _built(model: nn.Module | Callable[[], nn.Module]) -> tuple[nn.Module, WeightSource | None]:
    if isinstance(model, nn.Module):
        return model, None
    made, weights = factory.build(model)
    return made, factory.FromRank0(weights)


def with_weights(
    make: Callable[[], tuple[nn.Module, WeightSource | None]],
    layout: str,
    policies: tuple[object, ...],
) -> Layout:
    """Spread a model over all ranks, and return how; as `parallelize`.

    Args:
        make: Returns the model, and the source of its weights if it is on meta. Called once the
            layout is known to fit the ranks.
        layout: As `parallelize` takes it.
        policies: As `parallelize` takes them.

    Raises:
        LayoutError: As `parallelize`.
        UsageError: This is the notebook.
    """
    side.require_rank("nbdist.parallelize")
    if not (dist.is_available() and dist.is_initialized()):
        raise LayoutError(
            "There is no process group here, so there are no ranks to spread a model over.",
            why="parallelize runs on the ranks",
            do="call it in a %%distributed cell",
        )
    world_size = dist.get_world_size()
    ranks_on_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # as torchrun sets it
    ranks_on_host = min(ranks_on_host, world_size)
    shape = mesh.parse(layout, world_size, ranks_on_host)
    here.asked.append(layout)
    asked = two_levels.with_groups(read(policies, shape), world_size, ranks_on_host)
    given, source = make()
    model = torch_modules.uncompiled(given)
    known = layout_of(model)
    if known is not None and known.shape == shape and str(known.policies) == str(asked):
        return known
    axes, is_wrapped = axes_of(shape), given is not model
    if is_wrapped or torch_modules.is_compiled(model):
        for axis in axes:
            axis.refuse_compiled(shape, asked, is_wrapped=is_wrapped)
    _refuse_spread(model, known, shape)
    if source is None:
        _refuse_meta(model)
    for axis in reversed(axes):
        axis.check(model)
    cutting = [axis.name for axis in reversed(axes) if FACTS[axis.name].cuts_model]
    if cutting:
        old_optimizers.refuse(model, cutting[0])
    precision.check(model, asked.precision)
    eight_bits.check(model, asked.precision, shape)
    if asked.compress is not None:
        compress.check(asked.compress, asked.precision, shape)
    if asked.checkpoint is not None:
        schedule = asked.pipeline.schedule
        halving = schedule if shape.pp > 1 and makes_halves(schedule) else None
        activation_checkpoint.check(asked.checkpoint, model, find_blocks(model), halving)
    if asked.offload is not None:
        blocks, has_factory = find_blocks(model), source is not None
        offload.check(
            asked.offload, asked.checkpoint, shape, blocks, layout=layout, has_factory=has_factory
        )
    with torch_modules.as_written():
        result = spread(model, shape, asked, source)
    attach(result)
    here.report(**layout_facts(result))
    return result


def _refuse_spread(model: nn.Module, known: Layout | None, shape: MeshShape) -> None:
    """Refuse a model that is spread already, by us or by torch."""
    if known is not None:
        other = "other policies" if known.shape == shape else f'"{shape.name}"'
        raise LayoutError(
            f'This model has the layout "{known.name}" and cannot get {other} as well.',
            why="a layout changes the model in place",
            do="build the model again, or give a function that does, which can be run again: "
            'parallelize(lambda: Model(config), "fsdp=-1")',
        )
    inner = next((name for name, part in model.named_modules() if layout_of(part)), None)
    if inner is not None:
        raise LayoutError(
            f"A part of this model, {inner}, has a layout of its own.",
            do="build the model again and parallelize it as a whole",
        )
    wrapped.refuse_wrapped(model)


def _refuse_meta(model: nn.Module) -> None:
    if any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
        raise LayoutError(
            "The model is on the meta device and has no weights yet.",
            why="what would initialise it is known to the code that builds it",
            do='give that code: layout = parallelize(lambda: Model(config), "fsdp=-1"), and take '
            "layout.model; no rank but 0 will hold the whole",
        )


def _report_nothing(**_facts: str) -> None:
    """Drop facts until the rank has a recorder."""


class AskedLayouts(Component):
    """The layouts that the newest cell has requested, as texts.

    Attributes:
        report: Gets facts of a run, as texts by keyword: layout, model, parameters. A rank sets
            its recorder's `fact` when it boots.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.report: Callable[..., None] = _report_nothing

    def cell_began(self, start: CellStart) -> None:
        """Begin with none."""
        self.asked.clear()

    def fitting(self, counts: list[int]) -> list[int]:
        """Return which of these numbers of ranks fit all of them."""
        return [n for n in counts if all(mesh.fits(text, n, n) for text in self.asked)]


here = AskedLayouts()
