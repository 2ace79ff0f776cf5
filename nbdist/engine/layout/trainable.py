"""Training of a spread model: a step, the parts of a batch, gradients, the optimizer.

Main thread, on all ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._pytree import tree_map_only

from nbdist.engine.compat import torch_modules, torch_wrappers
from nbdist.engine.data.position import resume
from nbdist.engine.layout import weight as weights
from nbdist.engine.layout.axes import unused, zero1
from nbdist.engine.layout.axes.cp.context import Context
from nbdist.engine.layout.axes.cp.exchange import own_part
from nbdist.engine.layout.axes.pp.pipeline_step import PipelineStep
from nbdist.engine.layout.plan.inputs import Inputs, as_inputs, as_tree, samples_in
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.policies import Policies
from nbdist.engine.layout.policies.precision import Scaler
from nbdist.engine.layout.weight import Weight
from nbdist.engine.steps import guard
from nbdist.engine.steps.forwards import MadeLoss
from nbdist.shared.errors import LayoutError

LossFunction = Callable[[Any, Any], torch.Tensor]


class Trainable:
    """The training methods of a layout; see `Layout` for the attributes."""

    def __init__(
        self,
        model: nn.Module,
        shape: MeshShape,
        device_mesh: DeviceMesh,
        policies: Policies,
        pipeline: PipelineStep | None,
        context: Context | None,
    ) -> None:
        self.model = model
        self.shape = shape
        self.mesh = device_mesh
        self.policies = policies
        self.pipeline = pipeline
        self.context = context
        self.last_step: tuple[Any, Any, LossFunction] | None = None
        self._averages = True
        self.scaler = Scaler(
            device_mesh.device_type,
            enabled=self.policies.precision.needs_scaler,
            agrees=list(shape.axes) != ["dp"],  # replicas have the same gradients, once averaged
        )

    def step(
        self,
        x: Any,
        y: Any,
        loss_fn: LossFunction,
        *,
        weight: Weight | None = None,
        skip_nonfinite: bool = False,
    ) -> torch.Tensor | None:
        """Run forward and backward on this rank's share of a batch; the optimizer is yours.

        Shares may differ in size: gradients are weighted by it, so that every sample counts once,
        where a plain loop averages ranks. Collective, as every backward. Inside of
        `torch.no_grad()` it makes the loss alone; with pp still by all ranks. With
        `Precision("fp16")` the loss is scaled, and `layout.scaler` steps the optimizer.

        Args:
            x: The model's inputs: a dict is keywords, `model(**x)`, a tuple or list is
                arguments, `model(*x)`, all else the one argument; `(x,)` gives a tuple or dict as
                it is. The first tensor's length is the number of samples.
            y: The targets, in any form that `loss_fn` takes.
            loss_fn: Makes the mean loss of `(model(x), y)`, over samples: a mean over what a mask
                keeps counts each share, and with pp each micro-batch, by its samples, unless
                `weight` says by what. `verify` says where that makes a difference.
            weight: Over how much this share's mean goes, in place of its samples: a number, or a
                tensor that is summed, such as `y != -100`, so that each kept token counts once.
                With pp and `ContextParallel(loss=True)` a tensor of the batch's length, and of its
                sequences'. A share of weight 0 has the loss 0. Of one step: the parts of
                `accumulate` count alike.
            skip_nonfinite: Leave the optimizer's next step out, on all ranks, where a gradient of
                any is nan or infinite: weights and the optimizer's state stay as they are.

        Returns:
            The loss of this share, detached, a plain tensor. With `ContextParallel(loss=True)` it
            is the mean over parts of sequences. With pp it is the mean over micro-batches, for each
            of which `loss_fn` makes a mean, and None on ranks without the last stage.

        Raises:
            LayoutError: Shares must be weighted, and the number of samples is unknown; a weight is
                none; the loss has no gradient; or, under ddp, a parameter got none.
        """
        resume.weigh_newest()
        self.last_step = (x, y, loss_fn)
        if skip_nonfinite and torch.is_grad_enabled():
            whole = self.model if self.pipeline is None else None
            guard.here.arm(self.model.parameters(), whole)
        inputs, evidence = as_inputs(x), guard.here.evidence
        of_it, averages = (self, y, loss_fn, weight, inputs.samples), self._averages
        evidence.makes(self.model, lambda: MadeLoss.of(*of_it, averages=averages))
        try:
            loss = self._step(inputs, y, loss_fn, weight)
        finally:
            evidence.makes(self.model, None)
        evidence.made_loss(self.model, loss)
        return loss

    def _step(
        self, inputs: Inputs, y: Any, loss_fn: LossFunction, weight: Weight | None = None
    ) -> torch.Tensor | None:
        trains = torch.is_grad_enabled()
        given = None if weight is None else self.own(weight)
        mine = None if given is None else weights.total_of(given)
        if self.pipeline is not None:
            share: Weight = self._share(inputs.samples, y, mine) if trains else 1.0
            if trains and self.scaler.is_enabled():
                share = self.scaler.scale(torch.tensor(share, device=self.mesh.device_type))
            of_part = self._loss_of_part(loss_fn)
            if given is not None:
                y, of_part = weights.weigh_parts(y, of_part, given, inputs.samples)
            loss = self.pipeline.step(inputs, y, of_part, share)
            return None if loss is None else self._of_all_parts(loss, mine)
        with self._loss_parallel():
            loss = weights.loss_of(inputs.run(self.model), self.own(y), loss_fn, mine)
            if trains:
                unused.refuse_untrained(self.model, loss)
                scaled = self.scaler.scale(loss)
                scaled.backward(torch.full_like(scaled, self._share(inputs.samples, y, mine)))
                unused.refuse(self.model)
        return self._seen(loss, mine)

    def loss_again(
        self, made: MadeLoss, output: Any, see: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Make a loss of a step again, and run its backward; before that, `see` gets the loss.

        Returns it as `step` does. Collective, as `step`; not with pp.
        """
        given = None if made.weight is None else self.own(made.weight)
        mine = None if given is None else weights.total_of(given)
        with self._loss_parallel():
            loss = weights.loss_of(output, self.own(made.y), made.loss_fn, mine)
            scaled = self.scaler.scale(loss)
            see(scaled)
            scaled.backward(torch.full_like(scaled, self._share(made.samples, made.y, mine)))
        return self._seen(loss, mine)

    def _seen(self, loss: torch.Tensor, weight: float | None) -> torch.Tensor:
        """Return a loss as users see it."""
        seen = loss.detach()
        return self._of_all_parts(seen.full_tensor() if isinstance(seen, DTensor) else seen, weight)

    def _loss_parallel(self) -> AbstractContextManager[Any]:
        return loss_parallel() if self.policies.tensor.loss else nullcontext()

    def _loss_of_part(self, loss_fn: LossFunction) -> LossFunction:
        return lambda out, y: loss_fn(out, self.own(y))

    def _of_all_parts(self, loss: torch.Tensor, weight: float | None) -> torch.Tensor:
        """Return the mean over ranks that have the loss of their part of a sequence each."""
        if not self._has_own_loss:
            return loss
        group = self.mesh.get_group("cp")
        if weight is not None:
            return weights.mean_over(group, loss, weight)
        dist.all_reduce(loss, group=group)
        return loss / self.shape.cp

    def own(self, y: Any) -> Any:
        """Return this rank's part of targets, along dim 1, as the model's output is.

        That is all of `y`, but for `ContextParallel(loss=True)`. Of a tuple, list or dict it is
        that of each tensor with a dim 1. No collective.
        """
        if not self._has_own_loss:
            return y
        mesh = self.mesh["cp"]
        return tree_map_only(
            torch.Tensor, lambda t: own_part(t, 1, mesh) if t.dim() > 1 else t, as_tree(y)
        )

    @property
    def _has_own_loss(self) -> bool:
        """Whether ranks of cp have the loss of their part of a sequence each."""
        return self.context is not None and self.policies.context.loss

    def _share(self, samples: int | None, y: Any, weight: float | None) -> float:
        """Return the size of this rank's share, in units of the mean share."""
        is_one = self.shape.data_part(0)[1] == 1
        if weight is not None and (self._has_own_loss or not is_one):
            return weights.in_units_of_the_mean(weight, self.mesh.device_type)
        if is_one:
            return 1.0
        samples = samples or samples_in(y)
        total = torch.tensor([samples], device=self.mesh.device_type)
        dist.all_reduce(total)
        if not total:
            raise LayoutError(
                "layout.step found no tensor in x or y, so it cannot tell how many samples a rank "
                "has.",
                why="every sample counts once, so gradients are weighted by the size of the share",
                do="give x or y as a tensor, or as a tuple, list or dict of tensors",
            )
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
        try:
            for part in range(parts):
                self.average(part == parts - 1)
                yield part
        finally:
            self.average(True)

    def average(self, is_on: bool) -> None:
        """Have the next backwards average gradients over ranks, or add them up here."""
        self._averages = is_on
        if self.pipeline is not None:
            self.pipeline.share(is_on)
        elif (switch := getattr(self.model, "set_requires_gradient_sync", None)) is not None:
            switch(is_on)

    def optimizer(
        self, kind: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """Return the model's optimizer: the same line for every layout.

            opt = layout.optimizer(torch.optim.AdamW, lr=3e-4)

        With `"zero1"` it is torch's ZeroRedundancyOptimizer, whose states are cut over the ranks;
        else `kind` itself, on the model's parameters. Of a pipeline's stage in which `params` has
        nothing to train, it is one without parameters, so that all ranks run the same loop.

        Args:
            kind: A class of optimizers, such as `torch.optim.AdamW`.
            params: Parameters, or groups of them with options of their own; all by itself.
            options: The arguments of `kind`.

        Raises:
            LayoutError: The number of ranks has changed since the layout was made, and "zero1" does
                not follow.
        """
        if self.shape.shards_states and self.shape.world_size != dist.get_world_size():
            raise LayoutError(
                f'This "{self.shape.name}" was made for {self.shape.world_size} ranks, and now '
                f"there are {dist.get_world_size()}.",
                do=f'nbdist.parallelize a plain model with "{self.shape.name}" again, on all ranks',
            )
        chosen = list(self.model.parameters() if params is None else params)
        if self.shape.shards_states:
            if params is None:
                chosen = [p for p in chosen if p.requires_grad or not zero1.is_quantized(p)]
            return zero1.make(kind, chosen, self.mesh.get_group("dp"), **options)
        if self.pipeline is not None and not chosen:
            chosen = [{"params": []}]
        return kind(chosen, **options)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their norm, over all of the model, is at most `max_norm`.

        Gradients that are still multiplied by `scaler`'s scale count without it.

        Returns:
            The norm before, a plain tensor, the same on every rank. Collective where the layout
            has shards or stages.
        """
        has_scale = self.scaler.is_enabled() and not torch_modules.has_unscaled(self.scaler)
        scale = self.scaler.get_scale() if has_scale else 1.0
        if self.pipeline is not None:
            return self.pipeline.clip_grad_norm_(max_norm, scale)
        # Who clips scaled gradients without a thought of the scale is told so.
        with torch_wrappers.here.unseen() if has_scale else nullcontext():
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm * scale)
        whole: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return whole / scale
