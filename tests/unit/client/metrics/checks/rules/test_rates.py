"""Learning rates of one model are compared between ranks, those of models apart are not."""

from nbdist.client.metrics.checks.rules.rates import UNEQUAL_LEARNING_RATES
from nbdist.shared.wire import Record
from tests.unit.client.metrics.checks.watching import Watching


def said(*made: tuple[int, float, float], ranks: int = 2) -> list[str]:
    """Return what is said of optimizers: their rank, rate, and parts of a batch."""
    rule = Watching(UNEQUAL_LEARNING_RATES, range(ranks))
    values = [{"lr": lr, "tensors": 2.0, "numbers": 9.0, "parts": parts} for _, lr, parts in made]
    records = [Record(one[0], 0, "optimizer", 0, 0, v) for one, v in zip(made, values, strict=True)]
    return [sentence for record in records if (sentence := rule.take(record))]


def test_ranks_are_named_with_their_rates() -> None:
    (sentence,) = said((1, 0.2, 2.0), (0, 0.1, 2.0))
    assert "learning rates: 0.1 on rank 0, 0.2 on rank 1." in sentence
    many = said(*((rank, float(1 + rank), 8.0) for rank in range(8)), ranks=8)
    assert "4 on rank 3, ..." in many[0]


def test_a_search_on_models_that_ranks_train_alone_is_silent() -> None:
    assert said((0, 0.1, 0.0), (1, 0.2, 0.0)) == []


def test_two_optimizers_are_compared_each_with_its_own_whatever_one_rank_trains_beside() -> None:
    assert said((0, 0.1, 2.0), (0, 7.0, 1.0), (0, 0.5, 2.0), (1, 0.1, 2.0), (1, 0.5, 2.0)) == []


def test_rates_that_differ_by_rounding_are_equal() -> None:
    assert said((0, 0.1, 2.0), (1, 0.1 + 1e-12, 2.0)) == []


def test_rates_that_part_later_are_told_at_the_step_that_reports_them() -> None:
    rule = Watching(UNEQUAL_LEARNING_RATES, range(2))
    told = [
        rule.take(Record(rank, 0, "use", step, 0, {"optimizer": 0.0, "lr": lr, "parts": 2.0}))
        for step, lr in ((1, 0.1), (10, 0.1), (20, 0.05))
        for rank, lr in ((0, 0.1), (1, lr))
    ]
    assert [bool(one) for one in told] == [False] * 5 + [True]
    assert "0.1 on rank 0, 0.05 on rank 1" in str(told[-1])
