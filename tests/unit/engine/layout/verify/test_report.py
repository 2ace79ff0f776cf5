"""What a proof says: what is round-off, what is not, and how people read it."""

import math

import pytest

from nbdist.engine.layout.verify.report import (
    MULTIPLE,
    Difference,
    Noise,
    OnePiece,
    Proof,
    allowances,
    judge,
)
from nbdist.shared.errors import LayoutError

ALLOWED = {
    "what": "gradient",
    "name": "up.weight",
    "step": 1,
    "rank": 0,
    "by": 2e-7,
    "floor": 1e-7,
    "allowed": 1e-6,
}


def difference(**changed: object) -> Difference:
    return Difference(**{**ALLOWED, **changed})  # type: ignore[arg-type]


def proof(*found: Difference, is_bit_equal: bool = False) -> Proof:
    return judge("ddp", 3, found, [(2.0, 2.0)], ["A note."], is_bit_equal=is_bit_equal)


def test_a_tensor_may_be_some_noise_floors_away() -> None:
    assert allowances({"a": Noise(1e-7, 1.0)}, 0.0)["a"] == pytest.approx(MULTIPLE * 1e-7)


def test_a_floor_that_is_small_by_luck_counts_as_the_usual_one() -> None:
    noise = {name: Noise(1e-7, 1.0) for name in "abc"} | {"lucky": Noise(0.0, 2.0)}
    assert allowances(noise, 0.0)["lucky"] == pytest.approx(MULTIPLE * 2e-7)


def test_a_tensor_that_is_all_noise_has_its_own_floor() -> None:
    noise = {name: Noise(1e-7, 1.0) for name in "abc"} | {"cancels": Noise(3e-8, 2e-8)}
    assert allowances(noise, 0.0)["cancels"] == pytest.approx(MULTIPLE * 3e-8)


def test_nothing_is_told_apart_below_the_epsilon_of_the_dtype() -> None:
    assert allowances({"a": Noise(0.0, 1.0)}, 1e-7)["a"] == pytest.approx(MULTIPLE * 1e-7)


def test_a_result_that_is_no_number_is_a_difference() -> None:
    found = proof(difference(by=math.nan))
    assert not found.ok


def test_the_first_step_counts_and_in_it_the_furthest() -> None:
    found = proof(
        difference(step=2, by=9.0),
        difference(name="near", by=2e-6),
        difference(name="far", by=1e-3, rank=1),
        difference(name="far", by=2e-3, rank=2),
    )
    assert found.first is not None
    assert (found.first.name, found.first.step, found.ranks) == ("far", 1, (1, 2))
    assert found.worst[0] == found.first
    assert repr(found).splitlines()[0] == (
        "ddp against one process on the same split: DIFFERS: the gradient of far at step 1 by "
        "2.0e-03 (allowed 1.0e-06) on ranks 1-2"
    )


def test_a_proof_says_that_it_is_equal_to_the_bit() -> None:
    found = proof(difference(by=0.0), is_bit_equal=True)
    assert repr(found).splitlines() == [
        "ddp against one process on the same split: equal bit for bit over 3 steps",
        "  loss, ddp          2",
        "  loss, one process  2",
        "  A note.",
    ]


def test_a_proof_on_pieces_says_what_one_piece_has_and_that_it_was_not_tried() -> None:
    def said(one_piece: OnePiece) -> list[str]:
        found = [difference(by=0.0)]
        return repr(
            judge("ddp", 3, found, [], [], one_piece=one_piece, is_bit_equal=True)
        ).splitlines()

    other = said(OnePiece(4, 8, 2.0, 3.0, 1e-8))
    assert other[0].endswith(
        "equal bit for bit over 3 steps; in one piece the batch has another loss, 2 and not 3"
    )
    assert other[1].startswith("  The loss of 4 of 8 pieces in one piece is 2; the mean of the 4 ")
    assert said(OnePiece(2, 2, failed="RuntimeError: no")) == [
        other[0].partition(";")[0] + "; not compared with the batch in one piece",
        "  The batch could not be computed in one piece (RuntimeError: no).",
    ]


def test_round_off_between_one_piece_and_the_mean_of_several_is_no_other_loss() -> None:
    assert OnePiece(2, 2, 1.0, 1.0 + 1e-9, 1e-8).is_mean
    assert not OnePiece(2, 2, 1.0, 1.0 + 1e-7, 1e-8).is_mean
    assert not OnePiece(2, 2, failed="RuntimeError: no").is_mean


def test_a_proof_says_how_near_to_the_noise_floor_it_is() -> None:
    assert proof(difference()).verdict == (
        "equal within round-off over 3 steps. Closest call: the gradient of up.weight differs "
        "by 2.0e-07 (round-off alone 1.0e-07, limit 1.0e-06)"
    )


def test_a_difference_raises_only_when_asked() -> None:
    proof(difference()).raise_if_different()
    with pytest.raises(LayoutError, match=r"gradient of up\.weight at step 1 by 1\.0e\+00"):
        proof(difference(by=1.0)).raise_if_different()
