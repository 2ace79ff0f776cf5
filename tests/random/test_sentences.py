"""What is held against the truth: sentences that are false, and those that are not."""

from tests.random import sentences
from tests.random.acts import Fault

LOST = "Rank 1 had lost step 4: it copied the model (Linear) and its optimizer from rank 0."


def test_a_lost_step_is_true_only_of_the_steps_in_which_a_fault_may_part_ranks() -> None:
    assert sentences.false_loss(LOST, {4}) == []
    assert sentences.false_loss(LOST, {3}) == [LOST.rstrip(".")]


def test_a_loader_stands_at_the_end_of_an_epoch_or_at_the_next_ones_begin() -> None:
    for place in ("sample 60 of epoch 0", "sample 0 of epoch 1"):
        said = f"The cell continues: its loader is at {place}."
        assert sentences.false_place(said, {5}) == []
        assert sentences.false_place(said, {4, 6})


def test_a_death_whose_signal_is_not_told_is_missed() -> None:
    assert sentences.missing_cause("rank 1 died", Fault("SIGSEGV", (1,))) == ["SIGSEGV"]
    assert sentences.missing_cause("killed by SIGSEGV", Fault("SIGSEGV", (1,))) == []


def test_frames_of_nbdist_are_found_in_any_of_its_folders() -> None:
    frame = 'File "/somewhere/nbdist/client/cells/run.py", line 3, in run'
    assert sentences.raw(f"Traceback:\n  {frame}\nValueError") == [f"  {frame}"]
    assert sentences.raw('File "/somewhere/my_nbdist.py", line 3') == []
