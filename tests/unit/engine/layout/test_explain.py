"""What a layout says of itself before anything runs."""

from nbdist.engine.layout.explain import Explanation
from nbdist.engine.layout.plan.cost import ModelSize
from nbdist.engine.layout.plan.mesh import parse


def told(text: str, ranks: int) -> str:
    size = ModelSize(4000, 4000, 4000, 1000)
    shape = parse(text, ranks)
    return repr(Explanation(shape.name, shape, (), size, size, "gloo"))


def test_a_name_that_the_other_axes_leave_one_rank_is_said_to_do_nothing() -> None:
    assert "zero3 has one rank, which shares nothing: pp=2 takes all of them" in told(
        "zero3 pp=2", 2
    )


def test_of_names_that_have_ranks_nothing_of_that_kind_is_said() -> None:
    assert "one rank" not in told("zero3 pp=2", 4)
    assert "one rank" not in told("tp=2 dp=-1", 2)
