"""Which cases of a matrix `make test` runs: a covering sample; `make test-all` runs all of them.

Most faults need no more than two values that meet (Kuhn, Wallace and Gallo, "Software Fault
Interactions and Implications for Software Testing", 2004). The sample meets each value, and as many
pairs of them as there are without one that is met twice.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Case = TypeVar("Case", bound=Sequence[Hashable])


def covering(cases: Iterable[Case], gains: Iterable[int] | None = None) -> list[Case]:
    """Return cases that meet each value that any case has, in an order of choice.

    Args:
        cases: Each a value of every parameter.
        gains: How many new pairs of values a case must bring to be chosen, in passes over all
            cases; by default, once, nothing but new ones; of two parameters, no pair is asked for.
            Last come those with most values that no other has.
    """
    every = list(cases)
    parameters = len(every[0]) if every else 0
    if gains is None:
        gains = [parameters * (parameters - 1) // 2] if parameters > 2 else []
    chosen: list[Case] = []
    met: set[tuple[object, ...]] = set()

    def choose(size: int, least: int) -> None:
        for case in every:
            brings = set(itertools.combinations(enumerate(case), size)) - met
            if len(brings) >= least:
                chosen.append(case)
                met.update(itertools.combinations(enumerate(case), 1))
                met.update(itertools.combinations(enumerate(case), 2))

    for least in gains:
        choose(2, least)
    for least in range(parameters, 0, -1):
        choose(1, least)
    return chosen
