"""What is said of the steps that a cell has left out."""

from nbdist.engine.steps.left_out_steps import LeftOutSteps


def test_many_steps_are_named_by_the_first_ten_and_a_count() -> None:
    steps = LeftOutSteps()
    for number in range(1001, 1025):
        steps.note_left_out(number, "SGD")
    (said,) = steps.sentences("on all ranks")
    assert said.startswith("Steps 1,001, 1,002, ")
    assert "1,010 and 14 more were left out on all ranks: gradients were not finite. " in said


def test_a_step_that_all_its_optimizers_leave_out_is_named_once_and_whole() -> None:
    steps = LeftOutSteps()
    steps.note_stepped(3, "Muon")
    steps.note_stepped(3, "AdamW")
    assert steps.note_left_out(4, "Muon") == 4
    assert steps.note_left_out(4, "AdamW") is None
    (said,) = steps.sentences("on all ranks")
    assert said == (
        "Step 4 was left out on all ranks: gradients were not finite. Weights, buffers and the "
        "optimizer's state are as before; a schedule has counted it."
    )


def test_steps_that_another_optimizer_has_made_are_told_apart_whichever_was_first() -> None:
    steps = LeftOutSteps()
    steps.note_stepped(2, "Muon")
    steps.note_left_out(2, "AdamW")
    steps.note_left_out(4, "AdamW")
    steps.note_stepped(4, "Muon")
    steps.note_left_out(5, "Muon")
    steps.note_left_out(5, "AdamW")
    some, whole = steps.sentences("on all ranks")
    assert some == (
        "Steps 2 and 4 were left out on all ranks for AdamW alone, whose gradients were not "
        "finite: its weights and state are as before. In the same steps Muon has stepped; "
        "a schedule has counted them."
    )
    assert whole.startswith("Step 5 was left out on all ranks: gradients were not finite. Weights")


def test_where_steps_are_not_counted_each_call_is_one() -> None:
    steps = LeftOutSteps()
    assert [steps.note_left_out(None, "SGD") for _ in range(2)] == [1, 2]


def test_an_optimizer_of_the_same_name_is_another_one() -> None:
    steps = LeftOutSteps()
    steps.note_left_out(4, "Adam")
    steps.note_stepped(4, "Adam")
    (said,) = steps.sentences("on all ranks")
    assert "In the same step another Adam has stepped;" in said
