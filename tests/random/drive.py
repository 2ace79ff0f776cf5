"""Run a trial in a fresh session, and compare what every rank holds with the shadow after each act.

What may be lost must be said; then the shadow follows what was said. Everything else that differs
is a finding. Main thread, which a trial interrupts.
"""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbdist import Session
from tests.random import cells, sentences, training
from tests.random.calls import Calls, Driven, Lost, Ran
from tests.random.expected import must_fail, within
from tests.random.held import OPTIMIZER_REFUSED, REFUSED, Held
from tests.random.shadow import Shadow
from tests.random.strikes import pid_of
from tests.random.trial import (
    DEADLY,
    NO_FAULT,
    Act,
    Drop,
    Group,
    Idle,
    Keep,
    Make,
    Message,
    Model,
    Push,
    Restart,
    Scale,
    Set,
    Sum,
    Train,
    Trial,
    whole_epochs,
)


@dataclass
class _Group:
    """A group of ranks; `trouble` says why its use may be refused."""

    ranks: tuple[int, ...]
    trouble: str = ""


def drive(trial: Trial, session: Session, folder: Path) -> Driven:
    """Run all acts of a trial in a session that has just begun."""
    driver = Driver(trial.n, session, folder)
    try:
        for act in trial.acts:
            driver.act(act)
        driver.finish()
    except Lost:
        pass
    return driver.driven


class Driver:
    """A trial while it runs."""

    def __init__(self, n: int, session: Session, folder: Path) -> None:
        """Begin with a session of `n` ranks that hold nothing."""
        self.calls = Calls(session, folder)
        self.held = Held(self.calls)
        self._session = session
        self._n = n
        self._groups: dict[str, _Group] = {}
        self._models: dict[str, Model] = {}  # the last of each name
        self._pids = self._pids_now()
        self._is_uneven = False  # ranks do not hold the same models

    @property
    def driven(self) -> Driven:
        """What has come of it so far."""
        return self.calls.driven

    def act(self, act: Act) -> None:
        """Do one act, look at all ranks, and compare."""
        self.calls.begin(act)
        self.held.allowed = {}
        match act:
            case Make():
                self._make(act.models)
            case Train():
                self._train(act)
            case Keep():
                self._keep(act)
            case Drop():
                self._drop(act)
            case Group():
                self._group(act.name, act.ranks)
            case Sum():
                self._sum(act)
            case Message():
                self._message(act)
            case Set():
                self.calls.ran_well(f"{act.name} = {act.factor} * rank")
                self._set(act.name, [act.factor * rank for rank in range(self._n)])
            case Push():
                self._push(act)
            case Idle():
                self._idle([rank for rank in act.ranks if rank < self._n][: self._n - 1])
            case Restart():
                self._restart([rank for rank in act.ranks if rank < self._n])
            case Scale():
                self._scale(act.n)
        self._look()

    def finish(self) -> None:
        """Train whatever still can be, and use each group, with no fault: all must be right."""
        for name in list(self.held.names):
            if self.held.usable(name) is not None:
                self.act(Train((name,), 2))
        for group in (None, *self._groups):
            self.act(Sum(group))

    # -- Models -----------------------------------------------------------------------------------

    def _make(self, models: Sequence[Model]) -> None:
        members = [self._members(model) for model in models]
        self.calls.row.layout = models[0].layout
        self.held.forget(models)
        self.calls.ran_well(cells.make(models, members))
        for model, ranks in zip(models, members, strict=True):
            self._models[model.name] = model
            shadow = Shadow(model, ranks)
            self.held.bind(
                model.name, {rank: shadow if rank in ranks else None for rank in range(self._n)}
            )

    def _members(self, model: Model) -> tuple[int, ...]:
        """Return the ranks that train a model; makes its group where there is none."""
        if model.group is None:
            return tuple(range(self._n))
        group = self._groups.get(model.group)
        if group is None or group.trouble:
            ranks = (0, self._n - 1) if group is None else group.ranks
            self._group(model.group, tuple(sorted({min(r, self._n - 1) for r in ranks})))
        return self._groups[model.group].ranks

    def _ready(self, name: str) -> Shadow | None:
        """Return a model to train, made again where it was refused, or not all ranks hold it."""
        shadow = self.held.common(name)
        if shadow is not None and shadow.trouble == OPTIMIZER_REFUSED:
            self.driven.story.append(f"### the optimizer of {name} again")
            self.calls.ran_well(cells.make_optimizer(shadow.model))
            shadow.renew_optimizer()
            shadow.trouble = ""
        elif (shadow is None or shadow.trouble == REFUSED) and name in self._models:
            model = self._models[name]
            if model.layout == "dp=2 fsdp=2" and self._n != 4:
                model = replace(model, layout="zero3")
            row = self.calls.row
            self.act(Make((model,)))
            self.calls.row = row
            shadow = self.held.common(name)
        return shadow

    def _train(self, act: Train) -> None:
        if act.model is None:
            ready = [self._ready(name) for name in act.names]
            shadows = [shadow for shadow in ready if shadow is not None]
        else:
            self._models[act.model.name] = act.model
            self.held.forget([act.model])
            shadows = [Shadow(act.model, self._members(act.model))]
        if not shadows:
            return
        first = shadows[0]
        shadows = [s for s in shadows if s.members == first.members]
        fault = within(act.fault, first.members, self._n)
        self.calls.row.layout, self.calls.row.fault = first.model.layout, fault.kind
        begins = [s.made for s in shadows]
        steps = act.steps
        if first.model.data == "loader":
            steps = whole_epochs(begins[0] + steps) - begins[0]
        models = [s.model for s in shadows]
        flag = self.calls.flag
        code = cells.train(models, first.members, begins, steps, fault, flag, act.style)
        ran = self.calls.run(code, fault, retry=act.retry)
        attempts = 1 + act.retry
        must_retry = act.again or act.style != "apart" or first.model.data == "loader"
        if ran.error is not None and must_retry and not ran.is_refusal:
            ran = self.calls.call(self._session.retry)
            attempts += 1
        newcomers = self._newcomers()
        ended = training.Ended(
            act, fault, shadows, steps, ran, attempts, newcomers, self._is_uneven
        )
        # Of a model that each attempt makes anew ranks may hold the one of either, or none.
        if act.style != "together" or ran.error is None:
            if act.model is not None:
                self.held.bind(act.model.name, dict.fromkeys(range(self._n), first))
            training.follow(ended, self.calls, self.held)
        training.judge(ended, self.calls, self.held)

    def _keep(self, act: Keep) -> None:
        by_rank = self.held.names.get(act.of)
        if by_rank is None or act.of in self.held.unsure:
            return
        ranks = tuple(r for r in act.ranks if r < self._n and by_rank.get(r) is not None)
        if not ranks:
            return
        self._is_uneven |= len(ranks) < self._n
        self.calls.ran_well(f"if rank in {ranks}: {act.name}, o_{act.name} = {act.of}, o_{act.of}")
        self.held.bind(
            act.name, {r: by_rank.get(r) if r in ranks else None for r in range(self._n)}
        )

    def _drop(self, act: Drop) -> None:
        by_rank = self.held.names.get(act.name)
        if by_rank is None or act.name in self.held.unsure:
            return
        ranks = tuple(r for r in act.ranks if r < self._n and by_rank.get(r) is not None)
        if not ranks:
            return
        self._is_uneven = True
        self.calls.ran_well(cells.drop(act.name, ranks))
        self.held.unbind(act.name, ranks)

    # -- Groups and values ------------------------------------------------------------------------

    def _group(self, name: str, ranks: Sequence[int]) -> None:
        ranks = tuple(r for r in ranks if r < self._n) or (0,)
        self.calls.ran_well(f"{name} = dist.new_group({list(ranks)})")
        self._groups[name] = _Group(ranks)

    def _sum(self, act: Sum) -> None:
        group = self._groups.get(act.group) if act.group else None
        if act.group and group is None:
            return
        everyone = tuple(range(self._n))
        members = group.ranks if group else everyone
        fault = within(act.fault, members, self._n)
        self.calls.row.layout = "group" if group else "all ranks"
        self.calls.row.fault = fault.kind
        ran = self.calls.run(cells.reduce(act.group, members, fault, self.calls.flag), fault)
        fired = self.calls.has_fired()
        if ran.error is None and ran.result is not None:
            total = float(sum(2**rank for rank in members))
            right = [total if rank in members else 2.0**rank for rank in everyone]
            if ran.result.value_list != right and not (fired and fault.kind == "leaves early"):
                self.calls.find("a wrong sum", f"{ran.result.value_list}, not {right}")
            if fired and must_fail(fault) and len(members) > 1:
                self.calls.find("an untold fault", f"{fault} did not fail the cell")
        elif group is not None and group.trouble:
            self.calls.row.outcome = "refused"
        elif fired:
            self.calls.row.outcome = "failed"
        else:
            self.calls.find("an error without a fault", ran.text)
        if fired:
            for cause in sentences.missing_cause(self.calls.text, fault):
                self.calls.find("an untold cause", f"{cause} is not in: {self.calls.text}")
        for text in sentences.false_loss(self.calls.text, set()):
            self.calls.find("a false sentence", text)

    def _message(self, act: Message) -> None:
        if max(act.sender, act.receiver) >= self._n:
            return
        fits = act.sent == act.room
        self.calls.row.fault = "none" if fits else "a message of another size"
        ran = self.calls.run(cells.message(act.sender, act.receiver, act.sent, act.room))
        right = [float(act.sent) if rank == act.receiver else 0.0 for rank in range(self._n)]
        if not fits:
            self.calls.row.outcome = "failed"
            if ran.error is None:
                self.calls.find("an untold fault", f"{act} did not fail the cell")
        elif ran.error is not None or ran.result is None:
            self.calls.find("an error without a fault", ran.text)
        elif ran.result.value_list != right:
            self.calls.find("a wrong value", f"{ran.result.value_list}, not {right}")

    def _push(self, act: Push) -> None:
        pulled: list[Any] = []

        def there_and_back() -> None:
            self._session.push({act.name: act.value})
            pulled.extend(self._session.pull(act.name))

        self._call_well(there_and_back)
        if pulled != [act.value] * self._n:
            self.calls.find("a wrong value", f"pushed {act.value}, pulled {pulled}")
        self._set(act.name, [act.value] * self._n)

    def _set(self, name: str, values: Sequence[int]) -> None:
        self.held.variables[name] = {rank: {value} for rank, value in enumerate(values)}

    # -- Ranks ------------------------------------------------------------------------------------

    def _idle(self, ranks: Sequence[int]) -> None:
        self.calls.row.fault = f"idle, {len(ranks)} killed" if len(ranks) > 1 else "idle, killed"
        for rank in ranks:
            os.kill(pid_of(self._session, rank), signal.SIGKILL)
        deadline = time.monotonic() + 10
        while set(self._session._cluster.dead()) != set(ranks) and time.monotonic() < deadline:
            time.sleep(0.005)
        self.calls.run("pass")  # mends

    def _restart(self, ranks: Sequence[int]) -> None:
        if ranks and len(ranks) < self._n:
            self.calls.row.fault = "restart"
            self._call_well(lambda: self._session.restart(",".join(map(str, ranks))))

    def _scale(self, n: int) -> None:
        if n == self._n:
            return
        self.calls.row.fault = f"scale {'up' if n > self._n else 'down'}"
        if self._call_well(lambda: self._session.scale(n)).error is not None:
            raise Lost
        self.held.leave(range(n, self._n))
        self._n = n
        for shadow in self.held.shadows():
            shadow.members = tuple(range(n))
            if shadow.model.layout != "ddp":
                shadow.trouble = shadow.trouble or "scaled"
        for group in self._groups.values():
            group.trouble = "scaled"
            group.ranks = tuple(r for r in group.ranks if r < n) or (0,)

    def _call_well(self, call: Any) -> Ran:
        """Call the session for what has no reason to fail; keeps the sentences it returns."""
        ran = self.calls.call(call)
        if ran.error is not None:
            self.calls.find("an error without a fault", ran.text)
        said = "\n".join(map(str, ran.result or ()))
        self.calls.text += said
        self.driven.story += [f"# {line}" for line in said.splitlines()]
        return ran

    def _pids_now(self) -> dict[int, int]:
        return {rank: state.pid for rank, state in self._session._cluster.ranks.items()}

    def _newcomers(self) -> set[int]:
        """Return the ranks that have other processes than when all were looked at last."""
        return {rank for rank, pid in self._pids_now().items() if self._pids.get(rank) != pid}

    def _look(self) -> None:
        """Compare what every rank holds with what the shadows allow."""
        names = [name for name in self.held.names if name not in self.held.unsure]
        code = cells.look(names, list(self.held.variables))
        ran = self.calls.run(code, is_told=False)
        if ran.error is not None or ran.result is None:
            self.calls.find("a lost session", ran.text)
            raise Lost
        newcomers = self._newcomers()
        self._pids = self._pids_now()
        fault = self.calls.row.fault
        may_cost = fault in DEADLY or fault.startswith(("idle", "restart", "scale"))
        if newcomers and not may_cost:
            self.calls.find("a process was lost", f"of {sorted(newcomers)}, by {fault}")
        seen = {rank: json.loads(part.value) for rank, part in ran.result.items()}
        self.held.compare(seen, newcomers)
        for group in self._groups.values():
            if set(group.ranks) <= newcomers:
                group.trouble = group.trouble or "all its ranks died"
        if not newcomers and fault == NO_FAULT.kind:
            for text in sentences.false_loss(self.calls.text, set()):
                self.calls.find("a false sentence", text)
