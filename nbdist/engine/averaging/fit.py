"""Refuse models that average their gradients already, and find the modules of an optimizer.

Main thread.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbdist.engine.compat import heap, torch_modules
from nbdist.engine.layout.layout import layout_of
from nbdist.engine.steps.optimizer_wrapper import Wrapper
from nbdist.shared.errors import LayoutError

# Batch norm's and instance norm's: the buffers that depend on the data a rank has seen.
_STATISTICS = ("running_mean", "running_var")


def check(optim: Any, name: str) -> None:
    """Refuse an optimizer that cannot be wrapped, before anything is sent.

    Raises:
        LayoutError: It is not one, is wrapped already, or its model is spread over ranks.
    """
    example = f"nbdist.{name}(torch.optim.SGD(model.parameters(), lr=0.1), ...)"
    if not isinstance(optim, Optimizer):
        raise LayoutError(f"{name} wraps an optimizer, not a {type(optim).__name__}.", do=example)
    if isinstance(optim, Wrapper):
        raise LayoutError(
            f"This optimizer is wrapped already, by {type(optim).__name__}.",
            why="two wrappers would average the same parameters twice",
            do=f"wrap the one inside: nbdist.{name}(opt.optim, ...)",
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise LayoutError(
            f"There is no process group here, so {name} has no ranks to average with.",
            do="call it in a %%distributed cell",
        )
    refuse_spread(optim, name)


def refuse_spread(optim: Optimizer, name: str) -> None:
    """Refuse an optimizer whose model exchanges gradients at each step, by a layout or by torch.

    Raises:
        LayoutError: It exchanges them.
    """
    by = _spread_by(optim)
    if by is not None:
        raise LayoutError(
            f"{name} needs a plain model, and this one is spread over the ranks by {by}.",
            why="ranks exchange gradients at each step there, which is what "
            f"{name} is to save; nothing would be saved, and averages would be taken twice",
            do="build the model again and leave parallelize or the wrapper out, or leave "
            f"{name} out",
        )


def _spread_by(optim: Optimizer) -> str | None:
    if hasattr(optim, "consolidate_state_dict"):
        return "ZeroRedundancyOptimizer"
    holders = _holders(optim)
    known = next((found for m in holders if (found := layout_of(m)) is not None), None)
    if known is not None:
        return f'the layout "{known.name}"'
    if any(hasattr(p, "device_mesh") for group in optim.param_groups for p in group["params"]):
        return "shards (fully_shard or tensor parallel)"
    for module in holders:
        if isinstance(module, FullyShardedDataParallel):
            return "FullyShardedDataParallel"
        is_ddp = isinstance(module, DistributedDataParallel)
        if is_ddp or torch_modules.reducer_of(module) is not None:
            return "DistributedDataParallel"
    return None


def modules_of(optim: Optimizer) -> list[nn.Module]:
    """Return the outermost modules that hold the optimizer's parameters, the largest first."""
    holders = _holders(optim)
    inner = {id(child) for module in holders for child in module._modules.values()}
    outermost = [module for module in holders if id(module) not in inner]
    # In an order that all ranks share, unlike the collector's.
    return sorted(outermost, key=lambda m: (-sum(1 for _ in m.modules()), type(m).__name__))


def _holders(optim: Optimizer) -> list[nn.Module]:
    """Return the modules that hold the optimizer's parameters, and those around them.

    Looks at all objects of the process (some 0.1 s), for an optimizer knows no modules.
    """
    own = {id(p) for group in optim.param_groups for p in group["params"]}
    known = [m for m in heap.living(nn.Module) if _is_built(m)]
    parents: dict[int, list[nn.Module]] = {}
    for module in known:
        for child in module._modules.values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    seen: dict[int, nn.Module] = {}
    found = [m for m in known if any(id(p) in own for p in m._parameters.values())]
    while found:
        module = found.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            found += parents.get(id(module), [])
    return list(seen.values())


def _is_built(module: Any) -> bool:
    return "_modules" in module.__dict__ and "_parameters" in module.__dict__


def whole_of(parameters: list[torch.Tensor], modules: list[nn.Module]) -> list[torch.Tensor]:
    """Return the tensors that must begin equal: parameters, frozen ones included, and buffers."""
    others = [p for module in modules for p in module.parameters()]
    tensors = [*parameters, *others, *buffers_of(modules).values()]
    return list({id(t): t for t in tensors}.values())


def buffers_of(modules: list[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the modules' buffers by name, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for module in modules:
        for name, buffer in module.named_buffers():
            found.setdefault(id(buffer), (name, buffer))
    return dict(found.values())


def statistics_of(modules: list[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the running statistics of the modules' norms, by name; their counters stay local."""
    buffers = buffers_of(modules)
    return {n: b for n, b in buffers.items() if n.rpartition(".")[2] in _STATISTICS}
