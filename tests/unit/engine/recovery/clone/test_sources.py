"""From whom replacements are cloned."""

from nbdist.engine.recovery.clone.sources import Model, Ties, choose, missed

ALL = (0, 1, 2, 3)
NOTHING = Ties((), (ALL,))


def models(*ranks: tuple[int, ...]) -> tuple[Model, ...]:
    return tuple(Model(f"model {its}", "Net", its, (f"net{its[0]}",)) for its in ranks)


def test_a_rank_that_trains_the_same_model_goes_first() -> None:
    ties = {
        0: Ties(models(ALL, (0, 1)), (ALL, (0, 1), (0, 3), (0, 3))),
        1: Ties(models(ALL, (0, 1)), (ALL, (0, 1))),
        2: Ties(models(ALL, (2, 3)), (ALL, (2, 3))),
        3: NOTHING,
    }
    assert choose(ties, [3]) == {2: [3]}


def test_a_rank_that_holds_the_same_part_goes_before_one_that_shares_a_model() -> None:
    ties = {
        0: Ties(models(ALL), (ALL,), ((0, 2),)),
        1: Ties(models(ALL), (ALL,), ((1, 3),)),
        2: Ties((), (ALL,), ((0, 2),)),
        3: Ties((), (ALL,), ((1, 3),)),
    }
    assert choose(ties, [0, 3]) == {1: [3], 2: [0]}


def test_then_one_that_shares_most_groups_then_the_lowest() -> None:
    ties = {0: NOTHING, 1: NOTHING, 2: Ties((), (ALL, (1, 2))), 3: NOTHING}
    assert choose(ties, [1]) == {2: [1]}
    assert choose(ties, [3]) == {0: [3]}


def test_replacements_of_different_models_have_sources_of_their_own() -> None:
    ties = {
        0: Ties(models((0, 1)), (ALL,)),
        1: NOTHING,
        2: NOTHING,
        3: Ties(models((2, 3)), (ALL,)),
    }
    assert choose(ties, [2, 1]) == {0: [1], 3: [2]}


def test_replacements_are_no_sources_and_without_a_living_rank_there_is_none() -> None:
    assert choose({0: NOTHING, 1: NOTHING}, [0]) == {1: [0]}
    assert choose({0: NOTHING, 1: NOTHING}, [0, 1]) == {}


def test_a_model_that_the_source_does_not_hold_is_missed_by_the_replacement_that_trained_it() -> (
    None
):
    ties = {
        0: Ties(models(ALL, (0, 1)), (ALL,)),
        1: NOTHING,
        2: Ties(models(ALL, (1, 2), (2, 3)), (ALL,)),
        3: NOTHING,
    }
    (found,) = missed(ties, 1, 0)
    assert (found.ranks, found.names) == ((1, 2), ("net1",))
    assert missed(ties, 1, 2)[0].ranks == (0, 1)
