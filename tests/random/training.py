"""Judge a training that a fault may have struck: where its models may stand, and what was said."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tests.random import sentences
from tests.random.acts import Fault, Train
from tests.random.calls import Calls, Ran
from tests.random.expected import must_fail, possible, possible_apart
from tests.random.held import OPTIMIZER_REFUSED, REFUSED, Held
from tests.random.shadow import Shadow, State


@dataclass(frozen=True, slots=True)
class Ended:
    """How a training ended.

    Attributes:
        act: What was asked for.
        fault: What was to strike.
        shadows: The models that were trained.
        steps: How many each was to make.
        ran: The last attempt.
        attempts: How many there were at most.
        replacements: Ranks with new processes since it began.
        is_uneven: Whether ranks hold different models, which may be refused then.
    """

    act: Train
    fault: Fault
    shadows: Sequence[Shadow]
    steps: int
    ran: Ran
    attempts: int
    replacements: Collection[int]
    is_uneven: bool

    @property
    def is_retried(self) -> bool:
        """Whether its cell was run again when it failed."""
        act, data = self.act, self.shadows[0].model.data
        return act.retry > 0 or act.again != "" or data == "loader" or act.style != "apart"


def follow(ended: Ended, calls: Calls, held: Held) -> None:
    """Note where the models may stand after a training, and check what was said of it."""
    fault, act = ended.fault, ended.act
    if ended.shadows[0].model.spread.share != "rank" and "backward" in fault.site:
        # A backward may need no peer of tp: then some ranks make the step without those struck.
        fault = replace(fault, site="before step")
    fired = calls.has_fired() and fault.kind != "SIGSTOP, SIGCONT"
    apart_at: set[int] = set()
    places: set[int] = set()
    for shadow in ended.shadows:
        is_first = shadow is ended.shadows[0]
        begin = shadow.made
        shadow.seed(act.noise)
        states = shadow.train(ended.steps)
        lost = possible(fault, states, is_first=is_first) if fired else []
        apart = possible_apart(fault, states, is_first=is_first)
        apart_at |= {state.by_optimizer for state in apart}
        if fired and (shadow.is_sharded or shadow.is_split):
            # A snapshot: what is said of it is held against where it stands.
            lost = lost + [s for s in shadow.history.values() if s.made < lost[0].made]
            back = sentences.rolled_back_to(calls.text)
            lost = [s for s in lost if s.by_optimizer in back] or lost
        places |= {state.made for state in lost}
        again: list[list[State]] = []
        if fired and ended.attempts > 1 and shadow.model.data == "index" and act.style == "apart":
            # Such a loop begins again where it did, with the model that it has come to.
            for state in lost:
                shadow.put(state)
                again.append(shadow.train(ended.steps, begin))
            shadow.put(states[-1])
        if ended.ran.error is None:
            allowed = [states[-1], *(made[-1] for made in again)]
        else:
            allowed = [*(lost or states[:1]), *(state for made in again for state in made)]
            if ended.attempts > 1:
                allowed += states
            if any(other.trouble for other in ended.shadows):
                allowed += states[:2]  # of two models one is refused where the other has stepped
        held.allowed[id(shadow)] = allowed
        shadow.history |= {state.made: state for state in states}
    for text in sentences.false_loss(calls.text, apart_at if fired else set()):
        calls.find("a false sentence", text)
    for text in sentences.false_start_over(calls.text, is_made=act.style == "together"):
        calls.find("a false sentence", text)
    if ended.shadows[0].model.data == "loader":
        for text in sentences.false_place(calls.text, places):
            calls.find("a false sentence", text)


def judge(ended: Ended, calls: Calls, held: Held) -> None:
    """Say whether a training rightly ended as it did."""
    fired = calls.has_fired()
    if fired:
        for cause in sentences.missing_cause(calls.text, ended.fault):
            calls.find("an untold cause", f"{cause} is not in: {calls.text}")
    ran = ended.ran
    if ran.error is None:
        calls.row.outcome = "went on" if fired else "right"
        if any(shadow.is_torn for shadow in ended.shadows):
            calls.find("wrong weights", "a model was trained that a fault has torn")
        if fired and must_fail(ended.fault) and not ended.is_retried:
            calls.find("an untold fault", f"{ended.fault} did not fail the cell")
        return
    if ran.is_refusal or "uses state that was lost" in ran.text:
        _judge_refusal(ended, calls, held, fired=fired)
        return
    calls.row.outcome = "failed"
    models = [shadow.model for shadow in ended.shadows]
    if not fired:
        calls.find("an error without a fault", ran.text)
        held.forget(models)
    elif ended.is_retried and not isinstance(ran.error, KeyboardInterrupt):
        # A death after the cell is found by the next one.
        is_late = ended.fault.kind in ("killed from outside", "second in the repair")
        if not _has_lost(ended) and not (is_late and ended.act.retry == 0):
            calls.find("a retry that does not go on", ran.text)
            held.forget(models)


def _judge_refusal(ended: Ended, calls: Calls, held: Held, *, fired: bool) -> None:
    calls.row.outcome = "refused"
    told = ended.ran.text
    has_no_snapshot = "no snapshot is common" in calls.text
    gone = any(set(s.members) <= set(ended.replacements) for s in ended.shadows)
    was_lost = any(s.trouble for s in ended.shadows) or (fired and _has_lost(ended))
    names = [s.model.name for s in ended.shadows]
    was_lost |= any(held.is_named(rank, name) for rank in ended.replacements for name in names)
    if not (was_lost or ended.is_uneven or has_no_snapshot or gone):
        calls.find("refused, though nothing was lost", told)
    is_model_whole = "the model itself" in told and len(ended.shadows) == 1
    for shadow in ended.shadows:
        if "the model itself is whole" in told and shadow.is_torn:
            calls.find("a false sentence", "the model itself is whole")
        # A loader or a schedule would begin elsewhere than the new optimizer.
        can_go_on = is_model_whole and shadow.model.data == "index" and not shadow.is_torn
        shadow.trouble = OPTIMIZER_REFUSED if can_go_on else REFUSED


def _has_lost(ended: Ended) -> bool:
    """Return whether a part went with a rank of which there is no other."""
    return any(
        shadow.trouble
        or (
            (shadow.is_sharded or shadow.is_split) and set(ended.replacements) & set(shadow.members)
        )
        for shadow in ended.shadows
    )
