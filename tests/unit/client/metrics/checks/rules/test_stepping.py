"""An optimizer that never stepped is said at the cell's end, after backwards enough for a loop."""

from nbdist.client.metrics.checks.rules.stepping import FORGOTTEN_STEP
from nbdist.shared.wire import CELL_END, Record
from tests.unit.client.metrics.checks.watching import Watching


def said(*backwards: float) -> str:
    """Return what is said at the end, of so many backwards on each rank that tells."""
    rule = Watching(FORGOTTEN_STEP, range(2))
    for rank, count in enumerate(backwards):
        assert rule.take(Record(rank, 0, "left", CELL_END, 0, {"backwards": count})) == ""
    return rule.end()


def test_the_backwards_and_the_ranks_are_named() -> None:
    assert "after 8 backwards the weights of ranks 0-1 are as they were." in said(8.0, 8.0)
    assert "after 6 backwards the weights of rank 1 are as they were." in said(1.0, 6.0)


def test_a_look_at_some_gradients_is_not_a_loop() -> None:
    assert said(4.0, 4.0) == ""
    assert said() == ""
