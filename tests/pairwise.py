"""Which cases of a matrix `make test` runs: those that together meet each pair of values.

Most faults need no more than two values that meet (Kuhn, Wallace and Gallo, "Software Fault
Interactions and Implications for Software Testing", 2004). `make test-all` runs the whole matrix.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Case = TypeVar("Case", bound=Sequence[Hashable])


def pairwise(cases: Iterable[Case], gains: Iterable[int] | None = None) -> list[Case]:
    """Return cases that meet each pair of values that any case has, in an order of choice.

    Args:
        cases: Each a value of every parameter.
        gains: How many new pairs a case must bring to be chosen, in passes over all cases; by
            default, all of them first, down to one. Where the last is more than one, few pairs
            are left out.
    """
    every = list(cases)
    chosen: list[Case] = []
    met: set[tuple[object, ...]] = set()
    parameters = len(every[0]) if every else 0
    passes = gains or range(parameters * (parameters - 1) // 2, 0, -1)
    for least, case in itertools.product(passes, every):
        pairs = set(itertools.combinations(enumerate(case), 2))
        if len(pairs - met) >= least:
            chosen.append(case)
            met |= pairs
    return chosen
