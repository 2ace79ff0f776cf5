"""The `dp` axis: a replica of the model on every rank, gradients averaged by DDP's reducer.

torch's composable `replicate` puts the reducer behind hooks of the module itself: names of
parameters, `state_dict` keys and the object stay what they were, and communication hooks work.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout.axes import unused
from nbdist.errors import LayoutError


def check(model: nn.Module) -> None:
    """Refuse what DDP cannot do, before anything is changed.

    Raises:
        LayoutError: No parameter requires a gradient.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise LayoutError(
            "No parameter of the model requires a gradient.",
            why="there is nothing to average, so ddp has nothing to do",
            do="set requires_grad on what you train, then parallelize",
        )


def apply(model: nn.Module, mesh: DeviceMesh, *, one_bucket: bool = False) -> None:
    """Average the gradients of `model` over a mesh of one dim, from its next backward on.

    Collective: builds the reducer, which compares the parameters' shapes on all ranks.
    """
    torch_modules.replicate(model, mesh.get_group(), mesh.device_type, one_bucket=one_bucket)
    model.register_forward_pre_hook(unused.before_forward, prepend=True)
