"""Bring all ranks to the same step after a fault: carry out what `decide` decides.

Main thread of every rank, at the same time, when the group has been re-created and state is reset.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

from nbdist.engine.data.position import resume
from nbdist.engine.group import rendezvous
from nbdist.engine.recovery import (
    decide,
    disabled,
    follow,
    model_state,
    send_tensors,
    wrapped_models,
)
from nbdist.engine.recovery.clone import shards
from nbdist.engine.recovery.decide import Decision, ModelReport
from nbdist.engine.recovery.snapshots import peer_state, peers, snapshot
from nbdist.engine.steps import step_state
from nbdist.engine.steps.followers.progress import Progress
from nbdist.shared.errors import ClusterError, LostStateError
from nbdist.shared.text import name_ranks

Optimizer = torch.optim.Optimizer

TIMEOUT_S = 20.0  # for the ranks to hear of each other


@dataclass(frozen=True, slots=True)
class _GoneBack:
    """A unit that went back to a snapshot, or `stood_there` still, with what the snapshot knows."""

    identity: str
    is_idle: bool
    stood_there: bool
    mark: step_state.StepState | None
    follows: follow.Kept | None


@dataclass(slots=True)
class _Unfinished:
    """A recovery that has begun and may be cut off by the next fault, which begins it again.

    What it had moved looks then as if it had always stood there, and what follows it does not.

    Attributes:
        progress: Of this rank, before anything was moved.
        copied: The optimizers that have copied a step since.
        gone_back: The units that have gone back to a snapshot, by identity.
    """

    progress: Progress
    copied: WeakSet[Optimizer] = field(default_factory=WeakSet)
    gone_back: dict[str, _GoneBack] = field(default_factory=dict)


def _that_count(gone_back: Sequence[_GoneBack]) -> list[_GoneBack]:
    """Return those whose loaders, counters and schedulers are the ones that go on.

    What the cell has trained; a model of an earlier one has a snapshot of what was then.
    """
    active = [one for one in gone_back if not one.is_idle]
    return active or [one for one in gone_back if not one.stood_there]


class StateSync:
    """What cannot be used since a fault, and how ranks are brought to one step."""

    def __init__(self) -> None:
        # Which cannot step any more, and what takes that back.
        self._stopped: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        # What some ranks do not hold; it was said.
        self._left_alone: WeakSet[torch.nn.Module] = WeakSet()
        self._are_shapes_wanted: Callable[[Iterable[Optimizer]], bool] = lambda _: False
        self._to_refuse: list[tuple[wrapped_models.Unit, Decision]] = []
        self._unfinished: _Unfinished | None = None

    def begin(self, progress: Callable[[], Progress]) -> Progress:
        """Begin a recovery, or one that was cut off once more; return the progress at the fault."""
        if self._unfinished is None:
            self._unfinished = _Unfinished(progress())
        return self._unfinished.progress

    def finish(self) -> None:
        """Note that the recovery has come to its end: the next fault begins another."""
        self._unfinished = None

    def sync(self, replacements: Iterable[int]) -> tuple[list[Decision], list[str], bool]:
        """Compare the units' steps on all ranks, and make them equal.

        A rank that copies a step it had lost has done all of that step but the update: its random
        numbers, buffers and loaders are those of the boundary it now stands at. All others go back
        to their last one.

        Args:
            replacements: Ranks that hold nothing yet.

        Returns:
            What was done; what is said of all that follows the steps; whether a step stays half
            done. The same on every rank.

        Raises:
            ClusterError: A rank did not answer in time.
        """
        assert self._unfinished is not None, "a recovery begins with `begin`"
        new, rank = sorted(replacements), dist.get_rank()
        half_done = resume.half_done()
        unfinished, progress = self._unfinished, self._unfinished.progress
        mine, reports = self._compare(new)
        snapshot.here.forget_schedules()
        step_state.here().restored.clear()
        self._to_refuse.clear()
        shards.here.expect_nothing()
        kept_by_peers = peer_state.kept(new) if peers.here.every() else None
        decisions = decide.decide(reports, new, kept_by_peers)
        beyond: set[str] = set()
        for decision in decisions:
            if rank in decision.places:
                unit = mine[decision.places[rank]]
                if decision.action == "roll back":
                    beyond |= _is_beyond_cell(unit, decision)
                self._carry_out(unit, decision, unfinished, new)
        gone_back = _that_count([*unfinished.gone_back.values()])
        if unfinished.copied:
            resume.count_copied()
            step_state.here().last = step_state.here().take()
        else:
            # What is no unit's is as in any notebook: a seed that a failed cell has set stays set.
            mark = next((one.mark for one in reversed(gone_back) if one.mark), None)
            step_state.restore(mark, random=bool(mine))
        back = {one.identity: one.follows is not None for one in gone_back if not one.stood_there}
        kept = next((one.follows for one in reversed(gone_back) if one.follows), None)
        if kept is not None and all(back.values()):
            follow.put_back(kept)
        if any(one.stood_there and one.follows is None for one in gone_back):
            # Its snapshot is of the step itself, and what the loop did to weights then is undone.
            lacking = tuple(sorted({*progress.lacking, *progress.written}))
            progress = replace(progress, lacking=lacking)
        lines, is_half = follow.settle(mine, decisions, progress, unfinished.copied, back)
        return decisions, [*lines, *half_done, *sorted(beyond)], is_half or bool(half_done)

    def _compare(
        self, new: Sequence[int]
    ) -> tuple[list[wrapped_models.Unit], dict[int, Sequence[ModelReport]]]:
        """Exchange reports, and once more where old models stood in the way; as `_exchange`."""
        mine, reports = self._exchange("units")
        if decide.has_unmatched(reports, new):
            # Old models that a cycle keeps, on some of the ranks: all look again without them.
            del mine
            gc.collect()
            mine, reports = self._exchange("units again")
        return mine, reports

    def _carry_out(
        self,
        unit: wrapped_models.Unit,
        decision: Decision,
        unfinished: _Unfinished,
        new: Sequence[int],
    ) -> None:
        """Do to a unit of this rank what was decided; `new` are the replacements."""
        is_moved = False
        match decision.action:
            case "tell":
                step_state.here().restored.update(unit.optimizers)
                return
            case "forbid":
                self._forbid(unit, decision)
                return
            case "leave":
                self._left_alone.update(unit.modules)
                return
            case "copy":
                is_moved = _copy(unit, decision, dist.get_rank())
                if is_moved:
                    unfinished.copied.update(unit.optimizers)
            case "roll back":
                _roll_back(unit, decision, unfinished)
                is_moved = True
            case "refuse":
                self._refuse_or_expect(unit, decision, new)
        unit.settle(decision.parts, decision.steps)
        if is_moved:
            # The step that parted the ranks was the last cell's, also where it was not made.
            step_state.here().count_copied(unit.optimizers)

    def _refuse_or_expect(
        self, unit: wrapped_models.Unit, decision: Decision, new: Sequence[int]
    ) -> None:
        """Refuse a unit: now, or after the clone where its shapes travel to replacements."""
        # Before its first forward FSDP2 has not said which modules are a unit's: nothing
        # there could be refused, so nothing may come without its contents.
        can_come = bool(new and decision.identity and unit.modules and unit.can_be_restored)
        if can_come and self._are_shapes_wanted(unit.optimizers):
            for replacement in sorted(set(new) & set(unit.ranks)):
                peer_state.expect(replacement, unit)
            # After the clone: hooks would travel, too.
            self._to_refuse.append((unit, decision))
        else:
            self._refuse(unit, decision)

    def _exchange(
        self, topic: str
    ) -> tuple[list[wrapped_models.Unit], dict[int, Sequence[ModelReport]]]:
        """Return this rank's units, and what every rank says of its own."""
        snapshot.here.before_any_step()  # others may have been further
        mine = wrapped_models.find()
        for unit in mine:
            if unit.kind == "replicated":
                unit.optimizers = [o for o in unit.optimizers if o not in self._stopped]
        said = decide.to_json(
            [
                unit.report(
                    snapshot.here.held(unit),
                    snapshot.here.turns(unit),
                    is_settled=any(o in self._stopped for o in unit.optimizers),
                    is_told=any(module in self._left_alone for module in unit.modules),
                )
                for unit in mine
            ]
        )
        heard = rendezvous.exchange(topic, said, TIMEOUT_S)
        return mine, {rank: decide.from_json(text) for rank, text in heard.items()}

    def refuse_missing(
        self, decisions: Iterable[Decision], missing: Mapping[str, Sequence[int]]
    ) -> list[Decision]:
        """Refuse units whose objects have not come to all new ranks; return what becomes of all.

        Args:
            decisions: What was decided.
            missing: By identity, the new ranks.
        """
        final = []
        units = {unit.identity: unit for unit in wrapped_models.find()} if missing else {}
        for decision in decisions:
            if decision.identity not in missing:
                final.append(decision)
                continue
            line = (
                f"A part that a peer had kept for {name_ranks(missing[decision.identity])} could "
                "not be given back: what holds its optimizer or model holds something that is lost."
            )
            refused = replace(decision, action="refuse", line=line, given=())
            if decision.identity in units:
                self._refuse(units[decision.identity], refused)
            elif dist.get_rank() in missing[decision.identity]:
                for module in wrapped_models.untrained_cut():  # it has come without its contents
                    disabled.here.refuse(module, _not_whole("This model", refused.line, ""))
            final.append(refused)
        return final

    def _refuse(self, unit: wrapped_models.Unit, decision: Decision) -> None:
        """Let the unit's next forward and step raise, until it has been given a whole state.

        A model of which each rank has the whole may go on, with another optimizer, where all are
        level.
        """
        if unit.is_cut_in_states_only and decision.is_level:
            error = LostStateError(
                f"{unit.name[0].upper()}{unit.name[1:]} cannot step: its states are not whole.",
                why=decision.line,
                do="make it again on every rank; the model itself is whole" + _advice(unit),
            )
            self._stop(unit.optimizers, error)
            return
        error = _not_whole(unit.name, decision.line, _advice(unit))
        optimizers = [ref(optimizer) for optimizer in self._stop(unit.optimizers, error)]

        def allow(module: torch.nn.Module, _keys: object) -> None:
            self.allow_again([module], [o for held in optimizers if (o := held()) is not None])

        for module in unit.modules:
            disabled.here.refuse(module, error)
            module.register_load_state_dict_post_hook(allow)

    def allow_again(
        self, modules: Iterable[torch.nn.Module], optimizers: Iterable[Optimizer]
    ) -> None:
        """Take refusals back, for the state is whole again; harmless where there are none."""
        for module in modules:
            disabled.here.allow(module)
        for optimizer in optimizers:
            if (handle := self._stopped.pop(optimizer, None)) is not None:
                handle.remove()

    def keep_shapes(self, wanted: Callable[[Iterable[Optimizer]], bool]) -> None:
        """Have what is refused travel to new ranks without its contents, where `wanted` says so.

        A checkpoint then has a place on all ranks to be restored to. It is asked of a unit's
        optimizers, and says the same on all ranks.
        """
        self._are_shapes_wanted = wanted

    def refuse_shapes(self, decisions: Iterable[Decision], *, is_new: bool) -> bool:
        """Refuse, on all ranks, what has come to a new one without its contents. After the clone.

        Returns:
            Whether this is a new rank, and a checkpoint can be restored into what has come to it.
        """
        for unit, decision in self._to_refuse:
            self._refuse(unit, decision)
        self._to_refuse.clear()
        if not is_new:
            return False
        has_come = False
        units = {unit.identity: unit for unit in wrapped_models.find()}
        for decision in decisions:
            if decision.action != "refuse" or not decision.identity:
                continue
            if (came := units.get(decision.identity)) is not None:
                self._refuse(came, decision)
                came.settle(decision.parts, decision.steps)
                has_come = True
            else:
                for module in wrapped_models.untrained_cut():  # it has come without its optimizer
                    disabled.here.refuse(module, _not_whole("This model", decision.line, ""))
        return has_come

    def are_refused(
        self, modules: Iterable[torch.nn.Module], optimizers: Iterable[Optimizer]
    ) -> bool:
        """Return whether any of these cannot be used, for its state is not whole."""
        refused = {id(module) for module, _ in disabled.here.refused()}
        parts = (part for module in modules for part in module.modules())
        is_refused = any(id(part) in refused for part in parts)
        return is_refused or any(o in self._stopped for o in optimizers)

    def _forbid(self, unit: wrapped_models.Unit, decision: Decision) -> None:
        """Let what has stepped, and is not on all ranks of the unit, step no more."""
        error = LostStateError(
            f"This optimizer of {unit.name} cannot step any more.",
            why=decision.line,
            do="make it again on every rank; the model itself stays as it is",
        )
        made = dict(zip(unit.parts, unit.steps(), strict=True))
        strange = [
            optimizer
            for optimizer, part in zip(unit.optimizers, unit.parts, strict=False)
            if part not in decision.parts and (made[part] or unit.kind == "sharded")
        ]
        self._stop(strange, error)

    def _stop(self, optimizers: Iterable[Optimizer], error: ClusterError) -> list[Optimizer]:
        stopped = list(optimizers)
        for optimizer in stopped:
            if optimizer not in self._stopped:
                self._stopped[optimizer] = _refuse_steps(optimizer, error)
        return stopped


def _is_beyond_cell(unit: wrapped_models.Unit, decision: Decision) -> set[str]:
    """Return what is to be said where a unit goes back to a step of an earlier cell."""
    before = [step_state.here().before_cell(o) for o in unit.optimizers]
    lost = max((b - s for b, s in zip(before, decision.steps, strict=False)), default=0)
    if lost <= 0:
        return set()
    line = (
        f"Of these steps of {unit.name} an earlier cell had made {lost}. A loop up to an epoch "
        "(while loader.epoch < N) makes them again, a single pass (for batch in loader) does not: "
        "for that, nbdist.restore() a checkpoint, or make them by their own cell (%%distributed "
        "--go-on), and then run this one."
    )
    return {line}


def _roll_back(unit: wrapped_models.Unit, decision: Decision, unfinished: _Unfinished) -> None:
    """Bring a unit back to its snapshot, and note in `unfinished` what the snapshot knows."""
    before = unfinished.gone_back.get(unit.identity)
    stood_there = before is None or before.stood_there
    stood_there &= unit.steps() == decision.steps
    put = snapshot.here.put_back(unit, decision.steps)
    unfinished.copied.difference_update(unit.optimizers)
    unfinished.gone_back[unit.identity] = _GoneBack(
        unit.identity, decision.is_idle, stood_there, *put
    )
    peers.here.forget_after(unit.identity, decision.steps)
    for replacement, _ in decision.given:
        peer_state.expect(replacement, unit)


def _copy(unit: wrapped_models.Unit, decision: Decision, rank: int) -> bool:
    """Take part in a copy; returns whether this rank now stands where another did."""
    if rank == decision.source:
        frame, tensors = model_state.read(unit, buffers=False)
        frame["options"] = model_state.read_options(unit)
        for other in decision.behind:
            send_tensors.send(frame, tensors, other)
    elif rank in decision.behind:
        frame, tensors = send_tensors.receive(decision.source)
        model_state.put_back(unit, frame, tensors, decision.parts)
        return True
    return False


def _not_whole(name: str, why: str, advice: str) -> LostStateError:
    return LostStateError(
        f"{name} cannot be trained on: its state is not whole.",
        why=why,
        do="build it again, or nbdist.restore() a checkpoint into it on every rank" + advice,
    )


def _advice(unit: wrapped_models.Unit) -> str:
    """Return how such a loss is prevented, where it was not."""
    if not unit.can_be_restored:
        return "" if unit.is_alike else "; dp=2 beside pp gives each stage to a second rank, too"
    if peers.here.every():
        return ""
    return "; `%dist start --peer-snapshots 10` keeps each rank's part in another rank's memory"


def _refuse_steps(optimizer: Optimizer, error: ClusterError) -> Any:
    def refuse(_optimizer: object, _args: object, _kwargs: Mapping[str, object]) -> None:
        raise type(error)(error.what, why=error.why, do=error.do)

    return optimizer.register_step_pre_hook(refuse)


here = StateSync()
