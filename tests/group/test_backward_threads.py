"""A backward on one of autograd's threads, as on a GPU, is seen as the main thread's."""

import pytest

from tests.group.backward_ranks import STEPS, train
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
