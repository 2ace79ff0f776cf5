"""Decide whether what is expected of a training holds: pure, on plain values.

Each function returns a line that says what was found, or raises ExpectationError with the numbers.
"""

import math
from collections.abc import Mapping, Sequence

from nbdist.client.expect.assertion import Comparison
from nbdist.client.metrics.analysis.values import Straggler
from nbdist.client.metrics.usual_step import RunFigures, StepTime
from nbdist.shared.errors import ExpectationError
from nbdist.shared.text import counted, milliseconds, name_bytes, name_ranks

HOLDS = "holds"
"""Stands in a line that says what was found, between the assertion and what was found."""

_MOST_STARVED = 0.5  # of the steps' time: twice as long is never the machine's fault


def found(text: str, what: str) -> str:
    """Return the line of an assertion that holds."""
    return f"{text} {HOLDS}: {what}."


def judge_comparison(
    asked: Comparison, values: Mapping[str, Sequence[object]], said: str, do: str = ""
) -> str:
    """Judge a comparison.

    Args:
        asked: What is compared.
        values: Of each name a value, or one of each rank: then it must hold on all of them.
        said: What the values are, in words.
        do: What to type where it does not hold.
    """
    ranks = max(map(len, values.values()))
    each = [{name: of[rank % len(of)] for name, of in values.items()} for rank in range(ranks)]
    broken = [rank for rank, mine in enumerate(each) if not asked.holds(mine)]
    if not broken:
        return found(asked.text, said)
    where = "" if ranks == 1 else f" on {name_ranks(broken)}"
    is_nan = any(value != value for of in values.values() for value in of)
    raise ExpectationError(
        f"{asked.text} does not hold{where}: {said}.",
        why="a comparison with NaN, which is no number, never holds" if is_nan else "",
        do=do,
    )


def judge_parity(text: str, *, ok: bool, proof: str) -> str:
    """Judge a proof by its text, of which the first line tells the result."""
    first, _, rest = proof.partition("\n")
    if ok:
        return found(text, first)
    raise ExpectationError(
        f"{text} does not hold: {first}.",
        why=rest.strip(),
        do="what lies between model, layout and loop changes what is trained: begin with the "
        "tensor that differs first",
    )


def judge_alarms(
    text: str, alarms: Sequence[str], verdicts: Sequence[Straggler], cut_off: str = ""
) -> str:
    """Judge what the session reports of a training.

    A rank that has no core is a fact about the machine, and no fault of the training. `cut_off`
    says how a training ended that did not finish, as in "failed after 3 steps".
    """
    starved = [v for v in verdicts if "starved" in (v.cause, v.within)]
    ended = [f"The run {cut_off}."] if cut_off else []
    wrong = [*ended, *alarms, *(v.sentence for v in verdicts if v not in starved)]
    if not wrong:
        besides = "".join(f" ({v.sentence})" for v in starved[:1])
        return found(text, f"nothing was found in the training{besides}")
    raise ExpectationError(
        f"{text} does not hold: {counted(len(wrong), 'alarm')}.",
        why=" ".join(wrong),
        do="%dist board shows the training",
    )


def judge_collectives(text: str, now: RunFigures, other: RunFigures, whose: str) -> str:
    """Judge whether the usual step launches what that of another run does."""
    said = _kinds(now.kinds)
    if now.kinds != other.kinds:
        rank = next((i for i, k in enumerate(now.kinds) if k != other.kinds[i]), 0)
        raise ExpectationError(
            f"{text} does not hold: a step makes {_kinds(now.kinds, rank)}, "
            f"and in {whose} it made {_kinds(other.kinds, rank)}.",
            do="%dist board collectives shows each with the line that launches it; if the change "
            "is meant: pytest --nbdist --nbdist-baseline",
        )
    if now.steps == other.steps and now.in_all != other.in_all:
        raise ExpectationError(
            f"{text} does not hold: {counted(now.steps, 'step')} made "
            f"{counted(max(now.in_all), 'collective')} in all, and in {whose} "
            f"{max(other.in_all):,}.",
            why=f"the usual step is the same, {said}: some steps make others beside.",
            do="%dist board collectives shows each with the line that launches it",
        )
    return found(text, f"{said} a step, as in {whose}; what lies outside the steps is not counted")


def _kinds(kinds: Sequence[Mapping[str, int]], rank: int = 0) -> str:
    """Return in words what one rank launches."""
    if not kinds or not kinds[rank]:
        return "no collective"
    return ", ".join(f"{count} {kind}" for kind, count in kinds[rank].items())


def judge_bytes(text: str, now: float, other: float, share: float, whose: str) -> str:
    """Judge whether as many bytes are on the wire a step, but for a share."""
    change = abs(now - other) / other if other else (0.0 if now == other else math.inf)
    what = f"{name_bytes(now)} a step on the wire"
    if change <= share:
        return found(text, f"{what}, {name_bytes(other)} in {whose}")
    by = f"{100 * (now / other - 1):+.3g} %" if other else "from nothing"
    raise ExpectationError(
        f"{text} does not hold: {what}, and {name_bytes(other)} in {whose} ({by}).",
        why="a larger model, another dtype, or a collective more or less",
        do="%dist board collectives shows who sends what; layout.explain() what a layout must send",
    )


def judge_step(text: str, now: StepTime, other: StepTime, factor: float, whose: str) -> str:
    """Judge whether a step takes no longer than `factor` times another run's, beyond the noise.

    What steps differ by in both runs, and what ranks waited for a core in this one, is allowed on
    top: of a machine that does other work beside, a small change cannot be told.
    """
    starved = min(now.starved, _MOST_STARVED)
    crowded = starved / (1 - starved)
    allowed = factor * other.ms * (1 + now.noise + other.noise + crowded)
    what = f"{milliseconds(now.ms)} ms a step, {milliseconds(other.ms)} ms in {whose}"
    limit = f"limit {milliseconds(allowed)} ms with the noise of both"
    if now.ms <= allowed:
        return found(text, f"{what} ({limit})")
    raise ExpectationError(
        f"{text} does not hold: {what}, {now.ms / other.ms:.2f} times as long ({limit}).",
        do="%dist board step shows what a step is made of; %dist runs how others were",
    )
