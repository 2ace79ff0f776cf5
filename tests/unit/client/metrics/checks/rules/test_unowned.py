"""Parameters that get gradients and never step: what is said of them."""

from nbdist.client.metrics.checks.planting import both
from nbdist.client.metrics.checks.rules.unowned import PARAMETERS_WITHOUT_OPTIMIZER
from tests.unit.client.metrics.checks.watching import Watching


def said(**values: float) -> str:
    watching = Watching(PARAMETERS_WITHOUT_OPTIMIZER, range(2))
    rows = both("use", (5,), unowned=2, **{"unowned:b.weight": 1}, **values)
    texts = [watching.take(row) for row in rows]
    return next(filter(None, [*texts, watching.end()]))


def test_new_parameters_are_to_get_an_optimizer() -> None:
    assert "and no optimizer has them" in said()


def test_where_all_that_steps_is_frozen_the_other_optimizer_is_to_step() -> None:
    assert said(frozen=1) == (
        "b.weight and 1 more get gradients, and the optimizer that steps has only what is frozen: "
        "until step 5 nothing has changed them. Another adapter or part is trained now than when "
        "it was made: step the one that was made for it."
    )
