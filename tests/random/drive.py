"""Run a trial in a fresh session, and compare what every rank holds with the shadow after each act.

What may be lost must be said; then the shadow follows what was said. Everything else that differs
is a `Finding`. Main thread, which a trial interrupts.
"""

import contextlib
import io
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbdist
from nbdist import CellResult, Session
from nbdist.errors import Interrupted
from tests.random import cells, sentences
from tests.random.shadow import Shadow, State, is_at, named
from tests.random.strikes import pid_of, strikes
from tests.random.trial import (
    DEADLY,
    NO_FAULT,
    SHARDED,
    Drop,
    Fault,
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

LONGEST_S = 60.0

# Trouble of a model, beside what has become of its ranks.
_REFUSED = "refused"
_OPTIMIZER_REFUSED = "its optimizer was refused"
_TORN = "struck within its step"


@dataclass(frozen=True, slots=True)
class Finding:
    """What must not be: a `kind` of wrong, and what was seen."""

    kind: str
    text: str


@dataclass(slots=True)
class Row:
    """One act of a trial, for the totals: what struck, what it struck, and what came of it."""

    act: str
    fault: str
    layout: str
    outcome: str = "right"
    seconds: float = 0.0


@dataclass(slots=True)
class Ran:
    """What a cell, or a call of the session, came to. `text` is all that was shown of it."""

    result: CellResult | None = None
    error: BaseException | None = None
    text: str = ""
    seconds: float = 0.0

    @property
    def is_refusal(self) -> bool:
        """Whether it says that it uses what is lost, or cannot be used any more."""
        words = ("LostStateError", "PlaceholderError", "ClusterError", "NameError")
        return self.error is not None and any(word in self.text for word in words)


@dataclass
class _Groups:
    ranks: tuple[int, ...]
    trouble: str = ""


class Lost(Exception):
    """The session cannot be used any more: the trial ends."""


@dataclass
class Driven:
    """What a trial came to. `story` is what was run and what was told, for people."""

    findings: list[Finding] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    story: list[str] = field(default_factory=list)


def drive(trial: Trial, session: Session, folder: Path) -> Driven:
    """Run all acts of a trial in a session that has just begun."""
    driver = _Driver(trial, session, folder)
    try:
        for act in trial.acts:
            driver.act(act)
        driver.finish()
    except Lost:
        pass
    return driver.driven


class _Driver:
    def __init__(self, trial: Trial, session: Session, folder: Path) -> None:
        self.driven = Driven()
        self._session = session
        self._folder = folder
        self._n = trial.n
        self._names: dict[str, dict[int, Shadow | None]] = {}  # name -> rank -> what it means
        self._unsure: set[str] = set()  # names whose meaning a failed cell leaves open
        self._void: set[tuple[str, int]] = set()  # names of which a rank holds what is of no use
        self._groups: dict[str, _Groups] = {}
        self._variables: dict[str, dict[int, set[Any]]] = {}
        self._seen: dict[int, str] = {}  # id of a shadow -> what its ranks held last
        self._allowed: dict[int, list[State]] = {}  # id of a shadow -> where it may stand now
        self._pids = self._pids_now()
        self._is_uneven = False  # ranks do not hold the same models
        self._act_count = 0
        self._text = ""
        self._row = Row("", "none", "")

    # -- What is run ------------------------------------------------------------------------------

    def act(self, act: Any) -> None:
        """Do one act, look at all ranks, and compare."""
        self._begin(act)
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
                self._ran_well(f"{act.name} = {act.factor} * rank")
                self._variables[act.name] = {r: {act.factor * r} for r in range(self._n)}
            case Push():
                self._push(act)
            case Idle():
                self._idle(tuple(r for r in act.ranks if r < self._n))
            case Restart():
                self._restart(tuple(r for r in act.ranks if r < self._n))
            case Scale():
                self._scale(act.n)
        self._look()

    def finish(self) -> None:
        """Train whatever still can be, and use each group, with no fault: all must be right."""
        for name, by_rank in list(self._names.items()):
            shadow = self._usable(name, by_rank)
            if shadow is not None:
                self.act(Train((name,), 2))
        for group in (None, *self._groups):
            self.act(Sum(group))

    def _begin(self, act: Any) -> None:
        self._act_count += 1
        self._text = ""
        self._allowed = {}
        fault = getattr(act, "fault", None)
        self._row = Row(type(act).__name__.lower(), fault.kind if fault else "none", "")
        self.driven.rows.append(self._row)
        self.driven.story.append(f"### {act}")

    def _run(
        self, code: str, fault: Fault = NO_FAULT, *, retry: int = 0, is_told: bool = True
    ) -> Ran:
        """Run a cell; once more where a rank had died before it, and it ran nowhere."""
        if is_told:
            self.driven.story.append(code)
        ran = self._call(
            lambda: self._session.run(
                code, retry=retry, track=False, show=True, timeout_s=LONGEST_S
            ),
            fault,
            is_told=is_told,
        )
        if "so this cell ran nowhere" in ran.text:
            return self._run(code, fault, retry=retry, is_told=is_told)
        return ran

    def _call(self, call: Any, fault: Fault = NO_FAULT, *, is_told: bool = True) -> Ran:
        """Call the session while a fault may strike; what is shown and raised is kept."""
        ran, shown, began = Ran(), io.StringIO(), time.monotonic()
        try:
            with contextlib.redirect_stdout(shown), strikes(self._session, fault, self._flag):
                ran.result = call()
        except nbdist.NBDistError as error:
            ran.error = error
        except KeyboardInterrupt as error:
            # One that came when the cell was over is no outcome of it.
            ran.error = error if isinstance(error, Interrupted) or ran.result is None else None
        except Exception as error:
            self._find("a raw exception", f"{type(error).__name__}: {error}")
            ran.error = error
        ran.seconds = time.monotonic() - began
        said = shown.getvalue()
        if ran.error is not None:
            said += f"\n{type(ran.error).__name__}: {ran.error}"
        ran.text = sentences.plain(said)
        self._text += ran.text
        self._row.seconds += ran.seconds
        if ran.text.strip() and (is_told or ran.error is not None):
            self.driven.story.append("\n".join(f"# {line}" for line in ran.text.splitlines()))
        if ran.seconds > LONGEST_S:
            self._find("a hang", f"{ran.seconds:.0f} s")
        for line in sentences.raw(ran.text):
            self._find("a raw traceback", line)
        if not self._session.is_running or self._session.broken:
            self._find("a lost session", ran.text)
            raise Lost
        return ran

    @property
    def _flag(self) -> str:
        return str(self._folder / f"act{self._act_count}")

    def _has_fired(self) -> bool:
        return any(self._folder.glob(f"act{self._act_count}-*"))

    def _ran_well(self, code: str) -> CellResult | None:
        """Run a cell that has no reason to fail."""
        ran = self._run(code)
        if ran.error is not None:
            self._find("an error without a fault", ran.text)
        return ran.result

    # -- Models -----------------------------------------------------------------------------------

    def _make(self, models: Sequence[Model]) -> None:
        members = [self._members(model) for model in models]
        self._row.layout = models[0].layout
        self._forget(models)
        self._ran_well(cells.make(models, members))
        for model, ranks in zip(models, members, strict=True):
            self._made(model, ranks)

    def _made(self, model: Model, members: Sequence[int]) -> Shadow:
        shadow = Shadow(model, members)
        self._names[model.name] = {
            rank: shadow if rank in members else None for rank in range(self._n)
        }
        self._know(model.name)
        return shadow

    def _know(self, name: str) -> None:
        """Begin to compare a name again: all ranks have just bound it."""
        self._unsure.discard(name)
        self._void = {(other, rank) for other, rank in self._void if other != name}

    def _forget(self, models: Sequence[Model]) -> None:
        self._unsure |= {model.name for model in models}

    def _members(self, model: Model) -> tuple[int, ...]:
        if model.group is None:
            return tuple(range(self._n))
        group = self._groups.get(model.group)
        if group is None or group.trouble:
            ranks = (0, self._n - 1) if group is None else group.ranks
            self._group(model.group, tuple(sorted({min(r, self._n - 1) for r in ranks})))
        return self._groups[model.group].ranks

    def _usable(self, name: str, by_rank: Mapping[int, Shadow | None]) -> Shadow | None:
        """Return the model of a name that all who train it hold, and that is in no trouble."""
        shadows = {id(s): s for s in by_rank.values() if s is not None}
        if name in self._unsure or len(shadows) != 1:
            return None
        shadow = next(iter(shadows.values()))
        holds_all = all(by_rank.get(rank) is shadow for rank in shadow.members)
        # Under other names it has no optimizer or data of its own.
        return shadow if holds_all and not shadow.trouble and name == shadow.model.name else None

    def _ready(self, name: str, model: Model | None) -> Shadow | None:
        """Return a model to train, made again where ranks do not hold it together."""
        by_rank = self._names.get(name, {})
        shadows = [s for s in by_rank.values() if s is not None]
        if name not in self._unsure and shadows:
            shadow = shadows[0]
            holds_all = all(by_rank.get(rank) is shadow for rank in shadow.members)
            if holds_all and shadow.trouble == _OPTIMIZER_REFUSED:
                self._act_make_optimizer(shadow)
                return shadow
            if holds_all and shadow.trouble != _REFUSED:
                return shadow
        model = model or (shadows[0].model if shadows else self._last_model.get(name))
        if model is None:
            return None
        self._act_make(model)
        return next(s for s in self._names[name].values() if s is not None)

    @property
    def _last_model(self) -> dict[str, Model]:
        return self.__dict__.setdefault("_models_by_name", {})

    def _act_make(self, model: Model) -> None:
        """Make a model again, as an act of its own."""
        row, text, allowed = self._row, self._text, self._allowed
        layout_fits = model.layout != "dp=2 fsdp=2" or self._n == 4
        if not layout_fits:
            model = Model(
                **{k: getattr(model, k) for k in model.__slots__ if k != "layout"}, layout="zero3"
            )
        self.act(Make((model,)))
        self._row, self._text, self._allowed = row, text, allowed

    def _act_make_optimizer(self, shadow: Shadow) -> None:
        """Make an optimizer again, as its refusal has told."""
        self.driven.story.append(f"### the optimizer of {shadow.model.name} again")
        self._ran_well(cells.make_optimizer(shadow.model))
        shadow.renew_optimizer()
        shadow.trouble = ""

    def _train(self, act: Train) -> None:
        if act.model is not None:
            self._last_model[act.names[0]] = act.model
        if act.style == "apart":
            ready = [self._ready(name, None) for name in act.names]
            shadows = [shadow for shadow in ready if shadow is not None]
            if len(shadows) < len(act.names):
                return
        else:
            assert act.model is not None
            self._forget([act.model])
            shadows = [Shadow(act.model, self._members(act.model))]
        first = shadows[0]
        if any(s.members != first.members for s in shadows):
            shadows = [first]
        self._row.layout = first.model.layout
        fault = _within(act.fault, first.members, self._n)
        self._row.fault = fault.kind
        begins = [s.made for s in shadows]
        steps = act.steps
        if first.model.data == "loader":
            steps = whole_epochs(begins[0] + steps) - begins[0]
        code = cells.train(
            [s.model for s in shadows], first.members, begins, steps, fault, self._flag, act.style
        )
        ran = self._run(code, fault, retry=act.retry)
        attempts = 1 if ran.error is None and not self._has_fired() else 1 + act.retry
        first_text = ran.text
        must_retry = act.again or act.style != "apart" or first.model.data == "loader"
        if ran.error is not None and must_retry and not ran.is_refusal:
            ran = self._call(self._session.retry)
            attempts += 1
        if act.style != "apart":
            assert act.model is not None
            if ran.error is not None and act.style == "together":
                # Ranks may hold the one of the first attempt or of the second, or none.
                self._row.outcome = "failed"
                self._judge_failure(act, fault, shadows, ran, first_text)
                return
            self._names[act.model.name] = dict.fromkeys(range(self._n), first)
            self._know(act.model.name)
        self._follow(act, fault, shadows, ran, steps, attempts)
        self._judge_failure(act, fault, shadows, ran, first_text)

    def _follow(
        self,
        act: Train,
        fault: Fault,
        shadows: Sequence[Shadow],
        ran: Ran,
        steps: int,
        attempts: int,
    ) -> None:
        """Note where the shadows of a training may stand after it, and check what was said."""
        fired = self._has_fired() and fault.kind != "SIGSTOP, SIGCONT"
        apart_at: set[int] = set()
        places: set[int] = set()
        for shadow in shadows:
            begin = shadow.made
            states = shadow.train(steps)
            lost = _possible(fault, states, is_first=shadow is shadows[0]) if fired else []
            places |= {state.made for state in lost}
            apart_at |= {s.by_optimizer for s in _possible_apart(fault, states, shadow, shadows)}
            if shadow.model.layout in SHARDED | {"zero1", "DDP and ZeRO"} and fired:
                lost = lost + [s for s in shadow.history.values() if s.made < lost[0].made]
            if ran.error is None:
                allowed = [states[-1]]
                if fired and shadow.model.data == "index" and act.style == "apart":
                    for state in lost:
                        shadow.put(state)
                        allowed.append(shadow.train(steps, begin)[-1])
                        shadow.put(states[-1])
            else:
                allowed = lost or states[:1]
                if attempts > 1:
                    allowed = allowed + states
            self._allowed[id(shadow)] = allowed
            shadow.history |= {state.made: state for state in states}
        for text in sentences.false_loss(self._text, apart_at if fired else set()):
            self._find("a false sentence", text)
        for text in sentences.false_start_over(self._text, is_made=act.style == "together"):
            self._find("a false sentence", text)
        if shadows[0].model.data == "loader":
            for text in sentences.false_place(self._text, places):
                self._find("a false sentence", text)

    def _judge_failure(
        self, act: Train, fault: Fault, shadows: Sequence[Shadow], ran: Ran, first_text: str
    ) -> None:
        """Say whether a training rightly ended as it did."""
        fired = self._has_fired()
        newcomers = self._newcomers_now()
        split = any(
            (s.model.layout in SHARDED or s.is_split) and newcomers & set(s.members)
            for s in shadows
        )
        is_lost = any(s.trouble for s in shadows) or (fired and split)
        told = first_text + self._text
        is_retried = act.retry > 0 or act.again or shadows[0].model.data == "loader"
        is_retried |= act.style != "apart"
        if fired:
            for cause in sentences.missing_cause(told, fault):
                self._find("an untold cause", f"{cause} is not in: {told}")
        if ran.error is None:
            self._row.outcome = "went on" if fired else "right"
            if any(s.trouble == _TORN for s in shadows):
                self._find("wrong weights", "a model was trained that a fault has torn")
            if fired and _must_fail(fault) and not is_retried:
                self._find("an untold fault", f"{fault} did not fail the cell")
            return
        self._row.outcome = "failed"
        if ran.is_refusal or "uses what was lost" in ran.text:
            self._row.outcome = "refused"
            no_snapshot = "no snapshot is common" in told
            gone = any(set(s.members) <= newcomers for s in shadows)
            if not (is_lost or self._is_uneven or no_snapshot or gone):
                self._find("refused, though nothing was lost", ran.text)
            is_model_whole = "the model itself" in ran.text and len(shadows) == 1
            for shadow in shadows:
                if "the model itself is whole" in ran.text and shadow.trouble == _TORN:
                    self._find("a false sentence", "the model itself is whole")
                # A loader or a schedule would begin elsewhere than the new optimizer.
                can_go_on = is_model_whole and shadow.model.data == "index"
                shadow.trouble = _OPTIMIZER_REFUSED if can_go_on else _REFUSED
            return
        if not fired:
            self._find("an error without a fault", ran.text)
            self._forget([shadow.model for shadow in shadows])
        elif is_retried and not isinstance(ran.error, KeyboardInterrupt) and not is_lost:
            late = fault.kind in ("killed from outside", "second in the repair")
            if not (late and act.retry == 0):
                self._find("a retry that does not go on", ran.text)
                self._forget([shadow.model for shadow in shadows])

    def _keep(self, act: Keep) -> None:
        by_rank = self._names.get(act.of)
        if by_rank is None or act.of in self._unsure:
            return
        ranks = tuple(r for r in act.ranks if r < self._n and by_rank.get(r) is not None)
        if not ranks:
            return
        self._is_uneven |= len(ranks) < self._n
        self._ran_well(
            f"if rank in {ranks}: {act.name}, o_{act.name} = {act.of}, o_{act.of}"
            if ranks
            else "pass"
        )
        self._names[act.name] = {r: by_rank.get(r) if r in ranks else None for r in range(self._n)}
        self._know(act.name)

    def _drop(self, act: Drop) -> None:
        by_rank = self._names.get(act.name)
        if by_rank is None or act.name in self._unsure:
            return
        ranks = tuple(r for r in act.ranks if r < self._n and by_rank.get(r) is not None)
        shadow = next((s for s in by_rank.values() if s is not None), None)
        if not ranks or shadow is None:
            return
        self._last_model[act.name] = shadow.model
        self._is_uneven = True
        # Whatever else holds it: the layout, the loop's last output.
        self._ran_well(
            f"if rank in {ranks}:\n"
            f"    for name in ('{act.name}', 'o_{act.name}', 'l_{act.name}', 'p_{act.name}', "
            f"'d_{act.name}', 'out'): globals().pop(name, None)"
        )
        for rank in ranks:
            by_rank[rank] = None
            self._void.discard((act.name, rank))

    # -- Groups, ranks, values --------------------------------------------------------------------

    def _group(self, name: str, ranks: tuple[int, ...]) -> None:
        ranks = tuple(r for r in ranks if r < self._n) or (0,)
        self._ran_well(f"{name} = dist.new_group({list(ranks)})")
        self._groups[name] = _Groups(ranks)

    def _sum(self, act: Sum) -> None:
        group = self._groups.get(act.group) if act.group else None
        if act.group and group is None:
            return
        everyone = tuple(range(self._n))
        members = group.ranks if group else everyone
        fault = _within(act.fault, members, self._n)
        self._row.layout = "group" if group else "all ranks"
        self._row.fault = fault.kind
        ran = self._run(cells.reduce(act.group, members, fault, self._flag), fault)
        fired = self._has_fired()
        is_alone = len(members) == 1
        if ran.error is None and ran.result is not None:
            total = float(sum(2**rank for rank in members))
            right = [total if rank in members else 2.0**rank for rank in everyone]
            if ran.result.value_list != right and not (fired and fault.kind == "leaves early"):
                self._find("a wrong sum", f"{ran.result.value_list}, not {right}")
            if fired and _must_fail(fault) and not is_alone:
                self._find("an untold fault", f"{fault} did not fail the cell")
        elif not fired and not (group and group.trouble):
            self._find("an error without a fault", ran.text)
        elif group and group.trouble:
            self._row.outcome = "refused"
        else:
            self._row.outcome = "failed"
        if fired:
            for cause in sentences.missing_cause(self._text, fault):
                self._find("an untold cause", f"{cause} is not in: {self._text}")
        for text in sentences.false_loss(self._text, set()):
            self._find("a false sentence", text)

    def _message(self, act: Message) -> None:
        if max(act.sender, act.receiver) >= self._n:
            return
        fits = act.sent == act.room
        self._row.fault = "none" if fits else "a message of another size"
        ran = self._run(cells.message(act.sender, act.receiver, act.sent, act.room))
        right = [float(act.sent) if rank == act.receiver else 0.0 for rank in range(self._n)]
        if not fits:
            self._row.outcome = "failed"
            if ran.error is None:
                self._find("an untold fault", f"{act} did not fail the cell")
        elif ran.error is not None or ran.result is None:
            self._find("an error without a fault", ran.text)
        elif ran.result.value_list != right:
            self._find("a wrong sum", f"{ran.result.value_list}, not {right}")

    def _push(self, act: Push) -> None:
        pulled: list[Any] = []

        def there_and_back() -> None:
            self._session.push({act.name: act.value})
            pulled.extend(self._session.pull(act.name))

        ran = self._call(there_and_back)
        if ran.error is not None:
            self._find("an error without a fault", ran.text)
        elif pulled != [act.value] * self._n:
            self._find("a wrong value", f"pushed {act.value}, pulled {pulled}")
        self._variables[act.name] = {r: {act.value} for r in range(self._n)}

    def _idle(self, ranks: tuple[int, ...]) -> None:
        if len(ranks) >= self._n:
            ranks = ranks[: self._n - 1]
        self._row.fault = f"idle, {len(ranks)} killed" if len(ranks) > 1 else "idle, killed"
        for rank in ranks:
            os.kill(pid_of(self._session, rank), signal.SIGKILL)
        deadline = time.monotonic() + 10
        while set(self._session._cluster.dead()) != set(ranks) and time.monotonic() < deadline:
            time.sleep(0.005)
        self._run("pass")  # mends

    def _restart(self, ranks: tuple[int, ...]) -> None:
        if not ranks or len(ranks) >= self._n:
            return
        self._row.fault = "restart"
        ran = self._call(lambda: self._session.restart(",".join(map(str, ranks))))
        if ran.error is not None:
            self._find("an error without a fault", ran.text)
        self._said(ran)

    def _said(self, ran: Ran) -> None:
        """Keep the sentences that a call returned."""
        said = "\n".join(map(str, ran.result or ()))
        self._text += said
        self.driven.story.append(said)

    def _scale(self, n: int) -> None:
        if n == self._n:
            return
        self._row.fault = f"scale {'up' if n > self._n else 'down'}"
        ran = self._call(lambda: self._session.scale(n))
        if ran.error is not None:
            self._find("an error without a fault", ran.text)
            raise Lost
        self._said(ran)
        self._n = n
        for by_rank in self._names.values():
            for rank in [r for r in by_rank if r >= n]:
                del by_rank[rank]
            for shadow in by_rank.values():
                if shadow is None:
                    continue
                shadow.members = tuple(range(n))
                if shadow.model.layout != "ddp":
                    shadow.trouble = "scaled"
        for variable in self._variables.values():
            for rank in [r for r in variable if r >= n]:
                del variable[rank]
        for group in self._groups.values():
            group.trouble = "scaled"
            group.ranks = tuple(r for r in group.ranks if r < n) or (0,)

    # -- What ranks hold --------------------------------------------------------------------------

    def _pids_now(self) -> dict[int, int]:
        return {rank: state.pid for rank, state in self._session._cluster.ranks.items()}

    def _newcomers_now(self) -> set[int]:
        return {rank for rank, pid in self._pids_now().items() if self._pids.get(rank) != pid}

    def _may_cost_processes(self) -> bool:
        fault = self._row.fault
        return fault in DEADLY or fault.startswith(("idle", "restart", "scale"))

    def _look(self) -> None:
        """Compare what every rank holds with what the shadows allow."""
        names = [name for name in self._names if name not in self._unsure]
        ran = self._run(cells.look(names, list(self._variables)), is_told=False)
        if ran.error is not None or ran.result is None:
            self._find("a lost session", ran.text)
            raise Lost
        held = {rank: json.loads(part.value) for rank, part in ran.result.items()}
        newcomers = self._newcomers_now()
        self._pids = self._pids_now()
        if newcomers and not self._may_cost_processes():
            self._find("a process was lost", f"of {sorted(newcomers)}, by {self._row.fault}")
        living = [rank for rank in held if rank not in newcomers]
        self._lose(newcomers)
        for name in names:
            self._compare(name, {rank: held[rank][name] for rank in held}, living)
        self._settle(names, held, living)
        for name, allowed in self._variables.items():
            for rank in living:
                if held[rank][name] not in allowed[rank]:
                    what = f"{name} of rank {rank} is {held[rank][name]}, not {allowed[rank]}"
                    self._find("a wrong value", what)
            for rank in newcomers:
                values = set().union(*(allowed[r] for r in living)) if living else {"absent"}
                if held[rank][name] not in values:
                    what = f"{name} of the new rank {rank} is {held[rank][name]}, not of {values}"
                    self._find("a wrong value", what)
                allowed[rank] = {held[rank][name]}
        if not living:
            self._variables.clear()
        if not (newcomers or self._has_fired()):
            for text in sentences.false_loss(self._text, set()):
                self._find("a false sentence", text)

    def _lose(self, newcomers: set[int]) -> None:
        """Note what went with ranks that were replaced."""
        for shadow in self._shadows():
            gone = newcomers & set(shadow.members)
            if gone and (shadow.model.layout in SHARDED or shadow.is_split):
                shadow.trouble = shadow.trouble or "a rank that held a part of it died"
            elif gone and gone >= set(shadow.members):
                shadow.trouble = "all its ranks died"
        for group in self._groups.values():
            if set(group.ranks) <= newcomers:
                group.trouble = group.trouble or "all its ranks died"

    def _compare(self, name: str, held: Mapping[int, Any], living: Sequence[int]) -> None:
        """Check that living ranks have kept what a name means, and see what newcomers have."""
        by_rank = self._names[name]
        for rank in living:
            if (name, rank) in self._void:
                continue
            if by_rank.get(rank) is None and held[rank] != "absent":
                self._find("a wrong value", f"{name} was not on rank {rank}, and is now")
            if by_rank.get(rank) is not None and isinstance(held[rank], str):
                self._find("a lost variable", f"{name} of rank {rank} is {held[rank]}")
                by_rank[rank] = None
        meant = {id(s): s for r in living if (s := by_rank.get(r)) is not None}
        for rank in sorted(set(held) - set(living)):
            by_rank[rank] = None
            if held[rank] != "absent":
                self._void.add((name, rank))
            if not isinstance(held[rank], str):
                fits = [s for s in meant.values() if self._fits(s, held[rank])]
                by_rank[rank] = fits[0] if fits else None
                if fits:
                    self._void.discard((name, rank))
                is_part = any(s.model.layout in SHARDED for s in meant.values())
                if not fits and not is_part and not self._is_torn_now(meant.values()):
                    other = self._whose(held[rank])
                    what = f"{name} of the new rank {rank} is no living rank's {name}{other}"
                    self._find("a wrong model", what)
                continue
            for shadow in meant.values():
                is_whole = not (shadow.model.layout in SHARDED or shadow.is_split)
                if is_whole and rank in shadow.members and not self._is_named(rank, name):
                    what = f"{name} of the new rank {rank} is {held[rank]}, and nothing says so"
                    self._find("silently lost", what)

    def _is_torn_now(self, shadows: Iterable[Shadow]) -> bool:
        return any(s.is_split and id(s) in self._allowed or s.trouble == _TORN for s in shadows)

    def _is_named(self, rank: int, name: str) -> bool:
        return f"Not cloned to rank {rank}" in self._text and name in self._text

    def _fits(self, shadow: Shadow, seen: Sequence[Any]) -> bool:
        states = self._allowed.get(id(shadow)) or [shadow.state()]
        return any(is_at(state, seen) for state in states)

    def _settle(
        self, names: Sequence[str], held: Mapping[int, Mapping[str, Any]], living: Sequence[int]
    ) -> None:
        """Find where each shadow stands now: one state for all ranks that hold it."""
        for shadow in self._shadows():
            seen = {
                (name, rank): held[rank][name]
                for name in names
                for rank, meant in self._names[name].items()
                if meant is shadow and rank in held and not isinstance(held[rank][name], str)
            }
            if not seen:
                continue
            if shadow.trouble == _TORN or (shadow.trouble and shadow.model.layout in SHARDED):
                continue
            allowed = self._allowed.get(id(shadow), [shadow.state()])
            state = next((s for s in allowed if all(is_at(s, v) for v in seen.values())), None)
            texts = {json.dumps(value) for value in seen.values()}
            if state is None:
                if "in the midst of an optimizer step" in self._text:
                    self._unsure.add(shadow.model.name)
                    continue
                if shadow.is_split and shadow.trouble and id(shadow) in self._allowed:
                    # Killed within its step, of which each rank makes a part: it must be refused.
                    shadow.trouble = _TORN
                    continue
                self._find("wrong weights", self._describe(shadow, allowed, seen))
                self._unsure |= {name for name, _ in seen}
                continue
            if shadow.model.layout not in SHARDED and len(texts) > 1:
                self._find("replicas differ in bits", f"{shadow.model.name}: {sorted(seen)}")
            if id(shadow) not in self._allowed and shadow.model.layout not in SHARDED:
                before = self._seen.get(id(shadow))
                if before is not None and before not in texts:
                    self._find("changed though untouched", f"{shadow.model.name}: {sorted(seen)}")
            self._seen[id(shadow)] = min(texts)
            if state.made != shadow.made or id(shadow) in self._allowed:
                shadow.put(state)

    def _shadows(self) -> list[Shadow]:
        found = {
            id(s): s
            for name, by_rank in self._names.items()
            if name not in self._unsure
            for s in by_rank.values()
            if s is not None
        }
        return list(found.values())

    def _describe(
        self, shadow: Shadow, allowed: Sequence[State], seen: Mapping[tuple[str, int], Any]
    ) -> str:
        lines = [f"{shadow.model.name} should be at step {[s.made for s in allowed]}:"]
        for (name, rank), value in seen.items():
            at = [s.made for s in allowed if is_at(s, value)]
            where = f"at step {at[0]}" if at else f"something else{self._whose(value)}"
            lines.append(f"{name} of rank {rank} is {where}")
        return " ".join(lines)

    def _whose(self, value: Sequence[Any]) -> str:
        states = {s.model.name: s for s in self._shadows()}
        whose = named(states, value)
        return f" ({whose})" if whose else ""

    def _find(self, kind: str, text: str) -> None:
        self._row.outcome = "wrong"
        self.driven.findings.append(Finding(kind, text))
        self.driven.story.append(f"#!! {kind}: {text}")


def _within(fault: Fault, members: Sequence[int], n: int) -> Fault:
    """Return the fault on ranks that there are; none, where all would be struck dead."""
    ranks = tuple(rank for rank in fault.ranks if rank in members)
    if fault.kind == "none" or not ranks:
        return NO_FAULT
    second = fault.second if fault.second is not None and fault.second < n else None
    if fault.kind == "second in the repair" and second is None:
        return NO_FAULT
    if fault.kind in DEADLY and len(ranks) >= n:
        return NO_FAULT
    return Fault(fault.kind, ranks, fault.site, fault.step, second, fault.delay_s)


def _must_fail(fault: Fault) -> bool:
    """Return whether a cell in which it strikes cannot end well the first time."""
    return fault.kind not in (
        "SIGSTOP, SIGCONT",
        "killed from outside",
        "interrupt",
        "leaves early",
        "mismatch",
    )


_BOUNDS = ("killed from outside", "interrupt", "interrupt a hang")


def _possible(fault: Fault, states: Sequence[State], *, is_first: bool) -> list[State]:
    """Return where ranks may stand together after a fault, of the states before each step."""
    if fault.kind in _BOUNDS:
        return list(states[fault.step :]) if is_first else list(states[max(0, fault.step - 1) :])
    if not is_first:
        return list(states[max(0, fault.step - 1) : fault.step + 2])
    if fault.site in ("before step", "after step"):
        return list(states[fault.step : fault.step + 2])
    return [states[fault.step]]


def _possible_apart(
    fault: Fault, states: Sequence[State], shadow: Shadow, shadows: Sequence[Shadow]
) -> list[State]:
    """Return the states that one rank may have had alone: which another can have lost."""
    possible = _possible(fault, states, is_first=shadow is shadows[0])
    return possible[1:] if len(possible) > 1 else []
