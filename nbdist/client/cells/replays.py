"""What ranks have found in a step that was left out, and the sentences about it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final, Self

from nbdist.shared.errors import UsageError
from nbdist.shared.text import begin_with_ranks, counted, name_ranks

_MENDED: Final = "or a change of the model since then has mended it"
_SHOWN: Final = 8  # names or numbers in a sentence


@dataclass(frozen=True, slots=True)
class BadModule:
    """The first module of a forward whose output is not finite.

    Attributes:
        name: In the model; "" for the model itself.
        kind: Its class.
        weights: Names of its own parameters and buffers that are not finite.
        is_passed_on: Whether what it was called with was not finite.
    """

    name: str
    kind: str
    weights: tuple[str, ...]
    is_passed_on: bool

    def __str__(self) -> str:
        return _named(self.name, self.kind)


@dataclass(frozen=True, slots=True)
class BadOperation:
    """The first operation of a backward whose gradient is not finite.

    Attributes:
        operation: As autograd calls it, such as `SqrtBackward0`.
        module: The innermost in whose forward it was made; None where none is known.
        kind: Its class; "" likewise.
        is_loss: Whether the loss has made it, behind the forward.
        place: The line that called it, such as `cell 7, line 5`; "" where it is not known.
        is_given: Whether the gradient was not finite before it.
        is_shared: Whether ranks communicate in it, so that it may be another rank's.
    """

    operation: str
    module: str | None
    kind: str
    is_loss: bool
    place: str
    is_given: bool
    is_shared: bool

    def __str__(self) -> str:
        if self.is_loss:
            made_in = " in the loss"
        elif self.module is None:
            made_in = ""
        else:
            made_in = f" in {_named(self.module, self.kind)}"
        place = f" ({self.place})" if self.place else ""
        if self.is_given:
            return (
                f"what reaches {self.operation}{made_in}{place} is not finite: a sum of gradients, "
                "or a hook's"
            )
        shared = "; ranks communicate in it, so it may be another rank's" if self.is_shared else ""
        return f"{self.operation}{made_in}{place} is the first whose gradient is not finite{shared}"


@dataclass(frozen=True, slots=True)
class ReplayedForward:
    """What one forward of a rank gave, and the batch that its loader had given last.

    Attributes:
        module: None where every output was finite, or it did not run.
        is_input: Whether what the model was called with is not finite.
        rows: Of its samples, by number in the batch from 0, those that are not finite: by the
            input, or by an output that has a row for each sample. None of them where all are; of
            many the first 16.
        samples: Which samples of the dataset these are; None where that is not certain.
        is_all: Whether it is so for all samples, more than one.
        epoch: Of the loader; None without a loader of nbdist's.
        positions: In the epoch, of this rank's part of the batch.
        batch: Samples of the dataset in it, the first 16; None where they are not known.
        beside: By number in the batch and in the dataset, samples with which the loader gave
            something that is not finite and is no input, such as a target; none where all are.
        is_all_beside: Whether it is so for all samples, more than one.
    """

    module: BadModule | None
    is_input: bool
    rows: tuple[int, ...]
    samples: tuple[int, ...] | None
    is_all: bool
    epoch: int | None
    positions: range | None
    batch: tuple[int, ...] | None
    beside: tuple[tuple[int, int], ...] = ()
    is_all_beside: bool = False

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Return what a rank has said of a forward."""
        bad, rows, samples = said["bad"], said.get("rows", ()), said.get("bad_samples")
        is_all = bool(rows) and said["bad_rows"] == said["size"] > 1
        beside = tuple(zip(said.get("beside", ()), said.get("beside_samples", ()), strict=True))
        is_all_beside = bool(beside) and said["beside_rows"] == said["size"] > 1
        return cls(
            None
            if bad is None
            else BadModule(bad["module"], bad["kind"], tuple(bad["weights"]), bad["is_passed_on"]),
            said.get("is_input", False),
            () if is_all else tuple(rows),
            None if samples is None or is_all else tuple(samples),
            is_all,
            said["epoch"],
            None if said["positions"] is None else range(*said["positions"]),
            None if said["samples"] is None else tuple(said["samples"]),
            () if is_all_beside else beside,
            is_all_beside,
        )

    @property
    def _which(self) -> str:
        """Return the samples in words; "" where none is known."""
        return _samples(self.rows, self.samples, is_all=self.is_all)

    @property
    def _which_beside(self) -> str:
        rows, samples = zip(*self.beside, strict=True) if self.beside else ((), ())
        return _samples(rows, samples, is_all=self.is_all_beside)

    def sentences(self) -> list[str]:
        """Return what is to be said of it, without the rank."""
        if self.module is None and not self.is_input:
            found = ["every output of its forward is finite"]
            if self._which_beside:
                found.append(f"what its loader gave beside it is not, in {self._which_beside}")
            return found
        found = []
        if self.is_input:
            which = f" in {self._which}" if self._which else ""
            found.append(f"the input of its forward is not finite{which}")
        if self.module is not None:
            which = f", for {self._which}" if self._which and not self.is_input else ""
            found.append(f"{self.module} is the first module whose output is not finite{which}")
            if self.module.weights:
                held = " and ".join(self.module.weights)
                found.append(f"its {held} {'is' if len(self.module.weights) == 1 else 'are'} not")
        return found


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

    @property
    def bad_gradients(self) -> tuple[str, ...]:
        """Modules with gradients that are not finite, in the order of the model."""
        return tuple(module for module, norm in self.gradients.items() if norm is None)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step that was left out, as each rank that left it out has found it. Prints as sentences.

    Attributes:
        step: Its number in its cell.
        ranks: By rank.
        ran: Whether its forward ran again.
        has_weights: Whether it did so with the weights that it began with; else with those of now.
        is_older: Whether a newer cell was guarded, and has left none out.
        where: Where it was kept on disk, in a sentence; "" where it was in memory.
    """

    step: int
    ranks: Mapping[int, RankReplay]
    ran: bool
    has_weights: bool
    is_older: bool = False
    where: str = ""

    @classmethod
    def of(cls, said: Mapping[int, Mapping[str, Any]]) -> Self:
        """Return what ranks have answered.

        Raises:
            UsageError: As they say.
        """
        first = next(iter(said.values()))
        if "error" in first:
            what, why, do = first["error"]
            raise UsageError(what, why=why, do=do)
        found = {rank: one for rank, one in said.items() if one}
        one = next(iter(found.values()))
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
            )
            for rank, mine in found.items()
        }
        older, where = one.get("is_older", False), one.get("where", "")
        return cls(one["step"], ranks, one["ran"], one["has_weights"], older, where)

    def __str__(self) -> str:
        looked = [*self._forwards(), *self._backward(), *self._float32()]
        said = [*looked, *self._gradients(), *self._batches()]
        return "\n".join([self._title, *said, *filter(None, [self.where])])

    def __repr__(self) -> str:
        return str(self)

    @property
    def _title(self) -> str:
        left_out = f"Step {self.step} was left out on {name_ranks(self.ranks)}"
        if self.is_older:
            left_out += " in an earlier cell (the newest guarded one has left none out)"
        if not self.ran:
            return f"{left_out}. Its forward did not run again:"
        which = "the weights it had" if self.has_weights else "the weights of now"
        return f"{left_out}. Its forward again, with {which}:"

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
        if all(map(_is_finite, (f for r in self.ranks.values() for f in r.forwards))):
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
        if not any(one for found in ran.values() for one in found):
            more = "" if self.has_weights else ", or these weights no longer show it"
            summed = "a sum of them (over uses of a weight, micro-batches or ranks)"
            yield f"  So it is {summed}, or a hook{more}."

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
        was_bad = [r for r, one in self.ranks.items() if not all(map(_is_finite, one.forwards))]
        bad = [rank for rank, forwards in again.items() if not all(map(_is_finite, forwards))]
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
            rank: (one.bad_gradients, one.bad_modules, one.modules)
            for rank, one in self.ranks.items()
        }
        for (bad, count, modules), ranks in _by_value(found):
            if bad:
                of_all = f" (all {modules} modules)" if count == modules > 1 else ""
                names = _some([name or "the model itself" for name in bad], count)
                yield f"Gradients that are not finite on {name_ranks(ranks)}: {names}{of_all}."
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
                    names = "" if batch is None else f": dataset[{_numbers(batch, len(positions))}]"
                    yield (
                        f"Newest batch of the loader on {name_ranks(ranks)}: positions "
                        f"{positions.start}-{positions.stop - 1} of epoch {epoch}{names}."
                    )


def _named(module: str, kind: str) -> str:
    return f"{module} ({kind})" if module else f"the model itself ({kind})"


def _samples(rows: Sequence[int], samples: Sequence[int] | None, *, is_all: bool) -> str:
    if is_all:
        return "every sample of its batch"
    if not rows:
        return ""
    known = "" if samples is None else f", dataset[{_numbers(samples)}]"
    return f"sample{'' if len(rows) == 1 else 's'} {_numbers(rows)} of its batch{known}"


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


def _is_finite(forward: ReplayedForward) -> bool:
    return forward.module is None and not forward.is_input


def _each(rank: int, forwards: Sequence[ReplayedForward], loss: str = "") -> Iterable[str]:
    for number, forward in enumerate(forwards, 1):
        which = f", forward {number} of {len(forwards)}" if len(forwards) > 1 else ""
        yield f"  rank {rank}{which}{loss}: {'; '.join(forward.sentences())}"


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
    more = count - len(names[:_SHOWN])
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _numbers(numbers: Sequence[int], count: int | None = None) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return shown + (", ..." if (count or len(numbers)) > _SHOWN else "")
