"""The sentences about a step that was left out."""

import math
from typing import Any

import pytest

from nbdist.client.cells.replays import Replayed
from nbdist.shared.errors import UsageError

FINITE: dict[str, Any] = {
    "bad": None,
    "is_input": False,
    "size": 4,
    "rows": [],
    "bad_rows": 0,
    "bad_samples": None,
    "epoch": None,
    "positions": None,
    "samples": None,
}
MENDED = "or a change of the model since then has mended it"
LOG = {"module": "0.log", "kind": "Log", "weights": [], "is_passed_on": False}


def rank(*forwards: dict[str, Any], **more: Any) -> dict[str, Any]:
    said = {
        "step": 3,
        "loss": 1.5,
        "gradients": {"0": None, "1": 2.0},
        "modules": 2,
        "bad_modules": 1,
        "why_not": "",
        "ran": True,
        "has_weights": True,
        "unkept": 0,
        "forwards": [FINITE | one for one in forwards],
    }
    return said | more


def lines(*said: dict[str, Any]) -> list[str]:
    return str(Replayed.of(dict(enumerate(said)))).splitlines()


def test_rank_module_and_sample_are_named() -> None:
    bad = {"bad": LOG, "rows": [2], "bad_rows": 1, "bad_samples": [11]}
    where = {"epoch": 0, "positions": [8, 12], "samples": [4, 9, 11, 2]}
    assert lines(rank({}), rank(bad | where, loss=math.nan)) == [
        "Step 3 was left out on ranks 0-1. Its forward again, with the weights it had:",
        "  rank 0 (loss 1.5): every output of its forward is finite",
        (
            "  rank 1 (loss nan): 0.log (Log) is the first module whose output is not finite, for "
            "sample 2 of its batch, dataset[11]"
        ),
        "Gradients that are not finite on ranks 0-1: 0.",
        "Newest batch of the loader on rank 1: positions 8-11 of epoch 0: dataset[4, 9, 11, 2].",
    ]


def test_of_an_input_that_is_not_finite_the_sample_is_named_with_it() -> None:
    said = lines(rank({"bad": LOG, "is_input": True, "rows": [0, 3], "bad_rows": 2}))
    assert said[1] == (
        "  rank 0 (loss 1.5): the input of its forward is not finite in samples 0, 3 of its batch; "
        "0.log (Log) is the first module whose output is not finite"
    )


def test_where_all_samples_are_bad_none_is_named_and_weights_are() -> None:
    bad = {"bad": LOG | {"weights": ["weight"]}, "rows": [0, 1, 2, 3], "bad_rows": 4}
    found = Replayed.of({0: rank(bad | {"bad_samples": [7, 8, 9, 1]})})
    (forward,) = found.ranks[0].forwards
    assert (forward.rows, forward.samples, forward.is_all) == ((), None, True)
    assert (
        str(found)
        .splitlines()[1]
        .endswith("is not finite, for every sample of its batch; its weight is not")
    )


def test_where_every_output_is_finite_it_says_what_is_left() -> None:
    assert lines(rank({}))[2] == f"  So it is the loss or the backward, {MENDED}."
    said = lines(rank({}, has_weights=False))
    assert said[0].endswith("with the weights of now:")
    assert said[2].endswith("or these weights no longer show it.")
    assert lines(rank({}, unkept=2))[2:4] == [
        "  rank 0: 2 forwards more that it did not keep",
        "  So it is a forward that was not kept, the loss or the backward.",
    ]


def test_where_nothing_ran_the_reason_and_the_gradients_are_told() -> None:
    why = {"ran": False, "why_not": "its model is gone"}
    assert lines(
        rank(**why), rank(**why | {"why_not": ""}, gradients={"": 1.0}, bad_modules=0)
    ) == [
        "Step 3 was left out on ranks 0-1. Its forward did not run again:",
        "  rank 0: its model is gone",
        "Gradients that are not finite on rank 0: 0.",
        "Rank 1 is without a gradient that is not finite.",
    ]


def test_of_many_modules_some_are_named_and_all_are_counted() -> None:
    many = {f"layer.{number}": None for number in range(64)}
    (*_, said) = lines(rank({}, gradients=many, modules=90, bad_modules=90))
    assert said.endswith("layer.6, layer.7 and 82 more (all 90 modules).")


def test_a_rank_that_did_not_leave_it_out_is_not_spoken_of() -> None:
    assert Replayed.of({0: {}, 1: rank({})}).ranks.keys() == {1}


def test_a_refusal_is_that_of_the_ranks() -> None:
    with pytest.raises(UsageError, match="Step 4 is not kept"):
        Replayed.of({0: {"error": ["Step 4 is not kept.", "kept is 3", "%dist replay 3"]}})


def in_float32(*forwards: dict[str, Any], low: str = "bfloat16") -> dict[str, Any]:
    said = [FINITE | one for one in forwards]
    return {"float32": {"forwards": said, "instead_of": [low] if low else []}}


def test_what_float32_can_hold_is_said_to_be_of_the_lower_precision() -> None:
    bad = {"bad": LOG, "rows": [2], "bad_rows": 1}
    said = lines(rank({}, **in_float32({})), rank(bad, **in_float32({})))
    assert said[3] == (
        "In float32 every output is finite: it is the range or the rounding of bfloat16."
    )


def test_what_float32_cannot_hold_either_is_named_once_more() -> None:
    bad = {"bad": LOG, "rows": [2], "bad_rows": 1}
    said = lines(rank(bad, **in_float32({})), rank(bad, **in_float32(bad)))
    assert said[3:6] == [
        "In float32 it is not finite on rank 1 either:",
        (
            "  rank 1: 0.log (Log) is the first module whose output is not finite, for sample 2 of "
            "its batch"
        ),
        "In float32 every output on rank 0 is finite.",
    ]


def test_a_forward_that_is_finite_either_way_is_no_precisions_fault() -> None:
    said = lines(rank({}, **in_float32({})))
    assert said[2:4] == [
        f"  So it is the loss or the backward, {MENDED}.",
        "In float32 every output is finite, too.",
    ]


def test_of_a_forward_that_is_float32_as_it_is_nothing_else_is_claimed() -> None:
    bad = {"bad": LOG, "rows": [2], "bad_rows": 1}
    said = lines(rank(bad, **in_float32(bad, low="")))
    assert said[2] == (
        "In float32 it is the same: it has no autocast, and no weight or input of a lower "
        "precision."
    )


def test_of_several_forwards_none_is_said_to_have_the_loss_of_the_step() -> None:
    assert "(loss" not in "\n".join(lines(rank({}, {}, loss=math.nan)))


def test_a_loss_that_is_not_finite_is_named_with_its_rank() -> None:
    assert (
        lines(rank({}), rank({}, loss=math.inf))[3] == f"  So it is the loss, on rank 1, {MENDED}."
    )


def test_a_target_that_is_not_finite_is_named_where_the_forward_is_finite() -> None:
    beside = {"beside": [3], "beside_rows": 1, "beside_samples": [19]}
    assert lines(rank(beside, loss=math.nan))[1] == (
        "  rank 0 (loss nan): every output of its forward is finite; what its loader gave beside "
        "it is not, in sample 3 of its batch, dataset[19]"
    )
    every = {"beside": [0, 1, 2, 3], "beside_rows": 4, "beside_samples": [7, 8, 9, 4]}
    assert "beside it is not, in every sample of its batch" in lines(rank(every))[1]
    assert "beside" not in lines(rank(beside | {"bad": LOG, "rows": [2], "bad_rows": 1}))[1]


def test_a_step_of_an_earlier_cell_is_said_to_be_of_one() -> None:
    assert lines(rank({}, is_older=True))[0] == (
        "Step 3 was left out on rank 0 in an earlier cell (the newest guarded one has left none "
        "out). Its forward again, with the weights it had:"
    )


SQRT: dict[str, Any] = {
    "operation": "SqrtBackward0",
    "module": "2.norm",
    "kind": "Norm",
    "is_loss": False,
    "place": "cell 7, line 5",
    "is_given": False,
    "is_shared": False,
}


def backward(*found: dict[str, Any] | None, why_not: str = "") -> dict[str, Any]:
    return {"backward": {"why_not": why_not, "ran": not why_not, "found": list(found)}}


def test_the_operation_that_bursts_in_the_backward_is_named_with_module_and_line() -> None:
    said = lines(rank({}, **backward(SQRT)), rank({}, **backward(None)))
    assert said[4:7] == [
        "Its loss and backward again:",
        (
            "  rank 0: SqrtBackward0 in 2.norm (Norm) (cell 7, line 5) is the first whose gradient "
            "is not finite"
        ),
        "  rank 1: every gradient that reaches a parameter is finite",
    ]


def test_of_several_backwards_each_is_told_and_ranks_that_agree_once() -> None:
    of_loss = SQRT | {"module": None, "kind": "", "is_loss": True, "place": ""}
    again = backward(None, of_loss)
    said = lines(rank({}, **again), rank({}, **again))
    assert said[5:7] == [
        "  ranks 0-1, backward 1 of 2: every gradient that reaches a parameter is finite",
        (
            "  ranks 0-1, backward 2 of 2: SqrtBackward0 in the loss is the first whose gradient "
            "is not finite"
        ),
    ]


def test_a_gradient_that_comes_from_elsewhere_is_not_laid_at_the_operations_door() -> None:
    summed = lines(rank({}, **backward(SQRT | {"is_given": True})))[4]
    assert summed == (
        "  rank 0: what reaches SqrtBackward0 in 2.norm (Norm) (cell 7, line 5) is not finite: a "
        "sum of gradients, or a hook's"
    )
    shared = lines(rank({}, **backward(SQRT | {"is_shared": True})))[4]
    assert shared.endswith("; ranks communicate in it, so it may be another rank's")


def test_where_every_gradient_is_finite_it_is_their_sum() -> None:
    said = lines(rank({}, **backward(None)))
    assert (
        said[5]
        == "  So it is a sum of them (over uses of a weight, micro-batches or ranks), a hook, or "
        "what the loop does to gradients; or a change of the model since then has mended it."
    )
    assert lines(rank({}, has_weights=False, **backward(None)))[5] == (
        "  So it is a sum of them (over uses of a weight, micro-batches or ranks), a hook, or "
        "what the loop does to gradients, or these weights no longer show it; or a change of the "
        "model since then has mended it."
    )


def test_why_no_backward_ran_again_is_told_and_nothing_is_claimed_of_it() -> None:
    said = lines(rank({}, **backward(why_not="its layout is gone")), rank({}))
    assert said[4:6] == ["Its backward did not run again:", "  rank 0: its layout is gone"]
    assert "a sum of them" not in "".join(said)


def made(*forwards: dict[str, Any], **more: Any) -> dict[str, Any]:
    sound = {"is_left_out": False, "gradients": {"0": 1.0, "1": 2.5}, "bad_modules": 0}
    return rank(*forwards, **sound | more)


def proof(steps: int = 3, loss: Any = None, norms: int | None = None) -> dict[str, Any]:
    return {"proof": {"begins": 1, "steps": steps, "loss": loss, "norms": norms}}


def test_of_a_step_that_was_not_left_out_the_proof_is_told_and_nobody_is_to_blame() -> None:
    assert lines(made({}, **proof()), made({}, **proof())) == [
        "Step 3 was made on ranks 0-1. Its forward again, with the weights it had:",
        "  rank 0 (loss 1.5): every output of its forward is finite",
        "  rank 1 (loss 1.5): every output of its forward is finite",
        (
            "Made again from step 1 on: the losses of all 3 steps are equal bit for bit, and so "
            "are the norms of their gradients."
        ),
        "Largest norms of gradients on ranks 0-1: 1 2.5, 0 1.",
    ]


def test_of_one_step_its_own_loss_is_the_proof() -> None:
    assert lines(made({}, **proof(1)))[2] == (
        "Made again: its loss is equal bit for bit, and so are the norms of its gradients."
    )


def test_where_losses_part_the_first_step_and_what_differs_first_are_told() -> None:
    said = lines(made({}, **proof(loss=[3, 0.5, 0.25])), made({}, **proof(loss=[2, 1.0, 2.0])))
    assert said[0].endswith("Its forward again, with weights that are not those it had:")
    assert said[3].endswith(
        "from step 2 on losses are no longer those of the training (1.0 then, 2.0 now, on rank 1)."
    )
    assert said[4].startswith("Gradients were the same until then")
    between = lines(made({}, **proof(loss=[3, 0.5, 0.25], norms=2)))
    assert between[3].startswith("In step 2 the optimizer got other gradients")


def test_why_no_loss_proves_it_is_told() -> None:
    said = lines(made({}, no_run="its loss is not known"))
    assert said[2] == "No loss proves it on rank 0: its loss is not known."
    assert not Replayed.of({0: made({}, no_run="x")}).is_proven


def in_one(*parts: dict[str, Any], was: float | None = None) -> dict[str, Any]:
    losses = {"was": was, "loss": was}
    said = [{"rank": n, "forwards": [FINITE | losses | p]} for n, p in enumerate(parts)]
    return {"one": said}


def test_what_is_not_finite_in_one_process_either_is_the_models_or_the_datas() -> None:
    bad = {"bad": LOG, "rows": [2], "bad_rows": 1}
    said = lines(rank({}, **in_one({}, bad)), rank(bad))
    assert said[3:7] == [
        "In one process, with the whole weights on rank 0:",
        "  the part of rank 0: every output of its forward is finite",
        (
            "  the part of rank 1: 0.log (Log) is the first module whose output is not finite, for "
            "sample 2 of its batch"
        ),
        "  So it is the model or the data, and not the layout.",
    ]


def test_what_is_finite_in_one_process_is_the_layouts() -> None:
    bad = {"bad": LOG, "rows": [2], "bad_rows": 1}
    said = lines(rank({}, **in_one({}, {})), rank(bad))
    assert said[6] == "  So it is the layout: it is not finite on rank 1 alone."
    other = lines(rank({}, **in_one({}, bad)), rank({}))
    assert "  It is not finite in one process alone: the layout computes something else." in other


def test_losses_in_one_process_are_the_ranks_or_apart_by_rounding_or_by_more() -> None:
    same = lines(made({}, **in_one({}, was=1.5)))
    assert same[3].endswith("; loss 1.5, the rank's, bit for bit")
    assert "In one process" not in same[4]
    near = lines(made({}, **in_one({"loss": 1.500001}, was=1.5)))
    assert near[3].endswith("; loss 1.500001, the rank's was 1.5")
    assert near[4] == "  Losses of 1 part differ by rounding alone, up to 6.7e-07 of them."
    mended = lines(made({}, **in_one({"loss": 3.0}, was=float("nan"))))[4]
    assert "is so no more: it is the layout, or the model has changed since" in mended
    assert "Losses differ by up to 5.0e-01" in lines(made({}, **in_one({"loss": 3.0}, was=1.5)))[4]


def test_losses_in_one_process_are_not_compared_where_weights_are_others() -> None:
    other = made({}, **in_one({"loss": 3.0}, was=1.5), **proof(loss=[2, 1.0, 2.0]))
    said = lines(other)
    assert "  the part of rank 0: every output of its forward is finite" in said
    assert "Losses differ" not in "".join(said)


def test_one_rank_is_shown_alone() -> None:
    said = {0: made({}, **proof(loss=[2, 1.0, 2.0])), 1: made({}, **proof())}
    found = Replayed.of(said, 1)
    assert list(found.ranks) == [1]
    bad = {"bad": LOG, "rows": [2], "bad_rows": 1}
    one = str(Replayed.of({0: rank(bad, **in_one(bad, {})), 1: rank({})}, 1))
    assert "So it is the model or the data" in one, "also where another rank has the bad part"
    assert not found.has_weights, "the weights of all ranks are of one training"
