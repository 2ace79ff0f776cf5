"""Trace one forward of a model by its blocks: the basis on which pp cuts it.

A *segment* is what runs from the entry of one block to the entry of the next. The first one begins
with the forward (embeddings), the last one ends with it (norm, head). What goes from a stage to the
next is what is `alive` where one segment ends.

Traced on fake tensors, by hooks and by every operation, so that a weight is known by where
it is used, however that is written.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nbdist.engine.compat import torch_quantized
from nbdist.engine.layout.axes.pp.alive import CannotCutError, Crossing, TensorSpec, Values
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
class Call:
    """A call of a module that is within no other's.

    Attributes:
        segment: In which it is.
        output: What it returns, with specs for tensors.
        is_staged: Whether the stage that has the segment makes it alone: of a block, or where all
            it returns depends on weights. Others, of positions or masks, run everywhere.
    """

    segment: int
    output: Any
    is_staged: bool


@dataclass(frozen=True, slots=True)
class ForwardTrace:
    """A record of a forward.

    Attributes:
        blocks: Those called once, in the order of their calls.
        uses: In which segments each parameter is used, by name; none where it is not.
        calls: Of blocks and of modules beside them, by name.
        crossings: What is sent before a block, by its number; of the cuts that were asked for.
        cannot: Why no stage may begin with a block, by its number.
    """

    blocks: tuple[str, ...]
    uses: dict[str, frozenset[int]]
    calls: dict[str, tuple[Call, ...]]
    crossings: dict[int, tuple[Crossing, ...]]
    cannot: dict[int, str]

    @property
    def beside(self) -> dict[str, frozenset[int]]:
        """In which segments each module runs that has calls of stages and is no block."""
        return {
            name: frozenset(call.segment for call in calls)
            for name, calls in self.calls.items()
            if name not in self.blocks and all(call.is_staged for call in calls)
        }


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
    firsts: Sequence[int] = (),
) -> ForwardTrace:
    """Run a forward on fake tensors and return what it did.

    Args:
        model: Not changed; its weights may be on meta.
        names: Candidates for blocks.
        inputs: The forward's inputs.
        device: Where the weights are meant to be.
        imitation: In what it computes.
        firsts: Numbers of blocks before which stages are cut; without, each is tried alone.
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
        names_of = {id(part): name for name, parts in used.items() for part in parts}
        parts = [part for parts in used.values() for part in parts]
        watch = _Watch(names_of, Values([*state.values(), *parts]))
        computing = imitation.on(units, device.type)
        with _hooked(model, names, watch), computing, torch.no_grad(), watch:
            here = inputs.map(m.from_tensor)
            output = torch.func.functional_call(model, dict(state), here.args, here.keywords)
        watch.values.end(output)
    return watch.found(model, names, firsts)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    if tensor.is_meta:
        return torch_quantized.empty_like(tensor.detach(), device)
    return mode.from_tensor(tensor.detach())


class _Watch(TorchDispatchMode):
    """Sees every operation of a forward: which parameters it uses, and what depends on them."""

    def __init__(self, parameters: dict[int, str], values: Values) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = values
        self.running: list[str] = []  # modules whose calls have begun, the outermost first
        self.calls: dict[str, list[Call]] = {}  # their segments counted as blocks entered
        self._parameters = parameters
        self._uses: dict[str, set[int]] = {name: set() for name in parameters.values()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = _tensors_in((args, kwargs))
        used = tuple(self._parameters[id(t)] for t in read if id(t) in self._parameters)
        for name in used:
            self._uses[name].add(len(self.values.entered))
        within = self.running[0] if self.running else ""
        self.values.operate(func, read, _tensors_in(result), used, within)
        return result

    def depends_on_weights(self, output: Any) -> bool:
        """Return whether every tensor in it does, or is drawn at random."""
        tensors = _tensors_in(output)
        return bool(tensors) and all(t in self.values for t in tensors)

    def found(self, model: nn.Module, names: list[str], firsts: Sequence[int]) -> ForwardTrace:
        """Return the record; see `trace`."""
        entered = self.values.entered
        once = [i for i, name in enumerate(entered) if entered.count(name) == 1]

        def segment(entries: int) -> int:
            # Before the first block is in its segment.
            return max(sum(i < entries for i in once) - 1, 0)

        crossings, cannot = self._crossings(once, firsts)
        crossings = {
            number: tuple(replace(one, since=segment(one.since)) for one in sent)
            for number, sent in crossings.items()
        }
        return ForwardTrace(
            tuple(entered[i] for i in once),
            {n: frozenset(map(segment, self._uses[n])) for n, _ in model.named_parameters()},
            {
                name: tuple(replace(call, segment=segment(call.segment)) for call in calls)
                for name, calls in self.calls.items()
            },
            crossings,
            cannot,
        )

    def _crossings(
        self, once: list[int], firsts: Sequence[int]
    ) -> tuple[dict[int, tuple[Crossing, ...]], dict[int, str]]:
        if firsts:
            numbers = {once[n]: n for n in firsts if 0 < n < len(once)}
            try:
                found = self.values.crossings(list(numbers))
            except CannotCutError as error:
                return {}, {numbers[error.entry]: str(error)}
            return {numbers[entry]: sent for entry, sent in found.items()}, {}
        cannot = {}
        for number, entry in list(enumerate(once))[1:]:
            try:
                self.values.crossings([entry])
            except CannotCutError as error:
                cannot[number] = str(error)
        return {}, cannot


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def specs(tree: Any) -> Any:
    """Return a tree with specs for its tensors."""
    return tree_map_only(torch.Tensor, lambda t: TensorSpec(t.shape, t.dtype), tree)


def arguments(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[int | str, Any]:
    """Return a call's arguments, by position or name."""
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(keywords)
    return given


@dataclass
class _Looked:
    """Looks at the calls of one module."""

    name: str
    watch: _Watch
    is_block: bool

    def before(self, _module: nn.Module, args: Any, keywords: Any) -> None:
        if self.is_block:
            self.watch.values.enter(self.name, arguments(args, keywords))
        self.watch.running.append(self.name)

    def after(self, _module: nn.Module, _args: Any, _keywords: Any, output: Any) -> None:
        watch = self.watch
        watch.running.pop()
        if watch.running:
            return
        calls = watch.calls.setdefault(self.name, [])
        watch.values.leave(self.name, len(calls), output)
        is_staged = self.is_block or watch.depends_on_weights(output)
        calls.append(Call(len(watch.values.entered), specs(output), is_staged))


@contextmanager
def _hooked(model: nn.Module, names: list[str], watch: _Watch) -> Iterator[None]:
    """Record the calls of blocks, and of modules beside them."""
    blocks = set(names)
    hooks = []
    for name, module in model.named_modules():
        holds_blocks = not name or any(block.startswith(f"{name}.") for block in blocks)
        if holds_blocks:
            continue
        call = _Looked(name, watch, name in blocks)
        hooks.append(module.register_forward_pre_hook(call.before, with_kwargs=True))
        hooks.append(module.register_forward_hook(call.after, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
