"""A backward on one of autograd's threads, as on a GPU, is seen as the main thread's."""

import pytest

from tests.group.backward_ranks import LATE, LATE_S, STEPS, train
from tests.group.harness import run_ranks

LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "tp=2", "pp=2", "fsdp=2 tp=2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_losses_collectives_and_lines_are_those_of_the_main_thread(layout: str) -> None:
    n = 4 if layout == "fsdp=2 tp=2" else 2
    expected = run_ranks(n, train, layout, False)
    found = run_ranks(n, train, layout, True)
    for there, here in zip(expected, found, strict=True):
        assert here["losses"] == there["losses"]
        assert here["weights"] == there["weights"]
        assert here["calls"] == there["calls"]
        assert {line for _, line in here["calls"]} <= {"cell 7, line 4", "cell 7, line 5"}
        assert len(here["steps"]) == len(there["steps"]) == STEPS
        for a, b in zip(here["steps"], there["steps"], strict=True):
            assert a.keys() ^ b.keys() <= {"rss_bytes"}  # told twice a second
            counted = ("collectives", "bytes", "loss")
            assert [a.get(name) for name in counted] == [b.get(name) for name in counted]


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "tp=2"])
def test_who_waits_in_backward_for_a_late_rank_waits_as_long_as_it_is_late(layout: str) -> None:
    ranks = run_ranks(2, train, layout, True, 1)
    waits, late = (rank["steps"][STEPS - 1 - LATE : STEPS - 1] for rank in ranks)
    least_waited, least = (
        min(s["comm_s"] - s["forward_comm_s"] for s in of) for of in (waits, late)
    )
    assert least_waited > 0.8 * LATE_S
    assert least < 0.5 * LATE_S, "on a loaded machine it may wait in a step, and not in each"
    assert min(step["compute_s"] for step in late) > LATE_S
