"""What is left changed is said in one sentence: where, what, and how it is put back."""

from nbdist.client.metrics.checks.rules.leftovers import LEFT_CHANGED
from nbdist.shared.wire import CELL_END, Record
from tests.unit.client.metrics.checks.watching import Watching


def said(*of_ranks: dict[str, float]) -> str:
    """Return what is said when ranks have told these values."""
    watching = Watching(LEFT_CHANGED, range(len(of_ranks)))
    for rank, values in enumerate(of_ranks):
        assert watching.take(Record(rank, 1, "left", CELL_END, 0, values)) == ""
    return watching.end()


def test_ranks_both_dtypes_and_the_way_back_are_named() -> None:
    changed = {"script": 0.0, "dtype": 2.0, "dtype_before": 0.0}
    assert said(changed, changed) == (
        "What this cell has called has left its processes changed on ranks 0-1, and the next "
        "cells meet it: torch's default dtype is bfloat16, and was float32. Put it back: "
        "torch.set_default_dtype(torch.float32)."
    )


def test_a_script_is_named_as_one() -> None:
    assert said({"script": 1.0, "gc_off": 1.0}).startswith("The script has left")


def test_several_changes_are_in_one_sentence() -> None:
    text = said({"script": 0.0, "gc_off": 1.0, "grad_off": 1.0, "anomaly_on": 1.0})
    assert "the garbage collector is off; gradients are off; autograd's anomaly" in text
    assert text.endswith(
        "gc.enable(); torch.set_grad_enabled(True); torch.autograd.set_detect_anomaly(False)."
    )


def test_only_the_ranks_that_tell_of_it_are_named() -> None:
    assert "on rank 1," in said({"backwards": 8.0}, {"script": 0.0, "stdout_lost": 1.0})


def test_what_is_left_undone_is_another_rules() -> None:
    assert said({"backwards": 8.0}) == ""
