"""Record the forwards of a model since its optimizer stepped last, so that one can run again.

What a forward was called with is kept by reference, detached, and with it the random numbers that
it began with. So it costs no copy; a batch that the loop changes in place afterwards is known by
its version. The hook is in the model while a guarded cell runs, and records forwards that train.

Threads: the one that calls the model.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from nbdist.engine.compat.cuda_graphs import graphs
from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.kernel.cost_clock import clocked
from nbdist.engine.steps import step_state
from nbdist.engine.steps.step_state import StepState

_log = logging.getLogger("nbdist.guard")

Place = tuple[str, int]  # device and address
Clip = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of `clip_grad_norm_`, behind the first

MOST_FORWARDS: Final = 64  # of one step: micro-batches that are accumulated


@dataclass(frozen=True, slots=True)
class GivenBatch:
    """This rank's part of a batch, as a loader gave it to a loop.

    Attributes:
        batch: What the loop got; None where no forward was recorded yet, and so none is held.
        epoch: Of the loader.
        positions: Of the part, in the order of the epoch; empty where samples were left out.
        samples: Returns which sample of the dataset each row is; None where that is not known.
    """

    batch: Any
    epoch: int
    positions: range
    samples: Callable[[], list[int] | None]


@dataclass(slots=True)
class MadeLoss:
    """The loss that `layout.step` makes of a forward.

    Attributes:
        layout: Gives None where it is gone.
        y: The targets, by reference, detached.
        loss_fn: As it was given.
        weight: Likewise, detached.
        samples: Of the forward, where the layout knows them.
        averages: Whether its backward averages gradients: of those that `accumulate` adds up, the
            last one's alone.
        tensors: Those that are kept.
        versions: Theirs, as it began.
        value: What it was, detached; None before it is made.
    """

    layout: Callable[[], Any]
    y: Any
    loss_fn: Callable[[Any, Any], torch.Tensor]
    weight: Any
    samples: int | None
    averages: bool
    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    value: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        layout: Any,
        y: Any,
        loss_fn: Any,
        weight: Any,
        samples: int | None,
        *,
        averages: bool = True,
    ) -> "MadeLoss":
        """Return one that is about to be made."""
        y, weight = tree_map_only(torch.Tensor, torch.Tensor.detach, (y, weight))
        tensors = tuple(tensors_in((y, weight)))
        versions = tuple(map(_version, tensors))
        return cls(ref(layout), y, loss_fn, weight, samples, averages, tensors, versions)

    @property
    def is_changed(self) -> bool:
        """Whether what it is made of has been changed in place since."""
        return tuple(map(_version, self.tensors)) != self.versions

    def run(self, output: Any, see: Callable[[torch.Tensor], None]) -> Any:
        """Make it of a model's output again, and run its backward; before that, `see` gets it.

        Returns:
            It, as `layout.step` would.
        """
        return self.layout().loss_again(self, output, see)


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward as it was called.

    Attributes:
        args: Its arguments, detached.
        keywords: Likewise.
        random: The random numbers with which it began.
        autocast: By type of device, whether autocast was on, and its dtype.
        given: What the loader had given last, if anything.
        tensors: Those among the arguments.
        versions: Theirs, as it began.
        loss: What `layout.step` makes of it; None where the loop makes it.
    """

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    random: StepState
    autocast: dict[str, tuple[bool, torch.dtype]]
    given: GivenBatch | None
    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    loss: MadeLoss | None = None

    @classmethod
    def of(
        cls, args: Any, keywords: Any, given: GivenBatch | None, loss: MadeLoss | None
    ) -> "Forward":
        """Return one that begins now."""
        leaves, form = tree_flatten((args, keywords))
        leaves = [one.detach() if isinstance(one, torch.Tensor) else one for one in leaves]
        args, keywords = tree_unflatten(leaves, form)
        tensors = tuple(one for one in leaves if isinstance(one, torch.Tensor))
        kinds = {"cpu", *(tensor.device.type for tensor in tensors)} - {"meta"}
        autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        }
        versions = tuple(map(_version, tensors))
        random = step_state.here().random_numbers()
        return cls(args, keywords, random, autocast, given, tensors, versions, loss)

    @property
    def is_changed(self) -> bool:
        """Whether they have been changed in place since it began."""
        return tuple(map(_version, self.tensors)) != self.versions

    def run(self, model: Callable[..., Any]) -> Any:
        """Run it again: return the model's output."""
        step_state.start_over(self.random)
        with self.autocasting():
            return model(*self.args, **self.keywords)

    @contextmanager
    def autocasting(self) -> Iterator[None]:
        """Have autocast as it was, on or off; a loss was made in it, too."""
        with ExitStack() as stack:
            for kind, (is_on, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled=is_on))
            yield


class Forwards:
    """Those of one model, since its optimizer stepped last. It keeps no model alive.

    Attributes:
        made: The forwards, oldest first.
        unkept: How many more there were, beyond the bounds.
        loss: Returns what `layout.step` makes of the next one.
        clips: The arguments of each `clip_grad_norm_` of all of the model's gradients since.
        changed: By address, what buffers held as the step's first forward began, of those that
            were written to since the step before.
    """

    def __init__(
        self, model: nn.Module, given: Callable[[], GivenBatch | None], most_bytes: int
    ) -> None:
        """Put a hook into the model.

        Args:
            model: Called by the loop.
            given: Returns what the loader gave last.
            most_bytes: Of what is kept.
        """
        self.made: list[Forward] = []
        self.unkept = 0
        self.loss: Callable[[], MadeLoss] | None = None
        self.clips: list[Clip] = []
        self.changed: dict[int, torch.Tensor] = {}
        self._given = given
        self._most_bytes = most_bytes
        self._bytes: dict[Place, int] = {}  # of each tensor that is held
        self._is_over = False
        self._hook = model.register_forward_pre_hook(
            _Before(ref(self)), with_kwargs=True, prepend=True
        )

    def stepped(self) -> None:
        """Begin anew with the next forward: an optimizer has stepped."""
        self._is_over = True

    @property
    def size_bytes(self) -> int:
        """Bytes of what is held."""
        return sum(self._bytes.values())

    def made_loss(self, loss: torch.Tensor | None) -> None:
        """Note what `layout.step` has returned of the newest forward."""
        newest = self.made[-1].loss if self.made else None
        if newest is not None and newest.value is None and loss is not None:
            newest.value = loss.detach().clone()

    def remove(self) -> None:
        """Take the hook out, and forget."""
        self._hook.remove()
        self.made = []

    @clocked("guard")
    def note(self, args: Any, keywords: Any) -> None:
        """Note a forward that begins."""
        if self._is_over:
            self.made, self.unkept, self._is_over = [], 0, False
            self._bytes, self.clips = {}, []
        if not self.made and not self.unkept:
            self.changed = step_state.here().changed_buffers()
        loss, self.loss = self.loss, None  # a forward within the loss is not the one it is of
        try:
            made = Forward.of(args, keywords, self._given(), None if loss is None else loss())
            held = self._bytes | _bytes_by_place(made)
        except Exception:  # of a tensor without an address, as sparse ones; the forward goes on
            _log.exception("The forwards of a model are no longer recorded")
            self.remove()
            return
        is_small = sum(held.values()) <= self._most_bytes
        if is_small and len(self.made) < MOST_FORWARDS and not self.unkept:
            self.made.append(made)
            self._bytes = held
        else:
            self.unkept += 1


class _Before:
    """The hook. A copy of the model, in this process or another, has one that does nothing."""

    def __init__(self, forwards: "Callable[[], Forwards | None]" = lambda: None) -> None:
        self._forwards = forwards

    def __reduce__(self) -> tuple[Any, ...]:
        return _Before, ()

    def __call__(self, _model: nn.Module, args: Any, keywords: Any) -> None:
        if torch.compiler.is_compiling() or graphs.is_capturing or not torch.is_grad_enabled():
            return
        if (forwards := self._forwards()) is not None:
            forwards.note(args, keywords)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes_by_place(made: Forward) -> dict[Place, int]:
    batch = [] if made.given is None else tensors_in(made.given.batch)
    found: dict[Place, int] = {}
    for tensor in [*made.tensors, *batch, *(made.loss.tensors if made.loss else ())]:
        local = local_part(tensor)
        found[str(local.device), local.data_ptr()] = local.nbytes
    return found


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def in_modes(model: nn.Module, modes: Iterable[bool]) -> Iterator[None]:
    """Have the modules of a model train or evaluate as these say, in the order of `modules()`."""
    modules = list(model.modules())
    before = [module.training for module in modules]
    _set(modules, modes)
    try:
        yield
    finally:
        _set(modules, before)


def _set(modules: Iterable[nn.Module], modes: Iterable[bool]) -> None:
    for module, is_training in zip(modules, modes, strict=True):
        module.training = is_training
