"""With which buckets reducers go on after a fault: pure, on what the ranks tell."""

import pytest

pytest.importorskip("torch")

from nbdist.engine.group.ddp_buckets import Claim, Fact, agreed, plan

NEW, FIRST_STEP = Fact(0, "first", False), Fact(0, "rebuilt", False)
ONE_STEP, LAID, UNUSED = Fact(1, "first", False), Fact(2, "rebuilt", False), Fact(2, "never", False)
STATIC_NEW, STATIC_LEARNT = Fact(0, "first", True), Fact(1, "first", True)
STATIC_LAID = Fact(2, "rebuilt", True)
THAWED = Fact(0, "first", False, "11")


@pytest.mark.parametrize(
    ("facts", "planned"),
    [
        pytest.param([NEW, NEW], "reset", id="no step has ended"),
        pytest.param([FIRST_STEP, NEW], "begin again", id="laid anew in a first step that is lost"),
        pytest.param([ONE_STEP, ONE_STEP], "agree", id="about to lay them anew"),
        pytest.param([LAID, ONE_STEP], "agree", id="some ranks have laid them anew"),
        pytest.param([ONE_STEP, NEW], "agree", id="a rank has not ended the first step"),
        pytest.param([LAID, NEW], "agree", id="a replacement has made no step"),
        pytest.param([LAID, LAID], "reset", id="all have laid them anew"),
        pytest.param([LAID], "reset", id="the module's other ranks have lost it"),
        pytest.param([UNUSED, UNUSED], "reset", id="gradients may be missing"),
        pytest.param([UNUSED, Fact(0, "never", False)], "reset", id="... also for a replacement"),
        pytest.param([STATIC_NEW, STATIC_NEW], "begin again", id="the graph was half learnt"),
        pytest.param([STATIC_LEARNT, STATIC_NEW], "agree", id="... by one rank"),
        pytest.param([STATIC_LAID, STATIC_LAID], "reset", id="the graph is known"),
        pytest.param([THAWED, THAWED], "reset", id="more is trained on all ranks"),
        pytest.param(
            [THAWED, Fact(2, "rebuilt", False, "10")],
            "in the next forward",
            id="... on some of them",
        ),
    ],
)
def test_buckets_stay_where_they_are_those_of_the_next_step(
    facts: list[Fact], planned: str
) -> None:
    assert plan(facts) == planned


def test_ranks_take_what_one_has_laid_then_what_one_would_lay_then_what_one_has() -> None:
    own, to_come = Claim("own", [[0, 1]]), Claim("to come", [[1, 0]])
    laid, other = Claim("laid", [[1], [0]]), Claim("laid", [[0], [1]])
    assert agreed([own, to_come, laid]) == laid
    assert agreed([own, to_come]) == to_come
    assert agreed([own]) == own
    assert agreed([]) is None
    assert agreed([laid, other]) == laid, "the group's first rank tells them, as with torch"
