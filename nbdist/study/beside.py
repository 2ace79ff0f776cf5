"""An estimate beside what was then measured in a training: plain numbers, and how they read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbdist.shared.text import aligned, name_bytes
from nbdist.study.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Measured:
    """What a training has measured.

    Attributes:
        collectives: Of the usual step, by rank.
        nbytes: Sent in it, the mean of the ranks; None where it is not known.
        peak: The most bytes that tensors took on a rank's GPU; None on CPUs, whose allocator does
            not count.
    """

    collectives: Sequence[int]
    nbytes: float | None
    peak: float | None


@dataclass(frozen=True, slots=True)
class Beside:
    """An estimate, and the training that came of it."""

    estimate: Estimate
    measured: Measured

    @property
    def sentence(self) -> str:
        """The cell says it when the training is over."""
        said = ", ".join(f"{name} {was} (estimated {told})" for name, told, was in self._rows())
        return f"Beside nbdist.estimate, a step: {said}."

    def __str__(self) -> str:
        """Return the estimate's table, and below it what was measured."""
        rows = [("", "estimated", "measured"), *self._rows()]
        return "\n".join([str(self.estimate), "", *aligned(rows, (False, True, True))])

    def _rows(self) -> list[tuple[str, str, str]]:
        ranks = self.estimate.ranks
        of_rank = self.estimate.heaviest
        told = sum(one.count for one in of_rank.traffic.values())
        rows = [("collectives", str(told), str(self.measured.collectives[of_rank.rank]))]
        if self.measured.nbytes is not None:
            sent = sum(t.nbytes for one in ranks for t in one.traffic.values()) / len(ranks)
            rows.append(("bytes sent", name_bytes(sent), name_bytes(self.measured.nbytes)))
        if self.measured.peak is not None:
            rows.append(("peak", name_bytes(self.estimate.peak), name_bytes(self.measured.peak)))
        return rows


def matching(
    estimates: Iterable[Estimate], facts: Mapping[str, str], world_size: int
) -> Estimate | None:
    """Return the newest estimate of the model and layout of a run, by the facts of its ranks.

    A model is known by its class and the number of its parameters; its batch is not compared.
    """
    asked = (facts.get("layout"), facts.get("model"), facts.get("parameters"), world_size)
    found = [
        one
        for one in estimates
        if (one.layout, one.model, str(one.parameter_count), one.world_size) == asked
    ]
    return found[-1] if found else None
