"""Loops over an nbdist.loader that is another one on each rank are named, and no others."""

from typing import Any

from nbdist.client.metrics.checks.rules.loader_split import UNEQUAL_LOADERS
from nbdist.shared.wire import Record
from tests.unit.client.metrics.checks.watching import Watching

RANKS = (0, 1, 3)


def begins(rank: int, order: float, line: int = 4, **more: float) -> Record:
    values = {"loader": 1.0, "order": order, "prompt": 7.0, "line": float(line), **more}
    return Record(rank, 0, "loader", 0, 0, values)


def said(*records: Record) -> list[str]:
    split = Watching(UNEQUAL_LOADERS, RANKS)
    return [sentence for record in records if (sentence := split.take(record))]


def test_ranks_whose_batches_follow_from_other_numbers_are_told_once_a_loop() -> None:
    (sentence,) = said(begins(0, 5.0), begins(1, 6.0), begins(3, 5.0))
    assert sentence.startswith("The loader of In[7], line 4 is another one on each rank: its seed,")
    assert sentence.endswith("Create it with the same arguments on all ranks.")


def test_loops_are_compared_by_their_count_on_a_line_whatever_comes_between() -> None:
    folds = [begins(rank, float(fold)) for rank in RANKS for fold in range(3)]
    others = [begins(rank, 9.0, line=8) for rank in reversed(RANKS)]
    assert said(*folds, *others) == []
    assert len(said(*folds[:6], begins(3, 0.0), begins(3, 2.0), begins(3, 2.0))) == 1


def test_loops_that_a_rank_never_begins_are_forgotten() -> None:
    split = Watching(UNEQUAL_LOADERS, RANKS)
    for _ in range(1000):
        assert not split.take(begins(0, 1.0))
    loops: Any = split.watcher
    assert len(loops._open) <= 256
