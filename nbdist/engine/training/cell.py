"""Make a record of each step that the hooks see in one cell.

Where the numbers come from:

- a *step* ends when an optimizer steps (`steps.StepRule` says which, of several; one that steps
  within another's step belongs to it); each makes one record of kind "step";
- the first step of several optimizers ends with the first one's step, and is recorded when it steps
  again: the losses of the others until then are its own, and it has no norm;
- the *loss* is the scalar on which `backward()` was called, unscaled, the mean of a step's
  backwards (`scalars.loss_of`). Roots that are no scalar, and backwards within a backward, are no
  losses: of a pipeline only the last stage has one, and the other ranks count steps without;
- `step_s` is the wall time from the end of one step to the end of the next, whatever the loop did
  in it. The first step of a cell begins when a batch is first asked for; when none was, its
  beginning was not seen, and it has no times but `data_s`;
- of steps that are *measured* (`tap/sampling.py`; all of them where they are long) `parts.py` says
  how their time divides. The others have loss, `step_s`, counts, bytes, samples and tokens;
- `comm_s` and `comm_total_s` are the tap's exposed and total times (`tap.py` says what they mean);
  at other levels than "full", which do not see DDP wait, there is none, and `compute_s` holds it;
- `samples` and `tokens` are those of the batches a step used, of the loader asked last;
- nbdist's own loaders report what making these batches took (`data/making.py`);
- `replays`: of CUDA graphs in the step. One that holds the optimizer's step is the step: only its
  loss and `step_s` are known, not its parts or its collectives;
- `cpu_s`, `starved_s` and memory: `resources.py`; `grad_share`: `gradients.py`.

On CUDA all times but the tap's are the host's: queued work is counted where the host waits for it.
The compute stream's waits for collectives are subtracted there (`parts.with_stream`).
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from nbdist.engine.compat import torch_hooks, torch_live, torch_loaders
from nbdist.engine.compat.cuda_graphs import graphs
from nbdist.engine.kernel.cost_clock import clock
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.tap import tap
from nbdist.engine.tap.sampling import Measuring
from nbdist.engine.training import expert_load
from nbdist.engine.training.gradients import Shares
from nbdist.engine.training.parts import PartTimer, with_stream
from nbdist.engine.training.resources import Memory, Processor
from nbdist.engine.training.scalars import Scalars, loss_of
from nbdist.engine.training.steps import Pace, Size, StepRule, size_of, steps_in_pass, take_used

MAX_HELD = 64  # steps whose loss has not come back from the GPU


@dataclass(slots=True)
class Pass:
    """The newest pass of a DataLoader's iterator; with persistent workers one makes several.

    Attributes:
        number: Of the iterator in the cell.
        began_at: The step it began at.
        is_whole: Its begin was seen.
        ended: How many passes of the iterator have come to their end.
    """

    number: int
    began_at: int
    is_whole: bool = False
    ended: int = 0


@dataclass(slots=True)
class _Held:
    """A step that is over; its numbers may still be in transfer from the GPU."""

    step: int
    values: dict[str, float]
    losses: Scalars
    shares: Scalars

    @property
    def is_ready(self) -> bool:
        return self.losses.is_ready and self.shares.is_ready


@dataclass(slots=True)
class RankMachine:
    """The sources of this rank's machine figures; one for all cells."""

    processor: Processor = field(default_factory=Processor)
    memory: Memory = field(default_factory=Memory)
    pace: Pace = field(default_factory=Pace)


class Cell:
    """The state of the running cell. Main thread, but for `step`."""

    def __init__(self, recorder: Recorder, machine: RankMachine | None, *, grad_norm: bool) -> None:
        self.step = 0
        self._recorder = recorder
        self._machine = machine
        self._parts = PartTimer()
        self._measuring = Measuring()
        self.is_measured = True  # the step that is being made
        self._is_second = True  # the one after it is measured, by the present stride
        self._began_ns = 0  # when it began, if that was seen
        self._rule = StepRule()
        self._is_newest_held = False  # the newest step, for other optimizers may add to it
        self._trained: dict[int, ref[torch.Tensor]] = {}  # parameters, by `id`
        self._trains_others = False  # the optimizer that stepped last for the first time
        self._trainings = 0
        self._made_by_then = 0  # number of the newest optimizer when the newest step ended
        self._has_begun = self._is_whole = False  # the step; and whether that was seen
        self.knows_parts = True  # False once a hook that measures them has failed
        self._losses = Scalars()
        self._norms = Shares() if grad_norm else None
        self._shares: dict[int, torch.Tensor | None] = {}  # by `id` of the optimizer
        self.backwards = 0  # of losses, since the newest step
        self.newest_backwards = 0  # those of the newest step
        self._fetched: deque[Size] = deque(maxlen=4096)  # of one iterator
        self._making: Counter[str] = Counter()  # of its batches since the newest step ended
        self._iterator: Any = None
        self.passes = 0  # over DataLoaders that were begun, or gone back to
        self._may_train = False  # on the newest batch
        self._pass = Pass(0, 0)
        self._passes: WeakKeyDictionary[Any, Pass] = WeakKeyDictionary()
        self._count_of_passes = 0
        self._held: deque[_Held] = deque()
        self._replays = graphs.replays  # when the step began
        expert_load.here.begin_cell()
        self.replayed = 0  # steps that were replays of a CUDA graph, or held some

    def _begin(self, now_ns: int, *, is_whole: bool) -> None:
        """The first sign of training in this cell; earlier communication belongs to no step."""
        self._has_begun, self._is_whole = True, is_whole
        self._began_ns = now_ns
        self._parts.begin(now_ns)
        tap.take()
        if self._machine is not None:
            self._machine.processor.take()

    def forget_step(self) -> None:
        """Forget what was seen of the current step; it begins with its next sign."""
        self._has_begun = self._is_whole = False
        tap.take()
        expert_load.here.forget()

    # -- what the hooks see

    def fetch_began(self) -> None:
        """A DataLoader is asked for a batch."""
        now_ns = perf_counter_ns()
        if not self._has_begun:
            self._begin(now_ns, is_whole=True)
        if self.is_measured:
            self._parts.fetch_began(now_ns, tap.exposed_ns())
        else:
            self._parts.forget_failed()

    def fetch_ended(self, iterator: Any, *, is_batch: bool) -> None:
        """It returned one, or was exhausted."""
        now_ns = perf_counter_ns()
        if is_batch or iterator is not self._iterator:
            self._note_pass(iterator)
        if not is_batch:
            self._pass.ended += 1
        if is_batch and (made := torch_loaders.report_of(iterator)) is not None:
            self._making.update(made.parts_ns, cpu=made.cpu_ns, batches=1)
        self._may_train = is_batch and torch.is_grad_enabled()
        if self.is_measured:
            number = self._pass.number
            self._parts.fetch_ended(now_ns, tap.exposed_ns(), number, may_train=self._may_train)

    @property
    def current_pass(self) -> tuple[Any, Pass]:
        """The DataLoader's iterator that was used last, if any, and its newest pass."""
        return self._iterator, self._pass

    @property
    def begun_pass(self) -> Any:
        """The DataLoader's iterator of the newest batch to train on, begun in this cell."""
        return self._iterator if self._may_train and self._pass.is_whole else None

    def note_batch(self, batch: Any) -> None:
        """Note the size of a batch."""
        self._fetched.append(size_of(batch))

    def _note_pass(self, iterator: Any) -> None:
        if iterator is not self._iterator:  # such as after validation
            self._iterator = iterator
            self.passes += 1
            self._fetched.clear()
            self._making.clear()
            found = self._passes.get(iterator)
            if found is None:
                self._count_of_passes += 1
                found = self._passes[iterator] = Pass(self._count_of_passes, self.step)
            self._pass = found
        if torch_hooks.batch_number(iterator) == 1:  # of persistent workers, again
            self._pass.began_at = self.step
            self._pass.is_whole = True
            self.passes += 1

    def backward_began(self) -> None:
        """An outermost backward begins."""
        if self.is_measured:
            now_ns = perf_counter_ns()
            if not self._has_begun:
                self._begin(now_ns, is_whole=False)
            self._parts.backward_began(now_ns, tap.exposed_ns())
        else:
            self._parts.forget_failed()
        tap.backward_began()

    def note_loss(self, tensors: Any) -> None:
        """Note the root of a backward, if it is a loss."""
        loss = loss_of(tensors)
        if loss is not None:
            self._losses.add(loss)
            self.backwards += 1

    def newest_loss(self) -> float | None:
        """Return the loss of the step that is being made, as far as it is. Waits for a GPU."""
        losses = self._losses.read()
        return sum(losses) / len(losses) if losses else None

    def backward_ended(self) -> None:
        """It has ended, or failed."""
        tap.backward_ended(is_measured=self.is_measured)
        if self.is_measured:
            self._parts.backward_ended(perf_counter_ns(), tap.exposed_ns())

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer is in its step."""
        return self._parts.is_stepping

    def first_step_began(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer begins its first step in the cell."""
        own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        known = self._trained
        self._trains_others = not any(i in known and known[i]() is p for i, p in own.items())
        known |= {i: ref(p) for i, p in own.items()}

    def optimizer_began(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> bool:
        """An optimizer begins to step; returns False where it does so within another's step."""
        if self.is_measured:
            is_outermost = self._parts.optimizer_began(
                perf_counter_ns(), tap.exposed_ns(), id(optimizer), has_closure=has_closure
            )
        else:
            is_outermost = self._parts.enter_optimizer()
        if is_outermost and self._norms is not None and not has_closure:
            self._shares[id(optimizer)] = self._norms.of(optimizer)
        return is_outermost

    def closure_began(self) -> None:
        """The optimizer calls its closure."""
        if self.is_measured:
            self._parts.closure_began(perf_counter_ns(), tap.exposed_ns())
        else:
            self._parts.enter_closure(True)

    def closure_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """The closure has ended, or failed."""
        if self.is_measured:
            self._parts.closure_ended(perf_counter_ns(), tap.exposed_ns())
        else:
            self._parts.enter_closure(False)
        if self._norms is not None:
            self._shares[id(optimizer)] = self._norms.of(optimizer)

    def optimizer_ended(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer has stepped; returns whether that ends a step."""
        now_ns = perf_counter_ns()
        key = id(optimizer)
        if self.is_measured:
            is_outermost = self._parts.optimizer_ended(now_ns, tap.exposed_ns(), key)
        else:
            is_outermost = self._parts.leave_optimizer(key)
        if not is_outermost:
            return False
        rule = self._rule
        if not rule.leads(key):
            made = torch_live.here.number_of(torch.optim.Optimizer, optimizer)
            if not rule.closes(key, is_new=made > self._made_by_then):
                if self._holds_newest:
                    self._add_to_newest()
                return False
        self._close_step(now_ns)
        return True

    @property
    def step_of_call(self) -> int | None:
        """The step that the newest call of an optimizer belongs to; None within another's call."""
        return None if self.is_stepping else self.step + self._rule.is_between

    # -- records

    @property
    def _holds_newest(self) -> bool:
        return self._is_newest_held and self._rule.is_open

    def _add_to_newest(self) -> None:
        """Another optimizer's step belongs to the step that was closed last."""
        newest = self._held[-1]
        newest.losses.take(self._losses)
        newest.shares = Scalars()  # its norm was the first optimizer's alone
        self._shares.clear()
        self.backwards = 0

    def _close_step(self, now_ns: int) -> None:
        self.step += 1
        self._made_by_then = torch_live.here.newest_number()
        if self.is_measured:
            self._measuring.measured(self.step, now_ns)
            self._is_second = self._measuring.measures(self.step + 1)
        is_next = self._is_second
        self._is_second = self._measuring.measures(self.step + 2)
        if self.is_measured:
            values = self._measured_values(now_ns, is_next=is_next)
        else:
            values = self._counted_values(now_ns)
        if self._rule.is_open and self._trains_others:
            self._trainings += 1
            if self._trainings > 1:
                values["training_began"] = float(self._trainings)
        if replays := graphs.replays - self._replays:
            values["replays"] = float(replays)
            self._replays = graphs.replays
            self.replayed += 1
        if self._iterator is not None:
            values |= self._amounts()
        load, by_expert = expert_load.here.take(now_ns)
        if load:
            values |= load
            if by_expert:
                self._recorder.add("experts", self.step, by_expert)
        if self.is_measured and self._machine is not None:
            self._machine.pace.note(values)
        self._keep(values)
        self.newest_backwards, self.backwards = self.backwards, 0
        self._has_begun = self._is_whole = True
        self._began_ns = now_ns
        if is_next and not self.is_measured:
            self._parts.begin_next(now_ns)
            if self._machine is not None:
                self._machine.processor.take()
        self.is_measured = is_next

    def end_clock(self, *, was_measured: bool) -> None:
        """The step that was closed last is complete."""
        # Among steps that are not measured, the one before a measured one is clocked.
        clocks_next = self.is_measured or self._is_second
        if was_measured or clocks_next or clock.is_on:
            clock.end_step(self._began_ns, is_measured=was_measured, clocks_next=clocks_next)
        else:
            clock.others.steps += 1
            clock.last_ns = self._began_ns

    def _measured_values(self, now_ns: int, *, is_next: bool) -> dict[str, float]:
        parts = self._parts.close(now_ns, tap.exposed_ns())
        traffic = tap.take(self.step, now_ns, is_next=is_next)
        if traffic.calls is not None:
            self._recorder.add("calls", traffic.calls_step, {}, traffic.calls)
        parts = with_stream(parts, traffic.stream_ns)
        # No hook sees the parts of a replay, nor its collectives.
        knows_parts = self.knows_parts and not graphs.is_stepping
        if self._is_whole:
            values = parts if knows_parts else {"step_s": parts["step_s"]}
            if tap.level() != "off" and not graphs.is_stepping:
                _note_communication(traffic, values)
            if tap.level() != "full" and "comm_s" in values:
                values["compute_s"] += values.pop("comm_s")
                values.pop("forward_comm_s", None)
        else:
            values = {"data_s": parts["data_s"]}
        if self._machine is not None:
            used = self._machine.processor.take()
            if self._is_whole:
                values |= used
            values |= self._machine.memory.take(now_ns)
        return values

    def _counted_values(self, now_ns: int) -> dict[str, float]:
        """Return the values of a step that is not measured."""
        values = {"step_s": (now_ns - self._began_ns) / 1e9} if self._is_whole else {}
        counts = tap.take_counts()
        if counts is not None and not graphs.is_stepping:
            values["bytes"], values["collectives"] = counts
        return values

    def _keep(self, values: dict[str, float]) -> None:
        """Record a step, at once if all its numbers are here."""
        losses = self._losses
        self._is_newest_held = (
            self._rule.is_open and len(torch_live.here.live(torch.optim.Optimizer)) > 1
        )
        if not (losses.copies or self._held or self._shares or self._is_newest_held):
            if found := losses.values:
                values["loss"] = found[0] if len(found) == 1 else sum(found) / len(found)
                found.clear()
            self._recorder.add("step", self.step, values)
            return
        self._held.append(_Held(self.step, values, losses, self._take_shares()))
        self._losses = Scalars()
        self.record_held(wait=False)

    def _amounts(self) -> dict[str, float]:
        """Return samples, tokens and the bounds of the pass, as far as they are known."""
        values: dict[str, float] = {}
        if self._fetched:
            used = take_used(self._fetched, self.backwards)
            values["samples"] = sum(size.samples for size in used)
            values["tokens"] = sum(size.tokens for size in used)
        if self.is_measured and (batches := self._making.pop("batches", 0)):
            values["batches"] = batches
            values["loader"] = torch_loaders.loader_of(self._iterator)
            values["making_cpu_s"] = self._making.pop("cpu") / 1e9
            values |= {f"{part}_s": ns / 1e9 for part, ns in self._making.items()}
        self._making.clear()
        if self.is_measured and (total := self._expected_steps()) is not None:
            values["total"] = total
            values["epoch_began"] = self._pass.began_at
        return {name: value for name, value in values.items() if value}

    def _take_shares(self) -> Scalars:
        scalars = Scalars()
        if not self._shares:
            return scalars
        shares = [share for share in self._shares.values() if share is not None]
        if len(shares) == len(self._shares):  # a part of the norm would be no norm
            for share in shares:
                scalars.add(share)
        self._shares.clear()
        return scalars

    def _expected_steps(self) -> int | None:
        """Return the step that ends the pass over the loader, if its length is known."""
        if self._iterator is None:
            return None
        batches = torch_hooks.batch_count(self._iterator)
        began = self._pass.began_at
        if batches is None or self.step <= began:
            return None
        return began + steps_in_pass(
            batches,
            batches_taken=torch_hooks.batch_number(self._iterator),
            steps_made=self.step - began,
            backwards=self.backwards,
        )

    def record_held(self, *, wait: bool) -> None:
        """Record the steps whose numbers have arrived; with `wait`, wait for them."""
        while wait and (late := tap.late()) is not None:
            self._recorder.add("calls", late[0], {}, late[1])
        held = self._held
        while len(held) > (0 if wait else self._holds_newest) and (
            wait or len(held) > MAX_HELD or held[0].is_ready
        ):
            over = held.popleft()
            losses, shares = over.losses.read(), over.shares.read()
            values = over.values
            if losses:
                values["loss"] = sum(losses) / len(losses)
            if shares:
                values["grad_share"] = sum(shares)
            self._recorder.add("step", over.step, values)


def _note_communication(traffic: tap.Traffic, values: dict[str, float]) -> None:
    values["bytes"] = float(traffic.bytes)
    values["collectives"] = float(traffic.collectives)
    if traffic.total_ns is not None:
        values["comm_total_s"] = traffic.total_ns / 1e9
