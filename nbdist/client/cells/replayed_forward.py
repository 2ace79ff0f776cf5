"""What a forward or a backward that ran again has given, and the words about it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

SHOWN: Final = 8  # names or numbers in a sentence


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
        return named(self.name, self.kind)


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
            made_in = f" in {named(self.module, self.kind)}"
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
    def is_finite(self) -> bool:
        """Whether its input and every output were."""
        return self.module is None and not self.is_input

    @property
    def _which(self) -> str:
        """Return the samples in words; "" where none is known."""
        return samples_in_words(self.rows, self.samples, is_all=self.is_all)

    @property
    def _which_beside(self) -> str:
        rows, samples = zip(*self.beside, strict=True) if self.beside else ((), ())
        return samples_in_words(rows, samples, is_all=self.is_all_beside)

    def sentences(self) -> list[str]:
        """Return what is to be said of it, without the rank."""
        if self.is_finite:
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


def named(module: str, kind: str) -> str:
    """Return a module in words."""
    return f"{module} ({kind})" if module else f"the model itself ({kind})"


def samples_in_words(rows: Sequence[int], samples: Sequence[int] | None, *, is_all: bool) -> str:
    """Return samples in words, by number in the batch and in the dataset; "" of none."""
    if is_all:
        return "every sample of its batch"
    if not rows:
        return ""
    known = "" if samples is None else f", dataset[{numbered(samples)}]"
    return f"sample{'' if len(rows) == 1 else 's'} {numbered(rows)} of its batch{known}"


def numbered(numbers: Sequence[int], count: int | None = None) -> str:
    """Return the first numbers; `count` is how many there are."""
    shown = ", ".join(map(str, numbers[:SHOWN]))
    return shown + (", ..." if (count or len(numbers)) > SHOWN else "")
