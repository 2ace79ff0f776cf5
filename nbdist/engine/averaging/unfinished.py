"""Tell at a cell's end which optimizers leave ranks apart that train one model.

In a sentence, and not by ending the round: that is a collective, and a rank whose cell has failed
would never come. Main thread.
"""

import torch.distributed as dist
from torch.optim import Optimizer

from nbdist.engine.averaging.async_sgd import AsyncSGD
from nbdist.engine.averaging.local_sgd import InRounds
from nbdist.engine.compat import torch_live


def notices() -> tuple[str, ...]:
    """Return a sentence for each optimizer with which the cell that runs leaves ranks apart."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ()
    wrappers = (o for o in torch_live.live(Optimizer) if isinstance(o, AsyncSGD | InRounds))
    return tuple(said for wrapper in wrappers if (said := wrapper.left_open()))
