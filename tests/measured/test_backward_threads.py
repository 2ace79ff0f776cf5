"""Who waits in a backward on one of autograd's threads, as on a GPU, and how long."""

import pytest

from tests.group.backward_ranks import LATE, LATE_S, STEPS, train
from tests.group.harness import run_ranks


# Of each kind of launch one: zero1 launches as ddp, zero2 as zero3.
@pytest.mark.parametrize(
    "layout",
    [
        "ddp",
        pytest.param("zero1", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
        "zero3",
        "tp=2",
    ],
)
def test_who_waits_in_backward_for_a_late_rank_waits_as_long_as_it_is_late(layout: str) -> None:
    ranks = run_ranks(2, train, layout, True, 1)
    waits, late = (rank["steps"][STEPS - 1 - LATE : STEPS - 1] for rank in ranks)
    waited, of_late = (
        [step["comm_s"] - step["forward_comm_s"] for step in steps] for steps in (waits, late)
    )
    # A rank that lacks a core comes late itself: in one step at least, nobody else did.
    assert max(waited) > 0.8 * LATE_S
    assert min(of_late) < 0.5 * LATE_S
    assert min(step["compute_s"] for step in late) > LATE_S
