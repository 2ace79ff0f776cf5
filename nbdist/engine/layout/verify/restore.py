"""Leave a model and a rank as they were: changes of shadow steps are undone, even after an error.

Nothing here is a collective, so that it works where a peer has died. An interrupt waits until all
is back.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbdist.engine.compat import torch_hooks, torch_modules, torch_reducers, torch_sharded
from nbdist.engine.group import ddp_hook_state
from nbdist.engine.layout.plan.trace import untouched
from nbdist.engine.layout.weights import full_tensors
from nbdist.engine.steps import defer_interrupt
from nbdist.engine.training import training

_LONGEST_S = 10.0  # that an interrupt waits for the weights to be back


@contextmanager
def unharmed(model: nn.Module) -> Iterator[None]:
    """Put back parameters, buffers, gradients, modes, what modules and hooks hold, random numbers.

    Steps within it do not train: they are not counted or shown.
    """
    full_tensors.settle(model)
    kept = _Kept(model)
    with training.here.unseen():
        try:
            with untouched(model):
                try:
                    yield
                except BaseException:
                    _forget_iteration(model)
                    raise
                finally:
                    full_tensors.settle(model)
        finally:
            defer_interrupt.here.begin(_LONGEST_S)
            try:
                kept.put_back()
            finally:
                defer_interrupt.here.end()


class _Kept:
    """Copies of this rank's parts."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = [(_local(t), _local(t).clone()) for t in full_tensors.names(model).values()]
        self._gradients = [
            (p, p.grad, None if p.grad is None else _local(p.grad).clone())
            for p in model.parameters()
        ]
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        reducer = torch_modules.reducer_of(model)
        self._put_back_hooks = ddp_hook_state.kept(reducer) if reducer is not None else lambda: None
        for parameter in model.parameters():
            parameter.grad = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything as it was."""
        for live, copy in self._tensors:
            live.copy_(copy)
        for parameter, gradient, numbers in self._gradients:
            parameter.grad = gradient
            if gradient is not None and numbers is not None:
                _local(gradient).copy_(numbers)
        self._put_back_hooks()
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return torch_hooks.local_part(tensor.detach())


def _forget_iteration(model: nn.Module) -> None:
    """Let reducers and FSDP forget an iteration that did not end."""
    inside = set(model.modules())
    for module, state in torch_sharded.live_fsdp2_roots():
        if module in inside:
            torch_sharded.reset_fsdp2(state)
    reducer = torch_modules.reducer_of(model)
    if reducer is not None:
        torch_reducers.reset_ddp(reducer)


# ---- Dropout ------------------------------------------------------------------------------------


@contextmanager
def without_dropout(*models: nn.Module) -> Iterator[None]:
    """Have nothing dropped, by modules or by functions: ranks cannot draw one process' masks."""
    kept = [
        (module, name, getattr(module, name))
        for model in models
        for module, name in _dropouts(model)
    ]
    with ExitStack() as stack:
        for module, name, value in kept:
            setattr(module, name, 0.0)
            stack.callback(setattr, module, name, value)
        yield


def dropouts(model: nn.Module) -> dict[str, float]:
    """Return the probability of each module that drops, by name; 0 where it is not in training."""
    names = {module: name for name, module in model.named_modules()}
    return {
        names[module]: float(getattr(module, attribute)) if module.training else 0.0
        for module, attribute in _dropouts(model)
    }


def _dropouts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module, "p"
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            yield module, "dropout"


def _backward(
    loss: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run the code of `Tensor.backward`, which would call the mode again."""
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


class NoDropout(TorchFunctionMode):
    """Calls functions that drop as if in evaluation; those that models call by themselves."""

    _DROPPING = (
        F.dropout,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        torch.dropout,
    )

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.backward:
            # While a function runs, the mode is off; a checkpoint calls the model in a backward.
            with self:
                return _backward(*args, **kwargs)
        if function in self._DROPPING:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            # (query, key, value, mask, dropout_p, ...)
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return function(*args, **kwargs)
