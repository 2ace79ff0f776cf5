"""Keep what a lost step spoils as it was at the last boundary: the end of an optimizer step.

A forward draws random numbers and moves running statistics, a loop takes batches; a fault then
loses the step, and when it is made again all of that must be as before it. So at each boundary, and
when a cell begins, this notes the state of torch's, Python's and numpy's generators, copies small
buffers of wrapped models (batch norm's statistics) and asks those who have registered (`also`:
loaders). Generators that a program has made itself are its own.

It also counts the steps of every optimizer, which is how ranks find out that one has lost a step.

Hooks on `torch.optim.Optimizer.step`, on whatever thread calls it; the rest on the main thread. A
hook that fails is taken out and logged, and training goes on: a notice says so.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from time import thread_time_ns
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from nbdist.engine.compat import torch_hooks, torch_live
from nbdist.engine.compat.torch_hooks import StepArgs, StepKeywords
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel.backward_threads import is_mains
from nbdist.engine.kernel.cost_clock import clock, clocked
from nbdist.engine.steps import defer_interrupt, halt, random_states
from nbdist.engine.steps.followers.followers import Followers
from nbdist.engine.steps.followers.progress import Progress
from nbdist.shared.wire import CellStart

BUFFER_BYTES = 8 << 20  # larger buffers are left out, and so is what would go beyond it in sum

_log = logging.getLogger("nbdist.boundary")

Take = Callable[[], Any]
Restore = Callable[[Any], None]
Optimizer = torch.optim.Optimizer
NamedTensor = tuple[str, torch.Tensor]


class KeptOptimizerError(BaseException):
    """A cell that is run again had started over, and steps an optimizer that it had made before.

    Nothing has been trained so far: the notebook runs the cell once more, and loops go on. It is no
    `Exception`, so that a loop which catches those of a step does not catch it.
    """


@dataclass(slots=True)
class OptimizerSteps:
    """What one optimizer has done since it was made."""

    whole: int = 0
    begun: int = 0
    at: float = -math.inf  # time.monotonic() when the last whole one ended
    versions: tuple[int, ...] | None = None  # of its parameters, when a step with a closure began
    cell: int = 0  # the newest in which it has stepped, as `StepBoundary` counts them
    opened: int = 0  # as `followers.Stepped` tells
    before: int = 0  # whole ones when that cell began
    # Called once, when the next step begins: what follows a step, a scheduler's, is done then.
    before_next: "list[Callable[[Optimizer], None]]" = field(default_factory=list)

    def is_torn(self, optimizer: Optimizer) -> bool:
        """Return whether a step was begun, has changed something and was not ended.

        A closure (forward and backward, as Lightning does it) may fail before anything is changed.
        """
        if self.begun == self.whole:
            return False
        return self.versions is None or self.versions != _versions(optimizer)

    def settle(self, whole: int) -> None:
        """Count `whole` steps, none of them half done."""
        self.whole = self.begun = whole
        self.versions = None


class StepState(NamedTuple):
    """The state at one boundary. Values, never changed afterwards, but for the buffers' copies.

    `plain_rng` is that of Python's and numpy's generators.
    """

    rng: torch.Tensor
    cuda_rng: torch.Tensor | None
    plain_rng: random_states.States
    others: tuple[Any, ...] = ()


@dataclass(slots=True)
class _Buffer:
    live: "ref[torch.Tensor]"
    copy: torch.Tensor
    version: int  # of the live one when it was copied
    is_silent: bool  # batch norm writes its statistics without a new version

    def moved(self) -> torch.Tensor | None:
        """Return the live buffer if it may have changed since it was copied."""
        live = self.live()
        if live is None or (live._version == self.version and not self.is_silent):
            return None
        return live


class StepBoundary(Component):
    """The last boundary of this rank."""

    def __init__(self) -> None:
        self.steps: WeakKeyDictionary[Optimizer, OptimizerSteps] = WeakKeyDictionary()
        self.last: StepState | None = None
        self.at_cell_begin: StepState | None = None
        # Called before an optimizer's first step in a cell; what it raises, the step raises.
        self.before_first_step: Callable[[Optimizer], None] = _let_it_step
        # Of which a rank has a part alone, and a new rank gets its own, in this recovery.
        self.restored: WeakSet[Optimizer] = WeakSet()
        self._notices: list[str] = []
        self._others: list[tuple[Take, Restore]] = []
        self.made_in: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # cells, as `_cell`
        self._before_cell: WeakSet[Optimizer] = WeakSet()
        self._cell = 1
        self._newest: tuple[Callable[[], Optimizer | None], OptimizerSteps]
        self._newest = _no_optimizer, OptimizerSteps()  # the one that was asked for last
        self._has_stepped = self._continues = False
        self._inside: Optimizer | None = None  # whose step runs: others within it belong to it
        self._buffers: list[_Buffer] = []
        self._undo: list[torch_hooks.Undo] = []
        self._main = threading.main_thread().ident
        self._is_failed = True  # the cell; until a cell says otherwise
        self._is_recording = True  # of the cell more than how many steps it makes
        self._find_buffers: Callable[[Optimizer], Iterable[NamedTensor]] = _no_buffers
        self._after: list[Callable[[Optimizer, int], None]] = []
        self._before_any: Callable[[], None] | None = None
        self._watched: WeakSet[Optimizer] = WeakSet()  # whose buffers were found before a step
        self.followers = Followers(self.steps, self.tell)

    def install(
        self,
        find_buffers: Callable[[Optimizer], Iterable[NamedTensor]],
        after: Callable[[Optimizer, int], None],
        before_any: Callable[[], None] | None = None,
    ) -> None:
        """Put the hooks in place. Once a process, before any optimizer is made.

        Args:
            find_buffers: Returns the buffers of what an optimizer trains, by name, once a cell.
            after: Called at each boundary with the optimizer and the number of its steps.
            before_any: Called before an optimizer's first step of all.
        """
        self._find_buffers = find_buffers
        self._after.append(after)
        self._before_any = before_any
        self._main = threading.main_thread().ident
        if not self._undo:
            self._undo = [
                torch_hooks.before_optimizer_step(self._before_step),
                torch_hooks.on_optimizer_step(self._after_step),
            ]

    def then(self, after: Callable[[Optimizer, int], None]) -> None:
        """Call also this at each boundary, with the optimizer and the number of its steps."""
        self._after.append(after)

    @property
    def is_installed(self) -> bool:
        """Whether the hooks are in place."""
        return bool(self._undo)

    # -- hooks

    # They run at every step: where nothing is due, few functions are called.

    def _before_step(self, optimizer: Optimizer, args: StepArgs, kwargs: StepKeywords) -> None:
        began_ns = thread_time_ns() if clock.is_on else 0
        if began_ns and clock.left_ns:
            clock.hook.note(began_ns - clock.left_ns)
            clock.left_ns = 0
        inside = self._inside
        is_main = get_ident() == self._main
        trains = is_main or is_mains()
        is_outer = (inside is None or inside is optimizer) and trains
        newest, known = self._newest  # a weak dictionary takes microseconds to say it
        steps = known if newest() is optimizer else self._steps_of(optimizer)
        if is_outer and (steps is None or steps.cell != self._cell):
            self.before_first_step(optimizer)
            steps = self.steps.get(optimizer)
        if is_outer:
            self._record(lambda: self.followers.before_step(steps))
        if steps is None:
            if is_outer and self._before_any is not None:
                self._record(self._before_any)
            steps = self.steps[optimizer] = OptimizerSteps()
        if steps.begun != steps.whole:  # one failed, and the program continued
            steps.begun = steps.whole
        if steps.before_next:
            due, steps.before_next = steps.before_next, []
            for before in due:
                before(optimizer)
        steps.begun += 1
        closure = torch_hooks.closure_of(args, kwargs) if kwargs or len(args) > 1 else None
        steps.versions = None if closure is None else _versions(optimizer)
        if is_outer and self._inside is None:
            self._inside = optimizer
            # A closure may take any time; and within backward no interrupt strikes.
            if closure is None and is_main:
                defer_interrupt.here.begin()
        if began_ns:
            clock.add("boundary", thread_time_ns() - began_ns + clock.hook.ns)

    def _after_step(self, optimizer: Optimizer, _args: StepArgs, _kwargs: StepKeywords) -> None:
        began_ns = thread_time_ns() if clock.is_on else 0
        newest, known = self._newest
        steps = known if newest() is optimizer else self._steps_of(optimizer)
        if steps is None:
            return  # made before the hooks were there
        steps.whole = steps.begun
        steps.at = time.monotonic()
        if self._inside is not optimizer:
            return
        self._inside = None
        if steps.cell != self._cell:
            self._first_step(optimizer, steps)
        self._record(lambda: self._take_boundary(optimizer, steps))
        defer_interrupt.here.end()
        if began_ns:
            clock.add("boundary", thread_time_ns() - began_ns + clock.hook.ns)
        if halt.here.is_asked:
            halt.here.stand()

    def _take_boundary(self, optimizer: Optimizer, steps: OptimizerSteps) -> None:
        self.last = self.take()
        self.followers.after_step(steps, optimizer)
        for after in self._after:
            after(optimizer, steps.whole)

    def _record(self, action: Callable[[], None]) -> None:
        """Do what records the cell; where that fails, only steps are counted until the next one.

        These always are: by them alone the models of all ranks are brought to one step.
        """
        if not self._is_recording:
            return
        try:
            action()
        except Exception as error:
            self._is_recording = False
            self._notices.append(
                "Of this cell only the steps are counted from here on: after a fault schedulers, "
                "averages, counters, loaders and random numbers may not stand where the models do "
                f"({type(error).__name__}: {error})."
            )
            _log.exception("Only the steps of this cell are counted from here on")

    def _steps_of(self, optimizer: Optimizer) -> OptimizerSteps | None:
        """Return what an optimizer has done, and remember that it was asked for last."""
        steps = self.steps.get(optimizer)
        if steps is not None:
            self._newest = ref(optimizer), steps
        return steps

    def _first_step(self, optimizer: Optimizer, steps: OptimizerSteps) -> None:
        """Note the optimizer's first step in this cell."""
        is_first = not self.stepped()
        self._continues = optimizer in self._before_cell and (self._continues or is_first)
        steps.cell, steps.before = self._cell, steps.whole - 1
        self._has_stepped = True
        self._record(lambda: self._watch_buffers(self._find_buffers(optimizer)))

    def remove(self) -> None:
        """Take the hooks out."""
        for undo in self._undo:
            undo()
        self._undo = []

    def tell(self, line: str) -> None:
        """Have a sentence said when the cell is over, or with the next one; once."""
        if line not in self._notices:
            self._notices.append(line)

    def take_notices(self) -> tuple[str, ...]:
        """Return sentences for people, each once."""
        taken, self._notices = tuple(self._notices), []
        return taken

    # -- boundaries

    def gave_batch(self, source: object) -> None:
        """Note that a loop gets a batch of a loader."""
        self._record(lambda: self.followers.gave_batch(source))

    def gave_all(self, source: object) -> None:
        """Note that a loop over a loader has come to its end."""
        self._record(lambda: self.followers.gave_all(source))

    def cell_began(self, start: CellStart) -> None:
        """Note the state in which a cell begins."""
        self.begin_cell()

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Note how the cell has ended; return what is to be said of its steps."""
        self.end_cell(cell.source, is_failed=not cell.has_succeeded)
        return self.take_notices()

    def begin_cell(self) -> None:
        """Note the state in which a cell begins."""
        self._cell += 1
        self._inside = None
        self._before_cell = WeakSet([*torch_live.here.live(Optimizer), *self.steps])
        self._has_stepped = self._continues = False
        self._is_failed = self._is_recording = True
        self._record(self._watch_unstepped)
        self._record(self.followers.begin_cell)
        self.at_cell_begin = self.last = self.take()

    def _watch_unstepped(self) -> None:
        """Watch the buffers of what has never stepped: a fault may come before it does."""
        for optimizer in self._before_cell:
            if optimizer not in self.steps and optimizer not in self._watched:
                self._watched.add(optimizer)  # to find buffers takes a millisecond a cell
                self._watch_buffers(self._find_buffers(optimizer))

    def end_cell(self, source: str = "", *, is_failed: bool) -> None:
        """Note how the cell has ended: where it ended well there is nothing to go back from."""
        self._is_failed = is_failed
        self._record(lambda: self.followers.end_cell(source, is_failed=is_failed))

    def progress(self) -> Progress:
        """Return how far the turn had come that a fault ended; nothing where it is not recorded."""
        found = Progress()

        def look() -> None:
            nonlocal found
            self.followers.look()
            found = self.followers.progress()

        self._record(look)
        return found

    def count_copied(self, optimizers: Iterable[Optimizer]) -> None:
        """Count the step that this rank had lost, and has copied, as one of the last cell's."""
        for optimizer in optimizers:
            steps = self.steps.setdefault(optimizer, OptimizerSteps())
            if steps.cell != self._cell:
                self._first_step(optimizer, steps)

    def go_on_from(self, mark: StepState) -> None:
        """Draw the random numbers that follow another process's mark, and stand at this one."""
        _set_rng(mark)
        self.last = self.take()

    def start_over(self, mark: StepState | None) -> None:
        """Draw the random numbers that follow `mark` once more."""
        if mark is not None:
            _set_rng(mark)

    def stepped(self) -> list[Optimizer]:
        """Return the optimizers that have stepped in this cell."""
        return [one for one, steps in self.steps.items() if steps.cell == self._cell]

    def has_stepped(self) -> bool:
        """Return whether an optimizer has stepped in the last cell."""
        return self._has_stepped

    def is_idle(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has not stepped in the last cell."""
        return optimizer not in self.stepped()

    def before_cell(self, optimizer: Optimizer) -> int:
        """Return how many whole steps an optimizer had made when the last cell began."""
        steps = self.steps.get(optimizer, OptimizerSteps())
        return steps.before if steps.cell == self._cell else steps.whole

    def continues(self) -> bool:
        """Return whether the optimizers that stepped in the last cell were there before it."""
        return self._continues

    def made(self) -> list[Optimizer]:
        """Return the optimizers that the last cell has made: those that stepped, if any has."""
        found = self.stepped() if self._has_stepped else torch_live.here.live(Optimizer)
        return [one for one in found if one not in self._before_cell]

    def note_made(self, made: object) -> None:
        """Note the cell that makes an optimizer, and the random numbers, where none has stepped.

        What seeded and drew before it is done, and a cell that keeps its model does it once.
        """
        if not isinstance(made, Optimizer):
            return
        self.made_in[made] = self._cell
        if self.last is not None and not self._has_stepped:
            self.last = self.random_numbers(self.last.others)

    def whole(self) -> list[Optimizer]:
        """Return the optimizers that a new rank gets: those of which each rank has all, mostly."""
        living = torch_live.here.live(Optimizer)
        inner = {id(getattr(optimizer, "optim", None)) for optimizer in living}
        return [
            one
            for one in living
            if id(one) not in inner and (one in self.restored or not _is_cut(one))
        ]

    def hand_over(self) -> dict[str, Any]:
        """Return what a new rank must know, among it the optimizers that each rank has whole."""
        made = {
            str(i): (
                one,
                self.steps[one].whole if one in self.steps else 0,
                self._cell - self.made_in.get(one, 0),  # cells ago: a new rank counts its own
            )
            for i, one in enumerate(self.whole())
        }
        cell = self._has_stepped, self._continues
        return {**made, "cell": cell, "followers": self.followers.hand_over()}

    def take_over(self, handed: dict[str, Any]) -> None:
        """Know, in a new rank, what `hand_over` told on the rank that it was cloned from."""
        self._has_stepped, self._continues = handed.pop("cell")
        self.followers.take_over(handed.pop("followers"))
        for optimizer, whole, cells_ago in handed.values():
            self.made_in[optimizer] = self._cell - cells_ago
            torch_live.here.remember(Optimizer, optimizer)
            self.steps.setdefault(optimizer, OptimizerSteps()).settle(whole)

    def take(self) -> StepState:
        """Note the state now, and return it."""
        if self._buffers:
            self._copy_buffers()
        return self._random_numbers(tuple([take() for take, _ in self._others]))

    @clocked("random", within="boundary")
    def _random_numbers(self, others: tuple[Any, ...]) -> StepState:
        return self.random_numbers(others)

    def at_boundary(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return what these hold at the last boundary: of buffers that are kept, the copies."""
        kept = {
            live.data_ptr(): buffer.copy
            for buffer in self._buffers
            if (live := buffer.live()) is not None
        }
        return [kept.get(tensor.data_ptr(), tensor) for tensor in tensors]

    def changed_buffers(self) -> dict[int, torch.Tensor]:
        """Return copies, by address, of buffers that were written to since the last boundary.

        Called as a forward begins, before it moves them; batch norm's statistics count as unmoved.
        """
        lives = ((buffer, buffer.live()) for buffer in self._buffers)
        return {
            live.data_ptr(): live.detach().clone()
            for buffer, live in lives
            if live is not None and live._version != buffer.version
        }

    def _copy_buffers(self) -> None:
        moved = [(buffer, live) for buffer in self._buffers if (live := buffer.moved()) is not None]
        if moved:
            with torch.no_grad():
                torch._foreach_copy_([b.copy for b, _ in moved], [live for _, live in moved])
            for buffer, live in moved:
                buffer.version = live._version

    def random_numbers(self, others: tuple[Any, ...] = ()) -> StepState:
        """Return a mark of the random generators, for `start_over`, and of `others`."""
        return StepState(
            torch.default_generator.get_state(),
            random_states.take_cuda() if torch.cuda.is_initialized() else None,
            random_states.take(),
            others,
        )

    def restore(self, mark: StepState | None = None, *, random: bool = True) -> bool:
        """Go back to a mark, by default the last one of a cell that failed.

        Buffers go back with the last one only: a snapshot has its own. Random numbers go back
        where `random` says so.

        Returns:
            Whether there was one.
        """
        chosen = mark or (self.last if self._is_failed else None)
        if chosen is None:
            return False
        if mark is None:
            self._put_back(self._buffers)
        if random:
            _set_rng(chosen)
        for (_, restore), value in zip(self._others, chosen.others, strict=False):
            restore(value)
        return True

    def fail_elsewhere(self) -> None:
        """Go back to the last boundary of a cell that ended well here, and failed on another rank.

        A rank may have left a loop that the others were in: what it drew since, they draw again.
        """
        if not self._is_failed and self.last is not None:
            self._put_back(self._buffers)
            _set_rng(self.last)

    def put_buffers_back(
        self, optimizer: Optimizer, changed: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Give the buffers of what an optimizer trains what they held at the last boundary.

        Args:
            optimizer: Of any model.
            changed: By address, what they have held since, and are to hold instead.
        """
        own = {live.data_ptr() for _, live in self._find_buffers(optimizer)}
        lives = ((buffer, buffer.live()) for buffer in self._buffers)
        self._put_back(b for b, live in lives if live is not None and live.data_ptr() in own)
        with torch.no_grad():
            for _, live in self._find_buffers(optimizer):
                if changed and (copy := changed.get(live.data_ptr())) is not None:
                    live.copy_(copy)

    def _put_back(self, buffers: Iterable[_Buffer]) -> None:
        for buffer in buffers:
            live = buffer.moved()
            if live is not None:
                with torch.no_grad():
                    live.copy_(buffer.copy)
                buffer.version = live._version

    def also(self, take: Take, restore: Restore) -> None:
        """Keep something else: `take` returns a value that is never changed, `restore` takes it."""
        self._others.append((take, restore))

    def _watch_buffers(self, buffers: Iterable[NamedTensor]) -> None:
        known = {id(live) for buffer in self._buffers if (live := buffer.live()) is not None}
        self._buffers = [buffer for buffer in self._buffers if buffer.live() is not None]
        room = BUFFER_BYTES - sum(buffer.copy.nbytes for buffer in self._buffers)
        for name, live in sorted(buffers, key=lambda pair: pair[1].nbytes):
            if id(live) not in known and live.nbytes <= room:
                room -= live.nbytes
                is_silent = name.rpartition(".")[2] in ("running_mean", "running_var")
                self._buffers.append(
                    _Buffer(ref(live), live.detach().clone(), live._version, is_silent)
                )


def _no_buffers(_optimizer: Optimizer) -> Iterable[NamedTensor]:
    """Say of every optimizer that what it trains has no buffers."""
    return ()


def _no_optimizer() -> None:
    """Stand for a reference to an optimizer."""


def _let_it_step(_optimizer: Optimizer) -> None:
    """Stand for what comes before an optimizer's step, and may refuse it."""


def _is_cut(optimizer: Optimizer) -> bool:
    """Return whether each rank has a part: of DTensors, or (ZeroRedundancyOptimizer) of states."""
    is_zero = hasattr(optimizer, "consolidate_state_dict")
    return is_zero or any(hasattr(p, "device_mesh") for p in optimizer.param_groups[0]["params"])


def _set_rng(mark: StepState) -> None:
    torch.default_generator.set_state(mark.rng)
    random_states.put_back(mark.plain_rng)
    if mark.cuda_rng is not None:
        torch.cuda.set_rng_state(mark.cuda_rng)


def _versions(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(
        getattr(parameter, "_local_tensor", parameter)._version
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


_here = StepBoundary()

install = _here.install
also = _here.also
begin_cell = _here.begin_cell
end_cell = _here.end_cell
has_stepped = _here.has_stepped
start_over = _here.start_over
continues = _here.continues
restore = _here.restore


def here() -> StepBoundary:
    """Return the boundary of this process."""
    return _here
