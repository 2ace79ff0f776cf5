"""Which saved model each one here is: by what fits, then by names, else nothing is guessed."""

from itertools import permutations

from nbdist.engine.checkpoint.pairing import Paired, paired

Names = dict[str, list[str]]


def every(here: Names, there: Names) -> set[tuple[str, str]]:
    return {(h, t) for h in here for t in there}


def pair(here: Names, there: Names, fits: set[tuple[str, str]] | None = None) -> Paired:
    possible = every(here, there) if fits is None else fits
    return paired(list(here), list(there), possible, here, there)


def test_names_decide_among_those_that_fit_in_whatever_order_they_are_made() -> None:
    there = {"M": ["a"], "M-2": ["b"], "M-3": ["t.c"]}
    for names in permutations(("a", "b", "t.c")):
        here = {name: [called] for name, called in zip(there, names, strict=True)}
        found = pair(here, there)
        assert {here[h][0]: t for h, t in found.pairs.items()} == {
            "a": "M",
            "b": "M-2",
            "t.c": "M-3",
        }
        assert not found.by_order
        assert not found.undecided


def test_what_alone_fits_goes_before_names() -> None:
    here, there = {"M": ["b"], "M-2": ["a"]}, {"M": ["a"], "M-2": ["b"]}
    assert pair(here, there, {("M", "M"), ("M-2", "M-2"), ("M-2", "M")}).pairs == {
        "M": "M",
        "M-2": "M-2",
    }


def test_a_name_that_was_another_ones_too_decides_nothing_alone() -> None:
    """As a loop leaves one behind: `for net in (a, b)`."""
    assert pair({"M": ["a", "net"], "M-2": ["b"]}, {"M": ["a"], "M-2": ["b", "net"]}).pairs == {
        "M": "M",
        "M-2": "M-2",
    }
    lost = pair({"M": ["x"], "M-2": ["b", "net"]}, {"M": ["net"], "M-2": ["b"]})
    assert lost.undecided == ("M", "M-2")


def test_the_last_one_left_needs_no_name() -> None:
    found = pair({"M": ["x"], "M-2": ["a"]}, {"M": ["a"], "M-2": ["b"]})
    assert found.pairs == {"M-2": "M", "M": "M-2"}


def test_order_counts_only_where_one_side_tells_no_names() -> None:
    there: Names = {"M": [], "M-2": []}
    found = pair({"M": ["b"], "M-2": ["a"]}, there)
    assert found.pairs == {"M": "M", "M-2": "M-2"}
    assert found.by_order == ("M", "M-2")
    found = pair({"M": ["x"], "M-2": ["y"]}, {"M": ["a"], "M-2": ["b"]})
    assert not found.pairs
    assert found.free == ("M", "M-2")


def test_a_variable_of_its_own_goes_before_a_place_in_a_list() -> None:
    found = pair(
        {"M": ["B", "ls[0]"], "M-2": ["A", "ls[1]"]}, {"M": ["A", "ls[0]"], "M-2": ["B", "ls[1]"]}
    )
    assert found.pairs == {"M": "M-2", "M-2": "M"}


def test_one_that_nothing_names_steps_aside_where_there_are_more_than_there_were() -> None:
    assert pair({"M": [], "M-2": ["model"]}, {"M": []}).pairs == {"M-2": "M"}
    assert pair({"M": ["old"], "M-2": ["model"]}, {"M": []}).undecided == ("M", "M-2")
    assert pair({"M": [], "M-2": ["student"]}, {"M": ["teacher"]}).undecided == ("M", "M-2")
