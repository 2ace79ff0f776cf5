"""Report batches that were shared out for another model than the one that was trained on them.

The newest layout says which ranks get the same samples, as those of one pipeline do. Main thread.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.data.order.shards import by_rank, data_shard
from nbdist.engine.data.position import position
from nbdist.engine.layout import layout
from nbdist.engine.steps import step_state


class SharedBatches(Component):
    """Compares what a cell has trained with the model whose layout its loader has followed."""

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Return what is said of a cell that has not trained the newest layout's model."""
        followed, stepped = layout.here.newest(), step_state.here().stepped()
        if followed is None or not stepped or position.here.newest() is None:
            return ()
        if not dist.is_initialized() or data_shard() == by_rank():
            return ()
        own = {id(parameter) for parameter in followed.model.parameters()}
        if any(id(parameter) in own for one in stepped for parameter in _trained_by(one)):
            return ()
        said = (
            "nbdist.loader has given several ranks the same samples, as the newest layout "
            f"({followed.name} of {type(followed.model).__name__}) asks, and the cell has trained "
            "another model: parallelize that one, which makes its layout the newest, or train it "
            "without the other (%dist restart)."
        )
        return (said,)


def _trained_by(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
