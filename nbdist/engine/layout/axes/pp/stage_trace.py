"""Trace one forward of a model by its blocks: the basis on which pp cuts it.

A *segment* is what runs from the entry of one block to the entry of the next. The first one begins
with the forward (embeddings), the last one ends with it (norm, head). What a block is called with
first is the *hidden state*: the one thing that goes from stage to stage.

Traced on fake tensors, by hooks and by every operation, so that a weight is known by where
it is used, however that is written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nbdist.engine.compat import torch_quantized
from nbdist.engine.layout.plan.examples import ask_for, of_example
from nbdist.engine.layout.plan.guesses import guesses
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.plan.trace import (
    first_line,
    numberless,
    refuse_numbers,
    untouched,
)
from nbdist.engine.layout.policies.precision import AS_BUILT, Imitation
from nbdist.shared.errors import LayoutError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> torch.Tensor:
        """Return a tensor like it, with its own memory: a forward may write to it."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class ForwardTrace:
    """A record of a forward.

    Attributes:
        blocks: Those called once, in the order of their calls.
        hidden: The first argument of each; None where that is no tensor of real numbers.
        uses: In which segments each parameter is used, by name; none where it is not.
        beside: In which segments a module outside of all blocks is called, for those whose outputs
            depend on weights. Others, of positions or masks, may run anywhere.
        outputs: The outputs of each call of a block, or of a module beside: specs for tensors.
        taken_again: Blocks whose hidden state the model uses once more, behind their call.
    """

    blocks: tuple[str, ...]
    hidden: tuple[TensorSpec | None, ...]
    uses: dict[str, frozenset[int]]
    beside: dict[str, frozenset[int]]
    outputs: dict[str, list[Any]]
    taken_again: frozenset[str]


def find(model: nn.Module, names: list[str], example: Any) -> tuple[Inputs, ForwardTrace]:
    """Return inputs with which the model runs, and the record of its forward.

    Args:
        model: Not changed.
        names: Candidates for blocks.
        example: From `Pipeline.example`; None guesses.

    Raises:
        LayoutError: The model does not run with the example, or with any that was tried.
    """
    given = [of_example(model, example)] if example is not None else list(guesses(model))
    first: Exception | None = None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for inputs in given:
        try:
            return inputs, trace(model, names, inputs, device)
        except Exception as error:
            first = first or error
    refuse_numbers(model, first)
    tried = "the example" if example is not None else "any input that was tried"
    raise LayoutError(
        f"{type(model).__name__} does not run with {tried}, so pp cannot see what its stages are.",
        why=f"{type(first).__name__}: {first_line(first)}"
        if first
        else "no layer shows which inputs it takes",
        do=ask_for("Pipeline"),
    ) from first


def trace(
    model: nn.Module,
    names: list[str],
    inputs: Inputs,
    device: torch.device,
    imitation: Imitation = AS_BUILT,
) -> ForwardTrace:
    """Run a forward on fake tensors and return what it did.

    Args:
        model: Not changed; its weights may be on meta.
        names: Candidates for blocks.
        inputs: The forward's inputs.
        device: Where the weights are meant to be.
        imitation: In what it computes.
    """
    units = [model, *map(model.get_submodule, names)]
    with (
        untouched(model),
        numberless(),
        FakeTensorMode(allow_non_fake_inputs=True) as m,
    ):
        plain = {name: _fake(t, m, device) for name, t in _tensors(model)}
        state = imitation.state(model, plain)
        used = {name: torch_quantized.plain(state[name]) for name, _ in model.named_parameters()}
        watch = _Watch({id(part): name for name, parts in used.items() for part in parts})
        computing = imitation.on(units, device.type)
        with _hooked(model, names, watch), computing, torch.no_grad(), watch:
            here = inputs.map(m.from_tensor)
            torch.func.functional_call(model, dict(state), here.args, here.keywords)
    return watch.found(model)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    if tensor.is_meta:
        return torch_quantized.empty_like(tensor.detach(), device)
    return mode.from_tensor(tensor.detach())


class _Watch(TorchDispatchMode):
    """Sees every operation of a forward: which parameters it uses, and what depends on them."""

    def __init__(self, parameters: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entered: list[str] = []  # blocks, in order
        self.fed: list[TensorSpec | None] = []
        self.depth = 0  # calls of modules beside, or of blocks, that run now
        self.calls: dict[str, list[int]] = {}  # of modules beside, whose outputs depend on weights
        self.outputs: dict[str, list[Any]] = {}
        self._parameters = parameters
        self._uses: dict[str, set[int]] = {name: set() for name in parameters.values()}
        # Held, for an id may not be given to another tensor meanwhile.
        self._weighted: dict[int, torch.Tensor] = {}
        self._left: dict[int, tuple[str, torch.Tensor]] = {}  # hidden states of blocks that ended
        self._again: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._again.update(self._left[key][0] for key in read if key in self._left)
        used = [self._parameters[key] for key in read if key in self._parameters]
        for name in used:
            self._uses[name].add(len(self.entered))
        if used or any(key in self._weighted for key in read):
            self._weighted.update({id(t): t for t in _tensors_in(result)})
        return result

    def depends_on_weights(self, output: Any) -> bool:
        """Return whether every tensor in it does."""
        tensors = _tensors_in(output)
        return bool(tensors) and all(id(t) in self._weighted for t in tensors)

    def leave(self, block: str, hidden: Any, output: Any) -> None:
        """Note that a block has ended, so that who uses its hidden state from here on is seen."""
        # One that a block has changed in place, and returns, is the next one's.
        if isinstance(hidden, torch.Tensor) and all(t is not hidden for t in _tensors_in(output)):
            self._left[id(hidden)] = (block, hidden)

    def found(self, model: nn.Module) -> ForwardTrace:
        """Return the record."""
        once = [i for i, name in enumerate(self.entered) if self.entered.count(name) == 1]

        def segments(entries: Any) -> frozenset[int]:
            # Before the first block is in its segment.
            return frozenset(max(sum(i < n for i in once) - 1, 0) for n in entries)

        return ForwardTrace(
            tuple(self.entered[i] for i in once),
            tuple(self.fed[i] for i in once),
            {name: segments(self._uses[name]) for name, _ in model.named_parameters()},
            {name: segments(entries) for name, entries in self.calls.items()},
            self.outputs,
            frozenset(self._again),
        )


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def specs(tree: Any) -> Any:
    """Return a tree with specs for its tensors."""
    return tree_map_only(torch.Tensor, lambda t: TensorSpec(t.shape, t.dtype), tree)


def first_of(args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return a call's first argument, however it is given."""
    return next(iter((*args, *keywords.values())), None)


@dataclass
class _Call:
    """Looks at the calls of one module."""

    name: str
    watch: _Watch
    is_block: bool
    tops: list[bool] = field(default_factory=list)  # of the calls that run: within no other's

    def before(self, _module: nn.Module, args: Any, keywords: Any) -> None:
        watch = self.watch
        self.tops.append(watch.depth == 0)
        watch.depth += 1
        if self.is_block:
            hidden = first_of(args, keywords)
            is_real = isinstance(hidden, torch.Tensor) and hidden.is_floating_point()
            watch.entered.append(self.name)
            watch.fed.append(TensorSpec(hidden.shape, hidden.dtype) if is_real else None)

    def after(self, _module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
        watch = self.watch
        watch.depth -= 1
        if not self.tops.pop():
            return
        if self.is_block:
            watch.leave(self.name, first_of(args, keywords), output)
            watch.outputs.setdefault(self.name, []).append(specs(output))
        elif self.name in watch.calls or watch.depends_on_weights(output):
            watch.calls.setdefault(self.name, []).append(len(watch.entered))
            watch.outputs.setdefault(self.name, []).append(specs(output))


@contextmanager
def _hooked(model: nn.Module, names: list[str], watch: _Watch) -> Iterator[None]:
    """Record the calls of blocks, and of modules beside them."""
    blocks = set(names)
    hooks = []
    for name, module in model.named_modules():
        holds_blocks = not name or any(block.startswith(f"{name}.") for block in blocks)
        if holds_blocks:
            continue
        call = _Call(name, watch, name in blocks)
        hooks.append(module.register_forward_pre_hook(call.before, with_kwargs=True))
        hooks.append(module.register_forward_hook(call.after, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
