"""Which loader goes on with which state of a checkpoint."""

import pickle
from collections.abc import Mapping
from typing import Any

from nbdist.engine.data.make import loader
from nbdist.engine.data.position.position import LoaderPosition, SavedPosition, matched, names_of


def made(samples: int = 8) -> Any:
    return loader(list(range(samples)), global_batch=4)


def standings(*loaders: Any) -> list[LoaderPosition]:
    return [one._standing for one in loaders]


def states(
    *loaders: Any, alive: bool = True, named: Mapping[str, object] | None = None
) -> list[SavedPosition]:
    """Return their states, or with `alive=False` as another session would have left them."""
    told = [one.state_dict() for one in loaders]
    if not alive:
        told = [{**t, "journal": {**t["journal"], "session": "?"}} for t in told]
    names = names_of(standings(*loaders), named or {})
    return [SavedPosition(state, names=called) for state, called in zip(told, names, strict=True)]


def test_a_loader_that_lives_on_takes_its_own_state_whatever_was_made_since() -> None:
    train, other = made(), made()
    assert matched(states(train), standings(train, other)) == standings(train)


def test_a_loader_that_was_made_in_the_place_of_one_that_is_gone_takes_its_state() -> None:
    gone = made()
    told, standing = states(gone), gone._standing  # which what a fault needs keeps alive
    del gone
    again = made()
    assert matched(told, [standing, again._standing]) == standings(again)


def test_a_loader_is_held_while_and_after_loops_over_it_copy_it() -> None:
    train = made()
    for _ in train:
        assert train._standing.is_held
    assert train._standing.is_held


def test_states_of_loaders_that_were_gone_choose_last() -> None:
    first, second = made(), made()
    told = states(first, second, alive=False)
    again = made()
    again._standing.account.kind = first._standing.account.kind
    told[0] = told[0]._replace(is_held=False)
    assert matched(told, standings(again)) == [None, again._standing]


def test_a_loader_that_has_travelled_is_known_as_the_one_that_it_was() -> None:
    train, other = made(), made()
    came = pickle.loads(pickle.dumps(train))
    assert matched(states(train), standings(came, other)) == standings(came)


def test_loaders_that_are_alike_take_their_states_in_the_order_of_making() -> None:
    first, second = made(), made()
    told = states(first, second, alive=False)
    for one in told:  # as if two cells had made them
        one.state["journal"]["kind"] = first._standing.account.kind
    second._standing.account.kind = first._standing.account.kind
    assert matched(told, standings(first, second)) == standings(first, second)


def test_one_that_is_made_anew_takes_the_state_and_one_that_lives_on_keeps_its_own() -> None:
    idle, train = made(), made()
    told = states(idle, train)
    again = made()
    again._standing.account.kind = idle._standing.account.kind
    assert matched(told, standings(idle, again)) == standings(idle, again)


def test_loaders_of_one_size_go_on_by_their_names_in_whatever_order_they_are_made() -> None:
    train, val = made(), made()
    told = states(train, val, alive=False, named={"train": train, "val": val, "_": val})
    second, first = made(), made()
    here = {"val": second, "train": first, "_": first, "x": 1}
    assert matched(told, standings(second, first), here) == standings(first, second)


def test_one_that_was_made_again_under_a_name_takes_the_state_though_the_older_one_lives() -> None:
    older, other = made(), made()
    told = states(older, other, named={"loader": older, "other": other})
    again = made()
    here = {"loader": again, "before": older, "other": other}
    everything = standings(older, other, again)
    assert matched(told, everything, here) == standings(again, other)


def test_a_name_that_another_number_of_samples_has_says_nothing() -> None:
    train = made(8)
    told = states(train, named={"loader": train})
    longer = made(12)
    assert matched(told, standings(train, longer), {"loader": longer}) == standings(train)


def test_a_state_of_another_number_of_samples_waits_for_its_loader() -> None:
    assert matched(states(made(12)), standings(made())) == [None]


def test_a_loader_that_comes_from_another_rank_is_older_than_what_is_made_then() -> None:
    here = made()._standing
    came = LoaderPosition.__new__(LoaderPosition)
    came.__setstate__({**vars(here), "number": here.number + 100})
    assert made()._standing.number > came.number
