"""Tell of a cell's run which layout it trains with: of the model whose weights its optimizer has.

A layout that an earlier cell made says nothing of a plain module that this one trains.
"""

from torch import nn
from torch.optim import Optimizer

from nbdist.engine.compat import torch_modules, torch_sharded
from nbdist.engine.layout import layout

FACTS = ("layout", "model", "parameters", "layout_explained")


def facts_of(optimizer: Optimizer) -> dict[str, str]:
    """Return what is told of the model that this optimizer changes; nothing for a plain module."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}

    def is_changed(model: nn.Module) -> bool:
        return any(id(parameter) in own for parameter in model.parameters())

    for known in layout.live_layouts():
        if is_changed(known.model):
            return layout.facts_of(known)
    for ddp in torch_modules.live_ddps():
        if is_changed(ddp):
            count = sum(parameter.numel() for parameter in ddp.parameters())
            name = torch_sharded.plain_name(ddp.module)
            return {"layout": "ddp", "model": name, "parameters": str(count)}
    return {}
