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
            cases; by default, once, nothing but new ones. A last pass takes what has a new value.
    """
    every = list(cases)
    chosen: list[Case] = []
    met: set[tuple[object, ...]] = set()
    parameters = len(every[0]) if every else 0
    all_pairs = parameters * (parameters - 1) // 2
    for least, case in itertools.product([*(gains or [all_pairs]), 0], every):
        pairs = set(itertools.combinations(enumerate(case), 2))
        values = {(value,) for value in enumerate(case)}
        if values <= met if least == 0 else len(pairs - met) < least:
            continue
        chosen.append(case)
        met |= pairs | values
    return chosen
