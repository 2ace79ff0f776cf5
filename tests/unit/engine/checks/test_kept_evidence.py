"""Which steps on disk can be looked into, by what each rank has of them."""

import pytest

from nbdist.engine.checks.kept_evidence import KeptFile, complete, said
from nbdist.shared.errors import UsageError


def file(*steps: int, world: int = 2, is_of_all: bool = True, misfit: str = "") -> KeptFile:
    return KeptFile(world, "ddp", {(1, step): is_of_all for step in steps}, misfit, 2000)


def test_steps_that_all_ranks_have_kept_are_whole() -> None:
    every = [file(3, 5), file(3, 5)]
    whole = complete("F", every, "ddp")
    assert whole == {(1, 3), (1, 5)}
    assert said("F", every, whole) == "Kept in F, 2.0 kB a rank."


def test_a_newer_step_that_one_has_not_written_is_named() -> None:
    every = [file(3, 5), file(3)]
    whole = complete("F", every, "ddp")
    assert whole == {(1, 3)}
    assert said("F", every, whole).endswith("Of step 5 there is nothing of rank 1.")


def test_a_rank_that_trains_by_itself_is_whole_alone() -> None:
    assert complete("F", [None, file(3, is_of_all=False)], "") == {(1, 3)}


@pytest.mark.parametrize("other", [None, file(1)])
def test_without_a_step_of_all_the_missing_rank_is_named(other: KeptFile | None) -> None:
    with pytest.raises(UsageError, match="of its newest step there is nothing of rank 1"):
        complete("F", [file(3), other], "ddp")


def test_another_number_of_ranks_is_refused_with_both() -> None:
    with pytest.raises(UsageError, match="is of 4 ranks, and here are 2") as error:
        complete("F", [file(3, world=4)] * 2, "ddp")
    assert "%dist scale 4" in error.value.do


def test_another_model_is_refused_with_what_differs_and_both_layouts() -> None:
    with pytest.raises(UsageError, match="No model of rank 1 is the one") as error:
        complete("F", [file(3), file(3, misfit="0.weight is [1]")], "zero3")
    assert error.value.why == (
        "its layout was 'ddp', and the newest layout here is 'zero3'; 0.weight is [1]"
    )
