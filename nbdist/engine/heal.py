"""Reset what a fault interrupted inside wrapped modules, so that the next step starts clean.

DDP's reducer and FSDP keep the state of the running iteration in themselves; an exception in the
middle of forward or backward leaves it half done, and the next iteration would fail or, worse, add
to it. The gradients of that iteration are lost, on every rank: they are set to None.

Modules are found without a search of the heap (0.1 s for a million objects, twice what a re-form
may take): DDP's constructor is watched from `join` on, and torch keeps a weak table of FSDP2's.
"""

from torch import nn

from nbdist.engine import torch_modules


def heal() -> list[str]:
    """Reset every live DDP, composable `replicate` and FSDP2 module. Main thread, after `reform`.

    No collective is run. FSDP1, pipelines and a user's own wrappers are left as they are.

    Returns:
        One line a module, such as `DDP(GPT): reducer reset, 28 gradients dropped`.
    """
    healed = []
    for ddp in torch_modules.live_ddps():
        torch_modules.reset_ddp(ddp)
        dropped = _drop_gradients(ddp)
        # Composable `replicate` hands DDP the parameters of the user's module in a list.
        inner = type(ddp.module).__name__
        name = "replicate" if isinstance(ddp.module, nn.ParameterList) else f"DDP({inner})"
        healed.append(f"{name}: reducer reset, {dropped}")
    for module, state in torch_modules.live_fsdp_roots():
        torch_modules.reset_fsdp(state)
        dropped = _drop_gradients(module)
        # torch gives the module a class of its own, such as FSDPGPT.
        name = type(module).__name__.removeprefix("FSDP")
        healed.append(f"fully_shard({name}): iteration reset, {dropped}")
    return healed


def _drop_gradients(module: nn.Module) -> str:
    """Set the module's gradients to None; returns how many there were, in words."""
    with_gradient = [p for p in module.parameters() if p.grad is not None]
    for parameter in with_gradient:
        parameter.grad = None
    return f"{len(with_gradient)} gradient{'' if len(with_gradient) == 1 else 's'} dropped"
