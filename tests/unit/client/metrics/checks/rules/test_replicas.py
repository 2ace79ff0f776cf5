"""A DistributedSampler for another number of ranks than train."""

import pytest

from nbdist.client.metrics.checks.rules.replicas import OTHER_REPLICAS
from nbdist.shared.wire import Record
from tests.unit.client.metrics.checks.watching import Watching

Place = tuple[int, int, int, int]  # replicas, replica, parts, part


def said(*steps: list[Place]) -> str:
    """Return what is said where ranks report these, at one step after the other."""
    watching = Watching(OTHER_REPLICAS, range(len(steps[0])))
    for number, step in enumerate(steps, 1):
        for rank, (replicas, replica, parts, part) in enumerate(step):
            values = {"replicas": replicas, "replica": replica, "parts": parts, "part": part}
            told = {name: float(value) for name, value in values.items() if value >= 0}
            assert watching.take(Record(rank, number, "use", number, 0, told)) == ""
    return watching.end()


def test_of_more_replicas_than_ranks_some_are_never_trained() -> None:
    step = [(4, 0, 2, 0), (4, 1, 2, 1)]
    assert "among 4 replicas" in said(step, step)
    assert "trained by 2 parts of each batch: the samples of 2 of them are never" in said(
        step, step
    )


def test_of_fewer_each_sample_is_trained_several_times() -> None:
    step = [(2, rank % 2, 4, rank) for rank in range(4)]
    assert "each sample is trained 2 times an epoch" in said(step, step)


SOUND = {
    "as many as there are ranks": [[(2, 0, 2, 0), (2, 1, 2, 1)]] * 2,
    "as many as parts, of which two ranks have each": [
        [(2, rank // 2, 2, rank // 2) for rank in range(4)]
    ]
    * 2,
    "two on each rank in turns": [
        [(4, 0, 2, 0), (4, 1, 2, 1)],
        [(4, 2, 2, 0), (4, 3, 2, 1)],
    ],
    "one report alone": [[(4, 0, 2, 0), (4, 1, 2, 1)]],
    "a loader without one, too": [[(4, 0, 2, 0), (4, 1, 2, 1)], [(-1, -1, 2, 0), (-1, -1, 2, 1)]],
    "no model that is spread": [[(4, 0, 0, 0), (4, 1, 0, 0)]] * 2,
}


@pytest.mark.parametrize("name", SOUND)
def test_what_leaves_no_sample_out_or_is_not_known_is_not_said(name: str) -> None:
    assert said(*SOUND[name]) == ""
