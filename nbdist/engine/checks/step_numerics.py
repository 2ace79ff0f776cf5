"""See what one step computes: inputs, outputs of modules, gradients, weights, as sketches.

torch's hooks on every module of the process are there while such a step runs; which modules are
the model's is known when its optimizer steps.

Threads: the one that trains.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from nbdist.engine.checks.sketch import sketch
from nbdist.engine.compat import torch_hooks
from nbdist.engine.compat.cuda_graphs import graphs
from nbdist.engine.steps.optimizer_options import options_of

Entry = list[Any]  # what; its name; shape and dtype, or ""; a sketch, a number or a text


class StepNumerics:
    """What is seen of the step that is being made.

    Attributes:
        failed: Why what modules return is no longer seen; None while it is.
    """

    def __init__(self) -> None:
        """See every module that is called, until `stop`.

        Not where code is compiled: it would be compiled anew as hooks come and go.
        """
        self.failed: Exception | None = None
        self._seen: list[tuple[nn.Module, str, str, torch.Tensor]] = []
        self._calls: Counter[int] = Counter()  # by `id`: `_seen` holds the modules
        self._around: list[nn.Module] = []  # whose forwards run
        self._random: list[Entry] = []
        self._sketched: list[tuple[Entry, torch.Tensor]] = []
        self._hooks: list[Any] = []
        if not torch_hooks.has_compiled():
            self._hooks = [
                torch_module.register_module_forward_pre_hook(self._enters),
                torch_module.register_module_forward_hook(self._leaves, with_kwargs=True),
            ]

    def stop(self) -> None:
        """See no more modules."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def optimizer_begins(
        self, optimizer: Optimizer, model: nn.Module | None, loss: float | None, *, is_first: bool
    ) -> None:
        """Take what the step has computed, before the optimizer changes the weights.

        Args:
            optimizer: Whose step it is.
            model: What it trains; None where that is not known.
            loss: Of this rank; None where it is not known.
            is_first: Whether weights that are not trained are taken, too.
        """
        self.stop()
        if self.failed is not None:
            raise self.failed
        trained = _named(optimizer, model)
        frozen = [] if model is None or not is_first else _frozen(model)
        self._take("weight", [*trained, *frozen])
        self._sketched += [(entry, _NOTHING) for entry in self._random]
        self._take_modules(model)
        self._take("buffer", [] if model is None else model.named_buffers())
        if loss is not None:
            self._sketched.append((["loss", "", "", loss], _NOTHING))
        grads = [(name, p.grad) for name, p in reversed(trained) if p.grad is not None]
        self._take("gradient", grads)
        for number, options in enumerate(options_of(optimizer)):
            told = {"optimizer": type(optimizer).__name__}
            told |= {name: repr(value) for name, value in options.items()}
            self._sketched.append((["options", f"group {number}", "", told], _NOTHING))

    def optimizer_ends(self, optimizer: Optimizer, model: nn.Module | None) -> list[Entry]:
        """Return all that was seen, in the order of computation. Waits for the device."""
        self._take("new weight", _named(optimizer, model))
        sums = [tensor for _, tensor in self._sketched if tensor is not _NOTHING]
        told = iter(torch.stack([one.cpu() for one in sums]).tolist() if sums else [])
        return [
            entry if tensor is _NOTHING else [*entry, next(told)]
            for entry, tensor in self._sketched
        ]

    def _take(self, what: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._sketched.append(([what, name, _shape(tensor)], sketch(tensor)))

    def _take_modules(self, model: nn.Module | None) -> None:
        """Take what modules of the model have got and returned; others are the loop's own."""
        named = () if model is None else model.named_modules()
        names = {id(module): name for name, module in named}
        for module, what, shape, sums in self._seen:
            if id(module) in names:
                which = what.partition(" ")
                name = (names[id(module)] or "the model") + which[1] + which[2]
                self._sketched.append(([which[0], name, shape], sums))
        self._seen = []

    def _enters(self, module: nn.Module, _args: Any) -> None:
        if _is_a_forward() and not self._around and not self._random:
            self._random = _random_states()
        self._around.append(module)

    def _leaves(self, module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
        while self._around and self._around.pop() is not module:
            pass  # of one that has raised
        if not _is_a_forward() or self.failed is not None:
            return
        try:
            if not self._around:  # a hook that comes before is given no keywords
                self._note(module, "input", (args, keywords))
            self._note(module, "output", output)
            self._calls[id(module)] += 1
        except (
            Exception
        ) as error:  # of a tensor of a kind of its own; the program's forward goes on
            self.failed = error

    def _note(self, module: nn.Module, what: str, tree: Any) -> None:
        call = self._calls[id(module)]
        which = f" (call {call + 1})" if call else ""
        found = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        for number, tensor in enumerate(found):
            at = f" [{number}]" if len(found) > 1 else ""
            self._seen.append((module, what + which + at, _shape(tensor), sketch(tensor)))


_NOTHING = torch.empty(0)


def _is_a_forward() -> bool:
    """Return whether modules are called to train, and not again within a backward."""
    return (
        torch.is_grad_enabled()
        and not torch_hooks.is_in_backward()
        and not torch.compiler.is_compiling()
        and not graphs.is_capturing
    )


def _named(optimizer: Optimizer, model: nn.Module | None) -> list[tuple[str, torch.Tensor]]:
    """Return what an optimizer changes, in the order of the model, or by number."""
    own: Mapping[int, str] = {}
    if model is not None:
        own = {id(p): name for name, p in model.named_parameters()}
    order = {number: at for at, number in enumerate(own)}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = [(own.get(id(p), f"parameter {at}"), p) for at, p in enumerate(parameters)]
    return sorted(found, key=lambda one: order.get(id(one[1]), len(order)))


def _frozen(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if not p.requires_grad]


def _shape(tensor: torch.Tensor) -> str:
    local = torch_hooks.local_part(tensor.detach())
    return f"{str(local.dtype).removeprefix('torch.')} {tuple(local.shape)}"


def _random_states() -> list[Entry]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return [
        ["random", kind, "", hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()]
        for kind, state in states.items()
    ]
