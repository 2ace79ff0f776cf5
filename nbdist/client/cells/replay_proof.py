"""How a kept step was made again, and what it gives in one process: the sentences. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from nbdist.client.cells.replayed_forward import ReplayedForward
from nbdist.shared.text import counted, name_ranks

_ROUNDING: Final = 1e-5  # of a loss in float32


@dataclass(frozen=True, slots=True)
class Proof:
    """How a rank has made the weights of a step again.

    Attributes:
        begins: The step from which on it has made steps again.
        steps: How many, the step itself among them.
        loss: The first whose loss is not the same bit for bit, what it was and what it is; None
            where all are.
        norms: The first whose gradients had other norms as the optimizer got them; None likewise.
    """

    begins: int
    steps: int
    loss: tuple[int, float, float] | None
    norms: int | None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Return what a rank has said."""
        loss = said["loss"]
        step = None if loss is None else (int(loss[0]), float(loss[1]), float(loss[2]))
        return cls(said["begins"], said["steps"], step, said["norms"])


def proven(proofs: Mapping[int, Proof]) -> Iterable[str]:
    """Say whether losses prove that weights are those that the step had, by what ranks found."""
    if not proofs:
        return
    first = next(iter(proofs.values()))
    several = first.steps > 1
    of_all = f"the losses of all {first.steps} steps are" if several else "its loss is"
    made = f"Made again from step {first.begins} on" if several else "Made again"
    differing = {rank: one.loss for rank, one in proofs.items() if one.loss is not None}
    changed = min((one.norms for one in proofs.values() if one.norms is not None), default=None)
    if not differing:
        if changed is None:
            norms = f"the norms of {'their' if several else 'its'} gradients"
            yield f"{made}: {of_all} equal bit for bit, and so are {norms}."
        else:
            yield f"{made}: {of_all} equal bit for bit. {_between(changed)}"
        return
    rank = min(differing, key=lambda rank: differing[rank][0])
    step, was, now = differing[rank]
    yield (
        f"{made}: from step {step} on losses are no longer those of the training ({was!r} then, "
        f"{now!r} now, on rank {rank})."
    )
    if changed is not None and changed < step:
        yield _between(changed)
    else:
        yield (
            "Gradients were the same until then: what the loop does to weights, buffers or the "
            "optimizer beside its steps is not made again, nor what a loss reads that has changed; "
            "or an operation is not deterministic."
        )


def _between(step: int) -> str:
    return (
        f"In step {step} the optimizer got other gradients than its backward makes now: what a "
        "loop does to them in between is not made again, but for clip_grad_norm_ of the whole "
        "model; or an operation, or a sum over ranks, is not deterministic."
    )


@dataclass(frozen=True, slots=True)
class OnePart:
    """What one process has found in the part of the batch that a rank had.

    Attributes:
        rank: The lowest that had it.
        forwards: Of the part.
        losses: Of each forward, what it was on the rank and is in one process; None where not
            known.
    """

    rank: int
    forwards: tuple[ReplayedForward, ...]
    losses: tuple[tuple[float, float] | None, ...]

    @classmethod
    def of(cls, said: Mapping[str, Any], *, has_weights: bool) -> Self:
        """Return what rank 0 has said of a part.

        Args:
            said: By rank 0.
            has_weights: Whether the forward has run with the weights that the step had; else its
                losses are not those of the step.
        """
        forwards = tuple(map(ReplayedForward.of, said["forwards"]))
        losses = tuple(
            (one["was"], one["loss"])
            if has_weights and one["was"] is not None and one["loss"] is not None
            else None
            for one in said["forwards"]
        )
        return cls(said["rank"], forwards, losses)

    @property
    def is_finite(self) -> bool:
        """Whether every output was."""
        return all(one.is_finite for one in self.forwards)

    @property
    def apart(self) -> float:
        """By what share of it a loss is another than the rank's, at most; 0.0 where none is."""
        return max((_apart(*both) for both in self.losses if both is not None), default=0.0)

    def sentences(self) -> Iterable[str]:
        """Return what is to be said of it, a line a forward."""
        for number, (forward, both) in enumerate(zip(self.forwards, self.losses, strict=True), 1):
            which = f", forward {number} of {len(self.forwards)}" if len(self.forwards) > 1 else ""
            said = "; ".join(forward.sentences())
            if both is not None:
                was, now = both
                apart = _apart(was, now)
                how = "the rank's, bit for bit" if not apart else f"the rank's was {was:.9g}"
                said += f"; loss {now:.9g}, {how}"
            yield f"  the part of rank {self.rank}{which}: {said}"


def in_one_process(parts: Sequence[OnePart], bad: Collection[int]) -> Iterable[str]:
    """Say what one process has found, and what that means.

    Args:
        parts: Of the batch.
        bad: Ranks on which the forward is not finite.
    """
    yield "In one process, with the whole weights on rank 0:"
    for part in parts:
        yield from part.sentences()
    worst = max((part.apart for part in parts), default=0.0)
    alone = [part.rank for part in parts if not part.is_finite]
    if alone and bad:
        yield "  So it is the model or the data, and not the layout."
    elif bad:
        yield f"  So it is the layout: it is not finite on {name_ranks(bad)} alone."
    elif alone:
        yield "  It is not finite in one process alone: the layout computes something else."
    elif math.isinf(worst):
        yield (
            "  A loss that was not finite is so no more: it is the layout, or the model has "
            "changed since, in its code or in what the loop sets, so that this is another step."
        )
    elif worst > _ROUNDING:
        yield (
            f"  Losses differ by up to {worst:.1e} of them: it is the layout, its precision, or "
            "dropout, which draws other numbers where ranks have parts of a module. %dist verify "
            "compares without it."
        )
    elif worst:
        count = counted(len(parts), "part")
        yield f"  Losses of {count} differ by rounding alone, up to {worst:.1e} of them."


def _apart(was: float, now: float) -> float:
    if was == now or (math.isnan(was) and math.isnan(now)):
        return 0.0
    if not math.isfinite(was) or not math.isfinite(now):
        return math.inf
    return abs(was - now) / max(abs(was), abs(now))
