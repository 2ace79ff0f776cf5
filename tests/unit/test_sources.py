"""From whom newcomers are cloned."""

from nbdist.engine.clone.sources import Ties, choose

ALL = (0, 1, 2, 3)
NOTHING = Ties((), (ALL,))


def test_a_rank_that_trains_the_same_model_goes_first() -> None:
    ties = {
        0: Ties((ALL, (0, 1)), (ALL, (0, 1), (0, 3), (0, 3))),
        1: Ties((ALL, (0, 1)), (ALL, (0, 1))),
        2: Ties((ALL, (2, 3)), (ALL, (2, 3))),
        3: NOTHING,
    }
    assert choose(ties, [3]) == {2: [3]}


def test_then_one_that_shares_most_groups_then_the_lowest() -> None:
    ties = {0: NOTHING, 1: NOTHING, 2: Ties((), (ALL, (1, 2))), 3: NOTHING}
    assert choose(ties, [1]) == {2: [1]}
    assert choose(ties, [3]) == {0: [3]}


def test_newcomers_of_different_models_have_sources_of_their_own() -> None:
    ties = {0: Ties(((0, 1),), (ALL,)), 1: NOTHING, 2: NOTHING, 3: Ties(((2, 3),), (ALL,))}
    assert choose(ties, [2, 1]) == {0: [1], 3: [2]}


def test_newcomers_are_no_sources_and_without_a_living_rank_there_is_none() -> None:
    assert choose({0: NOTHING, 1: NOTHING}, [0]) == {1: [0]}
    assert choose({0: NOTHING, 1: NOTHING}, [0, 1]) == {}
