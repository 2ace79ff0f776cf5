"""The tokens that experts got, by rank and expert, as a board shows them. Pure."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nbdist.client.board.scales import Floats

MOST_MIXTURES = 12  # that are shown


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTokens:
    """How many tokens came to each expert of each rank in one step.

    `of` has each column's rank and expert, in order; `mixtures` the tokens of each column by the
    name of the mixture, nan where a rank has none of it or has not said. `step` is the newest of
    those that ranks tell of: they do so about once a second.
    """

    step: int
    of: tuple[tuple[int, int], ...]
    mixtures: Mapping[str, Floats]

    @property
    def columns(self) -> list[str]:
        """Return a name for each column, as 1:5 for rank 1's expert 5."""
        return [f"{rank}:{expert}" for rank, expert in self.of]

    @property
    def title(self) -> str:
        """Return what is shown, with what the names of all mixtures have in common."""
        begin, end = self._common
        first, count, shown = next(iter(self.mixtures)), len(self.mixtures), len(self.shown)
        parts = first.split(".")
        named = ".".join([*parts[:begin], "*", *parts[len(parts) - end :]]) if count > 1 else first
        more = f" (the {shown} most uneven of {count})" if shown < count else ""
        return f"tokens of each expert in step {self.step:,}: {named}{more}"

    @property
    def shown(self) -> dict[str, Floats]:
        """Return the mixtures, of many the most uneven, by what tells their names apart."""
        begin, end = self._common

        def unevenness(name: str) -> float:
            tokens = self.mixtures[name]
            return float(np.nanmax(tokens) / max(float(np.nanmean(tokens)), 1e-9))

        chosen = sorted(self.mixtures, key=unevenness, reverse=True)[:MOST_MIXTURES]
        return {
            ".".join(name.split(".")[begin:][: -end or None]): tokens
            for name, tokens in self.mixtures.items()
            if name in chosen
        }

    @property
    def _common(self) -> tuple[int, int]:
        """Return how many parts all names begin with alike, and how many they end with."""
        names = [name.split(".") for name in self.mixtures]
        begin = _alike([name[:-1] for name in names])
        return begin, _alike([name[begin:][:0:-1] for name in names])


def _alike(names: list[list[str]]) -> int:
    """Return with how many equal parts all begin."""
    levels = zip(*names, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, levels))


def experts_of(told: Mapping[int, tuple[int, Mapping[str, float]]]) -> ExpertTokens | None:
    """Return the tokens of experts; None where no rank tells of any.

    Args:
        told: `Telemetry.experts`.
    """
    by_place = {
        (mixture, (rank, int(expert))): tokens
        for rank, (_, values) in told.items()
        for key, tokens in values.items()
        for mixture, _, expert in [key.rpartition(":")]
    }
    if not by_place:
        return None
    columns = tuple(sorted({place for _, place in by_place}))
    mixtures = {
        name: np.array([by_place.get((name, place), np.nan) for place in columns])
        for name in dict.fromkeys(name for name, _ in by_place)
    }
    return ExpertTokens(max(step for step, _ in told.values()), columns, mixtures)
