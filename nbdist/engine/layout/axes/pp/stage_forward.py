"""Run one stage's part of a model's own forward.

Every stage calls the whole forward with the same inputs, so that values that a model computes from
them itself (positions, masks, rotary tables) exist on every stage. Modules of other stages
return zeros of the right shapes. What was received takes the place of what they return, or of an
argument of the stage's first block, as `alive` has found. Where the next stage's first
block would be entered, what is alive there is the stage's output, and the forward ends.

`remove` takes all wrappers off again. They must
be the outermost, so they are installed once more when all axes are done: modules of another
stage are skipped with all their wrappers, and a checkpoint computes again without asking
which part runs.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_map_only, tree_unflatten

from nbdist.engine.compat import torch_transformer
from nbdist.engine.layout.axes.pp.alive import Crossing, Place, TensorSpec, leaves_of
from nbdist.engine.layout.axes.pp.stage_trace import ForwardTrace, arguments
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.shared.errors import LayoutError

# On the tensor whose place it took, by number of the block, for a checkpoint calls once more.
_RECEIVED = "_nbdist_received"


class _Reached(BaseException):
    """The next stage's first block: no error, and nothing that a model's code may catch."""

    def __init__(self, sent: tuple[Any, ...]) -> None:
        super().__init__()
        self.sent = sent


class _Active:
    """The part of a forward that runs."""

    def __init__(
        self,
        part: tuple[int, int],
        seen: ForwardTrace,
        received: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        self.start, self.end = part  # numbers of blocks: the first, and the one after the last
        self.is_within = False  # a module of this part
        self._seen = seen
        self._device = device
        self._calls: Counter[str] = Counter()
        given = zip(seen.crossings.get(self.start, ()), received, strict=True)
        self._arguments: list[tuple[Crossing, torch.Tensor]] = []
        self._received: dict[Place, torch.Tensor] = {}
        for crossing, tensor in given:
            if crossing.argument is not None:
                self._arguments.append((crossing, tensor))
            self._received.update(dict.fromkeys(crossing.places, tensor))
        wanted = seen.crossings.get(self.end, ())
        self._wanted = {place for crossing in wanted for place in crossing.places}
        self._found: dict[Place, Any] = {}
        self.places: dict[tuple[str, int], list[Place]] = {}
        for place in self._received.keys() | self._wanted:
            self.places.setdefault((place.module, place.call), []).append(place)

    def call(self, name: str) -> tuple[bool, Any]:
        """Note a call of a module; returns whether this part makes it, else what stands for it."""
        number = self._calls[name]
        self._calls[name] += 1
        call = self._seen.calls[name][number]
        if not call.is_staged or self.start <= call.segment < self.end:
            return True, None
        zeros = tree_map_only(TensorSpec, lambda spec: spec.zeros(self._device), call.output)
        return False, zeros

    def exchange(self, name: str, output: Any) -> Any:
        """Return what the last call of a module returns, with what was received in its place."""
        places = self.places.get((name, self._calls[name] - 1))
        if places is None:
            return None
        leaves, form = leaves_of(output)
        for place in places:
            leaves[place.leaf] = self._received.get(place, leaves[place.leaf])
            if place in self._wanted:
                self._found[place] = leaves[place.leaf]
        return tree_unflatten(leaves, form)

    def give(self, given: dict[int | str, Any]) -> None:
        """Have the first block's arguments, and who else has them, find what was received."""
        for crossing, tensor in self._arguments:
            assert crossing.argument is not None, "of arguments alone"
            stale = given[crossing.argument]
            if crossing.in_place:
                stale.copy_(tensor)
            else:
                known = getattr(stale, _RECEIVED, {})
                setattr(stale, _RECEIVED, {**known, self.start: tensor})

    def sent(self, given: dict[int | str, Any]) -> tuple[Any, ...]:
        """Return what is alive where the next stage's first block is called with these."""
        return tuple(
            self._found[crossing.places[-1]]
            if crossing.argument is None
            else given[crossing.argument]
            for crossing in self._seen.crossings[self.end]
        )


class _Apart(torch.autograd.Function):
    """Copies what was received, for a forward may write to it; all get gradients, if of zeros."""

    @staticmethod
    def forward(_ctx: FunctionCtx, *received: torch.Tensor) -> Any:
        return tuple(tensor.clone() for tensor in received)

    @staticmethod
    def backward(_ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        return tuple(gradient.contiguous() for gradient in gradients)  # they are sent


@dataclass
class StageForward:
    """The hooks that let a model run in parts. Main thread, and autograd's in checkpoints.

    Attributes:
        model: The model; its blocks may be on other ranks.
        trace: Of its forward. Shapes are passed with each call of `run`.
    """

    model: nn.Module
    trace: ForwardTrace
    _active: _Active | None = None
    _handles: list[Any] = field(default_factory=list)
    _exits: dict[str, Any] = field(default_factory=dict)  # handles, by name of the module
    _forwards: list["_Forward"] = field(default_factory=list)
    _always: Collection[str] = ()

    def install(self) -> None:
        """Install the hooks: before the existing ones, and around the present forwards."""
        for number, name in enumerate(self.trace.blocks):
            block = self.model.get_submodule(name)
            entry = _Entry(self, number)
            # First of all: a block's pre-hook must see the block's arguments.
            hook = block.register_forward_pre_hook(entry, with_kwargs=True, prepend=True)
            self._handles.append(hook)
        hook = self.model.register_forward_pre_hook(_Refusal(self), prepend=True)
        self._handles.append(hook)
        for name in self.trace.calls:
            module = self.model.get_submodule(name)
            self._exits[name] = module.register_forward_hook(_Exit(self, name))
            self._forwards.append(_Forward(self, name, module, name in self._always))
        self._forwards.append(_Whole(self, "", self.model, runs_always=True))

    def run_always(self, names: Collection[str]) -> None:
        """Let these modules beside the blocks run in every part, where their weights are here.

        Hooks that cut them expect their own output. To be said before `install`.
        """
        self._always = names

    def remove(self) -> None:
        """Remove everything; nothing was wrapped around it since."""
        for handle in (*self._handles, *self._exits.values()):
            handle.remove()
        for forward in reversed(self._forwards):
            forward.remove()
        self._handles.clear()
        self._exits.clear()
        self._forwards.clear()

    def run(
        self,
        start: int,
        end: int,
        inputs: Inputs,
        seen: ForwardTrace,
        received: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Run the blocks from `start` to before `end`, with the modules between and around them.

        Args:
            start: Number of the first block.
            end: Number of the block after the last one.
            inputs: The model's inputs.
            seen: A trace for inputs of these shapes, with what is sent at both ends.
            received: What is sent before `start`; nothing for the first part.

        Returns:
            A tuple of what is sent before block `end`; the model's output after the last one.
        """
        device = received[0].device if received else _device_of(inputs)
        if torch.is_grad_enabled() and received and not is_chain(seen.crossings[start]):
            received = _Apart.apply(*received)  # type: ignore[no-untyped-call]
        self._active = _Active((start, end), seen, received, device)
        for name, _ in self._active.places:
            # A hook of the user's that came later changes what this one takes or gives.
            hooks, handle = self._exits[name].hooks_dict_ref(), self._exits[name]
            hooks.move_to_end(handle.id)
        try:
            with torch_transformer.by_modules():
                return inputs.run(self.model)
        finally:
            self._active = None

    @property
    def active(self) -> _Active | None:
        """The part that runs now."""
        return self._active


def is_chain(crossings: Sequence[Crossing]) -> bool:
    """Return whether one tensor is sent, which one block alone is called with."""
    return len(crossings) == 1 and not crossings[0].places and not crossings[0].in_place


def _device_of(inputs: Inputs) -> torch.device:
    found: list[torch.device] = []
    inputs.map(lambda t: found.append(t.device) or t)  # type: ignore[func-returns-value]
    return found[0] if found else torch.device("cpu")


@dataclass
class _Entry:
    """A pre-hook of a block: the forward ends here, or continues from what was received."""

    forward: StageForward
    number: int

    def __call__(self, _block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        active, given = self.forward.active, arguments(args, keywords)
        if active is not None and self.number == active.end:
            raise _Reached(active.sent(given))
        if active is not None and self.number == active.start:
            active.give(given)
        is_changed = False
        for key, tensor in given.items():
            known = getattr(tensor, _RECEIVED, None) if isinstance(tensor, torch.Tensor) else None
            if known is not None and self.number in known:
                given[key], is_changed = known[self.number], True
        if not is_changed:
            return None
        return tuple(given[i] for i in range(len(args))), {name: given[name] for name in keywords}


@dataclass
class _Exit:
    """A hook of a module: what it returns is what was received, or is sent."""

    forward: StageForward
    name: str

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        active = self.forward.active
        return None if active is None or active.is_within else active.exchange(self.name, output)


@dataclass
class _Refusal:
    """A pre-hook of the model: without a step there is no part that could run."""

    forward: StageForward

    def __call__(self, model: nn.Module, _args: object) -> None:
        if self.forward.active is None:
            raise LayoutError(
                f"{type(model).__name__} has the layout of a pipeline and cannot be called by "
                "itself.",
                why="each rank has the blocks of its stages only, and micro-batches go through all",
                do="layout.step(x, y, loss_fn) runs forward and backward and returns the loss; "
                "inside of torch.no_grad() it returns only the loss",
            )


class _Forward:
    """Replaces a module's forward: modules of another part return zeros."""

    def __init__(
        self, forward: StageForward, name: str, module: nn.Module, runs_always: bool
    ) -> None:
        self.forward, self.name = forward, name
        self.module, self.runs_always = module, runs_always
        self.native = self.__wrapped__ = module.forward  # the latter for who asks its signature
        self._had = "forward" in vars(module)
        module.forward = self

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        active = self.forward.active
        if active is None or active.is_within:
            return self.native(*args, **keywords)
        runs, zeros = active.call(self.name)
        if not runs and not self.runs_always:
            return zeros
        active.is_within = True
        try:
            return self.native(*args, **keywords)
        finally:
            active.is_within = False

    def remove(self) -> None:
        """Restore the forward."""
        if self._had:
            self.module.forward = self.native
        else:
            del vars(self.module)["forward"]


class _Whole(_Forward):
    """Replaces the model's forward, and returns the result of the part."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        try:
            return self.native(*args, **keywords)
        except _Reached as reached:
            return reached.sent
