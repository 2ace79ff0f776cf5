"""What to do about a verdict, and where it is seen: a line for each cause. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.client.metrics.analysis.values import Cause, Straggler


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, and which of the board's views shows the numbers behind the verdict.

    `cause` names the cause in a few words, for a line that has no room for the sentence.
    """

    cause: str
    do: str
    view: str


_LESS_WORK = (
    "check the clock and the temperature of its processor, or give it fewer samples with "
    "nbdist.loader(..., weights=)."
)

_ADVICE: Mapping[Cause, Advice] = {
    "data": Advice(
        "data loading", "give its DataLoader more workers, or its data faster storage.", "step"
    ),
    "batch": Advice(
        "bigger batches",
        "give all ranks equal batches, or to each what it can do with "
        'nbdist.loader(..., weights="measured").',
        "ranks",
    ),
    "experts": Advice(
        "busy experts",
        "have the loss balance the router, as the auxiliary loss of transformers' models "
        "(output_router_logits=True) does; docs/layouts.md, Experts.",
        "ranks",
    ),
    "forward": Advice("forward", _LESS_WORK, "step"),
    "backward": Advice("backward", _LESS_WORK, "step"),
    "starved": Advice(
        "a shared core",
        "stop what else runs on its core, or start fewer ranks or threads than there are cores.",
        "verdicts",
    ),
    "idle": Advice(
        "idle time",
        "see where it waits with %dist stacks, such as a sleep, a lock or a slow file.",
        "verdicts",
    ),
    "optimizer": Advice(
        "optimizer",
        "compare its parameters and its optimizer with those of the others, and check its "
        "processor.",
        "step",
    ),
    "other": Advice(
        "rest of the loop",
        "do logging, evaluation and checkpoints less often, or equally on all ranks.",
        "step",
    ),
    "link": Advice(
        "a slow link",
        "send less over it (LocalSGD, DiLoCo, compress=), or give this rank another network; "
        "docs/slow-networks.md compares them.",
        "verdicts",
    ),
}


def cause_of(verdict: Straggler) -> str:
    """Return what makes the rank slow, and in which part of a step where both are known."""
    said = advice_for(verdict).cause
    return f"{said} in {verdict.cause}" if verdict.within else said


def advice_for(verdict: Straggler) -> Advice:
    """Return what to do about what a rank does, or else about the part in which it does so."""
    return _ADVICE[verdict.within or verdict.cause]
