"""The `dp` axis: a replica of the model on every rank, gradients averaged by DDP's reducer.

torch's composable `replicate` puts the reducer behind hooks of the module itself: names of
parameters, `state_dict` keys and the object stay what they were, and communication hooks work.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat import torch_modules, torch_reducers, torch_sharded
from nbdist.engine.layout.axes import uncalled, unused
from nbdist.engine.layout.axes.axis import Axis, Spreading
from nbdist.engine.layout.axes.dry_reducer import DryReducer
from nbdist.engine.layout.plan import device_mesh, numbers
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies import compress, precision
from nbdist.engine.layout.policies.efficiency import Compress
from nbdist.engine.layout.policies.two_levels import TwoLevels
from nbdist.shared.errors import LayoutError


class ReplicaAxis(Axis):
    """Replicas of the model: over `dp`, over `cp`, or on a single rank; none of fsdp's shards."""

    name = "dp"

    @classmethod
    def is_in(cls, shape: MeshShape) -> bool:
        """Return whether a layout has no shards."""
        return shape.fsdp == 1

    def check(self, model: nn.Module) -> None:
        """Refuse models that DDP cannot train.

        Raises:
            LayoutError: No parameter requires a gradient.
        """
        if not any(p.requires_grad for p in model.parameters()):
            raise LayoutError(
                "No parameter of the model requires a gradient.",
                why="there is nothing to average, so ddp has nothing to do",
                do="set requires_grad on what you train, then parallelize",
            )

    def share(self, work: Spreading) -> None:
        """Have gradients averaged by DDP's reducer, or by FSDP2 where tp has cut parameters."""
        model, shape, policies, mesh = work.model, work.shape, work.policies, work.mesh
        chosen = policies.precision
        if chosen.compute != "fp32":
            precision.Autocast(model, chosen, mesh.device_type)
        if shape.pp > 1:
            return  # a step averages its gradients once, behind the last micro-batch
        if not shape.is_cut:
            one_bucket = compress.needs_one_bucket(policies.compress, mesh.device_type)
            averaging = device_mesh.averaging(mesh, shape)
            reducer: compress.Reducer
            if numbers.are_here():
                reducer = apply(model, averaging, one_bucket=one_bucket)
            else:
                reducer = DryReducer(model, averaging.get_group(), one_bucket=one_bucket)
            if policies.compress is not None:
                compress.apply(reducer, policies.compress, _levels(policies.compress, mesh))
            elif chosen.reduce != "fp32":
                compress.round_to(reducer, chosen.reduce)
        elif shape.replicas > 1:
            averaging = device_mesh.averaging(mesh, shape)
            for unit in (*work.blocks.values(), model):
                torch_sharded.replicate_sharded(unit, averaging, precision.reduce_dtype(chosen))


def _levels(policy: Compress, mesh: DeviceMesh) -> TwoLevels | None:
    """Return the groups inside which gradients are averaged first. Collective."""
    if policy.between is None:
        return None
    assert policy.between != "hosts", "parallelize has counted the ranks of a host"
    return TwoLevels(device_mesh.two_levels(mesh.device_type, policy.between))


def apply(
    model: nn.Module, mesh: DeviceMesh, *, one_bucket: bool = False
) -> DistributedDataParallel:
    """Average the gradients of `model` over a mesh of one dim, from its next backward on.

    Collective: builds the reducer, which compares the parameters' shapes on all ranks, and
    returns it.
    """
    torch_modules.replicate(model, mesh.get_group(), mesh.device_type, one_bucket=one_bucket)
    reducer = torch_modules.reducer_of(model)
    assert reducer is not None, "it has just been made"
    torch_reducers.follow_trained(reducer)
    model.register_forward_pre_hook(unused.before_forward, prepend=True)
    uncalled.here.watch(model)
    return reducer
