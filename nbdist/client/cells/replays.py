"""What ranks have found in a step that was kept, and the sentences about it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final, Self

from nbdist.client.cells.replay_proof import OnePart, Proof, in_one_process, proven
from nbdist.client.cells.replayed_forward import (
    SHOWN,
    BadModule,
    BadOperation,
    ReplayedForward,
    numbered,
)
from nbdist.shared.errors import UsageError
from nbdist.shared.text import begin_with_ranks, counted, name_ranks

__all__ = ["BadModule", "BadOperation", "RankReplay", "Replayed", "ReplayedForward"]

_LARGEST: Final = 3  # modules
_MENDED: Final = "or a change of the model since then has mended it"


@dataclass(frozen=True, slots=True)
class RankReplay:
    """What one rank has found.

    Attributes:
        loss: Of the step, before it was left out; None where it is not known.
        gradients: The norm of its gradients by module, None where it is not finite; of many the
            first 64 that are not, and the 64 largest.
        modules: How many modules have gradients.
        bad_modules: In how many they are not finite.
        forwards: Those of the step: several where micro-batches are accumulated.
        why_not: Why they did not run again; "" where they did, or another rank is the reason.
        unkept: Forwards beyond what is kept.
        float32: What they gave in float32; None where that was not asked for.
        instead_of: The lower precisions of these forwards, such as `bfloat16`.
        backward: What is first in the backward of each forward whose loss is known, None where
            every gradient was finite; None where that was not asked for, or did not run.
        why_no_backward: Why no backward did run again; "" where one did, or another rank is the
            reason.
        proof: How this rank has made the weights of a step that was not left out; None where it
            has not.
        why_no_run: Why not; "" where it has, or the step was left out.
    """

    loss: float | None
    gradients: Mapping[str, float | None]
    modules: int
    bad_modules: int
    forwards: tuple[ReplayedForward, ...]
    why_not: str
    unkept: int
    float32: tuple[ReplayedForward, ...] | None = None
    instead_of: tuple[str, ...] = ()
    backward: tuple[BadOperation | None, ...] | None = None
    why_no_backward: str = ""
    proof: Proof | None = None
    why_no_run: str = ""

    @property
    def bad_gradients(self) -> tuple[str, ...]:
        """Modules with gradients that are not finite, in the order of the model."""
        return tuple(module for module, norm in self.gradients.items() if norm is None)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step that was kept, as each rank that made it has found it. Prints as sentences.

    Attributes:
        step: Its number in its cell.
        ranks: By rank.
        ran: Whether its forward ran again.
        has_weights: Whether it did so with the weights that it began with; else with those of now,
            or with what steps have made again that a loss shows to be others.
        is_older: Whether a newer cell was guarded, and has left none out.
        where: Where it was kept on disk, in a sentence; "" where it was in memory.
        is_left_out: Whether it was left out; else it is of a cell that keeps all.
        one: What one process has found in each part of the batch; None where it was not asked.
        proofs: By rank, also of those that are not shown: how weights were made again.
        bad: The ranks, likewise, whose forward is not finite.
    """

    step: int
    ranks: Mapping[int, RankReplay]
    ran: bool
    has_weights: bool
    is_older: bool = False
    where: str = ""
    is_left_out: bool = True
    one: tuple[OnePart, ...] | None = None
    proofs: Mapping[int, Proof] = field(default_factory=dict)
    bad: tuple[int, ...] = ()

    @classmethod
    def of(cls, said: Mapping[int, Mapping[str, Any]], rank: int | None = None) -> Self:
        """Return what ranks have answered; of one rank, where that alone is asked about.

        Raises:
            UsageError: As they say.
        """
        first = next(iter(said.values()))
        if "error" in first:
            what, why, do = first["error"]
            raise UsageError(what, why=why, do=do)
        found = {rank: one for rank, one in said.items() if one}
        one = next(iter(found.values()))
        proofs = {r: Proof.of(mine["proof"]) for r, mine in found.items() if mine.get("proof")}
        has_weights = one["has_weights"] and all(proof.loss is None for proof in proofs.values())
        in_one = next((mine["one"] for mine in found.values() if mine.get("one")), None)
        parts = in_one and tuple(OnePart.of(part, has_weights=has_weights) for part in in_one)
        ranks = {
            rank: RankReplay(
                mine["loss"],
                mine["gradients"],
                mine["modules"],
                mine["bad_modules"],
                tuple(map(ReplayedForward.of, mine["forwards"])),
                mine["why_not"],
                mine["unkept"],
                *_in_float32(mine.get("float32")),
                *_backward(mine.get("backward")),
                proofs.get(rank),
                mine.get("no_run", ""),
            )
            for rank, mine in found.items()
        }
        bad = tuple(r for r, its in ranks.items() if not all(f.is_finite for f in its.forwards))
        return cls(
            one["step"],
            ranks if rank is None else {rank: ranks[rank]},
            one["ran"],
            has_weights,
            one.get("is_older", False),
            one.get("where", ""),
            one.get("is_left_out", True),
            # The parts of all, for ranks may share one.
            parts,
            proofs,
            bad,
        )

    @property
    def is_proven(self) -> bool:
        """Whether losses prove that the weights are those that a step had, and was not left out."""
        return bool(self.proofs) and all(one.loss is None for one in self.proofs.values())

    def __str__(self) -> str:
        made = [*self._forwards(), *proven(self.proofs), *self._unproven()]
        looked = [*made, *self._backward(), *self._float32(), *self._in_one()]
        said = [*looked, *self._gradients(), *self._batches()]
        return "\n".join([self._title, *said, *filter(None, [self.where])])

    def __repr__(self) -> str:
        return str(self)

    @property
    def _title(self) -> str:
        done = "left out" if self.is_left_out else "made"
        text = f"Step {self.step} was {done} on {name_ranks(self.ranks)}"
        if self.is_older:
            text += " in an earlier cell"
            if self.is_left_out:
                text += " (the newest guarded one has left none out)"
        if not self.ran:
            return f"{text}. Its forward did not run again:"
        which = "the weights it had" if self.has_weights else "the weights of now"
        if self.proofs and not self.is_proven:
            which = "weights that are not those it had"
        return f"{text}. Its forward again, with {which}:"

    def _unproven(self) -> Iterable[str]:
        """Say why no loss proves that the weights are those of a step that was not left out."""
        reasons = {rank: one.why_no_run for rank, one in self.ranks.items()} if self.ran else {}
        for why, ranks in _by_value(reasons):
            if why:
                yield f"No loss proves it on {name_ranks(ranks)}: {why}."

    def _in_one(self) -> Iterable[str]:
        """Say what one process has found."""
        if self.one is not None:
            yield from in_one_process(self.one, self.bad)

    def _forwards(self) -> Iterable[str]:
        if not self.ran:
            for why_not, ranks in _by_value({r: one.why_not for r, one in self.ranks.items()}):
                if why_not:
                    yield f"  {name_ranks(ranks)}: {why_not}"
            return
        for rank, one in self.ranks.items():
            is_of_one = one.loss is not None and len(one.forwards) < 2  # else it is of all of them
            loss = f" (loss {one.loss:.4g})" if is_of_one else ""
            yield from _each(rank, one.forwards, loss)
            if one.unkept:
                yield f"  rank {rank}: {counted(one.unkept, 'forward')} more that it did not keep"
        is_sound = all(f.is_finite for r in self.ranks.values() for f in r.forwards)
        if is_sound and self.bad:
            yield f"  The forward of {name_ranks(self.bad)} is not finite: leave out --rank."
        elif is_sound and self.is_left_out:
            yield f"  {self._elsewhere}"

    @property
    def _elsewhere(self) -> str:
        """Return where it has become so, if no forward is to blame."""
        if any(one.unkept for one in self.ranks.values()):
            return "So it is a forward that was not kept, the loss or the backward."
        if not self.has_weights:
            return "So it is the loss or the backward, or these weights no longer show it."
        losses = {rank: one.loss for rank, one in self.ranks.items()}
        if bad := [r for r, loss in losses.items() if loss is not None and not isfinite(loss)]:
            return f"So it is the loss, on {name_ranks(bad)}, {_MENDED}."
        return f"So it is the loss or the backward, {_MENDED}."

    def _backward(self) -> Iterable[str]:
        """Say which operation has made a gradient that is not finite."""
        reasons = {rank: one.why_no_backward for rank, one in self.ranks.items()}
        if any(reasons.values()):
            yield "Its backward did not run again:"
            for why_not, ranks in _by_value(reasons):
                if why_not:
                    yield f"  {name_ranks(ranks)}: {why_not}"
        ran = {rank: one.backward for rank, one in self.ranks.items() if one.backward is not None}
        if not ran:
            return
        yield "Its loss and backward again:"
        for found, ranks in _by_value(ran):
            for number, first in enumerate(found, 1):
                which = f", backward {number} of {len(found)}" if len(found) > 1 else ""
                said = (
                    "every gradient that reaches a parameter is finite"
                    if first is None
                    else str(first)
                )
                yield f"  {name_ranks(ranks)}{which}: {said}"
        if self.is_left_out and not any(one for found in ran.values() for one in found):
            more = "" if self.has_weights else ", or these weights no longer show it"
            summed = "a sum of them (over uses of a weight, micro-batches or ranks)"
            yield (
                f"  So it is {summed}, a hook, or what the loop does to gradients{more}; {_MENDED}."
            )

    def _float32(self) -> Iterable[str]:
        """Say whether it is the precision that has made it so."""
        again = {rank: one.float32 for rank, one in self.ranks.items() if one.float32 is not None}
        if not again:
            return
        low = sorted({name for one in self.ranks.values() for name in one.instead_of})
        if not low:
            yield (
                "In float32 it is the same: it has no autocast, and no weight or input of a lower "
                "precision."
            )
            return
        was_bad = [r for r, one in self.ranks.items() if not all(f.is_finite for f in one.forwards)]
        bad = [rank for rank, forwards in again.items() if not all(f.is_finite for f in forwards)]
        if bad:
            either = " either" if set(bad) <= set(was_bad) else ""
            yield f"In float32 it is not finite on {name_ranks(bad)}{either}:"
            for rank in bad:
                yield from _each(rank, again[rank])
            if mended := [rank for rank in was_bad if rank not in bad]:
                yield f"In float32 every output on {name_ranks(mended)} is finite."
        elif was_bad:
            yield (
                f"In float32 every output is finite: it is the range or the rounding of "
                f"{' and '.join(low)}."
            )
        else:
            yield "In float32 every output is finite, too."

    def _gradients(self) -> Iterable[str]:
        found = {
            rank: (
                one.bad_gradients,
                one.bad_modules,
                one.modules,
                None if self.is_left_out else tuple(one.gradients.items()),
            )
            for rank, one in self.ranks.items()
        }
        for (bad, count, modules, _), ranks in _by_value(found):
            if bad:
                of_all = f" (all {modules} modules)" if count == modules > 1 else ""
                names = _some([name or "the model itself" for name in bad], count)
                yield f"Gradients that are not finite on {name_ranks(ranks)}: {names}{of_all}."
            elif not self.is_left_out:
                yield from _largest(ranks, self.ranks[ranks[0]].gradients)
            else:
                yield f"{begin_with_ranks(ranks, be=True)} without a gradient that is not finite."

    def _batches(self) -> Iterable[str]:
        given = {
            rank: tuple((one.epoch, one.positions, one.batch) for one in mine.forwards)
            for rank, mine in self.ranks.items()
        }
        for batches, ranks in _by_value(given):
            for epoch, positions, batch in dict.fromkeys(batches):
                if epoch is not None and positions:
                    names = "" if batch is None else f": dataset[{numbered(batch, len(positions))}]"
                    yield (
                        f"Newest batch of the loader on {name_ranks(ranks)}: positions "
                        f"{positions.start}-{positions.stop - 1} of epoch {epoch}{names}."
                    )


def _in_float32(
    said: Mapping[str, Any] | None,
) -> tuple[tuple[ReplayedForward, ...] | None, tuple[str, ...]]:
    if said is None:
        return None, ()
    return tuple(map(ReplayedForward.of, said["forwards"])), tuple(said["instead_of"])


def _backward(
    said: Mapping[str, Any] | None,
) -> tuple[tuple[BadOperation | None, ...] | None, str]:
    if said is None:
        return None, ""
    found = tuple(None if one is None else BadOperation(**one) for one in said["found"])
    return (found if said["ran"] else None), said["why_not"]


def _each(rank: int, forwards: Sequence[ReplayedForward], loss: str = "") -> Iterable[str]:
    for number, forward in enumerate(forwards, 1):
        which = f", forward {number} of {len(forwards)}" if len(forwards) > 1 else ""
        yield f"  rank {rank}{which}{loss}: {'; '.join(forward.sentences())}"


def _largest(ranks: Sequence[int], norms: Mapping[str, float | None]) -> Iterable[str]:
    """Say in which modules gradients are largest."""
    finite = {name: norm for name, norm in norms.items() if norm is not None}
    largest = sorted(finite, key=lambda name: -finite[name])[:_LARGEST]
    if largest:
        named = (f"{name or 'the model itself'} {finite[name]:.3g}" for name in largest)
        yield f"Largest norms of gradients on {name_ranks(ranks)}: {', '.join(named)}."


def _by_value(values: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Return each value once, and the ranks that have it."""
    found: list[tuple[Any, list[int]]] = []
    for rank, value in values.items():
        known = next((ranks for one, ranks in found if one == value), None)
        if known is None:
            found.append((value, [rank]))
        else:
            known.append(rank)
    return found


def _some(names: Sequence[str], count: int) -> str:
    more = count - len(names[:SHOWN])
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
