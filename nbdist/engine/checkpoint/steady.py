"""Which tensors of a training only an optimizer's step changes: they are copied while it goes on.

Forward and backward read parameters and the optimizer's states, so a thread may copy them until the
next step begins, which waits for it. That a program changes them nowhere else (clipped weights, an
average written back) is seen first: a cell's first save copies at once, and what it has copied is
compared when the next step begins. After that their versions tell, and sums of their bits, and a
save in which one has moved is given up rather than torn. All else (buffers, kept models) is copied
at once.

Threads: `copy` runs on a save's own; the rest on the main thread.
"""

import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from weakref import WeakSet

import torch

from nbdist.engine.checkpoint.trained_models import parameters_of
from nbdist.engine.checkpoint.training_state import Training, real
from nbdist.engine.compat.checkpoints import tensor_bytes
from nbdist.engine.compat.checkpoints.tensor_frame import lies_whole
from nbdist.engine.compat.checkpoints.torch_checkpoint import TensorKey
from nbdist.engine.component import Component
from nbdist.engine.steps import step_state
from nbdist.engine.steps.optimizer_wrapper import Wrapper
from nbdist.shared.errors import CheckpointError
from nbdist.shared.wire import CellStart

_PIECE = 1 << 20  # bytes that are copied, and summed while the cache holds them
_WORD = 8  # bytes
_MASK = (1 << 64) - 1  # sums wrap around

Optimizer = torch.optim.Optimizer
Source = tuple[TensorKey, torch.Tensor]
Room = dict[TensorKey, torch.Tensor]


# ---- What is written -----------------------------------------------------------------------------


class Staged:
    """The tensors that one rank writes: copies that training may not touch, or as they are.

    A copy lies in CPU memory that the next save uses again: new memory is ten times as slow. Sums
    of bits tell whether a tensor that was to be copied later is still what it was; a copy is summed
    piece by piece while a core's cache holds it. A save's main thread makes it; `copy_rest` and
    what follows it run on the save's own.

    Args:
        room: Copies of the save before; filled with those that are made.

    Attributes:
        content: What is written, by name and offset.
        steady: Tensors that stay as they are for a while, likewise.
    """

    def __init__(self, room: Room) -> None:
        self.content: Room = {}
        self.steady: Room = {}
        self._copies: Room = {}
        self._sums: dict[TensorKey, int] = {}
        self._changed = ""
        self._room = room

    def borrow(self, sources: Iterable[Source]) -> None:
        """Take tensors as they are: nothing changes them until they are written.

        Those that cannot be written from where they lie are copied.
        """
        every = list(sources)
        self.content.update((key, source) for key, source in every if lies_whole(source))
        self.copy((key, source) for key, source in every if not lies_whole(source))

    def copy(self, sources: Iterable[Source]) -> None:
        """Copy tensors now."""
        for key, source in sources:
            self._buffer(key, source).copy_(source, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def leave(self, sources: Mapping[TensorKey, torch.Tensor]) -> None:
        """Leave tensors for `copy_rest`, and remember what their bits are now.

        `.data` changes them, and no version tells.
        """
        self.steady.update(sources)
        self._sums = {key: _sum_of(source) for key, source in sources.items()}

    def copy_rest(self) -> int:
        """Copy the tensors that were left for later, and return how many. Any thread; once."""
        rest = [(key, source) for key, source in self.steady.items() if key not in self.content]
        for key, source in rest:
            buffer = self._buffer(key, source)
            if _copied(source, buffer) != self._sums[key] and not self._changed:
                self._changed = key[0]
        for key in self._room.keys() - self.content.keys():
            del self._room[key]
        self._room.update(self._copies)  # never what was borrowed: the next save writes into it
        return len(rest)

    def changed(self) -> str:
        """Return the name of a tensor that was changed before it was copied, or nothing."""
        return self._changed

    def is_as_copied(self) -> bool:
        """Return whether no steady tensor differs from its copy. Reads all of them."""
        return all(torch.equal(source, self.content[key]) for key, source in self.steady.items())

    def _buffer(self, key: TensorKey, source: torch.Tensor) -> torch.Tensor:
        """Return room for a tensor's copy, which is written from then on."""
        buffer = self._room.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            on_gpu = source.device.type == "cuda"
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=on_gpu)
        self.content[key] = self._copies[key] = buffer
        return buffer


def _copied(source: torch.Tensor, buffer: torch.Tensor) -> int:
    """Copy a CPU tensor, and return the sum of the copy's bits, as `_sum_of` does."""
    if not _lies_in_words(source):
        buffer.copy_(source)
        return _sum_of(buffer)
    total = 0
    for target, origin in zip(_words(buffer), _words(source), strict=True):
        step = _PIECE // target.element_size()
        for begin in range(0, target.numel(), step):
            piece = target[begin : begin + step]
            piece.copy_(origin[begin : begin + step])
            total += int(piece.sum())
    return total & _MASK


def _sum_of(tensor: torch.Tensor) -> int:
    """Return the sum of a CPU tensor's bits, at the memory's speed."""
    whole = (
        tensor if _lies_in_words(tensor) else tensor.clone(memory_format=torch.contiguous_format)
    )
    return sum(int(words.sum()) for words in _words(whole)) & _MASK


def _lies_in_words(tensor: torch.Tensor) -> bool:
    return lies_whole(tensor) and tensor.storage_offset() * tensor.element_size() % _WORD == 0


def _words(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor's bits as numbers: whole words, and the bytes that are left over."""
    flat = tensor_bytes.flat(tensor)
    left = flat.numel() * flat.element_size() % _WORD
    if not left:
        return [flat.view(torch.int64)]
    raw = flat.view(torch.uint8)
    return [raw[:-left].view(torch.int64), raw[-left:]]


# ---- When it is copied ---------------------------------------------------------------------------


class Known(Component):
    """The optimizers of which it is known whether steps alone change their tensors."""

    def __init__(self) -> None:
        self._proven: WeakSet[Optimizer] = WeakSet()  # in this cell
        self._refuted: WeakSet[Optimizer] = WeakSet()  # ever

    def cell_began(self, start: CellStart) -> None:
        """Begin a cell: what one program has not done, another may."""
        self._proven.clear()

    def prove(self, optimizers: Iterable[Optimizer]) -> None:
        """Note that this cell's program has changed their tensors in steps alone."""
        self._proven.update(optimizers)

    def refute(self, optimizers: Iterable[Optimizer]) -> None:
        """Note that a program has changed their tensors elsewhere, too. Any thread."""
        self._refuted.update(optimizers)

    def are_proven(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether this cell's program is known to change their tensors in steps alone."""
        return all(one in self._proven and one not in self._refuted for one in optimizers)


def find(training: Training) -> dict[str, torch.Tensor]:
    """Return what may be copied until the next step, by name as of `training_state.tree`.

    Nothing where ranks average what they train, or where the steps of an optimizer are not seen;
    no tensor of an accelerator, or of a model that is each rank's own.
    """
    steps = step_state.here().steps
    for optimizer in training.optimizers:
        counted = steps.get(optimizer)
        if isinstance(optimizer, Wrapper) or counted is None or not counted.whole:
            return {}
    apart = {model.name for model in training.models if model.is_apart}
    found: dict[str, torch.Tensor] = {}
    for number, optimizer in enumerate(training.optimizers):
        state_of = real(optimizer).state
        for parameter in parameters_of(optimizer):
            name = training.names.get(id(parameter), "")
            if not name or name.partition(".")[0] in apart:
                continue
            found[f"model.{name}"] = parameter
            for key, value in state_of.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"optim.{number}.{name}.{key}"] = value
    return {name: tensor for name, tensor in found.items() if tensor.device.type == "cpu"}


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what a change in place moves; that of a DTensor, or of the part that it holds."""
    return tensor._version, getattr(tensor, "_local_tensor", tensor)._version


def stage(
    sources: Sequence[Source], steady: Container[str], room: Room, *, at_once: bool
) -> Staged:
    """Copy what a rank writes, but for what is steady unless `at_once`.

    Args:
        sources: The tensors.
        steady: Names of those that only a step changes.
        room: Of the copies of the save before.
        at_once: Whether these are copied too, or left for `Staged.copy_rest`.
    """
    staged = Staged(room)
    later = {key: source for key, source in sources if key[0] in steady}
    staged.copy(sources if at_once else [one for one in sources if one[0] not in later])
    if at_once:
        staged.steady.update(later)
    else:
        staged.leave(later)
    return staged


class Copying:
    """The copies of one save: when they are whole, and whether they are of one moment.

    Args:
        staged: What is copied, a part of it perhaps already.
        steady: The tensors of which it is known that only steps change them, by name.
        optimizers: Whose steps change it; the next one waits for the rest.
        is_trial: Whether all was copied at once, to see whether something else changes it.
        waited: Called with the seconds for which a step has waited.
    """

    def __init__(
        self,
        staged: Staged,
        steady: Mapping[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
        waited: Callable[[float], None],
        *,
        is_trial: bool,
    ) -> None:
        self.staged = staged
        self._steady = {name: (tensor, _version(tensor)) for name, tensor in steady.items()}
        self._optimizers = WeakSet(optimizers)
        self._waited = waited
        self._is_trial, self._is_to_look = is_trial, is_trial
        self._is_whole = threading.Event()
        self._lock = threading.Lock()
        self._moved: str | None = None
        self._is_left = False
        counts = step_state.here().steps
        for one in {id(o): o for o in (*optimizers, *map(real, optimizers))}.values():
            steps = counts.setdefault(one, step_state.OptimizerSteps())
            steps.before_next.append(self._before_step)

    def copy(self) -> None:
        """Copy what is left. The save's thread; steps go on however it ends."""
        try:
            self.staged.copy_rest()
        finally:
            self._is_whole.set()

    def give_up(self) -> None:
        """Have no step wait: there is no thread that copies."""
        self._is_whole.set()

    def leave(self) -> None:
        """Say that this rank no longer waits for the save of tensors that were not copied."""
        self._is_left = True

    def settle(self) -> None:
        """Return when all is copied, and nothing more is to be seen of the tensors."""
        self._is_whole.wait()
        if self._is_to_look:
            self._is_to_look = False
            if self.staged.is_as_copied():
                here.prove(self._optimizers)
        self._has_moved()
        self._steady, self.staged.steady = {}, {}  # it holds them no longer

    def require_one_moment(self) -> None:
        """Refuse copies of tensors that changed meanwhile. Any thread, once all are there.

        Raises:
            CheckpointError: Some have.
        """
        if self._is_left:
            raise CheckpointError(
                "The checkpoint was not written: waiting for it was interrupted.",
                why="nbdist.save(wait=True) writes tensors without a copy, and they may change now",
            )
        moved = "" if self._is_trial else self._has_moved() or self.staged.changed()
        if moved:
            here.refute(self._optimizers)
            raise CheckpointError(
                f"The tensor {moved.partition('.')[2]} was changed while it was copied, and not by "
                "its optimizer's step.",
                why="between a save and the next step parameters are copied beside training",
                do="save again: from now on training stands still while they are copied",
            )

    def _has_moved(self) -> str:
        """Return the name of a steady tensor that has changed, or nothing.

        Told once and for all when it is first asked for, on whichever thread: a step asks before
        it changes them.
        """
        with self._lock:
            if self._moved is None:
                moved = (n for n, (tensor, was) in self._steady.items() if _version(tensor) != was)
                self._moved = next(moved, "")
            return self._moved

    def _before_step(self, _optimizer: Optimizer) -> None:
        began = time.monotonic()
        self.settle()
        self._waited(time.monotonic() - began)


here = Known()
