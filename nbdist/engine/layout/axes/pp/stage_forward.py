"""Run one stage's part of a model's own forward.

Every stage calls the whole forward with the same inputs, so that values that a model computes from
them itself (positions, masks, rotary tables) exist on every stage. Modules of other stages
return zeros of the right shapes until the stage's first block is entered: there the hidden state
that was received takes the place of the first argument. Where the next stage's first block would be
entered, its first argument is the stage's output, and the forward ends.

`remove` takes all wrappers off again. They must
be the outermost, so they are installed once more when all axes are done: modules of another
stage are skipped with all their wrappers, and a checkpoint computes again without asking
which part runs.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdist.engine.compat import torch_transformer
from nbdist.engine.layout.axes.pp.stage_trace import ForwardTrace, TensorSpec, first_of
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.shared.errors import LayoutError

# On the tensor whose place it took, by number of the block, for a checkpoint calls once more.
_HIDDEN = "_nbdist_hidden"


class _Reached(BaseException):
    """The next stage's first block: no error, and nothing that a model's code may catch."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(slots=True)
class _Active:
    """The part of a forward that runs."""

    start: int  # numbers of blocks: the first, and the one after the last
    end: int
    hidden: torch.Tensor | None
    outputs: dict[str, Iterator[Any]]  # of modules of other stages, from the trace
    device: torch.device

    def has(self, segments: frozenset[int]) -> bool:
        """Return whether one of these segments is of this part."""
        return any(self.start <= segment < self.end for segment in segments)

    def stand_in(self, name: str, given: Any) -> Any:
        """Return the output of a module of another stage, without its values."""

        def empty(spec: TensorSpec) -> torch.Tensor:
            if not isinstance(given, torch.Tensor) or given._is_view():
                return spec.zeros(self.device)
            fits = TensorSpec(given.shape, given.dtype) == spec
            return given if fits else spec.zeros(self.device)  # the former costs nothing

        return tree_map_only(TensorSpec, empty, next(self.outputs[name]))


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
        self._wrap_forwards()

    def _wrap_forwards(self) -> None:
        places = {name: frozenset({i}) for i, name in enumerate(self.trace.blocks)}
        for name, segments in {**self.trace.beside, **places}.items():
            module = self.model.get_submodule(name)
            forward = _Forward(self, name, segments, module)
            forward.runs_always = name in self._always
            self._forwards.append(forward)
        self._forwards.append(_Whole(self, "", frozenset(), self.model))

    def run_always(self, names: Collection[str]) -> None:
        """Let these modules beside the blocks run in every part, where their weights are here.

        Hooks that cut them expect their own output. To be said before `install`.
        """
        self._always = names

    def remove(self) -> None:
        """Remove everything; nothing was wrapped around it since."""
        for handle in self._handles:
            handle.remove()
        for forward in reversed(self._forwards):
            forward.remove()
        self._handles.clear()
        self._forwards.clear()

    def run(
        self, start: int, end: int, inputs: Inputs, outputs: dict[str, list[Any]], hidden: Any
    ) -> Any:
        """Run the blocks from `start` to before `end`, with the modules between and around them.

        Args:
            start: Number of the first block.
            end: Number of the block after the last one.
            inputs: The model's inputs.
            outputs: From a trace for inputs of these shapes.
            hidden: The first block's argument; None lets the forward make it.

        Returns:
            The hidden state for block `end`, or the model's output after the last one.
        """
        device = _device_of(inputs, hidden)
        made = {name: iter(calls) for name, calls in outputs.items()}
        self._active = _Active(start, end, hidden, made, device)
        try:
            with torch_transformer.by_modules():
                return inputs.run(self.model)
        finally:
            self._active = None

    @property
    def active(self) -> _Active | None:
        """The part that runs now."""
        return self._active


def _device_of(inputs: Inputs, hidden: Any) -> torch.device:
    if isinstance(hidden, torch.Tensor):
        return hidden.device
    found: list[torch.device] = []
    inputs.map(lambda t: found.append(t.device) or t)  # type: ignore[func-returns-value]
    return found[0] if found else torch.device("cpu")


@dataclass
class _Entry:
    """A pre-hook of a block: the forward ends here, or continues from the hidden state."""

    forward: StageForward
    number: int

    def __call__(self, _block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        active, given = self.forward.active, first_of(args, keywords)
        if active is not None and self.number == active.end:
            raise _Reached(given)
        hidden = getattr(given, _HIDDEN, {}).get(self.number)
        if active is not None and self.number == active.start and active.hidden is not None:
            hidden = active.hidden
            setattr(given, _HIDDEN, {**getattr(given, _HIDDEN, {}), self.number: hidden})
        if hidden is None:
            return None
        if args:
            return (hidden, *args[1:]), keywords
        return args, {**keywords, next(iter(keywords)): hidden}


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
        self, forward: StageForward, name: str, segments: frozenset[int], module: nn.Module
    ) -> None:
        self.forward, self.name, self.segments = forward, name, segments
        self.module, self.runs_always = module, False
        self.native = self.__wrapped__ = module.forward  # the latter for who asks its signature
        self._had = "forward" in vars(module)
        module.forward = self

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        active = self.forward.active
        if active is None or self.runs_always or active.has(self.segments):
            return self.native(*args, **keywords)
        return active.stand_in(self.name, first_of(args, keywords))

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
            return reached.hidden
