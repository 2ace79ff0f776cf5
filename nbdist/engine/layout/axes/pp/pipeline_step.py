"""A whole step of a pipeline: the schedule, and the exchange with ranks of other pipelines.

draw      a stage's own random numbers
run       micro-batches through the stages; gradients are kept, none is sent
share     gradients averaged over dp and cp, reduced into shards over fsdp: once a step
add up    those of weights that several stages have
follow    running statistics become those of the first pipeline
agree     no rank steps its optimizer before all have made their backwards
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from nbdist.engine.compat import torch_sharded
from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.layout.axes.pp import average
from nbdist.engine.layout.axes.pp.schedule_runner import LossFunction, ScheduleRunner
from nbdist.engine.layout.axes.pp.shared_weights import SharedWeights, shared_by
from nbdist.engine.layout.plan import device_mesh, random_numbers
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies import precision
from nbdist.engine.layout.policies.policies import Policies
from nbdist.engine.layout.weights.buffers import BufferSync


class PipelineStep:
    """The steps of one layout with pp.

    Attributes:
        runner: Its pipeline.
        shared: Weights that several stages have.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: ScheduleRunner,
        shape: MeshShape,
        mesh: DeviceMesh,
        policies: Policies,
    ) -> None:
        self.runner = runner
        self._shares = True
        self._model = model
        self._shape = shape
        self._mesh = mesh
        self._policies = policies
        has_replicas = shape.fsdp == 1 and shape.replicas > 1
        self._replicas = device_mesh.averaging(mesh, shape).get_group() if has_replicas else None
        groups = [mesh.get_group(axis) for axis in shape.apart]
        self._buffers = BufferSync(model, groups)
        shared = shared_by(runner.plan.stages)
        self.shared = SharedWeights(model, shared, mesh.get_group("pp"))

    @property
    def elsewhere(self) -> list[str]:
        """The names of modules that do not run on this rank."""
        return self.runner.plan.elsewhere(self.runner.rank)

    def share(self, shares: bool) -> None:
        """Have the next steps share their gradients, or keep them for a later one to share."""
        self._shares = shares

    def step(
        self, inputs: Inputs, y: Any, loss_fn: LossFunction, weight: float | torch.Tensor
    ) -> torch.Tensor | None:
        """Run a batch; see `Layout.step`.

        Args:
            inputs: The model's inputs.
            y: The targets.
            loss_fn: Makes the mean loss of a micro-batch.
            weight: Of this rank's share; times the scale that its loss has.
        """
        trains = torch.is_grad_enabled()
        is_sharded = self._shape.fsdp > 1
        place = (self.runner.rank, self._shape.data_part(dist.get_rank())[0])
        if is_sharded and trains:
            torch_sharded.keep_gradients(self._model)
        with (
            loss_parallel() if self._policies.tensor.loss else nullcontext(),
            random_numbers.of_place(*place, device_type=self._mesh.device_type),
        ):
            loss = self.runner.run(inputs, y, loss_fn, weight)
        if not trains:
            if is_sharded:
                torch_sharded.reshard(self._model)
        elif self._shares:
            self._share()
        return loss

    def _share(self) -> None:
        if self._shape.fsdp > 1:
            torch_sharded.reduce_gradients(self._model)
        elif self._replicas is not None:
            dtype = precision.reduce_dtype(self._policies.precision)
            average.average(self._model.parameters(), self._replicas, dtype)
        self.shared.add_up()
        if self._model.training:
            self._buffers.sync()
        dist.all_reduce(torch.zeros(1, device=self._mesh.device_type))

    def clip_grad_norm_(self, max_norm: float, scale: float) -> torch.Tensor:
        """Scale gradients by their norm over all stages; returns it. Collective.

        Args:
            max_norm: Of gradients without their scale.
            scale: Their factor.
        """
        trained = [p for p in self._model.parameters() if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        elsewhere = self.shared.counted_elsewhere()
        own = [p.grad for p in trained if p.grad is not None and id(p) not in elsewhere]
        norm = nn.utils.get_total_norm(own)
        here = norm.full_tensor() if isinstance(norm, DTensor) else norm
        square = here.to(self._mesh.device_type) ** 2
        dist.all_reduce(square, group=self._mesh.get_group("pp"))
        whole = square.sqrt() / scale
        factor = (max_norm / (whole + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            local_part(gradient).mul_(factor.to(gradient.dtype))
        return whole
