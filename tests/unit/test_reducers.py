"""When ranks need new reducers after a fault: pure, on what the ranks tell."""

import pytest

pytest.importorskip("torch")

from nbdist.engine.reducers import must_remake


@pytest.mark.parametrize(
    ("facts", "needed"),
    [
        (["new buckets", "new buckets"], False),
        (["first buckets", "first buckets"], False),
        (["first buckets", "new buckets"], True),
        (["first step", "first step"], True),
        (["first step", "first buckets"], True),
        (["first buckets"], False),  # the module's other ranks have lost it
    ],
)
def test_reducers_are_made_anew_where_ranks_differ_or_a_first_step_was_lost(
    facts: list[str], needed: bool
) -> None:
    assert must_remake(facts) is needed
